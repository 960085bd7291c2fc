"""Files read and written past the page cache, at any offset and of any size.

[Note: whole blocks] A direct transfer must begin and end at multiples of what the file system asks for, in the file and in
memory. Transfers go in chunks that end at such multiples. A chunk whose memory lies well goes as it is; any other
through a bounce buffer, and if it begins or ends within a block, what the file has there is read first, so that
neighbours stay as they are. Where the file system has no direct transfers (tmpfs) the same code runs with blocks of one
byte. What the file system asks for is asked of it: 4096 bytes is wrong on some disks, and 512 on more.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

CHUNK = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000
_MASK_AT, _MEMORY_AT, _OFFSET_AT = 0, 152, 156  # in struct statx


def aligned_empty(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    """uint8 [nbytes] in host memory that begins at a page, so that a direct transfer may use it as it is."""
    if not pinned:
        return torch.frombuffer(_pages(nbytes), dtype=torch.uint8)[:nbytes]
    room = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
    return room[-room.data_ptr() % mmap.PAGESIZE :][:nbytes]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"expected a contiguous tensor in host memory, got strides {tensor.stride()} on {tensor.device}"
        )
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def asked_alignment(handle: int) -> int | None:
    """What the file system of an open file asks of direct transfers, in bytes: of memory or of offsets, the larger.

    None where it does not say: before Linux 6.1, and on most network file systems. 0: it has no direct transfers.
    """
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    found = ctypes.create_string_buffer(256)
    if statx(handle, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found) != 0:
        return None
    mask, memory, offset = (int.from_bytes(found.raw[i : i + 4], "little") for i in (_MASK_AT, _MEMORY_AT, _OFFSET_AT))
    return max(memory, offset) if mask & _STATX_DIOALIGN else None


class DirectFile:
    """One file, for any number of threads of one process.

    Args:
        path: made if it is not there. direct: False goes through the page cache.

    Attributes:
        block: transfers at multiples of it, in memory and in the file, go without a copy.

    Every transfer is complete, or raises OSError with the path, how many bytes it wanted and how many it got.
    """

    def __init__(self, path: Path, *, direct: bool = True):
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._edges = threading.Lock()
        self._end = self.size  # that writes so far ask for; padding beyond it is cut off
        try:
            self.block = self._open_direct() if direct and _DIRECT else 1
        except BaseException:
            os.close(self._handle)
            raise

    def _open_direct(self) -> int:
        asked = asked_alignment(self._handle)
        if asked == 0:
            return 1
        try:
            handle = os.open(self.path, os.O_RDWR | _DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            return 1
        os.close(self._handle)
        self._handle = handle
        return max(asked or 0, mmap.PAGESIZE)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle).st_size

    def reserve(self, begin: int, end: int) -> None:
        """Makes the file system set bytes [begin, end) aside, so that no write to them finds it full. Raises OSError."""
        try:
            with self._edges:
                os.posix_fallocate(self._handle, begin, end - begin)
                self._end = max(self._end, end)
        except OSError as error:
            free = free_bytes(self.path.parent)
            raise OSError(
                error.errno, f"{self.path}: {end - begin} bytes more are needed, {free} are free: {error.strerror}"
            ) from error

    def truncate(self, size: int) -> None:
        """Cuts the file, or lengthens it by zeros."""
        with self._edges:
            os.ftruncate(self._handle, size)
            self._end = size

    def mapped(self, at: int, nbytes: int) -> torch.Tensor:
        """Bytes of the file as uint8 [nbytes] to read, in pages that come when they are read and may go at any time.

        Raises OSError if the file does not have them.
        """
        if at + nbytes > self.size:
            raise OSError(f"{self.path}: {nbytes} bytes at {at} are wanted, the file has {self.size}")
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        pages = np.memmap(self.path, np.uint8, "r", at, (nbytes,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to
            return torch.from_numpy(pages)

    def sync(self) -> None:
        """Returns when all that was written is on disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._handle)

    def write(self, data: memoryview, at: int) -> None:
        """Writes bytes at an offset; the file is as long as its last byte needs."""
        with self._edges:
            self._end = max(self._end, at + len(data))
        for view, begin in self._chunks(data, at):
            self._write_chunk(view, begin)

    def read(self, out: memoryview, at: int) -> None:
        """Fills `out` from an offset on."""
        for view, begin in self._chunks(out, at):
            if self._fits(view, begin):
                self._get(view, begin, len(view))
                continue
            lo, hi = self._around(begin, len(view))
            buffer = _bounce(hi - lo)
            self._get(buffer, lo, begin + len(view) - lo)
            view[:] = buffer[begin - lo : begin - lo + len(view)]

    def _chunks(self, data: memoryview, at: int) -> Iterator[tuple[memoryview, int]]:
        done = 0
        while done < len(data):
            end = min(len(data), (at + done) // CHUNK * CHUNK + CHUNK - at)
            yield data[done:end], at + done
            done = end

    def _around(self, at: int, n: int) -> tuple[int, int]:
        return at // self.block * self.block, -(-(at + n) // self.block) * self.block

    def _fits(self, view: memoryview, at: int) -> bool:
        return self.block == 1 or (at % self.block | len(view) % self.block | _address(view) % self.block) == 0

    def _write_chunk(self, view: memoryview, at: int) -> None:
        if self._fits(view, at):
            self._put(view, at)
            return
        lo, hi = self._around(at, len(view))
        buffer = _bounce(hi - lo)
        if (lo, hi) == (at, at + len(view)):
            buffer[:] = view
            self._put(buffer, lo)
            return
        with self._edges:  # two writes into one block
            size = self.size
            for edge in {lo, hi - self.block}:
                if edge < size:
                    self._get(buffer[edge - lo : edge - lo + self.block], edge, min(self.block, size - edge))
            buffer[at - lo : at - lo + len(view)] = view
            self._put(buffer, lo)
            if hi > self._end:
                os.ftruncate(self._handle, self._end)

    def _put(self, data: memoryview, at: int) -> None:
        done = 0
        try:
            while done < len(data):
                n = os.pwrite(self._handle, data[done:], at + done)
                if n == 0 or (done + n < len(data) and n % self.block):
                    raise OSError(errno.EIO, "a short write")
                done += n
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.path}: wrote {done} of {len(data)} bytes at {at}: {error.strerror}; "
                f"{free_bytes(self.path.parent)} bytes are free",
            ) from error

    def _get(self, out: memoryview, at: int, needed: int) -> None:
        """Fills at least `needed` bytes; a file may end within its last block."""
        done = 0
        try:
            while done < needed:
                n = os.preadv(self._handle, [out[done:]], at + done)
                if n == 0:
                    raise OSError(errno.EIO, f"the file has {self.size} bytes")
                done += n
        except OSError as error:
            raise OSError(
                error.errno, f"{self.path}: read {done} of {needed} bytes at {at}: {error.strerror}"
            ) from error


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write in the file system of a folder; 0 if the folder is gone."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is in, such as "ext4"; "" where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    rows = [line.split(" - ", 1) for line in lines]
    return next((after.split()[0] for before, after in rows if before.split()[2] == name), "")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) and not view.readonly else 1


def _bounce(nbytes: int) -> memoryview:
    return memoryview(_pages(nbytes))


def _pages(nbytes: int) -> mmap.mmap:
    """Memory of its own, in huge pages where the system has them: each page of a direct transfer is looked up and pinned,
    which is half of the time that small ones take."""
    room = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            room.madvise(mmap.MADV_HUGEPAGE)
    return room
