"""What the gather cache and the reductions of a step hold and send, by the executor's own rules, without data.

Each class here follows `executor/cache.py`, `executor/shards.py` or `executor/reductions.py` line for line in what it keeps;
the list of gathers is planned by the same function.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable

from funzero.core.spec import Layout
from funzero.executor.cache import AHEAD
from funzero.executor.gather_list import Gather, plan_gathers
from funzero.executor.reductions import DEFAULT_LIMIT
from funzero.planning.ledger import Ledger
from funzero.planning.stores import StoresModel

WHOLE, COMING, GRADS = "params made whole", "params on the way", "gradients"
UNDER_WAY = "reductions under way"


@dataclasses.dataclass
class Memo:
    """What a step remembers from one micro-batch to the next: see `executor.cache.Program`."""

    gathers: tuple[Gather, ...] | None = None
    reductions: dict[tuple[int, ...], tuple[int, ...]] = dataclasses.field(default_factory=dict)


def nbytes(layout: Layout) -> int:
    """Of a whole piece."""
    return layout.n * layout.dtype.itemsize


def own_elements(layout: Layout) -> int:
    """Of the piece, what this rank holds."""
    lo, hi = layout.bounds(layout.index)
    return hi - lo


class CacheModel:
    """See `executor.cache.GatherCache` and `executor.shards.Shards`.

    Args:
        lazy: of the lazy params by place: the layout that is kept, and that in the compute dtype.
        on_round: what else happens in a round of agreement.
    """

    def __init__(
        self,
        lazy: dict[int, tuple[Layout, Layout]],
        budget: int | None,
        memo: Memo,
        stores: StoresModel,
        ledger: Ledger,
        on_round: Callable[[], None],
    ):
        self._lazy, self._sizes = lazy, {i: nbytes(x) for i, (_, x) in lazy.items()}
        self._budget, self._memo, self._stores, self._ledger = budget, memo, stores, ledger
        self._on_round = on_round
        self._held: dict[int, None] = {}
        self._flying: set[int] = set()
        self._coming: set[int] = set()
        self._position, self._bytes = 0, 0
        self._uses: list[int] = []
        self.loads: Counter[int] = Counter()

    def get(self, leaf: int) -> None:
        """A use."""
        if leaf not in self._sizes:
            return
        if not self._uses or self._uses[-1] != leaf:
            self._uses.append(leaf)
        if leaf in self._held:
            return
        if self._memo.gathers is None:
            self._on_round()
            while self._budget is not None and self._held and self._bytes + self._sizes[leaf] > self._budget:
                self._drop(next(iter(self._held)))
            self._post(leaf)
            self._land(leaf)
            return
        self._advance(leaf, self._memo.gathers)

    def _advance(self, leaf: int, gathers: tuple[Gather, ...]) -> None:
        while leaf not in self._flying:
            self._issue(gathers[self._position])
        self._land(leaf)
        for ahead in gathers[self._position : self._position + AHEAD]:
            if ahead.evict and not (ahead.early and gathers[self._position - 1].leaf == leaf):
                break
            self._issue(ahead)
        for ahead in gathers[self._position : self._position + AHEAD]:
            kept, _ = self._lazy[ahead.leaf]
            if kept.is_flat and kept.spec.memory != "device" and ahead.leaf not in self._coming:
                self._stores.fetch(COMING, kept)
                self._coming.add(ahead.leaf)

    def _issue(self, entry: Gather) -> None:
        for victim in entry.evict:
            self._drop(victim)
        self._post(entry.leaf)
        self._position += 1

    def _post(self, leaf: int) -> None:
        kept, whole = self._lazy[leaf]
        away, cast = kept.spec.memory != "device", kept.dtype != whole.dtype
        self._flying.add(leaf)
        self.loads[leaf] += 1
        self._bytes += self._sizes[leaf]
        if away and leaf not in self._coming:
            self._stores.fetch(COMING, kept)
        self._coming.discard(leaf)
        if not kept.is_flat:
            return  # it is whole when it lands
        own = own_elements(whole) * whole.dtype.itemsize if cast else 0
        self._ledger.add(COMING, own)
        self._ledger.add(WHOLE, self._sizes[leaf])
        self._ledger.add(COMING, -own)
        if away:
            self._stores.release(COMING, kept)

    def _land(self, leaf: int) -> None:
        kept, whole = self._lazy[leaf]
        self._flying.remove(leaf)
        self._held[leaf] = None
        if kept.is_flat:
            return
        if kept.dtype == whole.dtype:
            self._ledger.add(COMING, -self._sizes[leaf])
            self._ledger.add(WHOLE, self._sizes[leaf])
            self._stores.arrived(kept)
        else:
            self._ledger.add(WHOLE, self._sizes[leaf])
            self._stores.release(COMING, kept)

    def _drop(self, leaf: int) -> None:
        if leaf in self._flying:
            self._land(leaf)
        del self._held[leaf]
        self._bytes -= self._sizes[leaf]
        self._ledger.add(WHOLE, -self._sizes[leaf])

    def finish(self) -> None:
        """The end of a micro-batch."""
        if self._memo.gathers is None:
            if self._sizes:
                self._on_round()
            self._memo.gathers = plan_gathers(self._uses, self._sizes, self._budget)
        else:
            for entry in self._memo.gathers[self._position :]:
                self._issue(entry)
        self._uses = []
        if self._budget is None:
            self._position = len(self._memo.gathers)
        else:
            self.clear()

    def clear(self) -> None:
        """Drops all data."""
        for leaf in [*self._flying, *self._held]:
            self._drop(leaf)
        self._position = 0


@dataclasses.dataclass(frozen=True)
class Grad:
    """A gradient that waits for its turn. held: bytes of its memory. ready: it is contiguous and in the dtype in which it
    travels."""

    held: int
    ready: bool


class ReduceModel:
    """See `executor.reductions.ReduceQueue`.

    Args:
        landed: takes the bytes of a leaf's sum when it is there; True if it keeps their memory.

    Attributes:
        sent: bytes, by kind of collective.
    """

    def __init__(
        self,
        routes: dict[int, tuple[Layout, bool]],
        memo: Memo,
        limit: int | None,
        ledger: Ledger,
        landed: Callable[[int, int], bool],
    ):
        self.routes, self._memo, self._ledger, self._landed = routes, memo, ledger, landed
        self._limit = DEFAULT_LIMIT if limit is None else limit
        self._ready: dict[int, Grad] = {}
        self._flying: deque[tuple[int, int, int]] = deque()
        self._order = memo.reductions.get(tuple(routes))
        self._position, self._bytes = 0, 0
        self._done: list[int] = []
        self._in_hand: int | None = None  # whoever puts a gradient has it until `put` returns
        self.sent: Counter[str] = Counter()

    def put(self, leaf: int, grad: Grad) -> None:
        """A complete gradient has come; the ledger has its bytes among the gradients."""
        self._ready[leaf] = grad
        if self._order is not None:
            self._in_hand = leaf
            while self._position < len(self._order) and self._order[self._position] in self._ready:
                self._post(self._order[self._position])
                self._position += 1
            if self._in_hand is None:
                self._ledger.add(GRADS, -grad.held)
            self._in_hand = None

    def on_round(self) -> None:
        """A round of agreement, where all ranks have come as far as this one."""
        if self._order is None:
            for leaf in [k for k in self._ready if k not in self._done]:
                self._post(leaf)
                self._done.append(leaf)

    def finish(self) -> None:
        """Posts the rest, and waits for all."""
        if self._order is None:
            rest = [k for k in dict.fromkeys([*self._ready, *self.routes]) if k not in self._done]
            self._memo.reductions[tuple(self.routes)] = tuple([*self._done, *rest])
        else:
            rest = list(self._order[self._position :])
        for leaf in rest:
            self._post(leaf)
        while self._flying:
            self._land()

    def _post(self, leaf: int) -> None:
        layout, _ = self.routes[leaf]
        grad, size = self._ready.pop(leaf, Grad(0, False)), nbytes(layout)
        if not grad.ready:
            self._ledger.add(GRADS, size)
            if leaf == self._in_hand:
                self._in_hand = None
            else:
                self._ledger.add(GRADS, -grad.held)
        while self._flying and self._bytes + 2 * size > self._limit:
            self._land()
        self._ledger.add(UNDER_WAY, received(layout))
        self._flying.append((leaf, size if not grad.ready else grad.held, 2 * size))
        self._bytes += 2 * size
        self.sent["reduce-scatter"] += (layout.n - own_elements(layout)) * layout.dtype.itemsize

    def _land(self) -> None:
        leaf, held, counted = self._flying.popleft()
        layout, whole = self.routes[leaf]
        part = total = own_elements(layout) * layout.dtype.itemsize  # the sum has memory of its own
        self._ledger.add(GRADS, part)
        if whole:
            total = nbytes(layout)
            self._ledger.add(GRADS, total)
            self.sent["all-gather"] += part * (layout.ranks - 1)
        taken = self._landed(leaf, total)
        self._ledger.add(UNDER_WAY, -received(layout))
        self._ledger.add(GRADS, -held - (part if whole else 0) - (0 if taken else total))
        self._bytes -= counted


def received(layout: Layout) -> int:
    """The buffer of a reduction: this rank's range from every rank."""
    return own_elements(layout) * layout.ranks * layout.dtype.itemsize
