"""The update of a window: reduce, norm, clip, optimizer, and params whole again where they are kept whole."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from funzero.core import tree as tree_lib
from funzero.core.collectives import Group, post_gather
from funzero.core.spec import Layout
from funzero.executor import fused
from funzero.executor.dispatch import UNSCALED, Scale
from funzero.executor.donate import make_writable, private
from funzero.executor.flat import FlatState
from funzero.executor.kernel_update import KernelUpdate
from funzero.executor.options import StepOptions
from funzero.executor.pieces import PartCaller
from funzero.executor.selection import Selection
from funzero.executor.sound import first_spoilt
from funzero.executor.stores import Arrival, Arrived, Outbox, fetch, replaced, store_of
from funzero.transforms.norm import clip_factor
from funzero.transforms.storage import update_stored


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
    away = bool(selection.away)
    if away and selection.kernel is None:
        grads, away = [fetch(g, x) for g, x in zip(grads, selection.layouts, strict=True)], False
    if not all(map(torch.Tensor.is_contiguous, grads)):
        grads = [g.contiguous() for g in grads]
    fresh = selection.reduced
    divisor = torch.where(weight == 0, 1.0, weight) if options.reduction == "mean" else torch.ones_like(weight)
    if scale is not None:
        divisor = divisor * scale
    if away or (on_host and selection.kernel is not None):
        read = Fetched(grads, selection.layouts, selection.norm.order) if away else grads
        sums = selection.norm.sums(read, weight.device)
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


class Fetched(Sequence[torch.Tensor]):
    """Leaves that come to the device one by one, when they are asked for; the next one is already on its way.

    Args:
        order: in which they will be asked for.
    """

    def __init__(self, leaves: list[torch.Tensor], layouts: Sequence[Layout], order: Sequence[int]):
        self._leaves, self._layouts = leaves, layouts
        self._after = dict(itertools.pairwise(order))
        self._coming: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._leaves)

    def __getitem__(self, i: Any) -> Any:
        arrival = self._coming.pop(i, None) or self._start(i)
        following = self._after.get(i)
        self._coming = {} if following is None else {following: self._start(following)}
        return arrival.wait()

    def _start(self, i: int) -> Arrival:
        store = store_of(self._layouts[i])
        return Arrived(self._leaves[i]) if store is None else store.start_fetch(self._leaves[i], self._layouts[i])


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


def _update_fused(selection: Selection, flat: FlatState, grads: list[torch.Tensor], update: KernelUpdate) -> None:
    """In place where `update.donate` allows it."""
    kernel, targets = selection.kernel, selection.targets
    assert kernel is not None
    make_writable(flat.params, selection.params_here, update.donate)
    make_writable(flat.opt_state, kernel.schedule_counts, update.donate)
    draws = selection.draws(flat)
    counts = kernel.advance(flat.opt_state, selection.chosen, update.skip)
    update.run(targets, counts, grads, flat.params, flat.opt_state, draws)
    _make_whole(selection, flat)


def _make_whole(selection: Selection, flat: FlatState) -> None:
    """Gathers updated ranges into the params that they are ranges of: large ones in place and all at once."""
    under_way, outbox = [], Outbox()
    for group in selection.regather:
        ours = [selection.pieces[k] for k in group.indices]
        parts = [x.here(flat.params[x.at]) for x in ours]
        if len(ours) == 1 and ours[0].store is None:
            whole = flat.params[ours[0].at].view(-1)
            under_way.append(post_gather(parts[0], group.bundle.layouts[0], out=whole))
            continue
        for x, whole in zip(ours, _gathered(group, parts), strict=True):
            if x.store is None:
                flat.params[x.at].copy_(whole)
            else:
                outbox.write(x.store, flat.params[x.at], 0, whole)
    for pending in under_way:
        pending.wait()
    outbox.settle()


def _gathered(group: Group, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The whole params of which these are ranges."""
    if len(parts) == 1:
        return [post_gather(parts[0], group.bundle.layouts[0]).wait()]
    return group.bundle.gather(parts)


def _update_composed(
    selection: Selection, flat: FlatState, grads: list[torch.Tensor], skip: torch.Tensor | None, donate: bool
) -> torch.Tensor:
    """Looks at all that the optimizer returns before any of it is written."""
    before = [x.here(flat.params[x.at]) for x in selection.pieces]
    values, state = _composed(selection, flat, before, grads)
    found = first_spoilt([*before, *flat.opt_state], [*values, *state], selection.plan.mesh)
    if skip is None and int(found):
        return found
    if skip is not None:
        skip = skip | (found > 0)
        values = [torch.where(skip, a, b) for a, b in zip(before, values, strict=True)]
        state = [torch.where(skip, a, b) for a, b in zip(flat.opt_state, state, strict=True)]
    del before  # of what is written next, nobody else may hold the memory
    make_writable(flat.params, selection.params_here, donate)
    outbox = Outbox()
    for x, value in zip(selection.pieces, values, strict=True):
        if x.store is None:
            x.here(flat.params[x.at]).copy_(value)
        else:
            flat.params[x.at] = x.store.writable(flat.params[x.at], donate)
            outbox.write(x.store, flat.params[x.at], x.begin, value)
    outbox.settle()
    layouts = selection.plan.specs.opt_state.layouts
    flat.opt_state = [replaced(*row, donate) for row in zip(flat.opt_state, state, layouts, strict=True)]
    _make_whole(selection, flat)
    return found


def _composed(
    selection: Selection, flat: FlatState, pieces: list[torch.Tensor], grads: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Runs the optimizer as its transforms say, on trees in which leaves that took no part are `None`.

    Returns: the new chosen params and the whole new opt_state, in the dtypes in which they are kept.
    """
    trained, tx = selection.plan.specs.grads, selection.tx
    held = [torch.empty(x.local_shape, dtype=x.dtype, device="meta") for x in trained.layouts]
    given: list[Any] = [None] * len(held)
    for i, p, g in zip(selection.chosen, pieces, grads, strict=True):
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
