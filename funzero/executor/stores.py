"""Memories: where a leaf is kept between steps, and how parts of it come to the device and go back.

A leaf's spec names its memory. Nothing but this module asks which one it is: the others `keep` new values, `fetch` a leaf
whole, or `stream` parts of many leaves through a computation, and get tensors on the mesh's device. On a machine without
an accelerator, host memory is still memory apart from the device's: leaves are copied to work on them, and copied back.

[Note: memory goes back] Leaves are kept elsewhere to save memory, and malloc undoes that: glibc keeps what is freed in
pieces between things that stay, and a run of 116 MB took 480. So from the first such leaf on, each allocation of a MiB or
more is mapped by itself and unmapped when it is freed, in the whole process. MALLOC_MMAP_THRESHOLD_ in the environment is
left alone.
"""

import atexit
import ctypes
import errno
import functools
import math
import os
import shutil
import tempfile
import warnings
from collections import deque
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from funzero import _compat
from funzero.core import tree as tree_lib
from funzero.core.direct import file_system, free_bytes
from funzero.core.spec import Layout
from funzero.core.state import StateSpecs
from funzero.executor.bus import Arrival, Arrived, Room, Transfer, Viewed, bring, send, settle
from funzero.executor.disk import DiskLeaf, DiskStore, disk_leaf

_M_MMAP_THRESHOLD = -3  # of mallopt
MAPPED_BYTES = 1 << 20
OUTBOX_BYTES = 16 << 20


@functools.cache
def give_memory_back() -> None:
    """See [Note: memory goes back]. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


class Store(Protocol):
    """One memory. A leaf is the tensor that stands for it in a state."""

    def room(self, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """A new leaf whose values are undefined."""

    def start_fetch(self, leaf: torch.Tensor, layout: Layout) -> Arrival:
        """Starts to bring a whole leaf to the mesh's device, into memory of its own."""

    def writable(self, leaf: torch.Tensor, donate: bool) -> torch.Tensor:
        """A leaf like it to write to: in the same room if that may be given away and nobody else reads it, else in a new
        one whose values are undefined."""

    def same_room(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether what is written to one is read from the other."""

    def load(self, leaf: torch.Tensor, begin: int, end: int, device: torch.device, room: Room | None = None) -> Arrival:
        """Starts to bring elements [begin, end), 1-D, to the device, into memory of their own. room: to pass through."""

    def save(self, leaf: torch.Tensor, begin: int, values: torch.Tensor, room: Room | None = None) -> Transfer:
        """Starts to bring contiguous `values` back, to elements from `begin` on; they must stay as they are until that is
        done."""


class HostMemory:
    """Leaves in host memory, pinned where the device is an accelerator. `bytes_moved`: to the device and back."""

    def __init__(self) -> None:
        self.bytes_moved = 0

    def room(self, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """See `Store`."""
        give_memory_back()
        return torch.empty(layout.local_shape, dtype=dtype, pin_memory=layout.mesh.device.type != "cpu")

    def start_fetch(self, leaf: torch.Tensor, layout: Layout) -> Arrival:
        """See `Store`."""
        return Viewed(self.load(leaf, 0, leaf.numel(), layout.mesh.device), leaf.shape)

    def writable(self, leaf: torch.Tensor, donate: bool) -> torch.Tensor:
        """See `Store`."""
        if donate and not _compat.storage_is_shared(leaf):
            return leaf.data
        return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=leaf.is_pinned())

    def same_room(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """See `Store`."""
        return a.data_ptr() == b.data_ptr()

    def load(self, leaf: torch.Tensor, begin: int, end: int, device: torch.device, room: Room | None = None) -> Arrival:
        """See `Store`."""
        part = leaf.detach().view(-1)[begin:end]
        self.bytes_moved += part.nbytes
        if device.type != "cpu":
            return bring(part, device)
        out = torch.empty_like(part) if room is None else room.bytes(part.nbytes).view(part.dtype)
        return Arrived(out.copy_(part))

    def save(self, leaf: torch.Tensor, begin: int, values: torch.Tensor, room: Room | None = None) -> Transfer:
        """See `Store`."""
        self.bytes_moved += values.nbytes
        return send(values, leaf.detach().view(-1)[begin : begin + values.numel()])


class DiskMemory:
    """Leaves on disk, as `DiskLeaf`s. A folder's `DiskStore` lives as long as one of its leaves."""

    def __init__(self) -> None:
        self._stores: WeakValueDictionary[Path, DiskStore] = WeakValueDictionary()

    def in_folder(self, folder: str | None) -> DiskStore:
        """This process's store in a folder; None: in a temporary one."""
        path = default_folder() if folder is None else Path(folder).resolve()
        found = self._stores.get(path)
        if found is None:
            found = self._stores[path] = DiskStore(path)
        return found

    def room(self, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """See `Store`."""
        give_memory_back()
        store = self.in_folder(layout.spec.folder)
        slot = store.slot(math.prod(layout.local_shape) * dtype.itemsize)
        return disk_leaf(layout.path, slot, layout.local_shape, dtype, layout.mesh.device)

    def start_fetch(self, leaf: torch.Tensor, layout: Layout) -> Arrival:
        """See `Store`."""
        leaf = _on_disk(leaf)
        leaf.check()
        return Viewed(self.load(leaf, 0, leaf.numel(), layout.mesh.device), leaf.shape)

    def writable(self, leaf: torch.Tensor, donate: bool) -> torch.Tensor:
        """See `Store`."""
        leaf = _on_disk(leaf)
        leaf.check()
        slot = leaf.slot
        if not donate:
            slot = slot.store.slot(slot.nbytes)
        slot.version += 1
        return disk_leaf(leaf.path, slot, tuple(leaf.shape), leaf.dtype, leaf.device)

    def same_room(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """See `Store`."""
        return _on_disk(a).slot is _on_disk(b).slot

    def load(self, leaf: torch.Tensor, begin: int, end: int, device: torch.device, room: Room | None = None) -> Arrival:
        """See `Store`."""
        return _on_disk(leaf).start_read(begin, end, room)

    def save(self, leaf: torch.Tensor, begin: int, values: torch.Tensor, room: Room | None = None) -> Transfer:
        """See `Store`."""
        return _on_disk(leaf).start_write(begin, values, room)


@functools.cache
def default_folder() -> Path:
    """A temporary folder of this process, removed when it ends; warns if that is no disk at all."""
    folder = Path(tempfile.mkdtemp(prefix="funzero-disk-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if file_system(folder) in ("tmpfs", "ramfs"):
        warnings.warn(
            f"leaves on disk go to {folder}, which is in memory (tmpfs); give fz.with_memory a folder= on a disk",
            stacklevel=2,
        )
    return folder


def _on_disk(leaf: torch.Tensor) -> DiskLeaf:
    assert isinstance(leaf, DiskLeaf), "the layout says disk"
    return leaf


HOST, DISK = HostMemory(), DiskMemory()
_BY_KIND: dict[str, Store | None] = {"device": None, "host": HOST, "disk": DISK}


def check_room(specs: StateSpecs, *, twice: bool = False) -> None:
    """Raises OSError if what this rank will keep on disk, its accumulator included, is more than is free there.

    Args:
        twice: for an update that writes trained params and opt_state to new rooms before the old ones are given back.
    """
    trained = set(tree_lib.paths(specs.grads.tree))
    params = zip(tree_lib.paths(specs.params.tree), specs.params.layouts, strict=True)
    anew = [*(x for name, x in params if name in trained), *specs.opt_state.layouts] if twice else []
    needed: dict[str | None, int] = {}
    pairs = zip(specs.accum.layouts, specs.grads.layouts, strict=True)
    sums = [max(pair, key=lambda x: x.local_bytes) for pair in pairs]  # one becomes the other
    for x in (*specs.params.layouts, *specs.opt_state.layouts, *anew, *sums):
        if x.spec.memory == "disk":
            needed[x.spec.folder] = needed.get(x.spec.folder, 0) + x.local_bytes
    for name, nbytes in needed.items():
        folder = default_folder() if name is None else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        free = free_bytes(folder)
        if nbytes > free:
            message = f"{folder}: this rank's leaves on disk take {nbytes} bytes, {free} are free"
            raise OSError(errno.ENOSPC, f"{message}; free some, or give fz.with_memory another folder=")


def store_of(layout: Layout) -> Store | None:
    """The memory that a layout names; None for the device's own."""
    return _BY_KIND[layout.spec.memory]


def fetch(leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A local leaf's values on the device; the leaf itself if it is there."""
    return start_fetch(leaf, layout).wait()


def start_fetch(leaf: torch.Tensor, layout: Layout) -> Arrival:
    """Starts what `fetch` does."""
    store = store_of(layout)
    return Arrived(leaf) if store is None else store.start_fetch(leaf, layout)


def start_fetch_range(leaf: torch.Tensor, layout: Layout, begin: int, end: int) -> Arrival:
    """Starts to bring elements [begin, end) of a local leaf, 1-D, to the device; a view if it is there."""
    store = store_of(layout)
    if store is None:
        return Arrived(leaf.view(-1)[begin:end])
    return store.load(leaf, begin, end, layout.mesh.device)


class Outbox:
    """Values on their way from the device to where their leaves are kept: some may be under way while others are made.

    Args:
        limit: bytes under way, if it is more than one leaf.
    """

    def __init__(self, limit: int = OUTBOX_BYTES):
        self._limit, self._bytes = limit, 0
        self._flying: deque[tuple[Transfer, torch.Tensor]] = deque()

    def put(
        self, values: torch.Tensor, layout: Layout, old: torch.Tensor | None = None, *, donate: bool = True
    ) -> torch.Tensor:
        """The leaf that will hold these values when `settle` returns; the values themselves if the device keeps it.

        Args:
            values: of the leaf's size; they must stay as they are. old: a leaf like it, whose room is used again if
                `donate` says so and nobody else reads it.
        """
        store = store_of(layout)
        if store is None:
            return values
        leaf = store.room(layout, values.dtype) if old is None else store.writable(old, donate)
        self.write(store, leaf, 0, values)
        return leaf

    def write(self, store: Store, leaf: torch.Tensor, begin: int, values: torch.Tensor) -> None:
        """Starts to write elements from `begin` on."""
        data = values.detach().reshape(-1).contiguous()
        while self._flying and self._bytes + data.nbytes > self._limit:
            self._land()
        self._flying.append((store.save(leaf, begin, data), data))
        self._bytes += data.nbytes

    def _land(self) -> None:
        transfer, data = self._flying.popleft()
        self._bytes -= data.nbytes
        transfer.wait()

    def settle(self) -> None:
        """Returns when nothing is under way any more; raises the first error then."""
        settle([self._land] * len(self._flying))


def keep(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A new leaf with these values, of the local part's size and on any device, in the memory that the layout names.

    On the device it is a contiguous copy.
    """
    if store_of(layout) is None:
        out = torch.empty(layout.local_shape, dtype=values.dtype, device=layout.mesh.device)
        return out.copy_(values.detach().view(layout.local_shape) if layout.is_flat else values.detach())
    outbox = Outbox()
    leaf = outbox.put(values, layout)
    outbox.settle()
    return leaf
