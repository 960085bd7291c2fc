"""Params made ready for the loss function: cast in their shards, then gathered."""

import dataclasses
import functools

import torch

from funzero.core.collectives import Group, travel_groups
from funzero.executor.plan import Plan


@dataclasses.dataclass(frozen=True)
class GatherAll:
    """Gathers every cut param at once."""

    plan: Plan

    @functools.cached_property
    def _groups(self) -> list[Group]:
        pairs = zip(self.plan.specs.params.layouts, self.plan.compute_dtypes, strict=True)
        return travel_groups([dataclasses.replace(x, dtype=d) if x.ranks > 1 else None for x, d in pairs])

    def __call__(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole pieces in the compute dtype, of local params; those that need neither cast nor gather alias them."""
        out = [x.detach().to(d) for x, d in zip(params, self.plan.compute_dtypes, strict=True)]
        for group in self._groups:
            group.gather(out)
        return [x.view(y.piece_shape) for x, y in zip(out, self.plan.specs.params.layouts, strict=True)]
