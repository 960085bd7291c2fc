"""Precision policies on the demo's model: held-out loss, bytes of state and peak memory of a step.

`python -m tests.benchmarks.precision` runs the comparison (each run in a process of its own);
`python -m tests.benchmarks.precision POLICY RATE SEED STEPS` makes one run and prints a JSON line.
"""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

import funzero as fz
from funzero.cli.corpus import heldout_rows, load_corpus, sample_rows
from funzero.cli.demo_worker import load_example
from tests.benchmarks.work import peak_rss_mb, reset_peak

RATES, SEEDS, STEPS, HALF_STEPS = (2e-3, 4e-3, 8e-3), (0, 1, 2), 1000, 300
SCALING = fz.loss_scale.dynamic(24, window=100)


def one(name: str, rate: float, seed: int, steps: int) -> dict[str, float]:
    """Trains once; loss in nats per byte on all held-out files, in float32 arithmetic where the policy is float32."""
    torch.set_num_threads(1)
    example, corpus, policy = load_example(), load_corpus(), getattr(fz.precision, name)
    torch.manual_seed(seed)
    model = example.GPT()
    params, _ = fz.split_module(model)
    model.to("meta")
    schedule = fz.schedules.warmup_cosine(rate, warmup=min(40, steps // 4), total=steps, end=rate / 20)
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
        rows = batch_at(corpus.train, example, seed, at)
        state, metrics = step(state, rows)
        scale_now = float(metrics.loss_scale)
        skips, growths, last = skips + int(metrics.skipped), growths + int(last and scale_now > last), scale_now
        bad += sum(int(not x.isfinite().all()) for x in fz.tree.leaves(state.params)) if at % 100 == 99 else 0
    peak = peak_rss_mb() - before
    loss = heldout_loss(fz.make_eval(loss_fn, precision=policy), state, corpus.heldout, example.CONTEXT)
    found = {"policy": name, "rate": rate, "seed": seed, "loss": loss, "state_bytes": kept, "peak_mb": peak}
    return found | {"skips": skips, "growths": growths, "bad_leaves": bad}


def batch_at(text: object, example: object, seed: int, at: int) -> dict[str, torch.Tensor]:
    """The batch of a step."""
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


def spawn(name: str, rate: float, seed: int, steps: int = STEPS) -> dict[str, float]:
    """One run in a process of its own, on one thread."""
    command = [sys.executable, "-m", "tests.benchmarks.precision", name, str(rate), str(seed), str(steps)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    if out.returncode:
        raise RuntimeError(out.stderr[-2000:])
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    print(json.dumps(found), flush=True)
    return found


def compare() -> None:
    """bf16_pure against float32, each at the best of three rates; bytes against bf16_mixed; fp16_mixed from 2**24."""
    jobs = [(n, rate, seed) for n in ("float32", "bf16_pure") for rate in RATES for seed in SEEDS]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda job: spawn(*job), jobs))
    best = {}
    for name in ("float32", "bf16_pure"):
        by_rate = [[r for r in runs if r["policy"] == name and r["rate"] == rate] for rate in RATES]
        best[name] = min(by_rate, key=lambda found: statistics.mean(r["loss"] for r in found))
    mean = {name: statistics.mean(r["loss"] for r in found) for name, found in best.items()}
    for name, found in best.items():
        print(f"{name}: held-out {mean[name]:.4f} nats a byte over {len(SEEDS)} seeds at rate {found[0]['rate']}")
    rate = best["float32"][0]["rate"]
    mixed, pure = (spawn(name, rate, 0, 20) for name in ("bf16_mixed", "bf16_pure"))
    half, same = (spawn(name, rate, 0, HALF_STEPS) for name in ("fp16_mixed", "float32"))
    print(f"bf16_pure: held-out / float32 {mean['bf16_pure'] / mean['float32']:.4f} (target 1.01)")
    print(f"  bytes of state / bf16_mixed {pure['state_bytes'] / mixed['state_bytes']:.4f} (target 0.51)")
    print(
        f"  peak of a step / bf16_mixed {pure['peak_mb'] / mixed['peak_mb']:.3f} ({pure['peak_mb']:.0f} MB above the start)"
    )
    print(
        f"fp16_mixed from 2**24, {HALF_STEPS} steps: {half['skips']} skips, {half['growths']} growths, "
        f"{half['bad_leaves']} bad leaves; held-out / float32 {half['loss'] / same['loss']:.4f} (target 1.02)"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(one(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
    else:
        compare()
