"""`make bench`: funzero and its peers in turn, medians of 5 alternating runs, ratios. `python -m tests.benchmarks [NAME ...]`."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from tests.benchmarks import checkpoint, disk, kernels, planner, precision, vjp

LIMIT_S, LEAVE_S = 300, 10
# name: (ranks, task, peer, [(system, largest time ratio, largest memory ratio)])
COMPARISONS = {
    "small": (1, "small", "torch", [("fz0", 1.05, None)]),
    "tiny": (1, "tiny", "torch", [("fz0", 1.3, None), ("fz3", 1.3, None)]),
    "tiny-fsdp2": (2, "tiny", "fsdp2", [("fz3", 1.0, None)]),
    "medium-fsdp2": (2, "medium", "fsdp2", [("fz3:40", 1.0, 0.75), ("fz3", 0.9, None)]),
    "medium-ddp": (2, "medium", "ddp", [("fz1", 1.05, None), ("fz2", 1.05, None)]),
}
OTHERS = {
    module.__name__.rsplit(".", 1)[1]: module.compare for module in (precision, checkpoint, kernels, disk, planner, vjp)
}


def run(system: str, task: str, ranks: int) -> dict[str, float]:
    """One run in processes of its own: what it prints as JSON. A peer that aborts or hangs while it leaves has told it."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "tests.benchmarks.one", system, task]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        limit = threading.Timer(LIMIT_S, kill, (process.pid,))
        limit.start()
        try:
            line = next((x for x in process.stdout or () if x.startswith("{")), None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
        finally:
            limit.cancel()
            kill(process.pid)
            process.wait()
        errors.seek(0)
        if line is None:
            raise RuntimeError(f"{system} on {task}: {errors.read()[-2000:]}")
    found: dict[str, float] = json.loads(line)
    return found


def kill(pid: int) -> None:
    """Kills a process and those that it has started, which would outlive it."""
    with contextlib.suppress(OSError):
        started = [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for each in (*started, pid):
            os.kill(each, signal.SIGKILL)


def compare(name: str, repeats: int = 5) -> Iterable[str]:
    """Lines of one comparison."""
    ranks, task, peer, systems = COMPARISONS[name]
    rows: dict[str, list[dict[str, float]]] = {s: [] for s in (peer, *(s for s, _, _ in systems))}
    for _ in range(repeats):
        for system in rows:
            rows[system].append(run(system, task, ranks))
    middle = {
        s: {k: statistics.median(r[k] for r in found) for k in ("step_s", "peak_mb", "loss")}
        for s, found in rows.items()
    }
    base = middle[peer]
    yield f"{name}: {peer} step {base['step_s'] * 1e3:.2f} ms, peak {base['peak_mb']:.0f} MB, loss {base['loss']:.6f}"
    for system, most, most_memory in systems:
        here = middle[system]
        ratio = statistics.median(a["step_s"] / b["step_s"] for a, b in zip(rows[system], rows[peer], strict=True))
        memory = here["peak_mb"] / base["peak_mb"]
        limit = f" (target {most_memory})" if most_memory else ""
        yield (
            f"  {system}: step {here['step_s'] * 1e3:.2f} ms, ratio {ratio:.3f} (target {most}); peak {here['peak_mb']:.0f} MB, "
            f"ratio {memory:.3f}{limit}; loss differs by {abs(here['loss'] - base['loss']):.1e}"
        )


if __name__ == "__main__":
    for wanted in sys.argv[1:] or [*COMPARISONS, *OTHERS]:
        if wanted in OTHERS:
            OTHERS[wanted]()
            continue
        for line in compare(wanted):
            print(line, flush=True)
