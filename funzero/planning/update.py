"""What the update of a step takes: the norm, then lanes and nothing else where a kernel runs in place, else new trees."""

import dataclasses
import functools
import itertools
import math
import mmap
from collections.abc import Iterator, Sequence

from funzero.core import tree as tree_lib
from funzero.core.collectives import travel_groups
from funzero.core.spec import Layout
from funzero.executor.fused import FLOATS
from funzero.executor.plan import Plan
from funzero.executor.portions import Portion
from funzero.executor.selection import Selection
from funzero.executor.stream import LANES, PART_BYTES
from funzero.planning.ledger import Ledger
from funzero.planning.stores import OutboxModel, StoresModel
from funzero.transforms.base import Transform
from funzero.transforms.norm import SMALL_BYTES, TILE
from funzero.transforms.precision import LOW

HERE = "leaves brought here"
PARTS = "parts under way"
PASSING = ("updates", "float32 copies", "whole leaves")


@dataclasses.dataclass(frozen=True)
class Row:
    """Layouts of a trained leaf: of the param, its gradient, and its state as far as that is cut like it. per: how many
    elements stand for one of each of these."""

    param: Layout
    grad: Layout
    state: tuple[Layout, ...]
    per: tuple[int, ...]

    @property
    def n(self) -> int:
        """Elements that are updated here."""
        return math.prod(self.grad.local_shape)

    @property
    def operands(self) -> tuple[Layout, ...]:
        """What a kernel reads."""
        return (self.param, self.grad, *self.state)

    @property
    def away(self) -> bool:
        """Whether any of it lives elsewhere."""
        return any(map(_away, self.operands))


@dataclasses.dataclass(frozen=True)
class Update:
    """An update in which every trained leaf takes part. tx: None stands for a chain with a kernel that runs in place."""

    plan: Plan
    tx: Transform | None
    donate: bool

    @functools.cached_property
    def _selection(self) -> Selection | None:
        if self.tx is None:
            return None
        return Selection(self.plan, self.plan.resolved(self.tx), tuple(range(len(self._grads))))

    @property
    def _grads(self) -> tuple[Layout, ...]:
        return self.plan.specs.grads.layouts

    @functools.cached_property
    def fused(self) -> bool:
        """Whether a kernel runs it."""
        return self._selection is None or self._selection.kernel is not None

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether it writes where the state lies."""
        return self.donate and (self._selection is None or self._selection.tame)

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The trained leaves."""
        layouts = self.plan.specs.opt_state.layouts
        if self._selection is not None and self._selection.kernel is not None:
            targets = self._selection.targets
            found = [(tuple(layouts[i] for i in places), (1, 1, *targets.per)) for places in targets.places]
        else:
            found = [(state, (1,) * (2 + len(state))) for state in self._by_name()]
        params = [self.plan.specs.params.layouts[i] for i in self.plan.trained]
        return [Row(p, g, *kept) for p, g, kept in zip(params, self._grads, found, strict=True)]

    def _by_name(self) -> list[tuple[Layout, ...]]:
        """State of each trained leaf: what is named after it and cut like it."""
        names = tree_lib.paths(self.plan.specs.grads.tree)
        found: dict[str, list[Layout]] = {n: [] for n in names}
        for x in self.plan.specs.opt_state.layouts:
            words = x.path.split("/")
            ends = ("/".join(words[i:]) for i in range(1, len(words)))
            name = next((n for n in ends if n in found), None)
            if name is not None and x.shape:
                found[name].append(x)
        pairs = zip(names, self._grads, strict=True)
        return [tuple(x for x in found[n] if x.local_shape == g.local_shape) for n, g in pairs]

    def replay(self, ledger: Ledger, stores: StoresModel) -> None:
        """Counts what it takes; the gradients are there, or in rooms of their own elsewhere."""
        if any(map(_away, self._grads)):
            self._norm(ledger, stores)
        else:
            ledger.touch(sums_of_squares=self._norm_bytes())
        if self.fused:
            self._by_kernel(ledger, stores)
        else:
            self._composed(ledger, stores)
        self._whole_again(ledger, stores)

    def _by_kernel(self, ledger: Ledger, stores: StoresModel) -> None:
        """In place, or to new leaves."""
        if not self.in_place:
            params, state = [r.param for r in self.rows], self._state
            ledger.add("new params", _bytes(_here(params)))
            ledger.add("new opt_state", _bytes(_here(state)))
            for x in (*params, *state):
                if _away(x):
                    ledger.add("new room", x.local_bytes, x.spec.memory)
        self._stream(ledger, stores)

    @property
    def _state(self) -> list[Layout]:
        return [x for x in self.plan.specs.opt_state.layouts if x.shape]

    @property
    def _norm_kernel(self) -> bool:
        return all(x.dtype in FLOATS for x in self._grads)

    def _norm_bytes(self) -> int:
        """What the norm takes: tiles in float64, or the small leaves in float64 and their squares; a kernel nothing."""
        if self._norm_kernel:
            return 0
        small = sum(math.prod(x.local_shape) for x in self._grads if _small(x))
        return max(20 * small, max((_tiles(x) for x in self._grads if not _small(x)), default=0))

    def _norm(self, ledger: Ledger, stores: StoresModel) -> None:
        """Of gradients elsewhere: see `executor.update.Fetched`, which reads one leaf ahead of what it is asked for."""
        grads = self._grads
        small = [] if self._norm_kernel else [i for i, x in enumerate(grads) if _small(x)]
        order = [*small, *(i for i in range(len(grads)) if i not in small)]
        elements = sum(math.prod(grads[i].local_shape) for i in small)
        _start(grads[order[0]], stores)
        for i, following in itertools.zip_longest(order, order[1:]):
            if following is not None:
                _start(grads[following], stores)
            if i not in small:
                divided = 0 if self.fused else grads[i].local_bytes
                ledger.touch(sums_of_squares=(0 if self._norm_kernel else _tiles(grads[i])) + divided)
                _end(grads[i], stores)
            elif i == small[-1]:
                ledger.add("sums of squares", 8 * elements)
                ledger.touch(sums_of_squares=12 * elements)
        for i in small:
            _end(grads[i], stores)
        ledger.add("sums of squares", -8 * elements if small else 0)

    def _composed(self, ledger: Ledger, stores: StoresModel) -> None:
        """See `executor.composed`: the next portion is on its way while one is worked on."""
        assert self._selection is not None
        todo, outbox = self._selection.portions, OutboxModel(ledger)
        held, lone = self._bring(todo[0], ledger, stores), len(todo) == 1
        for portion, following in itertools.zip_longest(todo, todo[1:]):
            coming = 0 if following is None else self._bring(following, ledger, stores)
            for what, nbytes in self._work(portion).items():
                ledger.add(what, nbytes)
            ledger.add(HERE, -held)
            held = coming
            for what in PASSING:
                ledger.add(what, -ledger.held(what))
            for what, x, nbytes in self._made(portion):
                if _away(x):
                    if not (self.donate and lone):
                        ledger.add("new room", x.local_bytes, x.spec.memory)
                    stores.wrote(x, nbytes)
                    outbox.put(what, nbytes)
        outbox.settle()
        if not self.donate:
            ledger.add("new params", _bytes(_here([r.param for r in self.rows])))

    def _bring(self, portion: Portion, ledger: Ledger, stores: StoresModel) -> int:
        """What of a portion lives elsewhere comes here. Returns its bytes."""
        before = ledger.held(HERE)
        for k in portion.chosen:
            if _away(self.rows[k].param):
                stores.bring(HERE, self.rows[k].param, self.rows[k].n)
            if _away(self.rows[k].grad):
                stores.bring(HERE, self.rows[k].grad)
        for x in self._state_of(portion):
            if _away(x):
                stores.bring(HERE, x)
        return ledger.held(HERE) - before

    def _state_of(self, portion: Portion) -> list[Layout]:
        found = [self.plan.specs.opt_state.layouts[i] for i in portion.state]
        return [x for x in found if x.shape]

    def _made(self, portion: Portion) -> list[tuple[str, Layout, int]]:
        """What a portion gives: under which name, the layout, and bytes."""
        rows = [self.rows[k] for k in portion.chosen]
        params = [("new params", r.param, r.n * r.param.dtype.itemsize) for r in rows]
        return params + [("new opt_state", x, x.local_bytes) for x in self._state_of(portion)]

    def _work(self, portion: Portion) -> dict[str, int]:
        """Bytes on the device beside what came, by purpose."""
        state = self._state_of(portion)
        grads = [self._grads[k] for k in portion.chosen]
        values = [x.local_bytes for x in grads]
        low = [x for x in (*(self.rows[k].param for k in portion.chosen), *state) if x.dtype in LOW]
        made = self._made(portion)
        return {
            "new params": sum(n for what, _, n in made if what == "new params"),
            "new opt_state": _bytes(state),
            "updates": sum(values) + 2 * max(values, default=0),
            "float32 copies": 2 * sum(math.prod(x.local_shape) * 4 for x in low),
            "whole leaves": _whole(grads, state) if _needs_leaf(self.tx) else 0,
        }

    def _stream(self, ledger: Ledger, stores: StoresModel) -> None:
        """See `executor.stream`: each lane's buffers grow to the largest part that it has held."""
        buffers: list[dict[int, int]] = [{} for _ in range(LANES)]
        todo = [(row, n) for row in self.rows if row.away for n in _parts(row)]
        for turn, (row, n) in enumerate(todo):
            lane, here = buffers[turn % LANES], 0
            for i, x in enumerate(row.operands):
                if not _away(x):
                    continue
                here += (size := -(-n // row.per[i]) * x.dtype.itemsize)
                if size > lane.get(i, 0):  # the old one goes when the new one is there
                    ledger.add("lanes", size, "host")
                    ledger.add("lanes", -lane.get(i, 0), "host")
                    lane[i] = size
                if x.spec.memory == "disk":
                    stores.read += size
                    stores.written += 0 if x is row.grad else size
            ledger.add("lanes", here, "accelerator")
            ledger.add("lanes", -here, "accelerator")
        ledger.add("lanes", -sum(sum(lane.values()) for lane in buffers), "host")

    def _whole_again(self, ledger: Ledger, stores: StoresModel) -> None:
        """Params that are kept whole elsewhere and were updated in ranges; see `executor.regather.make_whole`."""
        rows = self.rows
        cut = [r.grad if r.grad.is_flat and not r.param.is_flat else None for r in rows]
        outbox, before = OutboxModel(ledger), 0
        for group in travel_groups(
            [x and dataclasses.replace(x, dtype=r.param.dtype) for x, r in zip(cut, rows, strict=True)]
        ):
            away = [rows[k].param for k in group.indices if _away(rows[k].param)]
            if not away and len(group.indices) == 1:
                continue  # in place
            parts = 0
            for k in group.indices:
                nbytes = rows[k].n * rows[k].param.dtype.itemsize
                if _away(rows[k].param):
                    parts += nbytes
                    stores.bring(PARTS, rows[k].param, rows[k].n)
            ledger.add(PARTS, -before)
            before = parts
            whole = sum(rows[k].param.n * rows[k].param.dtype.itemsize for k in group.indices)
            ledger.add(PARTS, whole * (1 if len(group.indices) == 1 else 2))
            for x in away:
                stores.wrote(x, x.local_bytes)
                outbox.put(PARTS, x.local_bytes)
            ledger.add(PARTS, _bytes(away) - whole * (1 if len(group.indices) == 1 else 2))
        outbox.settle()


def _whole(grads: list[Layout], state: list[Layout]) -> int:
    """What a transform that needs whole leaves is given, and gives, of leaves that are cut: all at a time."""
    cut, kept = [x for x in grads if x.is_flat], [x for x in state if x.is_flat]
    return 3 * sum(x.n * x.dtype.itemsize for x in cut) + 2 * sum(x.n * x.dtype.itemsize for x in kept)


def _parts(row: Row) -> Iterator[int]:
    """Elements of each part of a leaf."""
    widest = max(x.dtype.itemsize / per for x, per in zip(row.operands, row.per, strict=True))
    step = math.lcm(max((x.spec.quantum for x in row.state), default=1), mmap.PAGESIZE)
    size = max(1, int(PART_BYTES / widest) // step) * step
    for begin in range(0, max(1, row.n), size):
        yield min(size, row.n - begin)


def _start(layout: Layout, stores: StoresModel) -> None:
    if _away(layout):
        stores.fetch(HERE, layout)


def _end(layout: Layout, stores: StoresModel) -> None:
    if _away(layout):
        stores.release(HERE, layout)


def _small(layout: Layout) -> bool:
    return layout.n * layout.dtype.itemsize < SMALL_BYTES


def _tiles(layout: Layout) -> int:
    """What goes through float64 at a time; see `transforms.norm`."""
    n = math.prod(layout.local_shape)
    return 8 * min(n, layout.chunk if layout.chunk >= TILE // 2 else TILE)


def _needs_leaf(tx: Transform | None) -> bool:
    if tx is None:
        return False
    return any(map(_needs_leaf, tx.parts)) if tx.parts else tx.needs == "leaf"


def _away(layout: Layout) -> bool:
    return layout.spec.memory != "device"


def _here(layouts: Sequence[Layout]) -> list[Layout]:
    return [x for x in layouts if not _away(x)]


def _bytes(layouts: Sequence[Layout]) -> int:
    return sum(x.local_bytes for x in layouts)
