"""A window in the making: what micro-batches add up to, while one call of the step works on it."""

import dataclasses
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.state import EMPTY_NODE, Accumulator
from funzero.executor.donate import private
from funzero.executor.flat import FlatState
from funzero.executor.plan import Plan
from funzero.executor.reduce import SmallReductions
from funzero.executor.session import Differentiated, Placement
from funzero.transforms.accumulate import weigh_aux
from funzero.transforms.losses import Loss
from funzero.transforms.precision import LOW
from funzero.transforms.storage import Rounder


@dataclasses.dataclass
class Window:
    """The sums of an `Accumulator` as lists, in the order of `specs.grads`; None where nothing came yet.

    Attributes:
        final: sums of the whole window that are already reduced to the layout of `specs.grads`, by trained leaf.
    """

    sums: list[torch.Tensor | None]
    used: list[bool]
    weight: torch.Tensor
    loss: torch.Tensor
    aux: Any
    times: int
    buffers: list[torch.Tensor]
    final: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def held(self, placement: Placement) -> dict[int, torch.Tensor]:
        """The sums so far of the leaves that are reduced with the last micro-batch of the window."""
        return {i: x for i, x in enumerate(self.sums) if x is not None and i in placement.window_routes}

    def add(self, done: Differentiated, placement: Placement, small: SmallReductions, round_to: Rounder) -> None:
        """Adds what a micro-batch gave, reducing what this layout reduces every time.

        Args:
            round_to: rounds sums that are kept in less than float32.
        """
        grads = small.run(done.grads)
        for i, x in done.reduced.items():
            if i in placement.micro_routes:
                grads[i] = x
            else:
                self.final[i] = x.to(placement.plan.specs.grads.layouts[i].dtype)
        for i, dtype in placement.widened.items():
            if (g := grads[i]) is not None:
                grads[i] = g.to(dtype)
        if self.times:
            names = [x.path for x in placement.plan.specs.accum.layouts]
            self.sums = [_add(h, g, n, round_to) for h, g, n in zip(self.sums, grads, names, strict=True)]
        else:
            self.sums = grads
        self.used = [a or b for a, b in zip(self.used, done.used, strict=True)]
        self.times += 1
        if done.loss is not None:
            self.add_loss(done.loss)

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


def _add(held: torch.Tensor | None, grad: torch.Tensor | None, path: str, round_to: Rounder) -> torch.Tensor | None:
    if held is None or grad is None:
        return held if grad is None else grad
    if held.dtype in LOW:
        return round_to(path, "accum", held.to(torch.float32).add(grad), held.dtype)
    return held.add(grad)


def open_window(plan: Plan, flat: FlatState) -> Window:
    """An empty window, or the one that the state is in."""
    accum = flat.accum
    if not isinstance(accum, Accumulator):
        count = len(plan.specs.accum.layouts)
        zero = torch.zeros((), dtype=torch.float64, device=plan.mesh.device)
        return Window([None] * count, [False] * count, zero, zero, EMPTY_NODE, 0, flat.buffers)
    used = accum.used.bool().tolist()
    sums = list(tree_lib.leaves(accum.grads))
    return Window(sums, used, accum.weight, accum.loss, accum.aux, int(accum.times), tree_lib.leaves(accum.buffers))


def as_node(plan: Plan, window: Window) -> Accumulator:
    """The window as a node of the state, on leaves of its own; where nothing came there are zeros."""
    sums = [
        torch.zeros(y.local_shape, dtype=y.dtype, device=plan.mesh.device) if x is None else x
        for x, y in zip(window.sums, plan.specs.accum.layouts, strict=True)
    ]
    return Accumulator(
        grads=tree_lib.unflatten(plan.specs.accum.treedef, private([x.contiguous() for x in sums])),
        weight=window.weight.clone(),
        loss=window.loss.clone(),
        aux=tree_lib.map(torch.clone, window.aux),
        times=torch.tensor(window.times, dtype=torch.int32),
        used=torch.tensor(window.used, dtype=torch.uint8),
        buffers=tree_lib.unflatten(plan.specs.buffers.treedef, [b.clone() for b in window.buffers]),
    )
