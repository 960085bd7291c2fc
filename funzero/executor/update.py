"""The update of a window: reduce, norm, clip, optimizer, and params whole again where they are kept whole."""

import dataclasses
import functools
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.collectives import Group, travel_groups
from funzero.core.spec import Layout
from funzero.executor import fused, place
from funzero.executor.donate import private, writable
from funzero.executor.pieces import PartCaller
from funzero.executor.plan import Plan
from funzero.executor.reduce import ReducePlan
from funzero.transforms.base import Transform
from funzero.transforms.norm import NormPlan, clip_factor, fold


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

    @functools.cached_property
    def reduction(self) -> ReducePlan:
        """From the accumulator's layout to that of finalised gradients."""
        return ReducePlan(tuple(self.plan.specs.accum.layouts[i] for i in self.chosen), self.layouts)

    @functools.cached_property
    def norm(self) -> NormPlan:
        """The plan of the global norm."""
        return NormPlan(self.layouts)

    @functools.cached_property
    def kernel(self) -> fused.FusedAdam | None:
        """The fused form of the optimizer, if it has one."""
        names = tree_lib.paths(self.plan.specs.grads.tree)
        return fused.match(self.tx, self.plan.specs.opt_state, names)

    @functools.cached_property
    def params_at(self) -> list[int]:
        """Places of the chosen leaves among the params."""
        return [self.plan.trained[i] for i in self.chosen]

    @functools.cached_property
    def regather(self) -> list[Group]:
        """Params that are kept whole but were updated in ranges: how they become whole again."""
        kept = self.plan.specs.params.layouts
        pairs = zip(self.params_at, self.layouts, strict=True)
        cut = [dataclasses.replace(g, dtype=kept[i].dtype) if self._in_ranges(kept[i], g) else None for i, g in pairs]
        return travel_groups(cut)

    @staticmethod
    def _in_ranges(kept: Layout, updated: Layout) -> bool:
        return not kept.is_flat and updated.ranks > 1


def clip(
    selection: Selection, grads: list[torch.Tensor], weight: torch.Tensor, max_norm: float | None, mean: bool
) -> Any:
    """Finalised, clipped gradients, their norm (0-dim float64, before the clip), and a function that names a bad leaf.

    Multiplications by exactly 1 are left out where the host can see it: on the CPU.
    """
    on_host = weight.device.type == "cpu"
    grads = private(grads)
    if mean and not (on_host and float(weight) in (0.0, 1.0)):
        torch._foreach_div_(grads, torch.where(weight == 0, 1.0, weight))
    sums = selection.norm.sums(grads)
    norm = fold(sums).sqrt()
    if max_norm is not None:
        factor = clip_factor(norm, max_norm)
        if not (on_host and float(factor) == 1.0) and grads:
            torch._foreach_mul_(grads, factor)
    return grads, norm, lambda: selection.norm.first_bad(sums)


def update_leaves(
    selection: Selection,
    params: list[torch.Tensor],
    opt_state: Any,
    grads: list[torch.Tensor],
    skip: torch.Tensor | None,
    donate: bool,
) -> tuple[list[torch.Tensor], Any]:
    """New local params and a new opt_state.

    Args:
        params: all local params. grads: finalised, of the chosen leaves.
        skip: 0-dim bool on the device that makes the update a no-op, or None when the host knows that it happens.
    """
    new_params = list(params)
    for i in selection.params_at:
        new_params[i] = writable(params[i], donate)
    pieces = [place.cut_flat(new_params[i], g) if g.is_flat else new_params[i] for i, g in _targets(selection)]
    leaves, treedef = tree_lib.flatten(opt_state)
    if selection.kernel is not None:
        for k in selection.kernel.written(list(selection.chosen)):
            leaves[k] = writable(leaves[k], donate)
        selection.kernel.run(pieces, grads, leaves, list(selection.chosen), skip)
        opt_state = tree_lib.unflatten(treedef, leaves)
    else:
        opt_state = _composed(selection, pieces, opt_state, grads, skip)
    _make_whole(selection, new_params, pieces)
    return new_params, opt_state


def _targets(selection: Selection) -> list[tuple[int, Layout]]:
    """For each chosen leaf its place among the params, and the layout of what is updated, as a part of what is kept."""
    kept = selection.plan.specs.params.layouts
    pairs = zip(selection.params_at, selection.layouts, strict=True)
    return [
        (i, g if not kept[i].is_flat else dataclasses.replace(g, spec=dataclasses.replace(g.spec, flat=())))
        for i, g in pairs
    ]


def _composed(
    selection: Selection,
    pieces: list[torch.Tensor],
    opt_state: Any,
    grads: list[torch.Tensor],
    skip: torch.Tensor | None,
) -> Any:
    """Runs the optimizer as its transforms say, on trees in which leaves that took no part are `None`; writes the pieces."""
    count = len(selection.plan.specs.grads.layouts)
    trained = selection.plan.specs.grads
    held: list[Any] = [None] * count
    given: list[Any] = [None] * count
    for i, p, g in zip(selection.chosen, pieces, grads, strict=True):
        held[i], given[i] = p, g
    shapes = [
        torch.empty(x.local_shape, dtype=x.dtype, device="meta") if h is None else h
        for x, h in zip(trained.layouts, held, strict=True)
    ]
    caller = PartCaller(dict(zip(tree_lib.paths(trained.tree), trained.layouts, strict=True)))
    tx = selection.tx
    trees = tree_lib.unflatten(trained.treedef, given), opt_state, tree_lib.unflatten(trained.treedef, shapes)
    updates, new = tx.update(*trees, call=caller) if tx.parts else caller(tx, *trees)
    changed = dict(zip(*tree_lib.flatten_with_paths(updates)[:2], strict=True))
    names = tree_lib.paths(trained.tree)
    for i, p in zip(selection.chosen, pieces, strict=True):
        u = changed[names[i]]
        p.copy_(p + u) if skip is None else p.copy_(torch.where(skip, p, p + u))
    return new if skip is None else tree_lib.map(lambda a, b: torch.where(skip, a, b), opt_state, new)


def _make_whole(selection: Selection, new_params: list[torch.Tensor], pieces: list[torch.Tensor]) -> None:
    out = list(pieces)
    for group in selection.regather:
        group.gather(out)
        for k in group.indices:
            new_params[selection.params_at[k]].copy_(out[k])
