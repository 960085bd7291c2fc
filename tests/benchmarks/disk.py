"""Leaves on disk: bytes a second beside fio and DeepSpeed's aio, and what the disk costs an update.

fio must be installed. DeepSpeed's part runs where DEEPSPEED_PYTHON names a Python that has it (and libaio).
"""

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import funzero as fz
from funzero.core.direct import aligned_empty
from funzero.executor.disk import DiskStore

RUNS = 5
BYTES = 512 << 20
AIO = {"deepspeed": (8, 1), "deepspeed tuned": (32, 4)}  # depth and threads: its defaults, and the best found here
LEAVES = {f"w{i}": (1 << 23,) for i in range(8)}
JOBS = [("psync", bs, 1) for bs in ("1m", "8m")] + [("io_uring", bs, d) for bs in ("1m", "8m") for d in (1, 8, 32)]
DEEPSPEED = """
import sys, time, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, n, depth, threads = sys.argv[1], *map(int, sys.argv[2:])
handle = AsyncIOBuilder().load().aio_handle(1 << 20, depth, False, True, threads)
x = handle.new_cpu_locked_tensor(n, torch.empty(0, dtype=torch.uint8))
handle.sync_pwrite(x, path, 0)
for move in (handle.sync_pwrite, handle.sync_pread):
    begin = time.perf_counter()
    move(x, path, 0)
    print(n / (time.perf_counter() - begin))
"""


def fio(path: Path, engine: str, block: str, depth: int) -> tuple[float, float]:
    """Bytes a second of one job: (written, read)."""
    found = []
    for way in ("write", "read"):
        command = ["fio", "--name=job", f"--filename={path}", f"--size={BYTES}", f"--rw={way}", f"--bs={block}"]
        command += ["--direct=1", f"--ioengine={engine}", f"--iodepth={depth}", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]["bw_bytes"])
    return found[0], found[1]


def deepspeed(path: Path, depth: int, threads: int) -> tuple[float, float] | None:
    """The same of DeepSpeed's aio; None where it cannot run."""
    python = os.environ.get("DEEPSPEED_PYTHON")
    if not python:
        return None
    path.write_bytes(b"")
    os.truncate(path, BYTES)
    command = [python, "-c", DEEPSPEED, *map(str, (path, BYTES, depth, threads))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.replace(".", "").isdigit()]
    if len(lines) != 2:
        print(f"DeepSpeed's aio does not run here: {done.stderr.strip().splitlines()[-1:]}")
        return None
    return float(lines[0]), float(lines[1])


def own(folder: Path) -> tuple[float, float]:
    """The same of a slot, after it has been written once."""
    store, data = DiskStore(folder), aligned_empty(BYTES).fill_(3)
    slot = store.slot(BYTES)

    def speed(move: Callable[[], object]) -> float:
        begin = time.perf_counter()
        move()
        return BYTES / (time.perf_counter() - begin)

    store.start_write(slot, data).wait()
    return (
        speed(lambda: store.start_write(slot, data).wait()),
        speed(lambda: store.start_read(slot, data).wait()),
    )


class Update:
    """An update of 67M elements by AdamW with opt_state in a memory."""

    def __init__(self, memory: str, folder: Path):
        tx, mesh = fz.adamw(1e-3), fz.make_mesh()
        params = {n: torch.ones(s) for n, s in LEAVES.items()}
        specs = fz.with_memory(fz.zero_specs(params, tx, mesh, stage=0), {"opt_state/**": memory}, folder=folder)
        self.state = fz.init_state(params, tx, specs=specs, donate=True)
        self.step = fz.make_step(lambda p, b: sum(x.sum() for x in p.values()) * b["c"], tx, specs=specs, max_norm=1.0)
        self.bytes = 2 * 4 * sum(x.numel() for x in params.values())  # read, and as many written

    def __call__(self) -> float:
        """Seconds of one update."""
        self.state = self.step.accumulate(self.state, {"c": torch.tensor(1.0)})
        begin = time.perf_counter()
        self.state, _ = self.step.update(self.state)
        return time.perf_counter() - begin


def compare() -> None:
    """Prints all of it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        update, in_memory = Update("disk", folder), Update("device", folder)
        rows: dict[str, list[tuple[float, float]]] = {}
        times: list[tuple[float, float]] = []
        update(), in_memory()
        for _ in range(RUNS):
            for job in JOBS:
                rows.setdefault(" ".join(map(str, job)), []).append(fio(folder / "fio", *job))
            rows.setdefault("funzero", []).append(own(folder))
            for name, how in AIO.items():
                if (found := deepspeed(folder / "aio", *how)) is not None:
                    rows.setdefault(name, []).append(found)
            times.append((update(), in_memory()))
        middle = {n: tuple(statistics.median(x[i] for x in r) for i in (0, 1)) for n, r in rows.items()}
        best = [max(middle[" ".join(map(str, job))][i] for job in JOBS) for i in (0, 1)]
        for name, (write, read) in middle.items():
            print(f"{name:16} write {write / 1e9:.2f} GB/s, read {read / 1e9:.2f} GB/s")
        own_speed = middle["funzero"]
        print(
            f"  of the best fio job: write {own_speed[0] / best[0]:.2f}, read {own_speed[1] / best[1]:.2f} (target 0.85)"
        )
        for name in AIO.keys() & middle.keys():
            ratios = [a / b for a, b in zip(own_speed, middle[name], strict=True)]
            print(f"  of {name}'s aio: write {ratios[0]:.2f}, read {ratios[1]:.2f} (target 1.5)")
        took, here = (statistics.median(x[i] for x in times) for i in (0, 1))
        needed = update.bytes / best[0] + update.bytes / best[1]
        print(
            f"update, opt_state on disk: {took * 1e3:.0f} ms; its bytes need {needed * 1e3:.0f} ms: {took / needed:.2f} "
            f"(target 1.15); in memory {here * 1e3:.0f} ms"
        )
