"""Files of leaves: safetensors files, written past the page cache and read in checked blocks.

[Note: direct writes] A checkpoint is written once and seldom read, so it should neither push other data out of the page
cache nor pass through it. Data go through a few buffers of whole pages, several at a time, with O_DIRECT where the file
system has it. The header is padded with blanks, which safetensors allows, so that data begin at a whole page.
"""

import bisect
import contextlib
import ctypes
import dataclasses
import errno
import itertools
import json
import math
import mmap
import os
import queue
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funzero.checkpoint.manifest import BLOCK, File, Piece, opened
from funzero.checkpoint.manifest import DTYPES as DTYPES
from funzero.core.errors import CheckpointError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
PAGE, SECTOR = 4096, 512
BUFFER = 4 << 20  # bytes of one write
WRITERS, SUMMERS = 2, 1  # threads
_DIRECT = getattr(os, "O_DIRECT", 0)
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of Linux
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_REAL = {torch.complex128: torch.float64}  # no safetensors dtype; written with a last dim of 2


@dataclasses.dataclass(frozen=True)
class Item:
    """A tensor to write: contiguous, in host memory. `key`: its name in the file."""

    key: str
    tensor: torch.Tensor


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory, as bytes."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def write_file(path: Path, items: list[Item]) -> tuple[File, list[tuple[int, str]]]:
    """Writes a safetensors file and waits until it is on disk.

    Returns: the file, and for each item the offset of its first byte and its checksums.

    Raises OSError, and ValueError for a dtype that safetensors lacks.
    """
    # Whole sectors come first and the others by the size of an element, so that each leaf is aligned.
    order = sorted(
        range(len(items)), key=lambda i: (items[i].tensor.nbytes % SECTOR > 0, -items[i].tensor.element_size())
    )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for i in order:
        x = items[i].tensor
        starts[i], end = end, end + x.numel() * x.element_size()
        header[items[i].key] = _described(x, starts[i], end)
    text = json.dumps(header).encode()
    data = math.ceil((8 + len(text)) / PAGE) * PAGE
    head = memoryview((data - 8).to_bytes(8, "little") + text.ljust(data - 8))
    views = [bytes_of(items[i].tensor) for i in order]
    with _threads(SUMMERS) as summers, _threads(WRITERS) as writers:
        sums = summers.imap(zlib.crc32, [v[at : at + BLOCK] for v in views for at in range(0, len(v), BLOCK)], 8)
        _write(path, [head, *views], writers)
        digits = iter([f"{x:08x}" for x in sums])
    crcs = {i: "".join(itertools.islice(digits, math.ceil(len(v) / BLOCK))) for i, v in zip(order, views, strict=True)}
    file = File(bytes=data + end, start=data, crc32=f"{zlib.crc32(head):08x}")
    return file, [(data + starts[i], crcs[i]) for i in range(len(items))]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPool]:
    """Threads that end with the block. Those of concurrent.futures take no more work once the script has ended, while
    a save in the background may still be under way."""
    pool = ThreadPool(count)
    try:
        yield pool
    finally:
        pool.close()
        pool.join()


def _described(x: torch.Tensor, start: int, end: int) -> dict[str, object]:
    shape = list(x.shape) if x.dtype not in _REAL else [*x.shape, 2]
    dtype = _REAL.get(x.dtype, x.dtype)
    if dtype not in _NAMES:
        raise ValueError(f"safetensors has no {dtype}")
    return {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}


def _write(path: Path, parts: list[memoryview], pool: ThreadPool) -> None:
    """The parts end to end, in buffers of whole pages."""
    arrays = [np.frombuffer(p, dtype=np.uint8) for p in parts]  # which copy without holding up other threads
    ends = list(itertools.accumulate(len(p) for p in parts))
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(WRITERS):
        buffers.put(mmap.mmap(-1, BUFFER))

    def put(handle: int, at: int) -> None:
        buffer = buffers.get()
        try:
            size = _fill(np.frombuffer(buffer, dtype=np.uint8), arrays, ends, at)
            _put(handle, memoryview(buffer)[: math.ceil(size / PAGE) * PAGE], at)
        finally:
            buffers.put(buffer)

    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    direct = handle
    try:
        direct = _reopened(path, handle)
        try:
            put(direct, 0)
        except OSError as error:
            if direct == handle or error.errno != errno.EINVAL:
                raise
            os.close(direct)
            direct = handle
            put(direct, 0)
        done = [pool.apply_async(put, (direct, at)) for at in range(BUFFER, ends[-1], BUFFER)]
        for result in done:
            result.wait()
        for result in done:
            result.get()
        os.ftruncate(handle, ends[-1])
        os.fsync(handle)
    finally:
        for each in {handle, direct}:
            os.close(each)


def _reopened(path: Path, handle: int) -> int:
    """The same file past the page cache, or as it is where the file system does not allow that."""
    try:
        return os.open(path, os.O_WRONLY | _DIRECT) if _DIRECT else handle
    except OSError:
        return handle


def _fill(buffer: Bytes, parts: list[Bytes], ends: list[int], at: int) -> int:
    """Copies the bytes from `at` on into a buffer; how many there were."""
    size = min(BUFFER, ends[-1] - at)
    i, done = bisect.bisect_right(ends, at), 0
    while done < size:
        begin = at + done - (ends[i] - len(parts[i]))
        n = min(len(parts[i]) - begin, size - done)
        buffer[done : done + n] = parts[i][begin : begin + n]
        done, i = done + n, i + 1
    return size


def _put(handle: int, buffer: memoryview, at: int) -> None:
    while buffer:
        n = os.pwrite(handle, buffer, at)
        buffer, at = buffer[n:], at + n


class Reader:
    """One file of a checkpoint, opened for reading; its size and header are checked.

    Raises CheckpointError: not an ordinary file, another size or header than the manifest says; OSError.
    """

    def __init__(self, path: Path, file: File):
        self._path, self._file = path, file
        try:
            self._handle = opened(path)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing") from None
        try:
            self._check(file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            self.close()
            raise

    def _check(self, file: File) -> None:
        size = os.fstat(self._handle).st_size
        if size != file.bytes:
            raise CheckpointError(f"{self._path}: has {size} bytes, the manifest says {file.bytes}")
        head = bytearray(file.start)
        self._get(memoryview(head), 0)
        if zlib.crc32(head) != int(file.crc32, 16):
            raise CheckpointError(
                f"{self._path}: damaged, the checksum of its header (bytes 0 to {file.start}) is wrong"
            )

    def _get(self, out: memoryview, at: int) -> None:
        while out:
            n = os.preadv(self._handle, [out], at)
            if n == 0:
                raise CheckpointError(f"{self._path}: ends at byte {at}")
            out, at = out[n:], at + n

    def read(self, leaf: str, piece: Piece, size: int, lo: int, out: memoryview) -> Callable[[], None]:
        """Bytes of a piece into `out`; what comes back is to be called, on any thread, and checks them block by block.

        Args:
            leaf: its path, for messages. size: bytes of the whole piece. lo: the first byte wanted, within the piece.
        """
        hi = lo + len(out)
        begin = lo // BLOCK * BLOCK
        end = min(math.ceil(hi / BLOCK) * BLOCK, size)
        target = out if (begin, end) == (lo, hi) else memoryview(bytearray(end - begin))
        self._get(target, piece.at + begin)

        def check() -> None:
            for at in range(begin, end, BLOCK):
                block = target[at - begin : at - begin + BLOCK]
                digits = piece.crc32[8 * (at // BLOCK) : 8 * (at // BLOCK) + 8]
                if zlib.crc32(block) != int(digits, 16):
                    where = f"bytes {piece.at + at} to {piece.at + at + len(block)}"
                    raise CheckpointError(f"{self._path}: damaged in {leaf}, {where}: the checksum is wrong")
            if target is not out:
                out[:] = target[lo - begin : hi - begin]

        return check

    def close(self) -> None:
        """Closes the file."""
        os.close(self._handle)


def spans(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """[lo, hi) cut at multiples of `BUFFER`: what one thread reads."""
    at = lo
    while at < hi:
        end = min(hi, (at // BUFFER + 1) * BUFFER)
        yield at, end
        at = end


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap(a: Path, b: Path) -> None:
    """Exchanges two names in one step where the system can; else there is a moment without `b`."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return
    if rename is not None and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(ctypes.get_errno(), f"{a} and {b} cannot be exchanged")
    aside = a.with_name(f"{a.name}.old")
    os.rename(b, aside)
    try:
        os.rename(a, b)
    except BaseException:
        os.rename(aside, b)
        raise
    os.rename(aside, a)


def write_small(path: Path, raw: bytes) -> None:
    """A small file, all of it or none: written under another name, and renamed when it is on disk."""
    draft = path.with_name(f".{path.name}")
    with draft.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)
