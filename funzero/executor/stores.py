"""Memories: where a leaf is kept between steps, and how parts of it come to the device and go back.

A leaf's spec names its memory. Nothing but this module asks which one it is: the others `keep` new values, `fetch` a leaf
whole, or `stream` parts of many leaves through a computation, and get tensors on the mesh's device. On a machine without
an accelerator, host memory is still memory apart from the device's: leaves are copied to work on them, and copied back.
"""

import atexit
import functools
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from funzero import _compat
from funzero.core.direct import aligned_empty, file_system
from funzero.core.spec import Layout
from funzero.executor.disk import DiskLeaf, DiskStore, disk_leaf


class Transfer(Protocol):
    """Bytes under way."""

    def wait(self) -> None:
        """Returns when they have arrived; raises what went wrong."""


class Store(Protocol):
    """One memory. A leaf is the tensor that stands for it in a state."""

    def keep(self, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        """A new leaf with the values of a local part, which is on any device."""

    def fetch(self, leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Its values on the mesh's device."""

    def writable(self, leaf: torch.Tensor, donate: bool) -> torch.Tensor:
        """A leaf like it to write to: in the same room if that may be given away and nobody else reads it, else in a new
        one whose values are undefined."""

    def same_room(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether what is written to one is read from the other."""

    def read(self, leaf: torch.Tensor, begin: int, out: torch.Tensor) -> Transfer:
        """Starts to bring elements from `begin` on into `out`, 1-D in memory from `buffer`."""

    def write(self, leaf: torch.Tensor, begin: int, data: torch.Tensor) -> Transfer:
        """Starts to bring them back; `data` must stay as it is until that is done."""

    def buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Host memory for `read` and `write`, uint8; pinned if `device` is an accelerator."""


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


class HostMemory:
    """Leaves in host memory, pinned where the device is an accelerator. `bytes_moved`: to the device and back."""

    def __init__(self) -> None:
        self.bytes_moved = 0

    def keep(self, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        """See `Store`."""
        pinned = layout.mesh.device.type != "cpu"
        out = torch.empty(layout.local_shape, dtype=part.dtype, pin_memory=pinned)
        self.bytes_moved += out.nbytes
        return out.copy_(part.detach().view(layout.local_shape))

    def fetch(self, leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
        """See `Store`."""
        self.bytes_moved += leaf.nbytes
        return leaf.detach().to(layout.mesh.device, copy=True)

    def writable(self, leaf: torch.Tensor, donate: bool) -> torch.Tensor:
        """See `Store`."""
        if donate and not _compat.storage_is_shared(leaf):
            return leaf.data
        return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=leaf.is_pinned())

    def same_room(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """See `Store`."""
        return a.data_ptr() == b.data_ptr()

    def read(self, leaf: torch.Tensor, begin: int, out: torch.Tensor) -> Transfer:
        """See `Store`."""
        self.bytes_moved += out.nbytes
        out.copy_(leaf.detach().view(-1)[begin : begin + out.numel()])
        return Done()

    def write(self, leaf: torch.Tensor, begin: int, data: torch.Tensor) -> Transfer:
        """See `Store`."""
        self.bytes_moved += data.nbytes
        leaf.detach().view(-1)[begin : begin + data.numel()].copy_(data)
        return Done()

    def buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See `Store`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")


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

    def keep(self, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        """See `Store`."""
        data = part.detach().contiguous().cpu().view(layout.local_shape)
        store = self.in_folder(layout.spec.folder)
        slot = store.slot(data.nbytes)
        store.start_write(slot, data).wait()
        return disk_leaf(layout.path, slot, layout.local_shape, data.dtype, layout.mesh.device)

    def fetch(self, leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
        """See `Store`."""
        return _on_disk(leaf).read()

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

    def read(self, leaf: torch.Tensor, begin: int, out: torch.Tensor) -> Transfer:
        """See `Store`."""
        slot = _on_disk(leaf).slot
        return slot.store.start_read(slot, out, begin * leaf.itemsize)

    def write(self, leaf: torch.Tensor, begin: int, data: torch.Tensor) -> Transfer:
        """See `Store`."""
        slot = _on_disk(leaf).slot
        return slot.store.start_write(slot, data, begin * leaf.itemsize)

    def buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """See `Store`."""
        return aligned_empty(nbytes, pinned=device.type != "cpu")


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


def store_of(layout: Layout) -> Store | None:
    """The memory that a layout names; None for the device's own."""
    return _BY_KIND[layout.spec.memory]


def fetch(leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A local leaf's values on the device; the leaf itself if it is there."""
    store = store_of(layout)
    return leaf if store is None else store.fetch(leaf, layout)


def replaced(old: torch.Tensor, new: torch.Tensor, layout: Layout, donate: bool) -> torch.Tensor:
    """A leaf with new values, in the memory of the old one; the old leaf itself if it is the new one.

    Args:
        donate: whether the old leaf's room may be written to.
    """
    store = store_of(layout)
    if store is None or new is old:
        return new
    target = store.writable(old, donate)
    store.write(target, 0, new.detach().reshape(-1).cpu()).wait()
    return target
