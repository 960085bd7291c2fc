"""What runs in a Ray actor: one rank of a model, with its state, its step, and the pulls that are kept by handle."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import ray
import torch

from funzero.checkpoint.restore import restore
from funzero.checkpoint.save import save
from funzero.core import comm
from funzero.core import tree as tree_lib
from funzero.core.state import Metrics, StateSpecs, TrainState
from funzero.executor.into import accumulate_into
from funzero.executor.place import gather
from funzero.executor.vjp import vjp


class Updates(Protocol):
    """A step, as far as it is used here."""

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Closes the window."""


@dataclasses.dataclass
class Model:
    """What an actor owns.

    Attributes:
        fn: `fn(params, *inputs)`. state: with specs on this rank's mesh. step: such as `make_step(None, tx)`.
    """

    fn: Callable[..., Any]
    state: TrainState
    step: Updates


@dataclasses.dataclass(frozen=True)
class Rows:
    """A tree of tensors cut along dim 0 over the ranks of a group, by reference.

    Attributes:
        group: who makes it. counts, parts: of each rank the number of rows, and the local tree (or a tuple of trees, of
            which `at` says which one).
    """

    group: Any
    counts: tuple[Any, ...]
    parts: tuple[Any, ...]
    at: int | None = None

    def get(self) -> list[Any]:
        """The local tree of each rank. Waits; raises ActorError."""
        found = self.group.wait(self.parts)
        return found if self.at is None else [x[self.at] for x in found]

    def __reduce__(self) -> Any:  # actors need the references alone
        return Rows, (None, self.counts, self.parts, self.at)


class Worker:
    """One rank of a group."""

    def __init__(self, group: str, rank: int, world: int, timeout_s: float, threads: int):
        self._where = f"{group}: rank {rank} of {world}"
        self._rank, self._world, self._timeout_s = rank, world, timeout_s
        self._store: Any = None
        self._pulls: dict[int, Any] = {}
        self._failed: Exception | None = None
        os.environ["LOCAL_RANK"] = "0"  # Ray shows a process its own devices only
        torch.set_num_threads(threads)

    def listen(self) -> tuple[str, int]:
        """Opens what the ranks meet at, on the first of them."""
        host = ray.util.get_node_ip_address()
        self._store = comm.open_store(host, 0, self._world, self._timeout_s, first=True)
        return host, self._store.port

    def join(self, address: tuple[str, int], build: Callable[[], Model]) -> None:
        """Joins the others, and makes the model."""
        if self._store is None:
            self._store = comm.open_store(*address, self._world, self._timeout_s, first=False)
        comm.join_at(self._store, self._rank, self._world, self._timeout_s)
        self._model = build()

    @property
    def _specs(self) -> StateSpecs:
        specs = self._model.state.specs
        if specs is None:
            raise ValueError(
                f"{self._where}: the state has no specs; build it with fz.zero_specs on a mesh of the group"
            )
        return specs

    def forward(self, handle: int, inputs: list[Any]) -> tuple[int, Any]:
        """How many rows the output has, and the output."""
        with self._remembering():
            here = self._together(lambda: self._inputs(handle, inputs))
            out, self._pulls[handle] = vjp(self._model.fn, self._model.state.params, *here, specs=self._specs)
            return _rows(out), _to_host(out)

    def pull(self, handle: int, cotangents: list[Any], weight: float) -> tuple[int, Any]:
        """How many rows the first input has, and cotangents of all inputs."""
        with self._remembering():
            pull, given = self._together(lambda: (self._known(handle), self._mine(cotangents[0])))
            grads, *inputs = pull(given, last=True)
            self._model.state = accumulate_into(self._model.state, grads, weight)
            return _rows(inputs), _to_host(tuple(inputs))

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        """An update must not pass over what failed before it: nobody may have looked at that call's result."""
        try:
            yield
        except Exception as error:
            self._failed = self._failed or error
            raise

    def _inputs(self, handle: int, inputs: list[Any]) -> list[Any]:
        if handle in self._pulls:
            raise ValueError(f"{self._where}: handle {handle} is in use; pull it first, or choose another")
        return [self._mine(x) for x in inputs]

    def _known(self, handle: int) -> Any:
        if handle not in self._pulls:
            raise ValueError(f"{self._where}: no forward is kept under handle {handle}; kept are {sorted(self._pulls)}")
        return self._pulls.pop(handle)

    def _together(self, run: Callable[[], Any]) -> Any:
        """What `run` gives. If it fails on a rank, no rank of the group goes on to where it would wait for that one."""
        error, found = None, None
        try:
            found = run()
        except Exception as caught:
            error = caught
        failed = self._specs.mesh.gather_host(torch.tensor([error is not None]).int())
        if error is not None:
            raise error
        if failed.any():
            raise RuntimeError(
                f"{self._where}: rank {int(failed[:, 0].argmax())} of the group could not take its input"
            )
        return found

    def _mine(self, given: Any) -> Any:
        """This rank's rows of an input, on its device."""
        mesh = self._specs.mesh
        ranks, index = mesh.size(mesh.batch), mesh.index(mesh.batch)
        if not isinstance(given, Rows):
            whole = ray.get(given) if isinstance(given, ray.ObjectRef) else given
            return tree_lib.map(lambda x: x[_share(len(x), ranks, index)].to(mesh.device) if _has_rows(x) else x, whole)
        counts = ray.get(list(given.counts))
        mine, parts, at = _share(sum(counts), ranks, index), [], 0
        for count, ref in zip(counts, given.parts, strict=True):
            rows = slice(max(mine.start, at) - at, min(mine.stop, at + count) - at)
            if rows.start < rows.stop:
                local = ray.get(ref)
                parts.append(tree_lib.map(lambda x, r=rows: x[r], local if given.at is None else local[given.at]))
            at += count
        return tree_lib.map(lambda *xs: torch.cat(xs).to(mesh.device), *parts)

    def update(self) -> dict[str, float]:
        """Metrics of the update. Raises what went wrong in its window."""
        if self._failed is not None:
            raise self._failed
        self._model.state, metrics = self._model.step.update(self._model.state)
        names = ("grad_norm", "weight", "skipped", "step")
        return {n: float(getattr(metrics, n)) for n in names}

    def save(self, path: str) -> None:
        """Saves the state."""
        save(path, self._model.state, overwrite=True)

    def restore(self, path: str) -> None:
        """Replaces the state."""
        self._pulls.clear()
        self._failed = None
        self._model.state = restore(path, self._model.state)

    def params(self) -> Any:
        """Whole params."""
        return _to_host(gather(self._model.state.params, self._specs.params))


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _rows(tree: Any) -> int:
    return next((len(x) for x in tree_lib.leaves(tree) if _has_rows(x)), 0)


def _share(total: int, ranks: int, index: int) -> slice:
    if total % ranks:
        raise ValueError(f"{total} rows cannot be dealt out to {ranks} ranks; give a multiple")
    return slice(total // ranks * index, total // ranks * (index + 1))


def _to_host(tree: Any) -> Any:
    return tree_lib.map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, tree)
