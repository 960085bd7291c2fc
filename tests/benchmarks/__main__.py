"""`make bench`: funzero and its peers in turn, medians of 5 alternating runs, ratios. `python -m tests.benchmarks [NAME ...]`."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable

from tests.benchmarks import checkpoint, kernels, precision

# name: (ranks, task, peer, [(system, largest time ratio, largest memory ratio)])
COMPARISONS = {
    "small": (1, "small", "torch", [("fz0", 1.05, None)]),
    "tiny": (1, "tiny", "torch", [("fz0", 1.3, None), ("fz3", 1.3, None)]),
    "tiny-fsdp2": (2, "tiny", "fsdp2", [("fz3", 1.0, None)]),
    "medium-fsdp2": (2, "medium", "fsdp2", [("fz3:40", 1.0, 0.75), ("fz3", 0.9, None)]),
    "medium-ddp": (2, "medium", "ddp", [("fz1", 1.05, None), ("fz2", 1.05, None)]),
}


def run(system: str, task: str, ranks: int) -> dict[str, float]:
    """One run in processes of its own."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    out = subprocess.run(
        [sys.executable, *launch, "-m", "tests.benchmarks.one", system, task],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [x for x in out.stdout.splitlines() if x.startswith("{")]
    if not lines:  # a peer that aborts while it leaves has still told its figures
        raise RuntimeError(f"{system} on {task}: {out.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


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
    for wanted in sys.argv[1:] or [*COMPARISONS, "precision", "checkpoint", "kernels"]:
        if wanted == "precision":
            precision.compare()
            continue
        if wanted == "checkpoint":
            checkpoint.compare()
            continue
        if wanted == "kernels":
            kernels.compare()
            continue
        for line in compare(wanted):
            print(line, flush=True)
