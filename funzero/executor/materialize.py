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

    @functools.cached_property
    def _plain(self) -> bool:
        """True if every param is handed to the loss function as it is."""
        pairs = zip(self.plan.specs.params.layouts, self.plan.compute_dtypes, strict=True)
        return all(x.dtype == d and not x.is_flat for x, d in pairs)

    def __call__(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole pieces in the compute dtype, of local params; those that need neither cast nor gather alias them."""
        if self._plain:
            return params
        out = [x if x.dtype == d else x.to(d) for x, d in zip(params, self.plan.compute_dtypes, strict=True)]
        for group in self._groups:
            group.gather(out)
        return [x.view(shape) for x, shape in zip(out, self._shapes, strict=True)]

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [x.piece_shape for x in self.plan.specs.params.layouts]
