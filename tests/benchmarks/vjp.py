"""`vjp` and a pull beside torch.autograd.grad, on 100 small leaves in one process: in turn, medians."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import funzero as fz
from tests.benchmarks.work import Tiny

ROUNDS, WARM, TARGET = 300, 30, 1.3


def systems() -> dict[str, Callable[[], Any]]:
    """Each differentiates the same function at the same params and input, and gives gradients of both."""
    torch.manual_seed(0)
    model = Tiny()
    params, _ = fz.split_module(model.layers)
    x = torch.randn(4, 16)
    mesh, tx = fz.make_mesh(dp=1), fz.sgd(0.1)
    found: dict[str, Callable[[], Any]] = {}

    def plain() -> Any:
        inputs = x.detach().requires_grad_()
        y = model.layers(inputs)
        return torch.autograd.grad(y, [*model.parameters(), inputs], torch.ones_like(y))

    def functional() -> Any:
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        inputs = x.detach().requires_grad_()
        y = torch.func.functional_call(model.layers, leaves, (inputs,))
        return torch.autograd.grad(y, [*leaves.values(), inputs], torch.ones_like(y))

    def own(**options: Any) -> Callable[[], Any]:
        def run() -> Any:
            y, pull = fz.vjp(lambda p, x: fz.functional_call(model.layers, p, x), params, x, **options)
            return pull(torch.ones_like(y), last=True)

        return run

    found["torch.autograd.grad"] = plain
    found["with torch.func.functional_call"] = functional
    found["vjp"] = own()
    for stage in (0, 3):
        found[f"vjp, specs of stage {stage}"] = own(specs=fz.zero_specs(params, tx, mesh, stage=stage))
    return found


def compare() -> None:
    """Prints ratios of medians."""
    torch.set_num_threads(1)
    runs = systems()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(WARM + ROUNDS):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if round_ >= WARM:
                times[name].append(time.perf_counter() - begin)
    base = statistics.median(times["torch.autograd.grad"])
    for name, found in times.items():
        middle = statistics.median(found)
        print(
            f"  {name}: {middle * 1e3:.3f} ms, {middle / base:.3f} of torch.autograd.grad (target {TARGET})", flush=True
        )
