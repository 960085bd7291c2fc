"""Replays a step on a timeline: what a rank holds beside its state at each moment, and what it sends, reads and writes.

[Note: two steps] The first step agrees on lists of gathers and reductions while it runs, and the later ones go by them.
Both are replayed, and the larger peak counts.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator

from funzero.core.spec import Layout
from funzero.executor.cache import CacheOptions
from funzero.executor.placement import RESERVE, Placement
from funzero.executor.plan import Plan
from funzero.planning.ledger import TOTALS, Ledger
from funzero.planning.queues import GRADS, WHOLE, CacheModel, Grad, Memo, ReduceModel, nbytes, own_elements
from funzero.planning.stores import StoresModel
from funzero.planning.trace import Event, Timeline
from funzero.planning.update import Update
from funzero.planning.window import WindowModel
from funzero.transforms.base import Transform
from funzero.transforms.precision import wide_dtype


@dataclasses.dataclass(frozen=True)
class Options:
    """What a step is told, as far as memory depends on it; see `make_step`. tx: None stands for a chain with a kernel."""

    tx: Transform | None
    accumulate: int
    gather_budget: int | None
    donate: bool


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a step takes, on one rank and beside its state.

    Attributes:
        device: bytes by purpose at the moment when they are most. where: that moment. host, disk: bytes at most.
        together: bytes at most where the device and the host are one memory.
        sent: bytes a step by kind of collective. read, written: bytes of disk a step.
    """

    device: dict[str, int]
    where: str
    host: int
    disk: int
    together: int
    sent: dict[str, int]
    read: int
    written: int


def simulate(plan: Plan, timeline: Timeline, options: Options) -> Replay:
    """The larger of the first step and a later one; volumes are those of a later one."""
    memo, steps = Memo(), []
    for name in ("first step", "step"):
        steps.append(_Step(plan, timeline, options, memo))
        steps[-1].run(name)
    last, ledgers = steps[-1], [x.ledger for x in steps]
    most = max(ledgers, key=lambda x: x.peak["device"])
    peak = {m: max(x.peak[m] for x in ledgers) for m in TOTALS}
    top = {k: v for k, v in most.top.items() if v}
    sent = {k: v for k, v in last.sent.items() if v}
    volumes = sent, last.stores.read, last.stores.written
    return Replay(top, most.where, peak["host"], peak["disk"], peak["together"], *volumes)


class _Step:
    """One step on one rank."""

    def __init__(self, plan: Plan, timeline: Timeline, options: Options, memo: Memo):
        self.plan, self.timeline, self.options, self.memo = plan, timeline, options, memo
        self.ledger, self.sent = Ledger(), Counter[str]()
        self.stores = StoresModel(self.ledger)
        self.placement = Placement(plan, CacheOptions(options.gather_budget, always_ask=False))
        self.window = WindowModel(self.placement, self.stores, self.ledger)
        self.queue: ReduceModel | None = None
        self.told: set[int] = set()  # trained leaves whose gradients are taken as they come
        kept, placement = plan.specs.params.layouts, self.placement
        lazy = {i: (kept[i], x) for i, x in placement.lazy.items()}
        budget = placement.cache_options.budget
        self.cache = CacheModel(lazy, budget, memo, self.stores, self.ledger, self._on_round)

    def run(self, name: str) -> None:
        """The whole step."""
        self.ledger.phase = f"{name}, start"
        self.ledger.add("batch in the compute dtype", self.timeline.batch_bytes)
        self._head()
        for i in range(self.options.accumulate):
            which = f", micro-batch {i + 1}" if self.options.accumulate > 1 else ""
            self._differentiate(f"{name}{which}", i == self.options.accumulate - 1)
        self.cache.clear()
        self.ledger.add(WHOLE, -self.ledger.held(WHOLE))
        for leaf, count in self.cache.loads.items():
            self._count_gather(self.placement.lazy[leaf], count)
        self.ledger.phase = f"{name}, update"
        self._count_small()
        self.window.reduce()
        self.update()

    def update(self) -> None:
        """See `executor.update`."""
        update = Update(self.plan, self.options.tx, self.options.donate)
        update.replay(self.ledger, self.stores)
        params = self.plan.specs.params.layouts
        for k, g in enumerate(self.plan.specs.grads.layouts):
            kept = params[self.plan.trained[k]]
            if g.is_flat and not kept.is_flat:
                self._count_gather(dataclasses.replace(g, dtype=kept.dtype), 1)

    def _on_round(self) -> None:
        if self.queue is not None:
            self.queue.on_round()

    def _head(self) -> None:
        """Params that are made whole, brought here or cast at the start."""
        for i, (kept, x) in enumerate(zip(self.plan.specs.params.layouts, self.placement.layouts, strict=True)):
            away = kept.spec.memory != "device"
            if i in self.placement.lazy or not (away or x.is_flat or x.dtype != kept.dtype):
                continue
            if away:
                self.stores.fetch(WHOLE, kept)
            self.ledger.add(WHOLE, nbytes(x))
            if away:
                self.stores.release(WHOLE, kept)
            self._count_gather(x, 1)

    def _count_gather(self, x: Layout, times: int) -> None:
        if x.is_flat:
            self.sent["all-gather"] += times * own_elements(x) * x.dtype.itemsize * (x.ranks - 1)

    def _differentiate(self, name: str, last: bool) -> None:
        """See `executor.session.Session.differentiate`."""
        placement, budget = self.placement, self.options.gather_budget
        routes = {**placement.micro_routes, **(placement.window_routes if last else {})}
        queue = ReduceModel(routes, self.memo, budget and budget // RESERVE, self.ledger, self.window.reduced)
        self.queue = queue if routes else None
        lazy = {k for i, k in self.plan.place_of_trained.items() if i in placement.lazy}
        self.told = {*lazy, *placement.early, *routes}
        grads: dict[int, int] = {}
        for e in self.timeline.events:
            self.ledger.phase = f"{name}, {'backward' if e.backward else 'forward'}"
            self.ledger.touch(activations=e.high - e.waiting, gradients=e.waiting)
            if e.kind == "use":
                with self._alive(e.now - e.waiting, e.waiting):
                    self.cache.get(e.leaf)
            elif e.kind == "grad":
                others = max(0, e.waiting - e.held)
                with self._alive(e.now - others, others):
                    self._landed(self.plan.place_of_trained[e.leaf], e, grads)
        self.cache.finish()
        if self.queue is not None:
            self.queue.finish()
            self.sent.update(self.queue.sent)
            self.queue = None
        if self._scaled:  # each micro-batch divides by its own power of two
            wide = {k: n if k in self.told else nbytes(self._accum[k]) for k, n in grads.items()}
            self.ledger.add(GRADS, sum(n for k, n in wide.items() if k not in self.told))
            self.ledger.add(GRADS, -sum(n for k, n in grads.items() if k not in self.told))
            grads = wide
        self.ledger.phase = f"{name}, sum of gradients"
        self.window.finish(grads)

    @contextlib.contextmanager
    def _alive(self, activations: int, gradients: int) -> Iterator[None]:
        """What else there is meanwhile."""
        self.ledger.add("activations", activations)
        self.ledger.add(GRADS, gradients)
        yield
        self.ledger.add("activations", -activations)
        self.ledger.add(GRADS, -gradients)

    @property
    def _scaled(self) -> bool:
        return self.plan.policy.loss_scale is not None

    @property
    def _accum(self) -> tuple[Layout, ...]:
        return self.plan.specs.accum.layouts

    def _landed(self, k: int, e: Event, grads: dict[int, int]) -> None:
        """A gradient has come; what is not taken at once waits among `grads`."""
        self.ledger.add(GRADS, e.held)
        accum = self._accum[k]
        if k not in self.told:
            grads[k] = e.held
            return
        held, dense, dtype = e.held, e.dense, self.placement.layouts[self.plan.trained[k]].dtype
        if self._scaled:
            held, dense, dtype = nbytes(accum), True, accum.dtype
            self.ledger.add(GRADS, held)
        taken = True
        if self.queue is not None and k in self.queue.routes:
            self._queued(self.queue, k, Grad(held, dense and dtype == self.queue.routes[k][0].dtype))
        elif accum.is_flat:
            grads[k] = held
        else:
            taken = self.window.add(k, held, dense)
        self.ledger.add(GRADS, -(0 if taken else held) - (e.held if self._scaled else 0))

    def _queued(self, queue: ReduceModel, k: int, grad: Grad) -> None:
        """A gradient is reduced; once a window it is added to the sum so far before."""
        if k not in self.window.sums or k not in self.placement.window_routes:
            queue.put(k, grad)
            return
        accum, away = self._accum[k], k in self.placement.sums_away
        wide = wide_dtype(accum.dtype)
        total = accum.n * wide.itemsize
        if away:
            self.stores.fetch(GRADS, accum)
        self.ledger.touch(gradients=0 if wide == accum.dtype else 2 * total)
        self.ledger.add(GRADS, total)
        queue.put(k, Grad(total, wide == queue.routes[k][0].dtype))
        self.ledger.add(GRADS, -grad.held)
        if away:
            self.stores.release(GRADS, accum)

    def _count_small(self) -> None:
        """Small gradients that travel in bundles: in each micro-batch, or once where the accumulator is whole."""
        pairs = zip(self._accum, self.plan.specs.grads.layouts, strict=True)
        for k, (a, g) in enumerate(pairs):
            if k in self.window.final:
                continue
            size = self.plan.policy.reduce_dtype(a.dtype).itemsize
            if a.is_flat and k not in self.placement.micro_routes:
                self.sent["reduce-scatter"] += self.options.accumulate * (a.n - own_elements(a)) * size
            open_axes = tuple(x for x in a.spec.unreduced if a.mesh.axis_size(x) > 1)
            if open_axes:
                cut = g if g.is_flat and not a.is_flat else a.with_spec(flat=(*a.spec.flat, *open_axes), unreduced=())
                self.sent["reduce-scatter"] += (cut.n - own_elements(cut)) * size
                if cut is not g:
                    self.sent["reduce-scatter"] += own_elements(cut) * size * (cut.ranks - 1)
