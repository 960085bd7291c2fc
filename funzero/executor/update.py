"""The update of a window: reduce, norm, clip, optimizer, and params whole again where they are kept whole."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funzero.core import tree as tree_lib
from funzero.core.collectives import Group, post_gather, travel_groups
from funzero.core.spec import Layout
from funzero.executor import fused, place
from funzero.executor.dispatch import UNSCALED, Draw, Scale
from funzero.executor.donate import make_writable, private
from funzero.executor.flat import FlatState
from funzero.executor.kernel_update import KernelUpdate, Targets
from funzero.executor.options import StepOptions
from funzero.executor.pieces import PartCaller
from funzero.executor.plan import Plan
from funzero.executor.reduce import ReducePlan, or_zeros
from funzero.executor.sound import first_spoilt
from funzero.executor.stores import fetch, replaced
from funzero.executor.window import Window
from funzero.transforms.base import Transform
from funzero.transforms.norm import NormPlan, clip_factor
from funzero.transforms.precision import LOW
from funzero.transforms.storage import MASTER, Rounder, moments, rounder, update_stored


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
        if left not in self._reductions:
            accum, grads = self.plan.specs.accum.layouts, self.plan.specs.grads.layouts
            go = self.plan.travelling
            self._reductions[left] = ReducePlan(tuple(go(accum[i]) for i in left), tuple(go(grads[i]) for i in left))
        layouts = self.plan.specs.accum.layouts
        sums: list[Any] = [window.sums[i] for i in left]
        if self.plan.policy.reduce is not None or any(x is None for x in sums):
            sums = [or_zeros(x, self.plan.travelling(layouts[i])) for x, i in zip(sums, left, strict=True)]
        window.sums = []
        done = self._reductions[left].run(sums)
        if self.plan.policy.reduce is not None:
            done = [x.to(layouts[i].dtype) for x, i in zip(done, left, strict=True)]
        if not window.final:
            return done
        found = window.final | dict(zip(left, done, strict=True))
        window.final = {}
        return [found[i] for i in self.chosen]

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
        fits = {*params, *(x.dtype for x in self.layouts)} <= set(fused.FLOATS) and kept <= set(fused.MOMENTS)
        fits = fits and all(state[i].dtype == torch.float32 for i in self.masters)
        return found if fits else None

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
        return Targets(self.plan.specs.opt_state.layouts, moments, self.masters, decays)

    def draws(self, flat: FlatState) -> list[tuple[Draw, ...]]:
        """For stochastic rounding: of each chosen leaf's param and moments; else empty."""
        if self.plan.policy.rounding != "stochastic":
            return []
        round_to = self.rounder(flat)
        return [self._draws(round_to, i, at) for i, at in zip(self.chosen, self.targets.moments, strict=True)]

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
    def parts(self) -> list[tuple[int, Layout | None]]:
        """For each chosen leaf its place among the params, and the range of it that is updated here, if not all."""
        kept = self.plan.specs.params.layouts
        pairs = zip(self.params_at, self.layouts, strict=True)
        return [(i, g if g.is_flat and not kept[i].is_flat else None) for i, g in pairs]

    @functools.cached_property
    def regather(self) -> list[Group]:
        """Params that are kept whole but were updated in ranges: how they become whole again."""
        kept = self.plan.specs.params.layouts
        return travel_groups([part and dataclasses.replace(part, dtype=kept[i].dtype) for i, part in self.parts])


class Clipped(NamedTuple):
    """Finalised gradients of the chosen leaves.

    Attributes:
        norm: 0-dim float64, before the clip. bad: names a leaf that is not finite. scale: what is left for the kernel to do.
    """

    grads: list[torch.Tensor]
    norm: torch.Tensor
    bad: Callable[[], str]
    scale: Scale = UNSCALED


def clip(
    selection: Selection,
    grads: list[torch.Tensor],
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    options: StepOptions,
) -> "Clipped":
    """Gradients divided and clipped, at once or by the kernel that reads them.

    Multiplications by exactly 1 are left out where the host can see it: on the CPU.
    """
    on_host = weight.device.type == "cpu"
    grads = [g if g.is_contiguous() else g.contiguous() for g in grads]
    fresh = selection.reduced
    divisor = torch.where(weight == 0, 1.0, weight) if options.reduction == "mean" else torch.ones_like(weight)
    if scale is not None:
        divisor = divisor * scale
    if on_host and selection.kernel is not None:
        sums = selection.norm.sums(grads)
        norm = sums.sum().sqrt() / divisor
        left = 1.0 if options.max_norm is None else float(clip_factor(norm, options.max_norm))
        return Clipped(grads, norm, lambda: selection.norm.first_bad(sums), Scale(float(divisor), left))
    if grads and not (on_host and float(divisor) == 1.0):
        grads = grads if fresh else private(grads)
        torch._foreach_div_(grads, divisor)
    sums = selection.norm.sums(grads)
    norm = sums.sum().sqrt()
    if options.max_norm is not None and grads:
        factor = clip_factor(norm, options.max_norm)
        if not (on_host and float(factor) == 1.0):
            grads = grads if fresh else private(grads)
            torch._foreach_mul_(grads, factor)
    return Clipped(grads, norm, lambda: selection.norm.first_bad(sums))


def update_leaves(
    selection: Selection,
    flat: FlatState,
    clipped: Clipped,
    largest: torch.Tensor,
    skip: torch.Tensor | None,
    donate: bool,
) -> torch.Tensor:
    """Replaces the params and the opt_state of `flat`, unless something finite in them would cease to be.

    Args:
        clipped: from `clip`. largest: no element of theirs is beyond it, 0-dim float64.
        skip: 0-dim bool on the device that makes the update a no-op, or None when the host knows that it happens.

    Returns: 0, or which leaf refused the update, see `Selection.refuser`; int64 on the device, equal on every rank.
    """
    grads, scale = clipped.grads, clipped.scale
    if selection.kernel is None:
        return _update_composed(selection, flat, grads, skip, donate)
    hyper = selection.kernel.read(flat.opt_state)
    # Where only the device knows how large the gradients are, those whose squares overflow are refused unseen.
    rule, decay = selection.kernel.rule(hyper), hyper["weight_decay"]
    tame = selection.tame and fused.is_tame(rule, decay, float(largest) if skip is None else 0.0)
    if skip is not None and tame:
        too_large = largest.square() >= torch.finfo(torch.float32).max
        _update_fused(selection, flat, grads, KernelUpdate(rule, decay, scale, skip | too_large, donate))
        return too_large.long()
    if tame:
        _update_fused(selection, flat, grads, KernelUpdate(rule, decay, scale, skip, donate))
        return torch.zeros((), dtype=torch.int64)
    before, state = list(flat.params), list(flat.opt_state)
    _update_fused(selection, flat, grads, KernelUpdate(rule, decay, scale, skip, donate=False))
    places = selection.params_at
    found = first_spoilt(
        [*(before[i] for i in places), *state],
        [*(flat.params[i] for i in places), *flat.opt_state],
        selection.plan.mesh,
    )
    if int(found):
        flat.params, flat.opt_state = before, state
    return found


def _pieces(selection: Selection, flat: FlatState) -> list[torch.Tensor]:
    """What is updated here of each chosen param; a view."""
    return [flat.params[i] if part is None else place.cut_flat(flat.params[i], part) for i, part in selection.parts]


def _update_fused(selection: Selection, flat: FlatState, grads: list[torch.Tensor], update: KernelUpdate) -> None:
    """In place where `update.donate` allows it."""
    kernel = selection.kernel
    assert kernel is not None
    make_writable(flat.params, selection.params_at, update.donate)
    make_writable(flat.opt_state, kernel.schedule_counts, update.donate)
    draws = selection.draws(flat)
    counts = kernel.advance(flat.opt_state, selection.chosen, update.skip)
    pieces = _pieces(selection, flat)
    update.run(selection.targets, counts, pieces, grads, flat.opt_state, draws)
    _make_whole(selection, flat, pieces)


def _make_whole(selection: Selection, flat: FlatState, pieces: list[torch.Tensor]) -> None:
    """Gathers updated ranges into the params that they are ranges of: large ones in place and all at once."""
    under_way = []
    for group in selection.regather:
        wholes = [flat.params[selection.params_at[k]] for k in group.indices]
        if len(wholes) == 1:
            layout = group.bundle.layouts[0]
            under_way.append(post_gather(pieces[group.indices[0]], layout, out=wholes[0].view(-1)))
            continue
        group.gather(pieces)
        for k, whole in zip(group.indices, wholes, strict=True):
            whole.copy_(pieces[k])
    for pending in under_way:
        pending.wait()


def _update_composed(
    selection: Selection, flat: FlatState, grads: list[torch.Tensor], skip: torch.Tensor | None, donate: bool
) -> torch.Tensor:
    """Looks at all that the optimizer returns before any of it is written."""
    values, state = _composed(selection, flat, grads)
    found = first_spoilt([*_pieces(selection, flat), *flat.opt_state], [*values, *state], selection.plan.mesh)
    if skip is None and int(found):
        return found
    make_writable(flat.params, selection.params_at, donate)
    pieces = _pieces(selection, flat)
    if skip is not None:
        skip = skip | (found > 0)
        values = [torch.where(skip, a, b) for a, b in zip(pieces, values, strict=True)]
        state = [torch.where(skip, a, b) for a, b in zip(flat.opt_state, state, strict=True)]
    for p, value in zip(pieces, values, strict=True):
        p.copy_(value)
    layouts = selection.plan.specs.opt_state.layouts
    flat.opt_state = [replaced(*row, donate) for row in zip(flat.opt_state, state, layouts, strict=True)]
    _make_whole(selection, flat, pieces)
    return found


def _composed(
    selection: Selection, flat: FlatState, grads: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Runs the optimizer as its transforms say, on trees in which leaves that took no part are `None`.

    Returns: the new chosen params and the whole new opt_state, in the dtypes in which they are kept.
    """
    trained, tx = selection.plan.specs.grads, selection.tx
    held = [torch.empty(x.local_shape, dtype=x.dtype, device="meta") for x in trained.layouts]
    given: list[Any] = [None] * len(held)
    for i, p, g in zip(selection.chosen, _pieces(selection, flat), grads, strict=True):
        held[i], given[i] = p, g
    caller = PartCaller(dict(zip(selection.names, trained.layouts, strict=True)))
    layouts = selection.plan.specs.opt_state.layouts
    here = [fetch(x, layout) for x, layout in zip(flat.opt_state, layouts, strict=True)]
    opt_state = tree_lib.unflatten(selection.plan.specs.opt_state.treedef, here)
    trees = tree_lib.unflatten(trained.treedef, given), opt_state, tree_lib.unflatten(trained.treedef, held)
    policy, round_to = selection.plan.policy, selection.rounder(flat)
    params, new = update_stored(tx, policy, *trees, round_to, owners=selection.owners, call=caller)
    after = dict(zip(*tree_lib.flatten_with_paths(params)[:2], strict=True))
    state = [x.to(y.dtype) for x, y in zip(tree_lib.leaves(new), layouts, strict=True)]
    state = [old if x is before else x for x, before, old in zip(state, here, flat.opt_state, strict=True)]
    return [after[selection.names[i]] for i in selection.chosen], state
