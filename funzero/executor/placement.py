"""Which params are lazy, how each is made whole, and how its gradient goes: worked out once for each layout."""

import dataclasses
import functools
from typing import Any

import torch

from funzero.core.collectives import BUNDLE_BYTES, Group, travel_groups
from funzero.core.spec import Layout
from funzero.executor.cache import CacheOptions
from funzero.executor.forms import Forms
from funzero.executor.plan import Plan
from funzero.executor.stores import fetch, store_of

RESERVE = 4  # one part in so many of the gather budget is kept for pending reductions


@dataclasses.dataclass(frozen=True)
class Placement:
    """The plan of how params come to a loss function and gradients leave it."""

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
        """The params that come on use: those that are cut or kept elsewhere, and too large to travel in a bundle."""
        return {i: x for i, x in enumerate(self.layouts) if (x.is_flat or store_of(x)) and is_large(x)}

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
            a.dtype == b.dtype and not a.is_flat and store_of(a) is None
            for a, b in zip(kept, self.layouts, strict=True)
        )

    def head(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole pieces in the compute dtype of what is not lazy; lazy params as they are."""
        if self._plain:
            return params
        out = [
            x if i in self.lazy else fetch(x, y).to(y.dtype)
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
        return {i: (self.plan.travelling(x), False) for i, x in enumerate(accum) if x.is_flat and is_large(x)}

    @functools.cached_property
    def window_routes(self) -> dict[int, tuple[Layout, bool]]:
        """Large gradients that are reduced once a window, by trained leaf: as soon as its last micro-batch has them."""
        routes = {}
        for i, (a, g) in enumerate(zip(self.plan.specs.accum.layouts, self.plan.specs.grads.layouts, strict=True)):
            open_axes = tuple(x for x in a.spec.unreduced if a.mesh.axis_size(x) > 1)
            if a.is_flat or not open_axes or not is_large(a):
                continue
            if g.is_flat and set(open_axes) == {x for x in g.spec.flat if g.mesh.axis_size(x) > 1}:
                routes[i] = (self.plan.travelling(g), False)
            elif not g.is_flat:
                routes[i] = (self.plan.travelling(a.with_spec(flat=open_axes, unreduced=())), True)
        return routes

    @functools.cached_property
    def sums_away(self) -> frozenset[int]:
        """The trained leaves with an accumulator that is kept elsewhere."""
        return frozenset(k for k, x in enumerate(self.plan.specs.accum.layouts) if store_of(x) is not None)

    @functools.cached_property
    def early(self) -> frozenset[int]:
        """Those of them that are large: their gradients are added as they come."""
        return frozenset(k for k in self.sums_away if is_large(self.plan.specs.accum.layouts[k]))


def is_large(layout: Layout) -> bool:
    """Whether a leaf travels alone."""
    return layout.n * layout.dtype.itemsize >= BUNDLE_BYTES
