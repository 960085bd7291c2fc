"""The params of one call of a step: what is whole from the start, what is lazy, and where gradients go."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.collectives import BUNDLE_BYTES, Group, travel_groups
from funzero.core.scope import scope
from funzero.core.spec import Layout
from funzero.executor.anchors import Anchor, new_source
from funzero.executor.cache import FINISHED, CacheOptions, GatherCache, Program
from funzero.executor.forms import Forms
from funzero.executor.handed import Handed
from funzero.executor.lazy import LazyLeaves
from funzero.executor.micro import MicroBatch, call_loss, casting
from funzero.executor.plan import Plan
from funzero.executor.reductions import ReduceQueue
from funzero.transforms.grad import Takes, detached, gradients
from funzero.transforms.loss_scale import power_above
from funzero.transforms.losses import Loss
from funzero.transforms.precision import wide_dtype
from funzero.transforms.rng import seeded

RESERVE = 4  # one part in so many of the gather budget is kept for pending reductions


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which params are lazy, and how each is made whole; worked out once for each layout."""

    plan: Plan
    options: CacheOptions
    remat: tuple[Any, ...] = ()

    @functools.cached_property
    def layouts(self) -> list[Layout]:
        """Layouts of all params in the compute dtype."""
        pairs = zip(self.plan.specs.params.layouts, self.plan.compute_dtypes, strict=True)
        return [dataclasses.replace(x, dtype=d) for x, d in pairs]

    @functools.cached_property
    def widened(self) -> dict[int, torch.dtype]:
        """The accumulator's dtype of the trained leaves whose gradients come in another one."""
        accum = self.plan.specs.accum.layouts
        come = [
            self.plan.policy.reduce_dtype(a.dtype) if a.is_flat else self.layouts[i].dtype
            for a, i in zip(accum, self.plan.trained, strict=True)
        ]
        return {k: a.dtype for k, (a, d) in enumerate(zip(accum, come, strict=True)) if a.dtype != d}

    @functools.cached_property
    def lazy(self) -> dict[int, Layout]:
        """The params that are gathered on use: cut, and too large to travel in a bundle."""
        return {i: x for i, x in enumerate(self.layouts) if x.is_flat and x.n * x.dtype.itemsize >= BUNDLE_BYTES}

    @functools.cached_property
    def forms(self) -> Forms:
        """What each of them can be gathered as."""
        return Forms(self.lazy)

    @functools.cached_property
    def _head(self) -> list[Group]:
        return travel_groups([x if x.is_flat and i not in self.lazy else None for i, x in enumerate(self.layouts)])

    @functools.cached_property
    def _plain(self) -> bool:
        """True if every param is handed to the loss function as it is."""
        kept = self.plan.specs.params.layouts
        return not self.lazy and all(
            a.dtype == b.dtype and not a.is_flat for a, b in zip(kept, self.layouts, strict=True)
        )

    def head(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole pieces in the compute dtype of what is not lazy; lazy params as they are."""
        if self._plain:
            return params
        out = [
            x if i in self.lazy or x.dtype == y.dtype else x.to(y.dtype)
            for i, (x, y) in enumerate(zip(params, self.layouts, strict=True))
        ]
        for group in self._head:
            group.gather(out)
        return out

    @functools.cached_property
    def cache_options(self) -> CacheOptions:
        """The cache's share of the budget."""
        budget = self.options.budget
        return dataclasses.replace(self.options, budget=None if budget is None else budget - budget // RESERVE)

    @functools.cached_property
    def micro_routes(self) -> dict[int, tuple[Layout, bool]]:
        """Large gradients that are reduced in every micro-batch, by trained leaf."""
        accum = self.plan.specs.accum.layouts
        return {i: (self.plan.travelling(x), False) for i, x in enumerate(accum) if x.is_flat and _large(x)}

    @functools.cached_property
    def window_routes(self) -> dict[int, tuple[Layout, bool]]:
        """Large gradients that are reduced once a window, by trained leaf: as soon as its last micro-batch has them."""
        routes = {}
        for i, (a, g) in enumerate(zip(self.plan.specs.accum.layouts, self.plan.specs.grads.layouts, strict=True)):
            open_axes = tuple(x for x in a.spec.unreduced if a.mesh.axis_size(x) > 1)
            if a.is_flat or not open_axes or not _large(a):
                continue
            if g.is_flat and set(open_axes) == {x for x in g.spec.flat if g.mesh.axis_size(x) > 1}:
                routes[i] = (self.plan.travelling(g), False)
            elif not g.is_flat:
                routes[i] = (self.plan.travelling(a.with_spec(flat=open_axes, unreduced=())), True)
        return routes


def _large(layout: Layout) -> bool:
    return layout.n * layout.dtype.itemsize >= BUNDLE_BYTES


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
            shards = {i: params[i] for i in placement.lazy}
            mesh, options = self.plan.mesh, placement.cache_options
            self._cache = GatherCache(mesh, placement.forms, shards, options, program, self._round)

    def _round(self, want: int) -> list[int]:
        """One round of agreement while recording: who needs which leaf, and whose gradients are ready."""
        flags = self._queue.ready_flags() if self._queue else []
        rows = self.plan.mesh.gather_host(torch.tensor([want, *flags])).tolist()
        if self._queue:
            self._queue.on_round([r[1:] for r in rows], [r[0] == FINISHED for r in rows])
        return [r[0] for r in rows]

    def differentiate(
        self,
        loss_fn: Callable[..., Any],
        takes: Takes,
        micro: MicroBatch | None,
        add: dict[int, torch.Tensor] | None,
        scale: torch.Tensor | None = None,
    ) -> "Differentiated":
        """Loss and gradients of one micro-batch (None: this rank has none, and joins the others).

        Args:
            add: None while the window goes on; in its last micro-batch the sums so far, by trained leaf, to add before
                the reduction.
            scale: 0-dim loss scale that the gradients are multiplied by.
        """
        plan, placement = self.plan, self._placement
        routes = placement.micro_routes if add is None else placement.micro_routes | placement.window_routes
        budget = placement.options.budget
        self._queue = ReduceQueue(routes, self._program, budget and budget // RESERVE) if routes else None
        done = Differentiated(None, [None] * len(plan.trained), [False] * len(plan.trained), {})
        if micro is not None:
            self._run(loss_fn, takes, micro, add or {}, scale, done)
        if self._queue is not None:
            for k in self._queue.missing():  # no gradient now, but there may be one from earlier in the window
                if add and k in add:
                    self._queue.put(k, add[k])
        if self._cache is not None:
            self._cache.finish()
        if self._queue is not None:
            self._finish_queue(self._queue, done)
        return done

    def forward(self, fn: Callable[[Any], Any] | None) -> Any:
        """`fn(params)` without gradient; None: this rank has nothing to run, and joins the others."""
        out = None
        if fn is not None:
            lazy = LazyLeaves(self._cache, self._placement.forms) if self._cache is not None else None
            handed = Handed(self._leaves, self._placement.lazy, copy_on_write=not self._program.tried)
            with scope(lazy is not None), torch.no_grad():
                held, _ = self._inputs(handed.leaves, lazy, {}, None)
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
        add: dict[int, torch.Tensor],
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
            self._queue.put(k, grad if k not in add else add[k].to(wide_dtype(add[k].dtype)) + grad)  # type: ignore[union-attr]

        with (
            scope(lazy is not None, placement.remat) as opened,
            seeded(micro.key, plan.mesh.device),
            torch.enable_grad(),
        ):
            opened.params = handed.leaves
            held, wanted = self._inputs(handed.leaves, lazy, place, on_grad)
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
        if self._queue is None:
            done.grads, done.used = grads, [g is not None for g in grads]
            return
        for k, grad in zip(wanted, grads, strict=True):
            if not self._queue.takes(k):
                done.grads[k], done.used[k] = grad, grad is not None

    def _inputs(
        self, leaves: list[torch.Tensor], lazy: LazyLeaves | None, place: dict[int, int], on_grad: Any
    ) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """What the loss function sees, and what to differentiate with respect to, by trained leaf."""
        if lazy is None and self._queue is None:
            return leaves, {k: leaves[i].requires_grad_() for i, k in place.items()}
        held: list[Any] = []
        wanted: dict[int, torch.Tensor] = {}
        for i, x in enumerate(leaves):
            k, made = place.get(i), x
            if lazy is not None and i in self._placement.lazy:
                made, source = lazy.stand_in(i, None if k is None else functools.partial(on_grad, k))
                if k is not None and source is not None:
                    wanted[k] = source
            elif k is None:
                pass
            elif self._queue is not None and self._queue.takes(k):
                wanted[k] = new_source(x.device, x.dtype)
                made = Anchor.apply(wanted[k], x, functools.partial(on_grad, k))
            else:
                wanted[k] = x.requires_grad_()
            held.append(made)
        return held, wanted

    def _finish_queue(self, queue: ReduceQueue, done: "Differentiated") -> None:
        queue.finish(() if queue.agreed else self._agreed_order(queue))
        if self._placement.options.always_ask:
            self._program.reductions = {}
        done.reduced = queue.results
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
        grads: whole, not yet summed over ranks; None where there is none. used: whether a gradient came on this rank.
        reduced: sums over ranks of the large ones, cut as their route says.
    """

    loss: Loss | None
    grads: list[torch.Tensor | None]
    used: list[bool]
    reduced: dict[int, torch.Tensor]
