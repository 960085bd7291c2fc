"""The planner against reality: the growth of a process's peak memory during steps, beside what `fz.plan` says of it.

Each run is in processes of its own. Where some leaves live elsewhere, malloc is as the library sets it. Where all are on the
device, it is told to give memory from 128 KiB on back at once. That is glibc's own starting value, but by default it grows
to 32 MiB as memory is freed, and from then on much of what is freed stays with the process: what that does to the growth is
printed as well, and nothing holds it to the plan. Two layouts run under RLIMIT_DATA, which their state exceeds by the
factor `limit`, counted above a process that has trained a tiny model. A rank of a run is
`python -m tests.benchmarks.planner LAYOUT FOLDER`; it prints a JSON line.
"""

import dataclasses
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import funzero as fz
from funzero.executor.stores import DISK
from tests.benchmarks.work import GPT, MEDIUM, peak_rss_mb, reset_peak

RUNS, STEPS = 3, 4
RELATIVE, ABSOLUTE_MB = 0.05, 32
CONTEXT = 128
MB = 2**20


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to train the model. rows: of a rank's batch. memory: by field. budget: MB. limit: state over memory."""

    ranks: int = 1
    stage: int = 0
    rows: int = 8
    accumulate: int = 1
    memory: tuple[tuple[str, str], ...] = ()
    remat: bool = False
    budget: int | None = None
    limit: float | None = None


ALL = ("params", "accum", "opt_state")
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
LAYOUTS = {
    "one": Layout(),
    "one-opt-host": Layout(accumulate=2, rows=16, memory=(("opt_state", "host"),)),
    "zero1-all-host": Layout(2, 1, accumulate=2, rows=16, memory=tuple((x, "host") for x in ALL)),
    "zero2-accumulate": Layout(2, 2, accumulate=2, rows=16),
    "zero3-budget": Layout(2, 3, budget=64),
    "zero3-all-disk": Layout(2, 3, accumulate=2, rows=16, memory=tuple((x, "disk") for x in ALL), budget=64),
    "limit-3-all-disk": Layout(1, 3, rows=1, memory=tuple((x, "disk") for x in ALL), budget=32, limit=3),
    "limit-1.3-opt-disk": Layout(1, 0, rows=1, memory=(("opt_state", "disk"),), limit=1.3),
}
TINY = {**MEDIUM, "vocab": 64, "width": 32, "heads": 2, "layers": 1}


def work(layout: Layout, shape: dict[str, int], mesh: fz.Mesh, folder: str) -> tuple[Any, ...]:
    """Init thunks, optimizer, specs, loss, batch and the options of a step."""
    with torch.device("meta"):
        model = GPT(**shape)
    thunks = {n: functools.partial(_drawn, tuple(p.shape)) for n, p in fz.split_module(model)[0].items()}
    tx = fz.adamw(1e-4, weight_decay=1e-2)
    specs = fz.zero_specs(fz.eval_shape(thunks), tx, mesh, stage=layout.stage)
    if layout.memory:
        specs = fz.with_memory(specs, {f"{field}/**": kind for field, kind in layout.memory}, folder=folder)
    torch.manual_seed(0)
    batch = tuple(torch.randint(0, shape["vocab"], (layout.rows, CONTEXT)) for _ in range(2))
    budget = None if layout.budget is None else layout.budget * MB
    remat = {"blocks.*": "nothing"} if layout.remat else None
    options = {"accumulate": layout.accumulate, "remat": remat, "gather_budget": budget}
    return thunks, tx, specs, lambda p, b: fz.functional_call(model, p, *b), batch, options


def _drawn(shape: tuple[int, ...], key: torch.Tensor) -> torch.Tensor:
    return fz.random.normal(key, shape) * 0.02


def tighten(layout: Layout, mesh: fz.Mesh, folder: str) -> None:
    """Sets the limit, if the layout has one."""
    if layout.limit is None:
        return
    threading.stack_size(1 << 20)  # RLIMIT_DATA counts what stacks reserve, 8 MB each if nothing is said
    thunks, tx, specs, loss_fn, batch, options = work(Layout(), TINY, mesh, folder)
    fz.make_step(loss_fn, tx, specs=specs, **options)(fz.init_state(thunks, tx, specs=specs), batch)
    specs = work(layout, MEDIUM, mesh, folder)[2]
    state = sum(x.local_bytes for x in specs.fields.values())
    most = round(status_mb("VmData") * MB + state / layout.limit)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def status_mb(name: str) -> float:
    """A line of this process's status, such as "VmRSS"."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(name))


def one(name: str, folder: str) -> None:
    """Trains for a few steps; rank 0 prints what it planned and what it saw, in MB."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    layout, mesh = LAYOUTS[name], fz.make_mesh(dp=-1)
    tighten(layout, mesh, folder)
    thunks, tx, specs, loss_fn, batch, options = work(layout, MEDIUM, mesh, folder)
    made = fz.plan(loss_fn, fz.abstract_state(thunks, tx, specs=specs), batch, tx=tx, **options)
    state = fz.init_state(thunks, tx, specs=specs)
    held = {m: sum(x.nbytes for x, y in _leaves(state) if y == m) for m in ("device", "host", "disk")}
    step = fz.make_step(loss_fn, tx, specs=specs, max_norm=1.0, **options)
    store = DISK.in_folder(folder)
    reset_peak()
    before, start = status_mb("VmRSS"), (0, 0)
    for i in range(STEPS):
        state, metrics = step(state, batch)
        if i == 0:  # which recorded
            start = store.bytes_read, store.bytes_written
    grown = peak_rss_mb() - before
    if mesh.rank == 0:
        planned = made.step.together / MB
        moved = store.bytes_read - start[0], store.bytes_written - start[1]
        exact = moved == ((STEPS - 1) * made.step.read, (STEPS - 1) * made.step.written)
        exact = exact and all(held[m] == made.ranks[m][0] for m in held)
        print(json.dumps({"planned": planned, "grown": grown, "exact": exact, "loss": float(metrics.loss)}), flush=True)


def _leaves(state: fz.TrainState) -> list[tuple[torch.Tensor, str]]:
    """All leaves of a state, and where each lives."""
    assert state.specs is not None
    rows = [(x, "device") for x in (state.step, state.skips, state.key)]
    for field in ("params", "opt_state", "buffers"):
        layouts = getattr(state.specs, field).layouts
        rows += [(x, y.spec.memory) for x, y in zip(fz.tree.leaves(getattr(state, field)), layouts, strict=True)]
    return rows


def run(name: str, steady_malloc: bool = False) -> dict[str, Any]:
    """One run in fresh processes. steady_malloc: see above."""
    ranks = LAYOUTS[name].ranks
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    env = {k: v for k, v in os.environ.items() if k != THRESHOLD}
    if steady_malloc:
        env[THRESHOLD] = str(128 * 1024)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        command = [sys.executable, *launch, "-m", "tests.benchmarks.planner", name, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    line = next((x for x in done.stdout.splitlines() if x.startswith("{")), None)
    if line is None:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def compare(runs: int = RUNS) -> bool:
    """Prints a table; True if all is as it should be."""
    good = True
    for name, layout in LAYOUTS.items():
        steady = not layout.memory
        rows = [run(name, steady) for _ in range(runs)]
        grown, planned = statistics.median(r["grown"] for r in rows), rows[0]["planned"]
        allowed = RELATIVE * grown + ABSOLUTE_MB
        exact = all(r["exact"] for r in rows)
        fine = abs(grown - planned) <= allowed and exact
        good = good and fine
        seen = ", ".join(f"{r['grown']:.0f}" for r in rows)
        malloc = (
            f"{THRESHOLD}=128 KiB; with malloc's default {run(name)['grown']:.0f} MB" if steady else "its own malloc"
        )
        print(
            f"{name:18} planned {planned:6.1f} MB, grown {grown:6.1f} MB ({seen}), off by {planned - grown:+6.1f} "
            f"(allowed {allowed:.1f}); state and disk {'exact' if exact else 'NOT EXACT'}: "
            f"{'good' if fine else 'NOT GOOD'}; {malloc}",
            flush=True,
        )
    return good


if __name__ == "__main__":
    one(sys.argv[1], str(Path(sys.argv[2])))
