"""Precision policies on the demo's model: held-out loss, bytes of state and peak memory of a step.

`python -m tests.benchmarks.precision` runs the comparison (each run in a process of its own);
`python -m tests.benchmarks.precision POLICY RATE SEED STEPS` makes one run and prints a JSON line.
"""

import json
import statistics
import subprocess
import sys

import torch

import funzero as fz
from funzero.cli.corpus import heldout_rows, load_corpus
from funzero.cli.demo_worker import load_example
from tests.benchmarks.work import peak_rss_mb, reset_peak

RATES, SEEDS, STEPS = (2e-3, 4e-3, 8e-3), (0, 1, 2), 1000
SCALING = fz.loss_scale.dynamic(24, window=200)


def one(name: str, rate: float, seed: int, steps: int) -> dict[str, float]:
    """Trains once; loss in nats per byte on all held-out files, in float32 arithmetic where the policy is float32."""
    torch.set_num_threads(2)
    example, corpus, policy = load_example(), load_corpus(), getattr(fz.precision, name)
    torch.manual_seed(seed)
    model = example.GPT()
    params, _ = fz.split_module(model)
    model.to("meta")
    schedule = fz.schedules.warmup_cosine(rate, warmup=40, total=steps, end=rate / 20)
    tx = fz.adamw(schedule, b2=0.95, weight_decay=0.1, mask=lambda p: fz.tree.map(lambda x: x.dim() >= 2, p))
    before = resident_mb()
    scale = SCALING if policy.loss_scale else None
    state = fz.init_state(params, tx, key=seed, precision=policy, loss_scale=scale, donate=True)
    del params

    def loss_fn(p: dict, batch: dict) -> fz.Loss:
        return fz.Loss(*fz.losses.cross_entropy(fz.functional_call(model, p, batch["tokens"]), batch["labels"]))

    step = fz.make_step(loss_fn, tx, precision=policy, max_norm=1.0)
    kept = sum(x.untyped_storage().nbytes() for x in fz.tree.leaves((state.params, state.opt_state)))
    skips, growths, last, bad = 0, 0, 0.0, 0
    reset_peak()
    for at in range(steps):
        rows = fz_rows(corpus.train, example, seed, at)
        state, metrics = step(state, rows)
        scale_now = float(metrics.loss_scale)
        skips, growths, last = skips + int(metrics.skipped), growths + int(last and scale_now > last), scale_now
        bad += sum(int(not x.isfinite().all()) for x in fz.tree.leaves(state.params)) if at % 100 == 99 else 0
    peak = peak_rss_mb() - before
    loss = heldout_loss(fz.make_eval(loss_fn, precision=policy), state, corpus.heldout, example.CONTEXT)
    found = {"policy": name, "rate": rate, "seed": seed, "loss": loss, "state_bytes": kept, "peak_mb": peak}
    return found | {"skips": skips, "growths": growths, "bad_leaves": bad}


def fz_rows(text: object, example: object, seed: int, at: int) -> dict[str, torch.Tensor]:
    """The batch of a step."""
    from funzero.cli.corpus import sample_rows

    rows = sample_rows(text, example.ROWS, example.CONTEXT, seed, at)
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def heldout_loss(evaluate: object, state: fz.TrainState, heldout: object, context: int) -> float:
    """Nats per byte over all held-out bytes."""
    total = count = 0.0
    tokens, labels = heldout_rows(heldout, context)
    for t, y in zip(tokens.split(256), labels.split(256), strict=True):
        metrics = evaluate(state, {"tokens": t, "labels": y})
        total, count = total + float(metrics.loss) * float(metrics.weight), count + float(metrics.weight)
    return total / count


def resident_mb() -> float:
    """RSS of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) / 256


def spawn(name: str, rate: float, seed: int) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.precision", name, str(rate), str(seed), str(STEPS)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if out.returncode:
        raise RuntimeError(out.stderr[-2000:])
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    print(json.dumps(found), flush=True)
    return found


def compare() -> None:
    """float32 params (bf16_mixed) against bf16_pure, each at the best of three rates; then fp16_mixed from 2**24."""
    best = {}
    for name in ("float32", "bf16_mixed", "bf16_pure"):
        runs = {rate: [spawn(name, rate, seed) for seed in SEEDS] for rate in RATES}
        best[name] = min(runs.values(), key=lambda found: statistics.mean(r["loss"] for r in found))
    mean = {name: statistics.mean(r["loss"] for r in found) for name, found in best.items()}
    for name, found in best.items():
        print(
            f"{name}: held-out {mean[name]:.4f} nats at rate {found[0]['rate']}, {found[0]['state_bytes']:,} bytes of state"
        )
    mixed, pure = best["bf16_mixed"][0], best["bf16_pure"][0]
    peaks = [statistics.median(r["peak_mb"] for r in best[n]) for n in ("bf16_pure", "bf16_mixed")]
    print(f"bf16_pure / float32 held-out {mean['bf16_pure'] / mean['float32']:.4f} (target 1.01)")
    print(f"bytes of state / bf16_mixed {pure['state_bytes'] / mixed['state_bytes']:.4f} (target 0.51)")
    print(
        f"peak of a step / bf16_mixed {peaks[0] / peaks[1]:.3f} ({peaks[0]:.0f} and {peaks[1]:.0f} MB above the start)"
    )
    half = spawn("fp16_mixed", best["float32"][0]["rate"], 0)
    same = next(r for r in best["float32"] if r["seed"] == 0)
    print(
        f"fp16_mixed from 2**24: {half['skips']} skips, {half['growths']} growths, {half['bad_leaves']} bad leaves, "
        f"loss / float32 {half['loss'] / same['loss']:.4f} (target 1.02)"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
    else:
        compare()
