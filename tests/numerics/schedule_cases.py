"""Optax's schedules at counts 0, 1, ..., stored so that parity is tested without JAX.

`python -m tests.numerics.schedule_cases` writes `data_schedules/optax.npz` (needs `optax` 0.2.8; float64). A case is a
function of the module `optax` and one of `funzero.transforms.schedules`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "data_schedules" / "optax.npz"
COUNTS = range(61)

SGDR = [
    {"init_value": 0.1, "peak_value": 1.0, "warmup_steps": 2, "decay_steps": 7, "end_value": 0.01},
    {"init_value": 0.1, "peak_value": 0.8, "warmup_steps": 2, "decay_steps": 14, "end_value": 0.01},
    {"init_value": 0.1, "peak_value": 0.64, "warmup_steps": 2, "decay_steps": 28, "end_value": 0.01},
]
SCALES = {0: 2.0, 5: 0.5, 9: 3.0, 30: 0.1}

CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "constant": (lambda o: o.constant_schedule(0.3), lambda s: s.constant(0.3)),
    "linear": (lambda o: o.linear_schedule(0.3, 0.1, 17), lambda s: s.linear(0.3, 0.1, 17)),
    "linear_begin": (lambda o: o.linear_schedule(0.3, 2.0, 17, 5), lambda s: s.linear(0.3, 2.0, 17, begin=5)),
    "polynomial": (lambda o: o.polynomial_schedule(0.3, 0.1, 2.5, 20), lambda s: s.polynomial(0.3, 0.1, 20, power=2.5)),
    "polynomial_begin": (
        lambda o: o.polynomial_schedule(0.1, 0.7, 0.5, 20, 9),
        lambda s: s.polynomial(0.1, 0.7, 20, power=0.5, begin=9),
    ),
    "exponential": (lambda o: o.exponential_decay(0.3, 7, 0.9), lambda s: s.exponential(0.3, 0.9, 7)),
    "exponential_lower": (
        lambda o: o.exponential_decay(0.3, 7, 0.5, 4, end_value=0.05),
        lambda s: s.exponential(0.3, 0.5, 7, begin=4, end=0.05),
    ),
    "exponential_upper": (
        lambda o: o.exponential_decay(0.3, 7, 1.5, 4, True, 2.0),
        lambda s: s.exponential(0.3, 1.5, 7, begin=4, staircase=True, end=2.0),
    ),
    "cosine": (lambda o: o.cosine_decay_schedule(0.3, 40), lambda s: s.cosine(0.3, 40)),
    "cosine_end": (
        lambda o: o.cosine_decay_schedule(0.3, 40, alpha=0.1, exponent=1.7),
        lambda s: s.cosine(0.3, 40, end=0.03, exponent=1.7),
    ),
    "warmup_cosine": (
        lambda o: o.warmup_cosine_decay_schedule(0.1, 0.9, 7, 45, 0.2, 2.0),
        lambda s: s.warmup_cosine(0.9, warmup=7, total=45, start=0.1, end=0.2, exponent=2.0),
    ),
    "warmup_cosine_none": (
        lambda o: o.warmup_cosine_decay_schedule(0.1, 0.9, 0, 45),
        lambda s: s.warmup_cosine(0.9, warmup=0, total=45, start=0.1),
    ),
    "sgdr": (
        lambda o: o.sgdr_schedule(SGDR),
        lambda s: s.cosine_restarts(1.0, 7, cycles=3, multiplier=2, decay=0.8, warmup=2, start=0.1, end=0.01),
    ),
    "warmup_stable_decay": (
        lambda o: o.join_schedules(
            [o.linear_schedule(0.1, 0.9, 7), o.constant_schedule(0.9), o.linear_schedule(0.9, 0.2, 13)], [7, 32]
        ),
        lambda s: s.warmup_stable_decay(0.9, warmup=7, decay=13, total=45, start=0.1, end=0.2),
    ),
    "warmup_stable_cosine": (
        lambda o: o.join_schedules([o.constant_schedule(0.5), o.cosine_decay_schedule(0.5, 13, alpha=0.5)], [32]),
        lambda s: s.warmup_stable_decay(0.5, warmup=0, decay=13, total=45, end=0.25, shape="cosine"),
    ),
    "piecewise_constant": (
        lambda o: o.piecewise_constant_schedule(0.3, SCALES),
        lambda s: s.piecewise_constant(0.3, SCALES),
    ),
    "piecewise_linear": (
        lambda o: o.piecewise_interpolate_schedule("linear", 0.3, SCALES),
        lambda s: s.piecewise_interpolate(0.3, SCALES),
    ),
    "piecewise_cosine": (
        lambda o: o.piecewise_interpolate_schedule("cosine", 0.3, SCALES),
        lambda s: s.piecewise_interpolate(0.3, SCALES, shape="cosine"),
    ),
    "cosine_onecycle": (lambda o: o.cosine_onecycle_schedule(50, 0.3), lambda s: s.cosine_onecycle(0.3, 50)),
    "cosine_onecycle_short": (
        lambda o: o.cosine_onecycle_schedule(3, 0.3, 0.1, 10.0, 50.0),
        lambda s: s.cosine_onecycle(0.3, 3, pct_start=0.1, div_factor=10.0, final_div_factor=50.0),
    ),
    "linear_onecycle": (lambda o: o.linear_onecycle_schedule(50, 0.3), lambda s: s.linear_onecycle(0.3, 50)),
    "linear_onecycle_other": (
        lambda o: o.linear_onecycle_schedule(47, 0.3, 0.21, 0.6, 10.0, 50.0),
        lambda s: s.linear_onecycle(0.3, 47, pct_start=0.21, pct_final=0.6, div_factor=10.0, final_div_factor=50.0),
    ),
}

if __name__ == "__main__":
    import jax
    import optax

    jax.config.update("jax_enable_x64", True)
    FILE.parent.mkdir(exist_ok=True)
    found = {name: [float(made(optax)(np.int64(t))) for t in COUNTS] for name, (made, _) in CASES.items()}
    np.savez_compressed(FILE, **{name: np.array(values) for name, values in found.items()})
