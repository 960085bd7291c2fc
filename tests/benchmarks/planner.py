"""The planner against reality: the growth of a process's peak memory during steps, beside what `fz.plan` says of it.

Each run is in processes of its own, whose malloc gives memory from 128 KiB on back at once. That is glibc's own starting
value, but by default it grows to 32 MiB as memory is freed, and from then on much of what is freed stays with the process:
what it does to the growth is printed as well, and nothing holds it to the plan. A rank of a run is
`python -m tests.benchmarks.planner LAYOUT FOLDER`; it prints a JSON line.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import funzero as fz
from tests.benchmarks.work import GPT, MEDIUM, peak_rss_mb, reset_peak

RUNS, STEPS = 3, 4
RELATIVE, ABSOLUTE_MB = 0.05, 32
CONTEXT = 128
MB = 2**20


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to train the model. rows: of a rank's batch. budget: MB."""

    ranks: int = 1
    stage: int = 0
    rows: int = 8
    accumulate: int = 1
    memory: str = "device"
    remat: bool = False
    budget: int | None = None


LAYOUTS = {
    "one": Layout(),
    "one-disk": Layout(accumulate=2, memory="disk", rows=16),
    "zero1": Layout(2, 1),
    "zero2-accumulate": Layout(2, 2, accumulate=2, rows=16),
    "zero3-budget": Layout(2, 3, budget=64),
    "zero3-remat-disk": Layout(2, 3, remat=True, memory="disk", accumulate=2, rows=16),
}


def work(layout: Layout, mesh: fz.Mesh, folder: str) -> tuple[Any, ...]:
    """Model on meta, whole params, optimizer, specs, loss, batch and the options of a step."""
    torch.manual_seed(0)
    model = GPT(**MEDIUM)
    params, _ = fz.split_module(model)
    params = {n: p.clone() for n, p in params.items()}
    model.to("meta")
    tx = fz.adamw(1e-4, weight_decay=1e-2)
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=layout.stage)
    if layout.memory != "device":
        specs = fz.with_memory(specs, {"opt_state/**": layout.memory}, folder=folder)
    batch = tuple(torch.randint(0, MEDIUM["vocab"], (layout.rows, CONTEXT)) for _ in range(2))
    budget = None if layout.budget is None else layout.budget * MB
    remat = {"blocks.*": "nothing"} if layout.remat else None
    options = {"accumulate": layout.accumulate, "remat": remat, "gather_budget": budget}
    return params, tx, specs, lambda p, b: fz.functional_call(model, p, *b), batch, options


def rss_mb() -> float:
    """VmRSS of this process."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmRSS"))


def one(name: str, folder: str) -> None:
    """Trains for a few steps; rank 0 prints what it planned and what it saw, in MB."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    layout, mesh = LAYOUTS[name], fz.make_mesh(dp=-1)
    params, tx, specs, loss_fn, batch, options = work(layout, mesh, folder)
    made = fz.plan(loss_fn, fz.abstract_state(params, tx, specs=specs), batch, tx=tx, **options)
    state = fz.init_state(params, tx, specs=specs)
    held = {m: sum(x.nbytes for x, y in _leaves(state) if y == m) for m in ("device", "host", "disk")}
    step = fz.make_step(loss_fn, tx, specs=specs, max_norm=1.0, **options)
    del params
    reset_peak()
    before = rss_mb()
    for _ in range(STEPS):
        state, metrics = step(state, batch)
    grown = peak_rss_mb() - before
    if mesh.rank == 0:
        planned = made.step.together / MB
        exact = all(held[m] == made.ranks[m][0] for m in held)
        print(json.dumps({"planned": planned, "grown": grown, "exact": exact, "loss": float(metrics.loss)}), flush=True)


def _leaves(state: fz.TrainState) -> list[tuple[torch.Tensor, str]]:
    """All leaves of a state, and where each lives."""
    assert state.specs is not None
    rows = [(x, "device") for x in (state.step, state.skips, state.key)]
    for field in ("params", "opt_state", "buffers"):
        layouts = getattr(state.specs, field).layouts
        rows += [(x, y.spec.memory) for x, y in zip(fz.tree.leaves(getattr(state, field)), layouts, strict=True)]
    return rows


def run(name: str, steady_malloc: bool = True) -> dict[str, float]:
    """One run in fresh processes. steady_malloc: see above."""
    ranks = LAYOUTS[name].ranks
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        command = [sys.executable, *launch, "-m", "tests.benchmarks.planner", name, folder]
        env = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)} if steady_malloc else {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    line = next((x for x in done.stdout.splitlines() if x.startswith("{")), None)
    if line is None:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(line)
    return found


def compare(runs: int = RUNS) -> bool:
    """Prints a table; True if all is as it should be."""
    good = True
    for name in LAYOUTS:
        rows = [run(name) for _ in range(runs)]
        grown, planned = statistics.median(r["grown"] for r in rows), rows[0]["planned"]
        allowed = RELATIVE * grown + ABSOLUTE_MB
        exact = all(r["exact"] for r in rows)
        fine = abs(grown - planned) <= allowed and exact
        good = good and fine
        seen = ", ".join(f"{r['grown']:.0f}" for r in rows)
        print(
            f"{name:18} planned {planned:6.1f} MB, grown {grown:6.1f} MB ({seen}), off by {planned - grown:+6.1f} "
            f"(allowed {allowed:.1f}); state {'exact' if exact else 'NOT EXACT'}: {'good' if fine else 'NOT GOOD'}; "
            f"with malloc's default {run(name, steady_malloc=False)['grown']:.0f} MB",
            flush=True,
        )
    return good


if __name__ == "__main__":
    one(sys.argv[1], str(Path(sys.argv[2])))
