"""The kernels that the executor uses: the only importer of `funzero_kernels`."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from funzero.core.spec import Layout
from funzero.transforms.norm import NormPlan
from funzero_kernels import ops
from funzero_kernels.batch import Batch, Squares
from funzero_kernels.checks import FLOATS
from funzero_kernels.ops import UNSCALED, Adam, Draw, Leaf, Lion, Moment, Momentum, Rule, Scale

__all__ = [
    "UNSCALED",
    "Adam",
    "Batch",
    "Draw",
    "Leaf",
    "Lion",
    "Moment",
    "Momentum",
    "NormKernel",
    "Rule",
    "Scale",
    "update",
    "update_batch",
]


def update(leaves: Sequence[Leaf], rule: Rule, scale: Scale = UNSCALED, skip: torch.Tensor | None = None) -> None:
    """One update of each leaf in place; none if `skip`, a 0-dim bool, is true."""
    if skip is None or not bool(skip):
        ops.update(leaves, rule, scale)


def update_batch(batch: Batch, *how: Any, skip: torch.Tensor | None) -> None:
    """`batch.update(*how)`; nothing if `skip` is true."""
    if skip is None or not bool(skip):
        batch.update(*how, torch.get_num_threads())


class NormKernel:
    """Sums of squares by a kernel: other bits than `NormPlan`'s own, but as equal for every layout.

    Args:
        plan: of leaves on the CPU whose dtypes a kernel takes.
    """

    def __init__(self, plan: NormPlan):
        self.order = [i for i, _, _ in plan.rows]
        rows = [(plan.layouts[i], first, chunk) for i, first, chunk in plan.rows]
        self._rows = [(math.prod(x.local_shape), chunk, first, x.dtype) for x, first, chunk in rows]
        self._all = Squares(self._rows)

    @staticmethod
    def of(plan: NormPlan) -> "NormKernel | None":
        """None for leaves that no kernel takes."""
        return NormKernel(plan) if all(x.dtype in FLOATS and _on_cpu(x) for x in plan.layouts) else None

    def fill(self, sums: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """See `NormPlan.sums`."""
        self._all.fill(sums, [grads[i] for i in self.order], torch.get_num_threads())

    def fill_one_by_one(self, sums: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """The same of leaves that come when they are asked for."""
        for i, alone in zip(self.order, self._each, strict=True):
            alone.fill(sums, [grads[i]], torch.get_num_threads())

    @functools.cached_property
    def _each(self) -> list[Squares]:
        return [Squares([row]) for row in self._rows]


def _on_cpu(layout: Layout) -> bool:
    return layout.mesh.device.type == "cpu"
