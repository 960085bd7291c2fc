"""Direct reads and writes of any size at any offset."""

import errno
import itertools
import mmap
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from funzero.core import direct
from funzero.core.direct import CHUNK, DirectFile, aligned_empty, memory_of

SIZES = (1, 511, 512, 513, 4095, 4096, (1 << 20) + 1)
SHM = Path("/dev/shm")


@pytest.fixture(params=["disk", "tmpfs", "page cache"])
def make(request, tmp_path):
    folder = tmp_path
    if request.param == "tmpfs":
        if not os.access(SHM, os.W_OK):
            pytest.skip("no tmpfs here")
        folder = SHM / f"funzero-test-{os.getpid()}"
        folder.mkdir()
    files = []

    def made(name="x"):
        files.append(DirectFile(folder / name, direct=request.param != "page cache"))
        return files[-1]

    yield made
    for file in files:
        file.close()
        file.path.unlink()
    if folder != tmp_path:
        folder.rmdir()


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


# deepspeed.md 3.14
@pytest.mark.parametrize("at", [0, 1, 512])
@pytest.mark.parametrize("n", SIZES)
def test_ds_3_14_any_size_at_any_offset(make, n, at):
    file = make()
    before = noise(at, 1)
    file.write(memoryview(before), 0)
    data = noise(n + 4, 2)[4:]  # not at a page, nor at a sector
    file.write(memoryview(data), at)
    assert file.size == at + n
    assert file.path.read_bytes() == before.tobytes() + data.tobytes()
    frame = np.full(n + 16, 7, dtype=np.uint8)
    file.read(memoryview(frame[8 : 8 + n]), at)
    assert np.array_equal(frame[8 : 8 + n], data)
    assert (frame[:8] == 7).all() and (frame[8 + n :] == 7).all(), "neighbours in memory"


@pytest.mark.parametrize("n", SIZES)
def test_ds_3_14_neighbours_in_the_file_stay(make, n):
    file = make()
    around = noise(n + 3 * 4096, 1)
    file.write(memoryview(around), 0)
    data = noise(n, 2)
    file.write(memoryview(data), 4097)
    around[4097 : 4097 + n] = data
    assert file.path.read_bytes() == around.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_ds_3_14_threads_that_share_blocks(make, threads):
    file = make()
    data = noise(100_003)
    cuts = [0, 1, 700, 4097, 50_001, 50_002, 99_999, len(data)]
    todo = list(itertools.pairwise(cuts))

    def work(k):
        for a, b in todo[k::threads]:
            file.write(memoryview(data[a:b]), a)

    for _ in range(20):
        file.truncate(0)
        running = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert file.path.read_bytes() == data.tobytes()


def test_several_chunks(make):
    file = make()
    data = noise(2 * CHUNK + 12_345)
    file.write(memoryview(data), 3)
    out = np.empty_like(data)
    file.read(memoryview(out), 3)
    assert np.array_equal(out, data) and file.size == 3 + len(data)


def test_what_lies_well_goes_without_a_copy(tmp_path, monkeypatch):
    file = DirectFile(tmp_path / "x")
    data = memory_of(aligned_empty(3 * CHUNK))
    monkeypatch.setattr(direct, "_bounce", None)
    file.write(data, 0)
    file.read(data, 0)
    file.close()


def test_the_file_system_is_asked(tmp_path):
    with (tmp_path / "x").open("wb") as opened:
        asked = direct.asked_alignment(opened.fileno())
    file = DirectFile(tmp_path / "x")
    assert file.block == 1 if asked == 0 else file.block % (asked or mmap.PAGESIZE) == 0
    file.close()


def test_a_larger_block_than_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(direct, "asked_alignment", lambda handle: 65_536)
    file = DirectFile(tmp_path / "x")
    assert file.block == 65_536
    data = noise(100_000)
    file.write(memoryview(data), 5000)
    assert file.path.read_bytes() == bytes(5000) + data.tobytes()
    file.close()


def test_no_direct_transfers(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    file = DirectFile(tmp_path / "x")
    assert file.block == 1
    file.write(memoryview(noise(1000)), 1)
    assert file.size == 1001
    file.close()


def test_br46_a_file_that_may_not_grow(tmp_path):
    """A true short write."""
    file = DirectFile(tmp_path / "x")
    first = noise(4096)
    file.write(memoryview(first), 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"x: wrote \d+ of \d+ bytes") as found:
            file.write(memoryview(noise(10_000)), 0)
        assert found.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    file.write(memoryview(first), 0)
    assert file.path.read_bytes() == first.tobytes()
    file.close()


def test_br46_a_full_disk(tmp_path, monkeypatch):
    file = DirectFile(tmp_path / "x")
    real, calls = os.pwrite, []

    def full(handle, data, at):
        calls.append(at)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:4096], at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        OSError, match=r"x: wrote 4096 of 16384 bytes at 0: No space left on device; \d+ bytes are free"
    ):
        file.write(memoryview(noise(16_384)), 0)
    file.close()


def test_br46_a_file_that_was_cut(tmp_path):
    file = DirectFile(tmp_path / "x")
    file.write(memoryview(noise(10_000)), 0)
    os.truncate(file.path, 5000)
    with pytest.raises(OSError, match=r"x: read 5000 of 10000 bytes at 0: the file has 5000 bytes"):
        file.read(memoryview(np.empty(10_000, dtype=np.uint8)), 0)
    file.close()


def test_pages_of_a_file_and_a_file_that_was_cut(tmp_path):
    file = DirectFile(tmp_path / "x")
    data = torch.arange(10_000, dtype=torch.int32).view(torch.uint8)
    file.write(memoryview(data.numpy()), 4096)
    assert torch.equal(file.mapped(4096 + 8, 100), data[8:108]) and file.mapped(0, 0).numel() == 0
    file.write(memoryview(data.numpy()[::-1].copy()), 4096)  # past the page cache, which must not serve what was there
    assert torch.equal(file.mapped(4096, 40_000), data.flip(0))
    with pytest.raises(OSError, match=r"40001 bytes at 4096 are wanted, the file has 44096"):
        file.mapped(4096, 40_001)
    file.close()
