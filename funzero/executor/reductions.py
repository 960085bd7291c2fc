"""Reductions of large gradients: posted as soon as they are ready, in one order on all ranks, waited for before use."""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from funzero.core.collectives import Pending, post_gather, post_reduce_scatter
from funzero.core.spec import Layout
from funzero.executor.cache import Program

DEFAULT_LIMIT = 64 * 1024 * 1024


class ReduceQueue:
    """The reductions of one micro-batch.

    Args:
        routes: by trained leaf, the layout whose flat axes the gradient is summed and cut over, and whether the sum
            is made whole again afterwards.
        limit: bytes of gradients and buffers that may be under way. landed: takes a leaf's sum when it is there.
    """

    def __init__(
        self,
        routes: dict[int, tuple[Layout, bool]],
        program: Program,
        limit: int | None,
        landed: Callable[[int, torch.Tensor], None],
    ):
        self.routes, self._program = routes, program
        self._limit = DEFAULT_LIMIT if limit is None else limit
        self._landed = landed
        self._ready: dict[int, torch.Tensor] = {}
        self._flying: deque[tuple[int, Pending, int]] = deque()
        self._seen: set[int] = set()
        self._bytes = 0
        self._order = program.reductions.get(tuple(routes))
        self._position = 0
        self._done: list[int] = []

    def put(self, leaf: int, grad: torch.Tensor) -> None:
        """Takes the complete gradient of a leaf, of piece shape, and posts whatever its turn has come."""
        if grad.layout != torch.strided:
            name = self.routes[leaf][0].path.rpartition("grads/")[2]
            raise ValueError(f"params/{name}: a sparse gradient cannot be reduced; use a dense one (sparse=False)")
        self._ready[leaf] = grad
        self._seen.add(leaf)
        if self._order is not None:
            while self._position < len(self._order) and self._order[self._position] in self._ready:
                self._post(self._order[self._position])
                self._position += 1

    @property
    def agreed(self) -> bool:
        """True if the order is known."""
        return self._order is not None

    def takes(self, leaf: int) -> bool:
        """True if this leaf's gradient belongs here."""
        return leaf in self.routes

    def waiting(self) -> list[int]:
        """The leaves whose gradients are here and not yet posted, in the order in which they came."""
        return list(self._ready)

    def missing(self) -> list[int]:
        """The leaves that no gradient came for."""
        return [k for k in self.routes if k not in self._seen]

    def turns(self) -> list[int]:
        """While recording: for each route whose turn it was that its gradient came, of those that wait here; else 0."""
        came = {k: turn for turn, k in enumerate(self._ready, 1)}
        return [came.get(k, 0) for k in self.routes]

    def on_round(self, turns: list[list[int]], finished: list[bool]) -> None:
        """While recording: posts what every rank either has or, being finished, will never have.

        In the order in which the first rank that has it got it: later steps go by that order, while the backward goes on.
        """
        found = []
        for i, leaf in enumerate(self.routes):
            came = [row[i] for row in turns]
            if leaf not in self._done and any(came) and all(c or f for c, f in zip(came, finished, strict=True)):
                found.append((next(c for c in came if c), leaf))
        for _, leaf in sorted(found):
            self._post(leaf)
            self._done.append(leaf)

    def finish(self, order: Iterable[int] = ()) -> None:
        """Posts the rest, zeros where this rank has no gradient, and waits for all.

        Args:
            order: the agreed order of what is left, at the end of a recording.
        """
        if self._order is None:
            rest = [k for k in order if k not in self._done]
            self._program.reductions[tuple(self.routes)] = tuple([*self._done, *rest])
        else:
            rest = list(self._order[self._position :])
        for leaf in rest:
            self._post(leaf)
        while self._flying:
            self._land()

    def _post(self, leaf: int) -> None:
        layout, _ = self.routes[leaf]
        grad = self._ready.pop(leaf, None)
        if grad is None:
            grad = torch.zeros(layout.piece_shape, dtype=layout.dtype, device=layout.mesh.device)
        grad = grad.to(layout.dtype)
        size = 2 * layout.n * layout.dtype.itemsize
        while self._flying and self._bytes + size > self._limit:
            self._land()
        self._flying.append((leaf, post_reduce_scatter(grad, layout), size))
        self._bytes += size

    def _land(self) -> None:
        leaf, pending, size = self._flying.popleft()
        layout, whole = self.routes[leaf]
        part = pending.wait()
        self._landed(leaf, post_gather(part, layout).wait() if whole else part)
        self._bytes -= size
