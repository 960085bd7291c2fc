"""Parts of leaves on their way through a computation: some are read, one is computed on, some are written, at a time.

[Note: lanes] A lane holds the memory of one part: room for each operand that does not live on the device. Parts take
the lanes in turn, so memory is bounded by the lanes whatever the leaves measure, and a lane's next read waits for its
last write only. What lives on the device is worked on where it is.
"""

import dataclasses
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from funzero.executor.bus import Arrival, Arrived, Room, Transfer, settle
from funzero.executor.stores import Store

LANES = 3
PART_BYTES = 8 << 20  # of the largest operand


@dataclasses.dataclass(frozen=True)
class Operand:
    """A leaf in a computation.

    Attributes:
        source, target: what is read and what is written, the same leaf or two; target None: it is only read.
        store: its memory; None: the device. per: how many elements of the part stand for one of its own.
        first: where in the leaf element 0 of the computation is.
    """

    source: torch.Tensor
    target: torch.Tensor | None = None
    store: Store | None = None
    per: int = 1
    first: int = 0

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Its own elements of a part."""
        return self.first + begin // self.per, self.first + min(-(-end // self.per), self.source.numel())


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements [begin, end) of one leaf, with the operands that belong to it. `leaf`: which one, for the caller."""

    leaf: int
    begin: int
    end: int
    operands: Sequence[Operand]


def parts(leaf: int, numel: int, operands: Sequence[Operand], quantum: int) -> Iterable[Part]:
    """A leaf in parts that begin at multiples of `quantum` elements; whole where all of it is on the device."""
    size = numel
    if any(x.store is not None for x in operands):
        widest = max(x.source.itemsize / x.per for x in operands)
        step = math.lcm(quantum, mmap.PAGESIZE)  # so that parts lie well on a disk
        size = max(1, int(PART_BYTES / widest) // step) * step
    for begin in range(0, max(1, numel), max(1, size)):
        yield Part(leaf, begin, min(begin + size, numel), operands)


class _Lane:
    """The memory of one part on its way: a room for each operand."""

    def __init__(self, device: torch.device):
        self._device = device
        self._rooms: dict[int, Room] = {}
        self._saves: list[Transfer] = []
        self._coming: list[Arrival] = []
        self.part: Part | None = None

    def load(self, part: Part) -> None:
        """Starts to read a part, when what was written last has gone."""
        self.wait()
        self.part, self._coming = part, []
        for i, x in enumerate(part.operands):
            begin, end = x.span(part.begin, part.end)
            if x.store is None:
                self._coming.append(Arrived(x.source.view(-1)[begin:end]))
            else:
                room = self._rooms.setdefault(i, Room(self._device))
                self._coming.append(x.store.load(x.source, begin, end, self._device, room))

    def compute(self, run: Callable[[Part, list[torch.Tensor]], None]) -> None:
        """Computes on the part, and starts to write what it changed."""
        assert self.part is not None
        tensors, self._coming = [x.wait() for x in self._coming], []
        run(self.part, tensors)
        for i, (x, made) in enumerate(zip(self.part.operands, tensors, strict=True)):
            if x.store is not None and x.target is not None:
                begin, _ = x.span(self.part.begin, self.part.end)
                self._saves.append(x.store.save(x.target, begin, made, self._rooms[i]))

    def wait(self) -> None:
        """Returns when nothing of this lane is under way."""
        coming, self._coming = self._coming, []
        saves, self._saves = self._saves, []
        settle([*(x.wait for x in coming), *(x.wait for x in saves)])


def stream(todo: Iterable[Part], device: torch.device, run: Callable[[Part, list[torch.Tensor]], None]) -> None:
    """Calls `run(part, tensors)` for each part; what it writes to the tensors of operands with a target is kept.

    Raises OSError; then some parts have been written and others not, and nothing is under way any more.
    """
    lanes = [_Lane(device) for _ in range(LANES)]
    loaded: deque[_Lane] = deque()
    try:
        for k, part in enumerate(todo):
            lane = lanes[k % LANES]
            if len(loaded) == LANES - 1:
                loaded.popleft().compute(run)
            lane.load(part)
            loaded.append(lane)
        while loaded:
            loaded.popleft().compute(run)
    finally:
        settle([lane.wait for lane in lanes])
