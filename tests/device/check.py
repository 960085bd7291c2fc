"""Checks for a machine with an accelerator: `python -m tests.device.check` (one process, a few minutes).

What a CPU cannot show: the same numbers on the device, keyed draws and kernels with the same bits, a skipped step without a
wait for the host, and the times of a step and of an update beside torch's. Prints one line a check, and ends with 1 if one
failed. Without an accelerator it runs the same checks on the CPU and says so, which shows only that the script works.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funzero as fz

GPU = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if GPU else torch.device("cpu")
CHECKS: list[Callable[[], str]] = []


def check(fn: Callable[[], str]) -> Callable[[], str]:
    """Adds a check: it asserts, and returns what to print."""
    CHECKS.append(fn)
    return fn


def model_of(width: int, layers: int) -> nn.Module:
    """A small MLP, equal every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())))


def trained(device: torch.device, policy: Any, steps: int = 5) -> tuple[dict[str, torch.Tensor], fz.Metrics]:
    """Params (on the CPU) after some steps on a device."""
    model = model_of(64, 2)
    mesh, (params, _) = fz.make_mesh(dp=-1), fz.split_module(model)
    if device.type == "cpu":
        mesh = None
    tx = fz.adamw(1e-2, weight_decay=0.1)
    specs = None if mesh is None else fz.zero_specs(params, tx, mesh, stage=0, precision=policy)
    scale = fz.loss_scale.dynamic(8) if policy.loss_scale else None
    state = fz.init_state(params, tx, specs=specs, precision=policy, loss_scale=scale, key=3)
    step = fz.make_step(
        lambda p, b: fz.functional_call(model, p, b).float().square().mean(), tx, precision=policy, max_norm=1.0
    )
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(state.step.device)
    metrics = None
    for _ in range(steps):
        state, metrics = step(state, x)
    assert metrics is not None
    return {k: v.float().cpu() for k, v in state.params.items()}, metrics


@check
def policies() -> str:
    """Every preset trains on the device; float32 agrees with the CPU."""
    worst = {}
    for name in ("float32", "bf16_mixed", "bf16_master", "bf16_pure", "fp16_mixed"):
        policy = getattr(fz.precision, name)
        found, metrics = trained(DEVICE, policy)
        assert not metrics.skipped and torch.isfinite(metrics.grad_norm), name
        want, _ = trained(torch.device("cpu"), policy)
        worst[name] = max(float((found[k] - want[k]).abs().max() / want[k].abs().max()) for k in want)
    assert worst["float32"] < 1e-4, worst
    return " ".join(f"{k} {v:.1e}" for k, v in worst.items())


@check
def draws() -> str:
    """Bits, uniforms and dropout masks are those of the CPU."""
    key = fz.random.key(5)
    for draw in (fz.random.bits, fz.random.uniform):
        assert torch.equal(draw(key, (1000,), device=DEVICE).cpu(), draw(key, (1000,)))
    x = torch.ones(1 << 20)
    assert torch.equal(fz.random.dropout(x.to(DEVICE), 0.3, key).cpu(), fz.random.dropout(x, 0.3, key))
    return "equal"


@check
def skipped() -> str:
    """An overflow on the device leaves the state bit for bit."""
    state = fz.init_state({"w": torch.ones(100)}, fz.adamw(0.1), loss_scale=fz.loss_scale.dynamic(4))
    step = fz.make_step(lambda p, b: (p["w"] * b).sum(), fz.adamw(0.1), donate=False)
    bad, metrics = step(state, torch.full((1,), float("inf"), device=state.step.device))
    assert metrics.skipped and float(bad.loss_scale.scale) == 8.0
    assert all(torch.equal(a, b) for a, b in zip(*map(fz.tree.leaves, (state.opt_state, bad.opt_state)), strict=True))
    return "state unchanged, scale halved"


@check
def offload() -> str:
    """State in host memory or on disk trains the same bits as on the device: by a kernel, in portions, and accumulating."""
    model = nn.Sequential(nn.Linear(700, 900), nn.GELU(), nn.Linear(900, 700))  # several parts a leaf
    params, _ = fz.split_module(model)
    mesh, cases = fz.make_mesh(dp=-1), 0
    x = torch.randn(8, 700, generator=torch.Generator().manual_seed(1)).to(mesh.device)
    for tx, accumulate in itertools.product((fz.adamw(1e-2, weight_decay=0.1), fz.lamb(1e-2)), (1, 2)):
        step = fz.make_step(
            lambda p, b: fz.functional_call(model, p, b).square().mean(), tx, accumulate=accumulate, max_norm=0.1
        )
        found = []
        for kind in ("device", "host", "disk"):
            specs = fz.zero_specs(params, tx, mesh, stage=0)
            if kind != "device":
                specs = fz.with_memory(specs, dict.fromkeys(("params/**", "opt_state/**", "accum/**"), kind))
            state = fz.init_state(params, tx, specs=specs)
            for _ in range(3):
                state, _ = step(state, x)
            found.append([t.detach().cpu() for t in fz.tree.leaves((state.params, state.opt_state))])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), (tx, accumulate)
            cases += 1
    return f"{cases} cases equal"


def seconds(step: Callable[[], Any], runs: int = 30) -> float:
    """Median seconds, each up to the end of the device's work."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        step()
        if GPU:
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[runs // 3 :])


@check
def speed() -> str:
    """A step beside the same loop in plain torch."""
    width, layers = (2048, 8) if GPU else (256, 4)
    model, x = model_of(width, layers).to(DEVICE), torch.randn(256, width, device=DEVICE)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def plain() -> None:
        opt.zero_grad()
        F.mse_loss(model(x), x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    params, _ = fz.split_module(model)
    tx = fz.adamw(1e-4, weight_decay=0.01)
    mesh = fz.make_mesh(dp=-1)
    state = fz.init_state(params, tx, specs=fz.zero_specs(params, tx, mesh, stage=0))
    step = fz.make_step(lambda p, b: F.mse_loss(fz.functional_call(model, p, b), b), tx, max_norm=1.0)

    def own() -> None:
        nonlocal state
        state, _ = step(state, x)

    ratios = [seconds(own) / seconds(plain) for _ in range(5)]
    return f"ratio to a torch loop {statistics.median(ratios):.3f} (of {min(ratios):.3f} to {max(ratios):.3f})"


def has_triton() -> bool:
    """Whether the Triton backend can run here."""
    return DEVICE.type == "cuda" and find_spec("triton") is not None


@check
def kernel_bits() -> str:
    """The Triton backend writes the reference's bits, for each rule, dtype, rounding and form of moments."""
    if not has_triton():
        return "left out: needs CUDA or ROCm, and triton"
    from kernels import reference, triton
    from tests.kernels.triton_leaves import BF16, F32, RULES, copied, differing, kinds, leaf_of, written

    cases = 0
    every = itertools.islice(kinds([F32, BF16, 256, (100, F32)]), 0, None, 5)
    for cases, kind in enumerate(every, 1):
        want = leaf_of(kind, 20000 + cases % 3, special=cases % 2 == 0)
        found, rule = copied(want, DEVICE), RULES[kind.rule]
        reference.update([want], rule)
        triton.update([found], rule, skip=torch.tensor(True, device=DEVICE))
        triton.update([found], rule)
        wrong = {name: differing(x.cpu(), written(want)[name]) for name, x in written(found).items()}
        assert not any(wrong.values()), f"{kind}: {wrong}"
    x = torch.randn(1_000_000, device=DEVICE)
    sums, moved = triton.square_sum(x, 70_000), torch.cat([x[:1], x[:140_001]])[1:]
    assert torch.allclose(sums.cpu(), reference.square_sum(x.cpu(), 70_000), rtol=1e-13, atol=0), "square_sum"
    assert torch.equal(sums[:2], triton.square_sum(moved, 70_000)[:2]), "square_sum of other alignment"
    return f"equal in {cases} forms"


@check
def kernel_speed() -> str:
    """AdamW in float32 beside torch's fused one: one large leaf, and many small ones."""
    if not has_triton():
        return "left out: needs CUDA or ROCm, and triton"
    from kernels import triton
    from kernels.reference import Adam, Leaf, Moment

    found = []
    for leaves, n in ((1, 1 << 26), (200, 1 << 14)):
        p, g, m, v = ([torch.rand(n, device=DEVICE) for _ in range(leaves)] for _ in range(4))
        counts = [torch.ones((), device=DEVICE) for _ in range(leaves)]
        hyper = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        flags = {"amsgrad": False, "maximize": False}
        own = [Leaf(a, b, (Moment(c), Moment(d)), weight_decay=0.01) for a, b, c, d in zip(p, g, m, v, strict=True)]
        ours = seconds(lambda own=own: triton.update(own, Adam(1e-4, 0.9, 0.999, 1e-8)))
        args = (p, g, m, v, [], counts)
        torchs = seconds(lambda args=args, more=hyper | flags: torch._fused_adamw_(*args, **more))
        rate = 28 * n * leaves / ours / 1e9
        found.append(f"{leaves} x {n}: {ours * 1e6:.0f} us ({rate:.0f} GB/s), ratio to torch {ours / torchs:.3f}")
    return "; ".join(found)


def main() -> int:
    """Runs all; the number of failures."""
    print(
        f"device {DEVICE}" + ("" if GPU else ": no accelerator here, so this shows only that the script works"),
        flush=True,
    )
    failures = 0
    for fn in CHECKS:
        try:
            print(f"{fn.__name__}: {fn()}", flush=True)
        except Exception as error:
            failures += 1
            print(f"{fn.__name__}: FAILED {type(error).__name__}: {error}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main() > 0)
