"""Saving and restoring a state of 800 MB, in turn with torch.save and DCP; what a save in the background costs the step.

Every save is timed with the sync to disk, every load from files that are not in the page cache, up to the sum of all
that was restored.
"""

import mmap
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import funzero as fz

LEAVES = {f"layer{i}.{n}": s for i in range(16) for n, s in (("w", (2048, 2000)), ("b", (2000,)), ("n", (61,)))}
RUNS, LOADS = 5, 3


def state() -> fz.TrainState:
    """Params and two moments, random: 805 MB in float32."""
    made = fz.init_state({n: torch.randn(s) for n, s in LEAVES.items()}, fz.adam(1e-3))
    filled = fz.tree.map_with_path(
        lambda p, x: torch.randn(x.shape) if x.is_floating_point() and "hyperparams" not in p else x, made
    )
    return filled


def flat(tree: Any) -> dict[str, torch.Tensor]:
    return dict(zip(*fz.tree.flatten_with_paths(tree)[:2], strict=True))


def evict(path: Path) -> None:
    """Drops the files from the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def total(leaves: dict[str, torch.Tensor]) -> float:
    return sum(float(x.double().sum()) if x.numel() < 100 else float(x.sum()) for x in leaves.values())


def sync(path: Path) -> None:
    for file in [path, path.parent]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Funzero:
    def save(self, path: Path, held: fz.TrainState) -> None:
        fz.save(path, held)

    def load(self, path: Path, held: fz.TrainState) -> dict[str, torch.Tensor]:
        like = fz.abstract_state({n: torch.empty(s, device="meta") for n, s in LEAVES.items()}, fz.adam(1e-3))
        return flat(fz.restore(path, like))


class TorchSave:
    def save(self, path: Path, held: fz.TrainState) -> None:
        torch.save(flat(held), path)
        sync(path)

    def load(self, path: Path, held: fz.TrainState) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return found


class Dcp:
    def save(self, path: Path, held: fz.TrainState) -> None:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(flat(held), storage_writer=dcp.FileSystemWriter(path, sync_files=True, thread_count=2))

    def load(self, path: Path, held: fz.TrainState) -> dict[str, torch.Tensor]:
        import torch.distributed.checkpoint as dcp

        into = {n: torch.empty_like(x) for n, x in flat(held).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(into, storage_reader=dcp.FileSystemReader(path))
        return into


class Raw:
    """No format, no checksum, no tensors: as many bytes, written past the page cache and read in order. The disk's limit."""

    BUFFER = 4 << 20

    def save(self, path: Path, held: fz.TrainState) -> None:
        buffer = mmap.mmap(-1, self.BUFFER)
        buffer.write(os.urandom(self.BUFFER))
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        for at in range(0, self._size(held), self.BUFFER):
            os.pwrite(handle, buffer, at)
        os.fsync(handle)
        os.close(handle)

    def load(self, path: Path, held: fz.TrainState) -> dict[str, torch.Tensor]:
        out = torch.empty(self._size(held), dtype=torch.uint8)
        view, handle = memoryview(out.numpy()), os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for at in range(0, len(view), self.BUFFER):
            os.preadv(handle, [view[at : at + self.BUFFER]], at)
        os.close(handle)
        return {}

    def _size(self, held: fz.TrainState) -> int:
        return sum(x.nbytes for x in flat(held).values()) // self.BUFFER * self.BUFFER


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    out = fn()
    return time.perf_counter() - begin, out


def compare() -> None:
    """Prints the comparison."""
    torch.set_num_threads(1)
    held = state()
    size, right = sum(x.nbytes for x in flat(held).values()), total(flat(held))
    systems = {"raw": Raw(), "funzero": Funzero(), "torch.save": TorchSave(), "DCP": Dcp()}
    times: dict[tuple[str, str], list[float]] = {}
    root = Path(tempfile.mkdtemp(dir=os.environ.get("FUNZERO_BENCH_DIR")))
    try:
        for run in range(RUNS):
            names = list(systems)
            for name in names[run % len(names) :] + names[: run % len(names)]:  # each is first once
                path, system = root / f"{name}{run}", systems[name]
                times.setdefault(("save", name), []).append(timed(lambda s=system, p=path: s.save(p, held))[0])
                for _ in range(LOADS):
                    evict(path)
                    seconds, sum_ = timed(lambda s=system, p=path: total(s.load(p, held)))
                    times.setdefault(("load", name), []).append(seconds)
                    assert name == "raw" or sum_ == right, f"{name} restored something else"
            settle(root)
        stall, copy = background(root, held)
    finally:
        shutil.rmtree(root)
    middle = {k: statistics.median(v) for k, v in times.items()}
    for action in ("save", "load"):
        for name in systems:
            seconds = middle[action, name]
            print(f"{action} {name}: {seconds * 1e3:.0f} ms, {size / seconds / 1e9:.2f} GB/s", flush=True)
    faster = min(("torch.save", "DCP"), key=lambda n: middle["save", n])
    print(f"  save: {ratio(times, 'save', faster):.2f}x the speed of {faster} (target 2)")
    print(f"  restore: {ratio(times, 'load', 'DCP'):.2f}x the speed of DCP (target 2)")
    print(
        f"  background: the step stalls {stall * 1e3:.0f} ms, a copy takes {copy * 1e3:.0f} ms: {stall / copy:.2f} (target 1.5)"
    )


def settle(root: Path) -> None:
    """Removes what was written, and waits until the disk has done so: the next run should not pay for it."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()
    time.sleep(3)


def ratio(times: dict[tuple[str, str], list[float]], action: str, peer: str) -> float:
    """Median of the ratios of neighbouring runs."""
    pairs = zip(times[action, peer], times[action, "funzero"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def background(root: Path, held: fz.TrainState) -> tuple[float, float]:
    """Seconds for which `save` keeps the caller, and for a copy of the state into new memory; medians."""
    stalls, copies = [], []
    for i in range(RUNS):
        copies.append(timed(lambda: [x.clone() for x in fz.tree.leaves(held)])[0])
        manager = fz.CheckpointManager(root / f"run{i}", keep=1)
        stalls.append(timed(lambda m=manager: m.save(held))[0])
        manager.wait()
        settle(root)
    return statistics.median(stalls), statistics.median(copies)


if __name__ == "__main__":
    compare()
