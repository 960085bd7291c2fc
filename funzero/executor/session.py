"""The params of one call of a step: what is whole from the start, what is lazy, and where gradients go."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.scope import scope
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
        plan, placement = self.plan, self._placement
        routes, budget = landing.routes, placement.options.budget
        reserve = budget and budget // RESERVE
        self._queue = ReduceQueue(routes, self._program, reserve, landing.reduced) if routes else None
        done = Differentiated(None, [None] * len(plan.trained), [False] * len(plan.trained))
        if micro is not None:
            self._run(loss_fn, takes, micro, landing, scale, done)
        if self._queue is not None:
            for k in self._queue.missing():  # no gradient now, but there may be one from earlier in the window
                if (held := landing.held(k)) is not None:
                    self._queue.put(k, held)
        if self._cache is not None:
            self._cache.finish()
        if self._queue is not None:
            self._finish_queue(self._queue)
        landing.finish(small.run(done.grads), done.used, done.loss)

    def forward(self, fn: Callable[[Any], Any] | None) -> Any:
        """`fn(params)` without gradient; None: this rank has nothing to run, and joins the others."""
        out = None
        if fn is not None:
            lazy = LazyLeaves(self._cache, self._placement.forms) if self._cache is not None else None
            handed = Handed(self._leaves, self._placement.lazy, copy_on_write=not self._program.tried)
            with scope(lazy is not None), torch.no_grad():
                held, *_ = self._inputs(handed.leaves, lazy, {}, None)
                with casting(self.plan):
                    out = fn(tree_lib.unflatten(self.plan.specs.params.treedef, held))
            handed.check(self.plan.specs.params.layouts)
            self._program.tried = True
        if self._cache is not None:
            self._cache.finish()
        return out

    def _run(
        self,
        loss_fn: Callable[..., Any],
        takes: Takes,
        micro: MicroBatch,
        landing: Landing,
        scale: torch.Tensor | None,
        done: "Differentiated",
    ) -> None:
        plan, accum = self.plan, self.plan.specs.accum.layouts
        power: torch.Tensor | None = None
        handed = Handed(self._leaves, self._placement.lazy, copy_on_write=not self._program.tried)
        lazy = LazyLeaves(self._cache, self._placement.forms) if self._cache is not None else None
        place, placement = plan.place_of_trained, self._placement

        def on_grad(k: int, grad: torch.Tensor) -> None:
            done.used[k] = True
            grad = grad if power is None else _times(grad, power, accum[k].dtype)
            if self._queue is not None and self._queue.takes(k):
                held = landing.held(k)
                self._queue.put(k, grad if held is None else held.to(wide_dtype(held.dtype)) + grad)
            elif accum[k].is_flat:  # small, and travels with the others
                done.grads[k] = grad
            else:
                landing.add(k, grad)

        with (
            scope(lazy is not None, placement.remat) as opened,
            seeded(micro.key, plan.mesh.device),
            torch.enable_grad(),
        ):
            opened.params = [x for i, x in enumerate(handed.leaves) if i not in placement.lazy]
            held, wanted, told = self._inputs(handed.leaves, lazy, place, on_grad)
            params = tree_lib.unflatten(plan.specs.params.treedef, held)
            with lazy.saved_by_name() if lazy is not None else contextlib.nullcontext(), casting(plan):
                loss = call_loss(loss_fn, takes, params, micro)
            if placement.remat and not opened.rematted:
                raise ValueError(
                    "remat: loss_fn called no module by fz.functional_call; wrap what it calls in fz.remat"
                )
            opened.in_backward = True
            if scale is not None:
                power = power_above(1 if loss.weight is None else loss.weight).to(scale.device)
            grads = gradients(
                loss.total, list(wanted.values()), None if scale is None or power is None else scale / power
            )
        if lazy is not None:
            lazy.close()
        handed.check(plan.specs.params.layouts)
        self._program.tried = True
        done.loss = detached(loss)  # with its graph it would keep alive what the anchors of the graph refer to
        if power is not None:
            grads = [g if g is None else _times(g, power, accum[k].dtype) for k, g in zip(wanted, grads, strict=True)]
        if not told:
            done.grads, done.used = grads, [g is not None for g in grads]
            return
        for k, grad in zip(wanted, grads, strict=True):
            if k not in told:
                done.grads[k], done.used[k] = grad, grad is not None

    def _inputs(
        self, leaves: list[torch.Tensor], lazy: LazyLeaves | None, place: dict[int, int], on_grad: Any
    ) -> tuple[list[Any], dict[int, torch.Tensor], set[int]]:
        """What the loss function sees, what to differentiate with respect to, by trained leaf, and which of these call
        `on_grad`."""
        placement, queue = self._placement, self._queue
        if lazy is None and queue is None and not placement.early:
            return leaves, {k: leaves[i].requires_grad_() for i, k in place.items()}, set()
        held: list[Any] = []
        wanted: dict[int, torch.Tensor] = {}
        told = set()
        for i, x in enumerate(leaves):
            k, made = place.get(i), x
            if lazy is not None and i in placement.lazy:
                made, source = lazy.stand_in(i, None if k is None else functools.partial(on_grad, k))
                if k is not None and source is not None:
                    wanted[k] = source
                    told.add(k)
            elif k is None:
                pass
            elif (queue is not None and queue.takes(k)) or k in placement.early:
                wanted[k] = new_source(x.device, x.dtype)
                made = anchored(wanted[k], x, functools.partial(on_grad, k))
                told.add(k)
            else:
                wanted[k] = x.requires_grad_()
            held.append(made)
        return held, wanted, told

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
        """Drops what was gathered."""
        if self._cache is not None:
            self._cache.clear() if kind is None else self._cache.abandon()
        # The cache refers to this session and the leaves to the cache: a cycle would keep the shards, and with them the
        # storage of the state, until a garbage collection.
        self._cache, self._queue, self._leaves = None, None, []


@dataclasses.dataclass
class Differentiated:
    """What a micro-batch gave, by trained leaf.

    Attributes:
        grads: those that have not landed: whole, not yet summed over ranks; None where there is none.
        used: whether a gradient came on this rank.
    """

    loss: Loss | None
    grads: list[torch.Tensor | None]
    used: list[bool]
