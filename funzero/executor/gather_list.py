"""The list of gathers of one micro-batch: agreed while it is recorded, planned once, then posted without asking.

[Note: agreed, never assumed] Two ranks that use different leaves must not pair different gathers. In the first
micro-batch a miss is a round on the CPU group: every rank says which leaf it needs, or that it has finished, and all
join the gathers of what anybody needs, until all have finished. The list so made is equal on all ranks. Later a use of
leaf k issues the list up to k, and the end of the micro-batch issues the rest. The list of uses is planned with the
farthest next use evicted, which is a function of the list alone: not of time, and not of who holds what.
"""

import bisect
import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Gather:
    """One entry of the list.

    Attributes:
        leaf: which leaf to gather. evict: leaves whose data are dropped before.
        early: True if it may be issued while the entry before it is in use: nothing that it evicts is used in between.
    """

    leaf: int
    evict: tuple[int, ...] = ()
    early: bool = False


def plan_gathers(uses: Sequence[int], sizes: Mapping[int, int], budget: int | None) -> tuple[Gather, ...]:
    """The gathers that serve a sequence of uses within a budget.

    A leaf that is larger than the budget is gathered alone. The farthest next use is evicted, which is optimal for
    leaves of equal size.

    Args:
        uses: leaf indices in order of use. sizes: bytes by leaf. budget: bytes, or None for no limit.

    References: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    times: dict[int, list[int]] = {}
    for t, leaf in enumerate(uses):
        times.setdefault(leaf, []).append(t)

    def next_use(leaf: int, after: int) -> int:
        later = times[leaf]
        at = bisect.bisect_right(later, after)
        return later[at] if at < len(later) else len(uses)

    held: set[int] = set()
    total, before = 0, -1
    out: list[Gather] = []
    for t, leaf in enumerate(uses):
        if leaf in held:
            continue
        evict = []
        while budget is not None and held and total + sizes[leaf] > budget:
            victim = max(held, key=lambda k: (next_use(k, t), k))
            held.remove(victim)
            evict.append(victim)
            total -= sizes[victim]
        # The leaf in use may be asked for again at once, so it must stay until another is used.
        early = before >= 0 and all(k != uses[before] and next_use(k, before) > t for k in evict)
        out.append(Gather(leaf, tuple(evict), early))
        held.add(leaf)
        total += sizes[leaf]
        before = t
    return tuple(out)
