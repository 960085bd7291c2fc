"""A window in the making: what micro-batches add up to, while one call of the step works on it.

[Note: sums that live elsewhere] A gradient joins the sum of its leaf as soon as it is complete, or summed over the ranks:
what the leaf has so far is fetched, added to and written back while the backward goes on. So no more than a few of the
gradients are on the device at a time. Sums of the state that came in are written over if it is donated; if the call then
fails, that state is spent.
"""

import dataclasses
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.spec import Layout
from funzero.core.state import EMPTY_NODE, Accumulator
from funzero.executor.donate import private
from funzero.executor.flat import FlatState
from funzero.executor.placement import Placement
from funzero.executor.plan import Plan
from funzero.executor.stores import Outbox, fetch, keep, store_of
from funzero.transforms.accumulate import weigh_aux
from funzero.transforms.losses import Loss
from funzero.transforms.precision import LOW
from funzero.transforms.rng import fold_in
from funzero.transforms.storage import NEAREST, Rounder, rounder


@dataclasses.dataclass
class Window:
    """The sums of an `Accumulator` as lists, in the order of `specs.grads`; None where nothing came yet.

    Attributes:
        borrowed: whether sums are those of the state that came in. donate: whether these may be written over. spoilt:
            True once one was.
        final: sums of the whole window that are already reduced to the layout of `specs.grads`, by trained leaf.
        outbox: sums on their way to where they are kept.
    """

    sums: list[torch.Tensor | None]
    used: list[bool]
    weight: torch.Tensor
    loss: torch.Tensor
    aux: Any
    times: int
    buffers: list[torch.Tensor]
    borrowed: bool = False
    donate: bool = True
    spoilt: bool = False
    final: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    outbox: Outbox = dataclasses.field(default_factory=Outbox)

    def add_loss(self, loss: Loss) -> None:
        """Adds what else a micro-batch brings."""
        weight = 1 if loss.weight is None else loss.weight
        self.weight = self.weight + weight
        self.loss = self.loss + loss.total.detach()
        if tree_lib.leaves(loss.aux):
            aux = weigh_aux(loss.aux, weight)
            self.aux = aux if not tree_lib.leaves(self.aux) else tree_lib.map(torch.add, self.aux, aux)
        if loss.buffers is not None:
            self.buffers = [b.detach() for b in tree_lib.leaves(loss.buffers)]


@dataclasses.dataclass
class Landing:
    """Where the gradients of one micro-batch arrive.

    Attributes:
        round_to: rounds sums that are kept in less than float32. closes: whether this is the last one of its window.
    """

    window: Window
    placement: Placement
    round_to: Rounder
    closes: bool

    @property
    def routes(self) -> dict[int, tuple[Layout, bool]]:
        """The large gradients that are reduced with this micro-batch."""
        routes = self.placement.micro_routes
        return routes | self.placement.window_routes if self.closes else routes

    def held(self, k: int) -> torch.Tensor | None:
        """The sum so far of a leaf that is reduced once a window, to add before; else None."""
        so_far = self.window.sums[k] if k in self.placement.window_routes else None
        return None if so_far is None else fetch(so_far, self._accum(k))

    def add(self, k: int, grad: torch.Tensor) -> None:
        """Adds a gradient that is laid out as the accumulator is."""
        window, layout = self.window, self._accum(k)
        grad = grad.to(self.placement.widened.get(k, grad.dtype))
        old = window.sums[k]
        held = None if old is None else fetch(old, layout)
        total = grad if held is None else _sum(held, grad, layout.path, self.round_to)
        window.spoilt |= window.borrowed and window.donate and store_of(layout) is not None
        window.sums[k] = window.outbox.put(total, layout, old, donate=window.donate)

    def reduced(self, k: int, total: torch.Tensor) -> None:
        """Takes the sum over ranks of a leaf that `routes` names."""
        if k in self.placement.micro_routes:
            self.add(k, total)
            return
        layout = self.placement.plan.specs.grads.layouts[k]
        self.window.final[k] = self.window.outbox.put(total.to(layout.dtype), layout)

    def finish(self, grads: list[torch.Tensor | None], used: list[bool], loss: Loss | None) -> None:
        """Adds what has not come one by one."""
        window, widened = self.window, self.placement.widened
        if self.placement.sums_away or window.times or any(map(_is_there, window.sums)):
            for k, g in enumerate(grads):
                if g is not None:
                    self.add(k, g)
        else:
            window.sums = [g if g is None or k not in widened else g.to(widened[k]) for k, g in enumerate(grads)]
        window.outbox.settle()
        window.used = [a or b for a, b in zip(window.used, used, strict=True)]
        window.times += 1
        if loss is not None:
            window.add_loss(loss)

    def _accum(self, k: int) -> Layout:
        return self.placement.plan.specs.accum.layouts[k]


def _is_there(x: torch.Tensor | None) -> bool:
    return x is not None


def _sum(held: torch.Tensor, grad: torch.Tensor, path: str, round_to: Rounder) -> torch.Tensor:
    if held.dtype in LOW:
        return round_to(path, "accum", held.to(torch.float32).add(grad), held.dtype)
    return held.add(grad)


def open_window(plan: Plan, flat: FlatState, donate: bool) -> Window:
    """An empty window, or the one that the state is in."""
    accum = flat.accum
    if not isinstance(accum, Accumulator):
        count = len(plan.specs.accum.layouts)
        zero = torch.zeros((), dtype=torch.float64, device=plan.mesh.device)
        return Window([None] * count, [False] * count, zero, zero, EMPTY_NODE, 0, flat.buffers)
    used = accum.used.bool().tolist()
    sums = list(tree_lib.leaves(accum.grads))
    buffers = tree_lib.leaves(accum.buffers)
    return Window(sums, used, accum.weight, accum.loss, accum.aux, int(accum.times), buffers, True, donate)


def rounding(plan: Plan, flat: FlatState, window: Window) -> Rounder:
    """How sums of gradients are rounded in the micro-batch that comes next."""
    layouts = plan.specs.accum.by_path
    if plan.policy.accum not in LOW:
        return NEAREST
    key = fold_in(flat.key, window.times)
    return rounder(plan.policy, key, flat.step, lambda path: layouts[path].indices())


def as_node(plan: Plan, window: Window) -> Accumulator:
    """The window as a node of the state, on leaves of its own; where nothing came there are zeros."""
    layouts = plan.specs.accum.layouts
    sums = [
        keep(torch.zeros(y.local_shape, dtype=y.dtype), y) if x is None else x
        for x, y in zip(window.sums, layouts, strict=True)
    ]
    here = [i for i, y in enumerate(layouts) if store_of(y) is None]
    for i, x in zip(here, private([sums[i].contiguous() for i in here]), strict=True):
        sums[i] = x
    return Accumulator(
        grads=tree_lib.unflatten(plan.specs.accum.treedef, sums),
        weight=window.weight.clone(),
        loss=window.loss.clone(),
        aux=tree_lib.map(torch.clone, window.aux),
        times=torch.tensor(window.times, dtype=torch.int32),
        used=torch.tensor(window.used, dtype=torch.uint8),
        buffers=tree_lib.unflatten(plan.specs.buffers.treedef, [b.clone() for b in window.buffers]),
    )
