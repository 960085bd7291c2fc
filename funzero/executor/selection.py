"""The leaves that took part in a window, and the plans for exactly these."""

import dataclasses
import functools
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.collectives import Group, travel_groups
from funzero.core.spec import Layout
from funzero.executor import fused
from funzero.executor.dispatch import Draw, NormKernel
from funzero.executor.flat import FlatState
from funzero.executor.kernel_update import Piece, Targets
from funzero.executor.placement import is_large
from funzero.executor.plan import Plan
from funzero.executor.portions import Portion, portions, whole
from funzero.executor.reduce import ReducePlan, or_zeros
from funzero.executor.stores import fetch, store_of
from funzero.executor.window import Window
from funzero.transforms.base import Transform
from funzero.transforms.norm import NormPlan
from funzero.transforms.precision import LOW
from funzero.transforms.storage import MASTER, Rounder, moments, rounder

KEPT = 16  # selections of one layout


@dataclasses.dataclass(frozen=True)
class Selection:
    """The trained leaves that took part in a window, and the plans for exactly these.

    Attributes:
        plan: of the whole layout. tx: the optimizer, with masks resolved. chosen: places among the trained leaves.
    """

    plan: Plan
    tx: Transform
    chosen: tuple[int, ...]

    @functools.cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of the finalised gradients."""
        return tuple(self.plan.specs.grads.layouts[i] for i in self.chosen)

    def reduce(self, window: Window) -> list[torch.Tensor]:
        """The window's sums of the chosen leaves, summed over ranks as finalised gradients are; takes them out of it."""
        left = tuple(i for i in self.chosen if i not in window.final) if window.final else self.chosen
        here = tuple(i for i in left if i not in self.away) if self.away else left
        done = self._reduced(here, [window.sums[i] for i in here])
        if here == self.chosen:
            window.sums = []
            return done
        found = window.final | dict(zip(here, done, strict=True))
        away = [i for i in left if i in self.away]
        large = {i for i in away if is_large(self.plan.specs.grads.layouts[i])}
        for group in ([i for i in away if i not in large], *([i] for i in away if i in large)):
            self._reduce_away(group, window, found)
        window.outbox.settle()
        window.sums, window.final = [], {}
        return [found[i] for i in self.chosen]

    @functools.cached_property
    def away(self) -> frozenset[int]:
        """The chosen leaves whose gradients are kept elsewhere."""
        return frozenset(i for i, x in zip(self.chosen, self.layouts, strict=True) if store_of(x) is not None)

    @functools.cached_property
    def params_here(self) -> list[int]:
        """The places of the chosen params that are on the device."""
        return [x.at for x in self.pieces if x.store is None]

    def _reduced(self, left: tuple[int, ...], sums: list[Any]) -> list[torch.Tensor]:
        accum, grads, go = self.plan.specs.accum.layouts, self.plan.specs.grads.layouts, self.plan.travelling
        if left not in self._reductions:
            self._reductions[left] = ReducePlan(tuple(go(accum[i]) for i in left), tuple(go(grads[i]) for i in left))
        if self.plan.policy.reduce is not None or any(x is None for x in sums):
            sums = [or_zeros(x, go(accum[i])) for x, i in zip(sums, left, strict=True)]
        done = self._reductions[left].run(sums)
        if self.plan.policy.reduce is not None:
            done = [x.to(accum[i].dtype) for x, i in zip(done, left, strict=True)]
        return done

    def _reduce_away(self, group: list[int], window: Window, found: dict[int, torch.Tensor]) -> None:
        """Leaves whose sums are kept elsewhere, together: those with nothing to add up stay as they are."""
        accum, grads = self.plan.specs.accum.layouts, self.plan.specs.grads.layouts
        same = [i for i in group if accum[i].local_shape == grads[i].local_shape]
        same = [i for i in same if accum[i].mesh.size(accum[i].spec.unreduced) == 1]
        done = {i: x for i in same if (x := window.sums[i]) is not None}
        found |= done
        todo = [i for i in group if i not in done]
        here = [x if x is None else fetch(x, accum[i]) for i, x in ((i, window.sums[i]) for i in todo)]
        for i in todo:
            window.sums[i] = None  # so that its room can be used again
        for i, x in zip(todo, self._reduced(tuple(todo), here), strict=True):
            found[i] = window.outbox.put(x, grads[i])

    @functools.cached_property
    def reduced(self) -> bool:
        """True if every chosen gradient comes out of a reduction, on memory that nobody else knows."""
        accum = self.plan.micro_grads
        return all(self.plan.mesh.size(accum[i].spec.unreduced) > 1 for i in self.chosen)

    @functools.cached_property
    def _reductions(self) -> dict[tuple[int, ...], ReducePlan]:
        return {}

    @functools.cached_property
    def norm(self) -> NormPlan:
        """The plan of the global norm."""
        return NormPlan(self.layouts)

    @functools.cached_property
    def norm_kernel(self) -> NormKernel | None:
        """What takes the sums of squares in its place, if the leaves are such."""
        return NormKernel.of(self.norm)

    @functools.cached_property
    def names(self) -> list[str]:
        """Paths of all trained leaves, below params."""
        return tree_lib.paths(self.plan.specs.grads.tree)

    @functools.cached_property
    def kernel(self) -> fused.FusedChain | None:
        """The fused form of the optimizer, if it has one, and one that takes these dtypes."""
        found = fused.match(self.tx, self.plan.specs.opt_state, self.names)
        if found is None or self.plan.policy.rounding == "kahan":
            return None
        state = self.plan.specs.opt_state.layouts
        params = [self.plan.specs.params.layouts[i].dtype for i in self.params_at]
        kept = {state[i].dtype for k in self.chosen for i in found.moments[k]}
        fits = {*params, *(x.dtype for x in self.layouts)} <= set(fused.FLOATS)
        fits = fits and kept <= set(fused.CODED if found.codes else fused.MOMENTS)
        fits = fits and all(state[i].dtype == torch.float32 for i in self.masters)
        return found if fits else None

    @functools.cached_property
    def portions(self) -> list[Portion]:
        """The leaves that the optimizer works on at a time where no kernel runs it."""
        kept = [*(x.kept for x in self.pieces), *self.layouts, *self.plan.specs.opt_state.layouts]
        if not self.chosen or not self.tx.separate or all(store_of(x) is None for x in kept):
            return [whole(self.plan, self.chosen)]
        return portions(self.plan, self.tx, self.chosen)

    @functools.cached_property
    def tame(self) -> bool:
        """True if what the kernel computes fits into what it is kept in: float16 overflows at 65504."""
        return all(self.plan.specs.params.layouts[i].dtype != torch.float16 for i in self.params_at)

    def refuser(self, found: int) -> str:
        """The path of the leaf that `update_leaves` returns."""
        params = [self.plan.specs.params.layouts[i].path for i in self.params_at]
        names = params + [x.path for x in self.plan.specs.opt_state.layouts]
        return names[len(names) - found]

    @functools.cached_property
    def masters(self) -> list[int]:
        """The places of the chosen leaves' master copies in opt_state, if the policy keeps any."""
        if self.plan.policy.master is None:
            return []
        at = {path: i for i, path in enumerate(tree_lib.paths(self.plan.specs.opt_state.tree))}
        return [at[f"{MASTER}/{self.names[i]}"] for i in self.chosen]

    @functools.cached_property
    def owners(self) -> dict[str, str]:
        """{moment: its param}, see `storage.moments`; empty where no moment is rounded."""
        if self.plan.policy.moments not in LOW:
            return {}
        return moments(self.tx, self.plan.specs.grads.abstract())

    @functools.cached_property
    def targets(self) -> Targets:
        """The chosen leaves as a kernel takes them."""
        kernel = self.kernel
        assert kernel is not None
        moments = [kernel.moments[i] for i in self.chosen]
        decays = [kernel.decays[i] for i in self.chosen]
        state = self.plan.specs.opt_state.layouts
        return Targets(state, moments, self.masters, decays, self.pieces, self.layouts, kernel.codes)

    def draws(self, flat: FlatState) -> list[tuple[Draw, ...]]:
        """For stochastic rounding: of each chosen leaf's param and moments; else empty."""
        if self.plan.policy.rounding != "stochastic":
            return []
        round_to = self.rounder(flat)
        every = 2 if self.targets.codes else 1  # their scales are never rounded
        return [self._draws(round_to, i, at[::every]) for i, at in zip(self.chosen, self.targets.moments, strict=True)]

    def _draws(self, round_to: Rounder, i: int, moments: tuple[int, ...]) -> tuple[Draw, ...]:
        """By the names that `update_stored` gives them."""
        paths = tree_lib.paths(self.plan.specs.opt_state.tree)
        words = [round_to.words(self.names[i], what) for what in ("params", *(paths[m] for m in moments))]
        index = round_to.index(self.names[i])
        return tuple(Draw(w, index) for w in words)

    def rounder(self, flat: FlatState) -> Rounder:
        """How this update rounds."""
        index = dict(zip((self.names[i] for i in self.chosen), self.layouts, strict=True))
        return rounder(self.plan.policy, flat.key, flat.step, lambda path: index[path].indices())

    @functools.cached_property
    def params_at(self) -> list[int]:
        """Places of the chosen leaves among the params."""
        return [self.plan.trained[i] for i in self.chosen]

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """For each chosen leaf, what is updated here of its param."""
        kept = self.plan.specs.params.layouts
        pairs = zip(self.params_at, self.layouts, strict=True)
        return [Piece(i, kept[i], g if g.is_flat and not kept[i].is_flat else None) for i, g in pairs]

    @functools.cached_property
    def regather(self) -> list[Group]:
        """Params that are kept whole but were updated in ranges: how they become whole again."""
        cut = [x.part and dataclasses.replace(x.part, dtype=x.kept.dtype) for x in self.pieces]
        return travel_groups(cut)


class Selections:
    """The selections of one layout by the leaves that took part, those used last: with many experts there is no end of them."""

    def __init__(self, plan: Plan, tx: Transform):
        self._plan, self._tx = plan, tx
        self._all = tuple(range(len(plan.specs.grads.layouts)))
        self._kept: dict[tuple[int, ...], Selection] = {}

    def of(self, used: list[bool]) -> Selection:
        """The plans for the leaves that took part."""
        chosen = self._all if all(used) else tuple(i for i, flag in enumerate(used) if flag)
        found = self._kept.pop(chosen, None) or Selection(self._plan, self._tx, chosen)
        if len(self._kept) == KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[chosen] = found
        return found


def writes_anew(plan: Plan, tx: Transform) -> bool:
    """Whether an update writes what lives elsewhere to new rooms, also where the old ones are given away."""
    selection = Selection(plan, plan.resolved(tx), tuple(range(len(plan.trained))))
    return len(selection.portions) > 1 if selection.kernel is None else not selection.tame
