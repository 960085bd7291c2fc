"""The disk as a memory of leaves: slots in a file of this process's own, and leaves that are read when they are used.

[Note: slots and versions] A leaf on disk is a tensor without data that names a slot and a version. The step reads and
writes slots; nothing else does. A write makes the slot's version one higher, so a leaf of an older state raises where it
is read, as a donated leaf does. A step that does not donate writes to a new slot. A slot goes back to the store when no
leaf and no transfer under way refers to it. A save reads leaves before it returns to the loop, so no slot is written under it.

[Note: whose folder] Each process makes a folder of its own below the one it is given and keeps a lock on a file in it. So two
runs do not share names, and what a killed run left is known by its lock being free: the next run removes it.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from funzero.core.direct import CHUNK, DirectFile, memory_of
from funzero.core.errors import DonatedError
from funzero.executor.bus import Arrival, Room, Transfer, bring, send
from funzero.executor.standin import FACTS, replaced

THREADS = 4
_PREFIX, _LOCK, _DATA, _THREAD = "funzero-", "lock", "leaves", "funzero-disk"


class Slot:
    """Room for the bytes of one leaf.

    Attributes:
        at: its first byte in the file. nbytes: of the leaf. version: how often it was written.
    """

    def __init__(self, store: "DiskStore", at: int, nbytes: int):
        self.store, self.at, self.nbytes = store, at, nbytes
        self.version = 0


class DiskStore:
    """Slots in one file, read and written past the page cache by a few threads.

    Args:
        folder: other runs may use it as well; made if it is not there. direct: False goes through the page cache.

    Raises OSError.
    """

    def __init__(self, folder: Path, *, direct: bool = True):
        folder.mkdir(parents=True, exist_ok=True)
        remove_left_over(folder)
        name = f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        draft, self.folder = folder / f".{name}", folder / name
        draft.mkdir()
        self._lock_file = _locked(draft / _LOCK)
        os.rename(draft, self.folder)  # nobody else can see it without its lock
        self.file = DirectFile(self.folder / _DATA, direct=direct)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=_THREAD)
        self._lock = threading.RLock()  # a slot may be given back wherever garbage is collected
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self.bytes_read = self.bytes_written = 0
        weakref.finalize(self, _close, self.file, self._lock_file, self._pool, self.folder, os.getpid())

    def slot(self, nbytes: int) -> Slot:
        """A new slot; the file system has set its bytes aside. Raises OSError for a full disk."""
        size = -(-nbytes // self.file.block) * self.file.block
        with self._lock:
            rooms = self._free.get(size)
            at = rooms.pop() if rooms else None
            if at is None:
                at, self._end = self._end, self._end + size
                if size:
                    try:
                        self.file.reserve(at, at + size)
                    except OSError:
                        self._end = at
                        raise
        made = Slot(self, at, nbytes)
        weakref.finalize(made, self._give_back, size, at).atexit = False
        return made

    def _give_back(self, size: int, at: int) -> None:
        with self._lock:
            self._free.setdefault(size, []).append(at)

    def start_write(
        self, slot: Slot, data: torch.Tensor, begin: int = 0, after: Transfer | None = None
    ) -> "DiskTransfer":
        """Begins to write bytes to a slot from its byte `begin` on; `data` must stay as it is until the transfer ends.

        Args:
            after: what brings `data`, if it is not there yet.
        """
        self.bytes_written += data.nbytes
        return self._start(self.file.write, data, slot, begin, after)

    def start_read(self, slot: Slot, out: torch.Tensor, begin: int = 0) -> "DiskTransfer":
        """Begins to read bytes of a slot from its byte `begin` on into `out`."""
        self.bytes_read += out.nbytes
        return self._start(self.file.read, out, slot, begin)

    def _start(
        self,
        move: Callable[[memoryview, int], None],
        data: torch.Tensor,
        slot: Slot,
        begin: int,
        after: Transfer | None = None,
    ) -> "DiskTransfer":
        at, memory = slot.at + begin, memory_of(data)
        edges = [0, *range(CHUNK - at % CHUNK, len(memory), CHUNK), len(memory)] if len(memory) else [0]
        runs = [(memory[a:b], at + a) for a, b in itertools.pairwise(edges)]
        return DiskTransfer([self._pool.submit(_moved, slot, after, move, *run) for run in runs])


def _moved(
    slot: Slot, after: Transfer | None, move: Callable[[memoryview, int], None], data: memoryview, at: int
) -> None:
    """Moves bytes of a slot, which nobody else gets until it is done."""
    if after is not None:
        after.wait()
    move(data, at)


class DiskTransfer:
    """A read or a write under way."""

    def __init__(self, parts: "list[Future[None]]"):
        self._parts = parts

    def wait(self) -> None:
        """Returns when all of it is done; raises its OSError, and only when no part is under way any more."""
        wait(self._parts)
        for part in self._parts:
            part.result()


def _close(file: DirectFile, lock: Any, pool: ThreadPoolExecutor, folder: Path, pid: int) -> None:
    if os.getpid() != pid:  # a forked child shares the folder
        return
    inside = threading.current_thread().name.startswith(_THREAD)  # the last leaf may go wherever garbage is collected
    pool.shutdown(wait=not inside)
    file.close()
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _locked(path: Path) -> Any:
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def remove_left_over(folder: Path) -> None:
    """Removes what runs that ended without cleaning up have left in a folder."""
    for left in folder.glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):  # held by a run that lives, or gone in this moment
            with (left / _LOCK).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)


class DiskLeaf(torch.Tensor):
    """A leaf on disk: any op reads it, none writes it.

    Attributes:
        path: for messages. slot, version: see [Note: slots and versions].
    """

    path: str
    slot: Slot
    version: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTS and not (func is torch.Tensor.type and len(args) > 1):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__repr__:
            return f"DiskLeaf({args[0].path}, shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        if func is torch.Tensor.detach:
            return args[0].alias()
        return func(*replaced(args, DiskLeaf, DiskLeaf.read), **replaced(kwargs, DiskLeaf, DiskLeaf.read))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*replaced(args, DiskLeaf, DiskLeaf.read), **replaced(kwargs or {}, DiskLeaf, DiskLeaf.read))

    def alias(self) -> "DiskLeaf":
        """The same leaf as another tensor, as stale as this one."""
        made = disk_leaf(self.path, self.slot, tuple(self.shape), self.dtype, self.device)
        made.version = self.version
        return made

    def check(self) -> None:
        """Raises DonatedError if the slot has been written since."""
        if self.version != self.slot.version:
            raise DonatedError(
                f"{self.path}: this leaf was on disk and has been updated; use the state that step returned"
            )

    def start_read(self, begin: int, end: int, room: Room | None = None) -> Arrival:
        """Begins to read elements [begin, end). room: where their bytes come to, in host memory; None: in new memory."""
        room = room or Room(self.device)
        out = room.bytes((end - begin) * self.itemsize).view(self.dtype)
        transfer = self.slot.store.start_read(self.slot, out, begin * self.itemsize)
        return _Reading(out, transfer, self.device, room)

    def start_write(self, begin: int, values: torch.Tensor, room: Room | None = None) -> Transfer:
        """Begins to write elements from `begin` on. room: what values of an accelerator pass through."""
        slot, at = self.slot, begin * self.itemsize
        if values.device.type == "cpu":
            return slot.store.start_write(slot, values, at)
        room = room or Room(self.device)
        data = room.bytes(values.nbytes).view(values.dtype)
        return slot.store.start_write(slot, data, at, after=send(values, data))

    def mapped(self) -> torch.Tensor:
        """Its data as pages of the file, in memory that the system may take back; to be read until the slot is written."""
        self.check()
        pages = self.slot.store.file.mapped(self.slot.at, self.slot.nbytes)
        return pages.view(self.dtype).view(self.shape)

    def read(self) -> torch.Tensor:
        """Its data, on its device."""
        self.check()
        return self.start_read(0, self.numel()).wait().view(self.shape)


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Elements on their way to the device by way of host memory."""

    data: torch.Tensor
    transfer: Transfer
    device: torch.device
    room: Room

    def wait(self) -> torch.Tensor:
        """The elements. Raises OSError."""
        self.transfer.wait()
        return bring(self.data, self.device, self.room).wait()


def disk_leaf(path: str, slot: Slot, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> DiskLeaf:
    """The leaf that a slot holds now."""
    made: DiskLeaf = torch.Tensor._make_wrapper_subclass(DiskLeaf, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
    made.path, made.slot, made.version = path, slot, slot.version
    return made
