"""What the update of a step takes: nothing but lanes where a kernel runs in place, else trees of new values."""

import dataclasses
import functools
import math
import mmap
from collections.abc import Sequence

from funzero.core.spec import Layout
from funzero.executor.plan import Plan
from funzero.executor.selection import Selection
from funzero.executor.stream import LANES, PART_BYTES
from funzero.transforms.base import Transform
from funzero.transforms.norm import SMALL_BYTES
from funzero.transforms.precision import LOW


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
        return Selection(self.plan, self.plan.resolved(self.tx), tuple(range(len(self.plan.specs.grads.layouts))))

    @functools.cached_property
    def fused(self) -> bool:
        """Whether a kernel runs it."""
        return self._selection is None or self._selection.kernel is not None

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether it writes where the state lies."""
        return self.donate and (self._selection is None or self._selection.tame)

    @property
    def norm_bytes(self) -> int:
        """What the norm takes: a chunk in float64, or the small leaves in float64 and their squares."""
        layouts = self.plan.specs.grads.layouts
        small = sum(math.prod(x.local_shape) for x in layouts if x.n * x.dtype.itemsize < SMALL_BYTES)
        return max(20 * small, max((8 * x.chunk for x in layouts), default=0))

    def temporaries(self) -> dict[str, int]:
        """Bytes on the device beside the state and the gradients, by purpose."""
        specs = self.plan.specs
        params = [specs.params.layouts[i] for i in self.plan.trained]
        state = [x for x in specs.opt_state.layouts if x.shape]
        copies = {} if self.in_place else {"new params": _bytes(params), "new opt_state": _bytes(_here(state))}
        if self.fused:
            return copies
        values = [x.local_bytes for x in specs.grads.layouts]
        low = [x for x in (*params, *state) if x.dtype in LOW]
        pieces = zip(specs.grads.layouts, params, strict=True)
        new = sum(math.prod(g.local_shape) * p.dtype.itemsize for g, p in pieces)
        return {
            "new params": new + (0 if self.donate else _bytes(params)),
            "new opt_state": _bytes(state),
            "opt_state brought here": _bytes(state) - _bytes(_here(state)),
            "updates": sum(values) + 2 * max(values, default=0),
            "float32 copies": 2 * sum(math.prod(x.local_shape) * 4 for x in low),
            "whole leaves": self._whole(state) if _needs_leaf(self.tx) else 0,
        }

    def _whole(self, state: list[Layout]) -> int:
        """What a transform that needs whole leaves is given, and gives, of leaves that are cut: all at a time."""
        cut = [x for x in self.plan.specs.grads.layouts if x.is_flat]
        kept = [x for x in state if x.is_flat]
        return 3 * sum(x.n * x.dtype.itemsize for x in cut) + 2 * sum(x.n * x.dtype.itemsize for x in kept)

    def elsewhere(self) -> tuple[int, int]:
        """Bytes on the host and on disk beside the state: lanes, and new room where the old may not be written."""
        layouts = self.plan.specs.opt_state.layouts
        host, disk = (_bytes([x for x in layouts if x.spec.memory == m]) for m in ("host", "disk"))
        lanes = self._lanes() if self.fused else 0
        return (lanes, 0) if self.donate else (lanes + host, disk)

    def _lanes(self) -> int:
        """Each lane's buffers grow to the largest part that it has held; leaves come in parts, one after the other."""
        rows = _rows(self.plan)
        buffers: list[dict[int, int]] = [{} for _ in range(LANES)]
        turn = 0
        for row, n, itemsize in rows:
            widest = max([itemsize, *(x.dtype.itemsize for x in row)])
            step = math.lcm(max(x.spec.quantum for x in row), mmap.PAGESIZE)
            size = max(1, int(PART_BYTES / widest) // step) * step
            for begin in range(0, max(1, n), size):
                lane = buffers[turn % LANES]
                for i, x in enumerate(row):
                    if x.spec.memory != "device":
                        lane[i] = max(lane.get(i, 0), min(size, n - begin) * x.dtype.itemsize)
                turn += 1
        return sum(sum(lane.values()) for lane in buffers)


def _needs_leaf(tx: Transform | None) -> bool:
    if tx is None:
        return False
    return any(map(_needs_leaf, tx.parts)) if tx.parts else tx.needs == "leaf"


def _rows(plan: Plan) -> list[tuple[list[Layout], int, int]]:
    """Of each trained leaf with state elsewhere: that state, its elements on this rank, bytes of one of the gradient's."""
    named: dict[str, list[Layout]] = {}
    for x in plan.specs.opt_state.layouts:
        if x.shape:
            named.setdefault(x.path.rpartition("/")[2], []).append(x)
    out = []
    for g in plan.specs.grads.layouts:
        row = [x for x in named.get(g.path.rpartition("/")[2], []) if x.local_shape == g.local_shape]
        if any(x.spec.memory != "device" for x in row):
            out.append((row, math.prod(g.local_shape), g.dtype.itemsize))
    return out


def _here(layouts: Sequence[Layout]) -> list[Layout]:
    return [x for x in layouts if x.spec.memory == "device"]


def _bytes(layouts: Sequence[Layout]) -> int:
    return sum(x.local_bytes for x in layouts)
