"""The update of a window: reduce, norm, clip, optimizer, and params whole again where they are kept whole."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from funzero.core.spec import Layout
from funzero.executor import fused
from funzero.executor.bus import Arrival
from funzero.executor.composed import ComposedUpdate
from funzero.executor.dispatch import UNSCALED, Scale
from funzero.executor.donate import make_writable, private
from funzero.executor.flat import FlatState
from funzero.executor.kernel_update import KernelUpdate
from funzero.executor.options import StepOptions
from funzero.executor.regather import make_whole
from funzero.executor.selection import Selection
from funzero.executor.sound import first_spoilt
from funzero.executor.stores import start_fetch
from funzero.transforms.norm import clip_factor, host_clip_factor


class Clipped(NamedTuple):
    """Finalised gradients of the chosen leaves.

    Attributes:
        norm: 0-dim float64, before the clip. bad: names a leaf that is not finite.
        scale: what is left for the kernel to do. scaled: what is left to do to some that have come to the device.
    """

    grads: list[torch.Tensor]
    norm: torch.Tensor
    bad: Callable[[], str]
    scale: Scale = UNSCALED
    scaled: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list


def clip(
    selection: Selection,
    grads: list[torch.Tensor],
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    options: StepOptions,
) -> Clipped:
    """Gradients divided and clipped: at once, or when they are read again, if some live elsewhere or a kernel does it."""
    if not all(map(torch.Tensor.is_contiguous, grads)):
        grads = [g.contiguous() for g in grads]
    if selection.kernel is not None and (weight.device.type == "cpu" or selection.away):
        sums = square_sums(selection, grads, weight.device)
        by = (float(weight) or 1.0) if options.reduction == "mean" else 1.0
        by *= 1.0 if scale is None else float(scale)
        norm = sums.sum().sqrt() / by
        left = 1.0 if options.max_norm is None else host_clip_factor(float(norm), options.max_norm)
        return Clipped(grads, norm, lambda: selection.norm.first_bad(sums), Scale(by, left))
    divisor = torch.where(weight == 0, 1.0, weight) if options.reduction == "mean" else torch.ones_like(weight)
    if scale is not None:
        divisor = divisor * scale
    divide = functools.partial(_scaled, torch._foreach_div_, divisor, selection.reduced)
    if not selection.away:
        grads = divide(grads)
    sums = square_sums(selection, grads, weight.device, lambda g: divide([g.clone()])[0])
    norm = sums.sum().sqrt()
    factor = None if options.max_norm is None else clip_factor(norm, options.max_norm)
    cut = functools.partial(_scaled, torch._foreach_mul_, factor, selection.reduced)
    bad = functools.partial(selection.norm.first_bad, sums)
    if selection.away:
        return Clipped(grads, norm, bad, scaled=lambda some: cut(divide(some)))
    return Clipped(cut(grads), norm, bad)


def square_sums(
    selection: Selection,
    grads: list[torch.Tensor],
    device: torch.device,
    then: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> torch.Tensor:
    """See `NormPlan.sums`. then: is done to leaves on their way, if some live elsewhere."""
    norm, kernel = selection.norm, selection.norm_kernel
    if not selection.away:
        return norm.sums(grads, device, None if kernel is None else kernel.fill)
    read = Fetched(grads, selection.layouts, (norm if kernel is None else kernel).order, then)
    return norm.sums(read, device, None if kernel is None else kernel.fill_one_by_one)


def _scaled(
    change: Callable[..., None], by: torch.Tensor | None, fresh: bool, grads: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients changed by a number, in place if `fresh` or nobody else has them; None or, as the host can see, 1: as
    they are."""
    if by is None or not grads or (by.device.type == "cpu" and float(by) == 1.0):
        return grads
    grads = grads if fresh else private(grads)
    change(grads, by)
    return grads


class Fetched(Sequence[torch.Tensor]):
    """Leaves that come to the device one by one, when they are asked for; the next one is already on its way.

    Args:
        order: in which they will be asked for. then: is done to each, and leaves it as it is.
    """

    def __init__(
        self,
        leaves: list[torch.Tensor],
        layouts: Sequence[Layout],
        order: Sequence[int],
        then: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ):
        self._leaves, self._layouts, self._then = leaves, layouts, then
        self._after = dict(itertools.pairwise(order))
        self._coming: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._leaves)

    def __getitem__(self, i: Any) -> Any:
        arrival = self._coming.pop(i, None) or self._start(i)
        following = self._after.get(i)
        self._coming = {} if following is None else {following: self._start(following)}
        return self._then(arrival.wait())

    def _start(self, i: int) -> Arrival:
        return start_fetch(self._leaves[i], self._layouts[i])


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
        return ComposedUpdate(selection, flat, grads, clipped.scaled, skip, donate).run()
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
    flat.spoilt |= update.donate
    counts = kernel.advance(flat.opt_state, selection.chosen, update.skip)
    update.run(targets, counts, grads, flat.params, flat.opt_state, draws)
    make_whole(selection, flat)
