"""The params of one call of a step: what is whole from the start, what is lazy, and where gradients go."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.scope import Scope, scope
from funzero.executor.anchors import anchored, new_source
from funzero.executor.cache import FINISHED, GatherCache, Program
from funzero.executor.handed import Handed
from funzero.executor.lazy import LazyLeaves
from funzero.executor.micro import MicroBatch, call_loss, casting
from funzero.executor.placement import RESERVE, Placement
from funzero.executor.reduce import SmallReductions
from funzero.executor.reductions import ReduceQueue
from funzero.executor.shards import Shards
from funzero.executor.window import Landing
from funzero.transforms.grad import Takes, detached, gradients
from funzero.transforms.loss_scale import power_above
from funzero.transforms.losses import Loss
from funzero.transforms.precision import wide_dtype
from funzero.transforms.rng import seeded


def _times(grad: torch.Tensor, power: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return grad.to(dtype) * power.to(dtype)


class Session:
    """The params of one call, from their gathering to the last reduction."""

    def __init__(self, placement: Placement, params: list[torch.Tensor], program: Program):
        self._placement, self._program = placement, program
        self.plan = placement.plan
        self._leaves = placement.head(params)
        self._queue: ReduceQueue | None = None
        self._take: Callable[[int, torch.Tensor], None] = lambda k, grad: None
        self._cache: GatherCache | None = None
        if placement.lazy:
            shards = Shards({i: params[i] for i in placement.lazy}, placement.forms, self.plan.specs.params.layouts)
            mesh, options = self.plan.mesh, placement.cache_options
            self._cache = GatherCache(mesh, placement.forms, shards, options, program, self._round)

    def _round(self, want: int) -> list[int]:
        """One round of agreement while recording: who needs which leaf, and whose gradients are ready."""
        turns = self._queue.turns() if self._queue else []
        rows = self.plan.mesh.gather_host(torch.tensor([want, *turns])).tolist()
        if self._queue:
            self._queue.on_round([r[1:] for r in rows], [r[0] == FINISHED for r in rows])
        return [r[0] for r in rows]

    def differentiate(
        self,
        loss_fn: Callable[..., Any],
        takes: Takes,
        micro: MicroBatch | None,
        landing: Landing,
        small: SmallReductions,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Runs one micro-batch (None: this rank has none, and joins the others) and lets its gradients land.

        Args:
            scale: 0-dim loss scale that the gradients are multiplied by.
        """
        with self.receiving(landing, small) as done:
            if micro is not None:
                self._run(loss_fn, takes, micro, landing, scale, done)

    @contextlib.contextmanager
    def receiving(self, landing: Landing, small: SmallReductions) -> "Iterator[Differentiated]":
        """Within the block gradients may come. At its end all ranks join what others still need, and all has landed."""
        routes, budget = landing.routes, self._placement.options.budget
        reserve = budget and budget // RESERVE
        self._queue = ReduceQueue(routes, self._program, reserve, landing.reduced) if routes else None
        count = len(self.plan.trained)
        done = Differentiated(None, [None] * count, [False] * count)
        self._take = functools.partial(self._came, landing, done)
        yield done
        if self._queue is not None:
            for k in self._queue.missing():  # no gradient now, but there may be one from earlier in the window
                if (held := landing.held(k)) is not None:
                    self._queue.put(k, held)
        self.rest()
        if self._queue is not None:
            self._finish_queue(self._queue)
        landing.finish(small.run(done.grads), done.used, done.loss)

    def rest(self) -> None:
        """Joins the gathers that other ranks still need."""
        if self._cache is not None:
            self._cache.finish()

    def _came(self, landing: Landing, done: "Differentiated", k: int, grad: torch.Tensor) -> None:
        """A complete gradient of a leaf that tells."""
        done.used[k] = True
        layout = self.plan.specs.accum.layouts[k]
        grad = grad if done.power is None else _times(grad, done.power, layout.dtype)
        if self._queue is not None and self._queue.takes(k):
            held = landing.held(k)
            self._queue.put(k, grad if held is None else held.to(wide_dtype(held.dtype)) + grad)
        elif layout.is_flat:  # small, and travels with the others
            done.grads[k] = grad
        else:
            landing.add(k, grad)

    def forward(self, fn: Callable[[Any], Any] | None) -> Any:
        """`fn(params)` without gradient; None: this rank has nothing to run, and joins the others."""
        out = None
        if fn is not None:
            with scope(self._cache is not None) as opened, torch.no_grad():
                graph = self.begin(fn, {}, (), opened)
                out = graph.out
            self.end(graph)
        self.rest()
        return out

    def begin(self, fn: Callable[[Any], Any], place: dict[int, int], routes: Container[int], opened: Scope) -> "Graph":
        """`fn(params)`, and what its backward needs.

        Args:
            place: {place among the params: trained leaf} of those to differentiate with respect to. routes: the trained
                leaves whose gradients are reduced as they come. opened: the scope that this is called in.
        """
        lazy = LazyLeaves(self._cache, self._placement.forms) if self._cache is not None else None
        handed = Handed(self._leaves, self._placement.lazy, copy_on_write=not self._program.tried)
        opened.params = [x for i, x in enumerate(handed.leaves) if i not in self._placement.lazy] if place else []
        held, wanted, told = self._inputs(handed.leaves, lazy, place, routes)
        saved = lazy.saved_by_name() if lazy is not None and place else contextlib.nullcontext()
        with saved, casting(self.plan):
            out = fn(tree_lib.unflatten(self.plan.specs.params.treedef, held))
        return Graph(out, wanted, told, lazy, handed)

    def end(self, graph: "Graph") -> None:
        """Lets go of a graph."""
        if graph.lazy is not None:
            graph.lazy.close()
        graph.handed.check(self.plan.specs.params.layouts)
        self._program.tried = True

    def _run(
        self,
        loss_fn: Callable[..., Any],
        takes: Takes,
        micro: MicroBatch,
        landing: Landing,
        scale: torch.Tensor | None,
        done: "Differentiated",
    ) -> None:
        plan, placement = self.plan, self._placement
        with (
            scope(self._cache is not None, placement.remat) as opened,
            seeded(micro.key, plan.mesh.device),
            torch.enable_grad(),
        ):
            graph = self.begin(
                lambda params: call_loss(loss_fn, takes, params, micro), plan.place_of_trained, landing.routes, opened
            )
            loss = graph.out
            if placement.remat and not opened.rematted:
                raise ValueError(
                    "remat: loss_fn called no module by fz.functional_call; wrap what it calls in fz.remat"
                )
            opened.in_backward = True
            if scale is not None:
                done.power = power_above(1 if loss.weight is None else loss.weight).to(scale.device)
            cotangent = None if scale is None or done.power is None else scale / done.power
            grads = gradients(loss.total, list(graph.wanted.values()), cotangent)
        self.end(graph)
        done.loss = detached(loss)  # with its graph it would keep alive what the anchors of the graph refer to
        if done.power is not None:
            accum, power = plan.specs.accum.layouts, done.power
            pairs = zip(graph.wanted, grads, strict=True)
            grads = [g if g is None else _times(g, power, accum[k].dtype) for k, g in pairs]
        done.take(graph, grads)

    def _inputs(
        self, leaves: list[torch.Tensor], lazy: LazyLeaves | None, place: dict[int, int], routes: Container[int]
    ) -> tuple[list[Any], dict[int, torch.Tensor], set[int]]:
        """What the loss function sees, what to differentiate with respect to, by trained leaf, and which of these tell
        when their gradients come."""
        placement = self._placement
        if lazy is None and not routes and not placement.early:
            return leaves, {k: leaves[i].requires_grad_() for i, k in place.items()}, set()
        held: list[Any] = []
        wanted: dict[int, torch.Tensor] = {}
        told = set()
        for i, x in enumerate(leaves):
            k, made = place.get(i), x
            tell = None if k is None else functools.partial(self._tell, k)
            if lazy is not None and i in placement.lazy:
                made, source = lazy.stand_in(i, tell)
                if k is not None and source is not None:
                    wanted[k] = source
                    told.add(k)
            elif k is None or tell is None:
                pass
            elif k in routes or k in placement.early:
                wanted[k] = new_source(x.device, x.dtype)
                made = anchored(wanted[k], x, tell)
                told.add(k)
            else:
                wanted[k] = x.requires_grad_()
            held.append(made)
        return held, wanted, told

    def _tell(self, k: int, grad: torch.Tensor) -> None:
        self._take(k, grad)

    def _finish_queue(self, queue: ReduceQueue) -> None:
        queue.finish(() if queue.agreed else self._agreed_order(queue))
        if self._placement.options.always_ask:
            self._program.reductions = {}
        self._queue = None

    def _agreed_order(self, queue: ReduceQueue) -> list[int]:
        """The order of what is left: as the gradients came on the first rank that has any, then on the others."""
        left = queue.waiting()
        row = torch.full((len(queue.routes),), -1)
        row[: len(left)] = torch.tensor(left, dtype=torch.int64)
        rows = self.plan.mesh.gather_host(row).view(-1).tolist()
        return list(dict.fromkeys([*(k for k in rows if k >= 0), *queue.routes]))

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool) -> None:
        """Drops what was gathered. failed: without waiting for what is under way."""
        if self._cache is not None:
            self._cache.abandon() if failed else self._cache.clear()
        # The cache refers to this session and the leaves to the cache: a cycle would keep the shards, and with them the
        # storage of the state, until a garbage collection.
        self._cache, self._queue, self._leaves = None, None, []
        self._take = lambda k, grad: None


@dataclasses.dataclass
class Graph:
    """A forward whose backward is to come.

    Attributes:
        out: what the function returned. wanted: what to differentiate with respect to, by trained leaf. told: those
            among them whose gradients are taken as they come.
    """

    out: Any
    wanted: dict[int, torch.Tensor]
    told: set[int]
    lazy: LazyLeaves | None
    handed: Handed


@dataclasses.dataclass
class Differentiated:
    """What a micro-batch gave, by trained leaf.

    Attributes:
        grads: those that have not landed: whole, not yet summed over ranks; None where there is none.
        used: whether a gradient came on this rank. power: what gradients are multiplied by; None: 1.
    """

    loss: Loss | None
    grads: list[torch.Tensor | None]
    used: list[bool]
    power: torch.Tensor | None = None

    def take(self, graph: Graph, grads: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of `graph.wanted` that were not told."""
        if not graph.told:
            self.grads, self.used = list(grads), [g is not None for g in grads]
            return
        for k, grad in zip(graph.wanted, grads, strict=True):
            if k not in graph.told:
                self.grads[k], self.used[k] = grad, grad is not None
