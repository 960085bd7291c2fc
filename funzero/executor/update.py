"""The update of a window: reduce, norm, clip, optimizer, and params whole again where they are kept whole."""

import dataclasses
import functools
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.collectives import Group, post_gather, travel_groups
from funzero.core.spec import Layout
from funzero.executor import fused, place
from funzero.executor.donate import make_writable, private
from funzero.executor.flat import FlatState
from funzero.executor.options import StepOptions
from funzero.executor.pieces import PartCaller
from funzero.executor.plan import Plan
from funzero.executor.reduce import ReducePlan, or_zeros
from funzero.executor.window import Window
from funzero.transforms.base import Transform
from funzero.transforms.norm import NormPlan, clip_factor


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
            self._reductions[left] = ReducePlan(tuple(accum[i] for i in left), tuple(grads[i] for i in left))
        layouts = self.plan.specs.accum.layouts
        sums: list[Any] = [window.sums[i] for i in left]
        if any(x is None for x in sums):
            sums = [or_zeros(x, layouts[i]) for x, i in zip(sums, left, strict=True)]
        window.sums = []
        done = self._reductions[left].run(sums)
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
    def kernel(self) -> fused.FusedAdam | None:
        """The fused form of the optimizer, if it has one."""
        kept = self.plan.specs.params.layouts
        if any(kept[i].dtype != g.dtype for i, g in zip(self.params_at, self.layouts, strict=True)):
            return None  # torch's kernel takes one dtype
        return fused.match(self.tx, self.plan.specs.opt_state, self.names)

    @functools.cached_property
    def written(self) -> list[int]:
        """The places in opt_state that the fused form writes to."""
        return self.kernel.written(self.chosen) if self.kernel else []

    @functools.cached_property
    def kernel_groups(self) -> list[fused.Group]:
        """The chosen leaves as the fused form takes them."""
        return self.kernel.groups(self.chosen, [x.dtype for x in self.layouts]) if self.kernel else []

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


def clip(selection: Selection, grads: list[torch.Tensor], weight: torch.Tensor, options: StepOptions) -> Any:
    """Finalised, clipped gradients, their norm (0-dim float64, before the clip), and a function that names a bad leaf.

    Multiplications by exactly 1 are left out where the host can see it: on the CPU.
    """
    on_host = weight.device.type == "cpu"
    grads = [g if g.is_contiguous() else g.contiguous() for g in grads]
    fresh = selection.reduced
    if options.reduction == "mean" and not (on_host and float(weight) in (0.0, 1.0)) and grads:
        grads = grads if fresh else private(grads)
        torch._foreach_div_(grads, torch.where(weight == 0, 1.0, weight))
    sums = selection.norm.sums(grads)
    norm = sums.sum().sqrt()
    if options.max_norm is not None and grads:
        factor = clip_factor(norm, options.max_norm)
        if not (on_host and float(factor) == 1.0):
            grads = grads if fresh else private(grads)
            torch._foreach_mul_(grads, factor)
    return grads, norm, lambda: selection.norm.first_bad(sums)


def update_leaves(
    selection: Selection, flat: FlatState, grads: list[torch.Tensor], skip: torch.Tensor | None, donate: bool
) -> None:
    """Replaces the params and the opt_state of `flat`.

    Args:
        grads: finalised, of the chosen leaves.
        skip: 0-dim bool on the device that makes the update a no-op, or None when the host knows that it happens.
    """
    make_writable(flat.params, selection.params_at, donate)
    pieces = [flat.params[i] if part is None else place.cut_flat(flat.params[i], part) for i, part in selection.parts]
    if selection.kernel is not None:
        make_writable(flat.opt_state, selection.written, donate)
        selection.kernel.run(pieces, grads, flat.opt_state, selection.chosen, selection.kernel_groups, skip)
    else:
        _composed(selection, pieces, flat, grads, skip)
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


def _composed(
    selection: Selection,
    pieces: list[torch.Tensor],
    flat: FlatState,
    grads: list[torch.Tensor],
    skip: torch.Tensor | None,
) -> None:
    """Runs the optimizer as its transforms say, on trees in which leaves that took no part are `None`."""
    trained, tx = selection.plan.specs.grads, selection.tx
    held = [torch.empty(x.local_shape, dtype=x.dtype, device="meta") for x in trained.layouts]
    given: list[Any] = [None] * len(held)
    for i, p, g in zip(selection.chosen, pieces, grads, strict=True):
        held[i], given[i] = p, g
    caller = PartCaller(dict(zip(selection.names, trained.layouts, strict=True)))
    opt_state = tree_lib.unflatten(selection.plan.specs.opt_state.treedef, flat.opt_state)
    trees = tree_lib.unflatten(trained.treedef, given), opt_state, tree_lib.unflatten(trained.treedef, held)
    updates, new = tx.update(*trees, call=caller) if tx.parts else caller(tx, *trees)
    changed = dict(zip(*tree_lib.flatten_with_paths(updates)[:2], strict=True))
    for i, p in zip(selection.chosen, pieces, strict=True):
        value = p + changed[selection.names[i]]
        p.copy_(value if skip is None else torch.where(skip, p, value))
    kept = selection.plan.specs.opt_state.layouts
    after = [x.to(y.dtype) for x, y in zip(tree_lib.leaves(new), kept, strict=True)]
    flat.opt_state = (
        after if skip is None else [torch.where(skip, a, b) for a, b in zip(flat.opt_state, after, strict=True)]
    )
