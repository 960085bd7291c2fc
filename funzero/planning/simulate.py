"""Replays a step on a timeline: what a rank holds beside its state at each moment, and what it sends, reads and writes.

[Note: two steps] The first step agrees on lists of gathers and reductions while it runs, and the later ones go by them.
Both are replayed, and the larger peak counts.
"""

import dataclasses
import functools
from collections import Counter
from typing import Any

import torch

from funzero.core.spec import Layout
from funzero.executor.cache import CacheOptions
from funzero.executor.placement import RESERVE, Placement
from funzero.executor.plan import Plan
from funzero.planning.ledger import Ledger
from funzero.planning.queues import GRADS, WHOLE, CacheModel, Grad, Memo, ReduceModel, nbytes, own_elements
from funzero.planning.trace import Timeline
from funzero.planning.update import Update
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
    memo, step = Memo(), None
    peaks = []
    for name in ("first step", "step"):
        step = _Step(plan, timeline, options, memo)
        step.run(name)
        peaks.append(step.ledger)
    assert step is not None
    most = max(peaks, key=lambda x: x.peak)
    host, disk = (n + step.summed_in(m) for n, m in zip(step.update.elsewhere(), ("host", "disk"), strict=True))
    together = max(most.peak + step.summed_in("host"), step.lanes_end)
    read, written = step.traffic()
    sent = {k: v for k, v in step.sent.items() if v}
    return Replay({k: v for k, v in most.top.items() if v}, most.where, host, disk, together, sent, read, written)


class _Step:
    """One step on one rank."""

    def __init__(self, plan: Plan, timeline: Timeline, options: Options, memo: Memo):
        self.plan, self.timeline, self.options, self.memo = plan, timeline, options, memo
        self.ledger, self.sent = Ledger(), Counter[str]()
        cache = CacheOptions(options.gather_budget, always_ask=False)
        self.placement = Placement(plan, cache)
        self.accum = plan.specs.accum.layouts
        self.update = Update(plan, options.tx, options.donate)
        self.sums: dict[int, int] = {}  # bytes of the sums so far, by trained leaf
        self.final: dict[int, int] = {}
        self._stale = 0  # of the micro-batch before, which a local name still refers to
        self.loads: Counter[int] = Counter()
        self.lanes_end = 0

    @functools.cached_property
    def lazy(self) -> dict[int, Layout]:
        """The params that are brought here on use: those that are cut, and those that live elsewhere."""
        away = {i: x for i, x in enumerate(self.placement.layouts) if x.spec.memory != "device"}
        return {**away, **self.placement.lazy}

    def run(self, name: str) -> None:
        """The whole step."""
        budget = self.placement.cache_options.budget
        self.ledger.phase = f"{name}, start"
        self.ledger.add("batch in the compute dtype", self.timeline.batch_bytes)
        self._head()
        cache = CacheModel(self.lazy, budget, self.memo, self.ledger)
        for i in range(self.options.accumulate):
            last = i == self.options.accumulate - 1
            which = f", micro-batch {i + 1}" if self.options.accumulate > 1 else ""
            done = self._differentiate(cache, f"{name}{which}", last)
            self.ledger.phase = f"{name}{which}, sum of gradients"
            self._add(done, i)
        cache.clear()
        self.ledger.add(GRADS, -self._stale)
        self.ledger.add(WHOLE, -self.ledger.held(WHOLE))
        self.ledger.add("batch in the compute dtype", -self.timeline.batch_bytes)
        self.loads = cache.loads
        for leaf, count in cache.loads.items():
            self._count_gather(self.lazy[leaf], count)
        self.ledger.phase = f"{name}, update"
        self._update()

    def _head(self) -> None:
        """Params that are made whole, or cast, at the start."""
        for i, (kept, x) in enumerate(zip(self.plan.specs.params.layouts, self.placement.layouts, strict=True)):
            if i not in self.lazy and (x.is_flat or x.dtype != kept.dtype):
                self.ledger.add(WHOLE, nbytes(x))
                self._count_gather(x, 1)

    def _count_gather(self, x: Layout, times: int) -> None:
        if x.is_flat:
            self.sent["all-gather"] += times * own_elements(x) * x.dtype.itemsize * (x.ranks - 1)

    def _differentiate(self, cache: CacheModel, name: str, last: bool) -> dict[int, tuple[int, bool]]:
        """Forward and backward: of each trained leaf the bytes that its gradient holds, and whether it is reduced."""
        placement, budget = self.placement, self.options.gather_budget
        routes = {**placement.micro_routes, **(placement.window_routes if last else {})}
        queue = ReduceModel(routes, self.memo, budget and budget // RESERVE, self.ledger)
        place = self.plan.place_of_trained
        kept: dict[int, int] = {}
        for e in self.timeline.events:
            self.ledger.phase = f"{name}, {'backward' if e.backward else 'forward'}"
            live = e.high - e.waiting
            self.ledger.touch(activations=live, gradients=e.waiting)
            if e.kind == "use":
                if cache.get(e.leaf) and queue.routes:
                    queue.on_round()
                self.ledger.touch(activations=e.now - e.waiting, gradients=e.waiting)
            elif e.kind == "grad":
                k = place[e.leaf]
                self._landed(queue, kept, k, e, last)
        cache.finish()
        if cache.loads:
            queue.on_round()
        queue.finish()
        self.sent["reduce-scatter"] += queue.sent
        if self.plan.policy.loss_scale is not None:  # each micro-batch divides by its own power of two
            wide = {k: self.accum[k].n * self.accum[k].dtype.itemsize for k in kept}
            self.ledger.swap(GRADS, sum(kept.values()), sum(wide.values()))
            kept = wide
        return {k: (n, False) for k, n in kept.items()} | {k: (n, True) for k, n in queue.results.items()}

    def _landed(self, queue: ReduceModel, kept: dict[int, int], k: int, e: Any, last: bool) -> None:
        rest = e.now - e.waiting + e.held
        self.ledger.add(GRADS, e.held)
        if k not in queue.routes:
            kept[k] = e.held
            return
        grad = Grad(e.held, e.dense and self._compute(k) == queue.routes[k][0].dtype)
        if last and k in self.sums and k in self.placement.window_routes:
            wide = wide_dtype(self.accum[k].dtype)
            total = self.accum[k].n * wide.itemsize
            self.ledger.add(GRADS, total)
            self.ledger.touch(activations=rest)
            self.ledger.add(GRADS, -e.held)
            grad = Grad(total, wide == queue.routes[k][0].dtype)
        queue.put(k, grad)

    def _compute(self, k: int) -> torch.dtype:
        return self.placement.layouts[self.plan.trained[k]].dtype

    def _add(self, done: dict[int, tuple[int, bool]], i: int) -> None:
        """See `executor.window.Window.add`; then the micro-batch before is forgotten."""
        self.ledger.add(GRADS, -self._stale)
        self._stale, new = 0, {}
        for k, (held, reduced) in done.items():
            if reduced and k not in self.placement.micro_routes:
                self.final[k] = held
                continue
            if k in self.placement.widened and (reduced or self.plan.policy.loss_scale is None):
                wide = self.accum[k].local_bytes
                self.ledger.add(GRADS, wide)
                if reduced:
                    self._stale += held
                else:
                    self.ledger.add(GRADS, -held)
                held = wide
            new[k] = held
        if i == 0:
            self.sums = new
            self._send_away()
            return
        sums = {k: self.accum[k].local_bytes if k in self.sums else n for k, n in new.items()}
        made = sum(n for k, n in sums.items() if k in self.sums and k not in self._away)
        self.ledger.add(GRADS, made)
        self.ledger.add(GRADS, -sum(n for k, n in self.sums.items() if k in new))
        self.sums = self.sums | sums
        self._stale += sum(new.values())
        for k in self._away & new.keys():  # added leaf by leaf, and nothing of it stays
            self.sums[k] = 0
            self.ledger.touch(gradients=2 * self.accum[k].local_bytes)

    @functools.cached_property
    def _away(self) -> set[int]:
        return {k for k, x in enumerate(self.accum) if x.spec.memory != "device"}

    def _send_away(self) -> None:
        """Sums that live elsewhere leave the device."""
        for k in self._away & self.sums.keys():
            self.ledger.add(GRADS, -self.sums[k])
            self.sums[k] = 0

    def summed_in(self, memory: str) -> int:
        """Bytes of the sums that live in a memory."""
        return sum(self.accum[k].local_bytes for k in self.sums if self.accum[k].spec.memory == memory)

    def _update(self) -> None:
        left = {k: n for k, n in self.sums.items() if k not in self.final}
        self.ledger.add(GRADS, -sum(n for k, n in self.sums.items() if k in self.final))
        if self.plan.policy.reduce is not None:
            size = self.plan.policy.reduce.itemsize
            cast = sum(self.accum[k].local_bytes // self.accum[k].dtype.itemsize * size for k in left)
            self.ledger.swap(GRADS, sum(left.values()), cast)
            self.ledger.swap(GRADS, cast, sum(left.values()))
        for k in left:
            self._count_small(k)
            if k in self._away:
                self.ledger.touch(gradients=self.accum[k].local_bytes)
        self.ledger.touch(sums_of_squares=self.update.norm_bytes)
        for what, n in self.update.temporaries().items():
            self.ledger.add(what, n)
        self.lanes_end = self.ledger.total + self.update.elsewhere()[0] + self.summed_in("host")
        params = self.plan.specs.params.layouts
        for k, g in enumerate(self.plan.specs.grads.layouts):
            kept = params[self.plan.trained[k]]
            if g.is_flat and not kept.is_flat:
                self._count_gather(dataclasses.replace(g, dtype=kept.dtype), 1)

    def _count_small(self, k: int) -> None:
        """Small gradients that travel in bundles: in each micro-batch, or once where the accumulator is whole."""
        a, g = self.accum[k], self.plan.specs.grads.layouts[k]
        size = self.plan.policy.reduce_dtype(a.dtype).itemsize
        if a.is_flat and k not in self.placement.micro_routes:
            self.sent["reduce-scatter"] += self.options.accumulate * (a.n - own_elements(a)) * size
        open_axes = tuple(x for x in a.spec.unreduced if a.mesh.axis_size(x) > 1)
        if open_axes:
            cut = g if g.is_flat and not a.is_flat else a.with_spec(flat=(*a.spec.flat, *open_axes), unreduced=())
            self.sent["reduce-scatter"] += (cut.n - own_elements(cut)) * size
            if cut is not g:
                self.sent["reduce-scatter"] += own_elements(cut) * size * (cut.ranks - 1)

    def traffic(self) -> tuple[int, int]:
        """Bytes that a step reads from disk and writes there."""
        on_disk = [(i, x) for i, x in enumerate(self.plan.specs.params.layouts) if x.spec.memory == "disk"]
        read = sum(self.loads[i] * x.local_bytes for i, x in on_disk)
        written = sum(x.local_bytes for i, x in on_disk if i in self.plan.place_of_trained)
        for x in self.plan.specs.opt_state.layouts:
            if x.spec.memory == "disk":
                read, written = read + x.local_bytes, written + x.local_bytes
        for x in self.accum:
            if x.spec.memory == "disk":
                read += self.options.accumulate * x.local_bytes
                written += self.options.accumulate * x.local_bytes
        return read, written
