"""Many steps at stage 3 with everything on: nothing grows.

Torch's own collectives grow a process by some hundred kB before they level off (a bare loop of the same collectives does
it too), so the slope is taken after that.
"""

import gc
import os

import pytest
import torch

import funzero as fz
from funzero.executor import session
from tests.ranks import pool

STEPS, SETTLED = 1500, 1100


def resident_kb():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def census():
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len(tensors), len(os.listdir("/proc/self/fd"))


def run(rank, world):
    session.BUNDLE_BYTES, before = 2048, session.BUNDLE_BYTES
    try:
        model = torch.nn.Sequential(*[torch.nn.Linear(48, 48) for _ in range(4)])
        params, _ = fz.split_module(model)
        model.to("meta")
        tx = fz.adamw(1e-3)
        specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=3)
        state = fz.init_state(params, tx, specs=specs)
        del params

        def loss_fn(p, b):
            return fz.Loss(fz.functional_call(model, p, b["x"]).square().sum(), weight=len(b["x"]))

        step = fz.make_step(loss_fn, tx, specs=specs, accumulate=2, max_norm=1.0, gather_budget=40_000)
        sizes, counts = [], []
        for t in range(STEPS):
            rows = 2 * (1 + (t * 7 + rank * 3) % 5)
            state, _ = step(state, {"x": torch.ones(rows, 48)})
            if t + 1 in (100, STEPS):
                counts.append(census())
            if t >= SETTLED:
                sizes.append(resident_kb())
        return counts, sizes
    finally:
        session.BUNDLE_BYTES = before


def slope(values):
    """Least squares, per step."""
    n = len(values)
    middle, mean = (n - 1) / 2, sum(values) / n
    return sum((i - middle) * (v - mean) for i, v in enumerate(values)) / sum((i - middle) ** 2 for i in range(n))


@pytest.mark.slow
def test_1500_steps_do_not_grow():
    for counts, sizes in pool(2).run(run, timeout=110):
        assert counts[0] == counts[1], "live tensors and open files"
        print(f"slope of RSS {slope(sizes):.3f} kB a step")
        assert slope(sizes) < 1.0
