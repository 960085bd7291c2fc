"""Params that are kept whole and were updated in ranges become whole again."""

import torch

from funzero.core.collectives import Group, post_gather
from funzero.executor.flat import FlatState
from funzero.executor.selection import Selection
from funzero.executor.stores import Outbox


def make_whole(selection: Selection, flat: FlatState) -> None:
    """Gathers updated ranges over the ranks that share them: large ones in place and all at once. A collective call."""
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
