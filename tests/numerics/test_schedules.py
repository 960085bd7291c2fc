"""Schedules give Optax's values at every count from 0, to 1e-12; those Optax lacks have values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from funzero.transforms import schedules as s
from tests.numerics.schedule_cases import CASES, COUNTS, FILE

HAND = {
    "wsd_sqrt": (
        lambda: s.warmup_stable_decay(2.0, warmup=2, decay=4, total=8, end=1.0, shape="sqrt"),
        [0.0, 1.0, 2.0, 2.0, 2.0, 1.5, 2 - math.sqrt(0.5), 2 - math.sqrt(0.75), 1.0, 1.0],
    ),
    "wsd_no_level": (
        lambda: s.warmup_stable_decay(1.0, warmup=1, decay=2, total=3, start=0.5),
        [0.5, 1.0, 0.5, 0.0, 0.0],
    ),
    "inverse_sqrt": (
        lambda: s.inverse_sqrt(3.0, warmup=4, start=1.0),
        [1.0, 1.5, 2.0, 2.5, 3.0, 3 * math.sqrt(4 / 5), 3 * math.sqrt(4 / 6)],
    ),
    "inverse_sqrt_timescale": (
        lambda: s.inverse_sqrt(1.0, warmup=0, timescale=9.0),
        [1.0, math.sqrt(9 / 10), math.sqrt(9 / 11), math.sqrt(9 / 12)],
    ),
    "restarts_default": (
        lambda: s.cosine_restarts(1.0, 2, cycles=2),
        [1.0, 0.5, 1.0, 0.5, 0.0, 0.0],
    ),
    "restarts_rounded": (  # cycles of 3, then round(4.5) = 4 updates
        lambda: s.cosine_restarts(1.0, 3, cycles=2, multiplier=1.5, decay=0.5),
        [1.0, 0.75, 0.25, 0.5, 0.25 * (1 + math.sqrt(0.5)), 0.25, 0.25 * (1 - math.sqrt(0.5)), 0.0, 0.0],
    ),
    "no_boundary": (lambda: s.piecewise_interpolate(0.5, {}), [0.5, 0.5]),
}
ALL = {**{name: lambda make=ours: make(s) for name, (_, ours) in CASES.items()}, **{k: v[0] for k, v in HAND.items()}}


@pytest.mark.parametrize("name", CASES)
def test_equals_optax(name):
    schedule = ALL[name]()
    with np.load(FILE) as file:
        want = file[name]
    assert np.allclose([float(schedule(t)) for t in COUNTS], want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", HAND)
def test_by_hand(name):
    make, want = HAND[name]
    assert [float(make()(t)) for t in range(len(want))] == pytest.approx(want, rel=1e-12, abs=1e-13)


def test_every_stored_schedule_has_its_case():
    with np.load(FILE) as file:
        assert set(file.files) == set(CASES)


@pytest.mark.parametrize("name", ALL)
def test_takes_numbers_and_tensors_of_counts(name):
    schedule, counts = ALL[name](), torch.arange(40, dtype=torch.int32)
    values = schedule(counts)
    assert values.dtype == torch.float64 and values.shape == counts.shape
    for other in (
        torch.stack([schedule(int(t)) for t in counts]),
        torch.stack([schedule(t) for t in counts]),
        torch.func.vmap(schedule)(counts),
        schedule(counts.reshape(5, 8)).reshape(40),
    ):
        assert torch.allclose(values, other, rtol=1e-14, atol=0.0)  # a power's last bit may depend on the shape


def test_join_at_its_boundaries():
    joined = s.join([s.constant(7.0), s.exponential(1.0, 0.5, 1), s.linear(0.0, 1.0, 2)], [3, 5])
    assert joined(torch.arange(9)).tolist() == [7.0, 7.0, 7.0, 1.0, 0.5, 0.0, 0.5, 1.0, 1.0]


BAD = {
    "linear: steps must be positive, got 0": lambda: s.linear(0.0, 1.0, 0),
    "linear: begin must be at least 0, got -1": lambda: s.linear(0.0, 1.0, 3, begin=-1),
    "polynomial: power must be positive, got 0": lambda: s.polynomial(0.0, 1.0, 3, power=0),
    "exponential: rate must be positive, got 0.0": lambda: s.exponential(1.0, 0.0, 3),
    "exponential: steps must be positive, got nan": lambda: s.exponential(1.0, 0.5, math.nan),
    "cosine: steps must be positive, got -2": lambda: s.cosine(1.0, -2),
    r"warmup_cosine: warmup must be within \[0, total=5\), got 5": lambda: s.warmup_cosine(1.0, warmup=5, total=5),
    "cosine_restarts: cycles must be positive, got 0": lambda: s.cosine_restarts(1.0, 3, cycles=0),
    r"cosine_restarts: warmup must be within \[0, 2\), the shortest cycle, got 2": lambda: s.cosine_restarts(
        1.0, 4, cycles=2, multiplier=0.5, warmup=2
    ),
    r"warmup_stable_decay: total must be at least warmup \+ decay = 7, got 6": lambda: s.warmup_stable_decay(
        1.0, warmup=3, decay=4, total=6
    ),
    r"warmup_stable_decay: shape must be one of \['cosine', 'linear', 'sqrt'\], got 'step'": (
        lambda: s.warmup_stable_decay(1.0, warmup=1, decay=4, total=6, shape="step")
    ),
    r"inverse_sqrt: timescale \(default: warmup\) must be positive, got 0": lambda: s.inverse_sqrt(1.0, warmup=0),
    "piecewise_constant: scales .* got a factor of -1.0 at 3": lambda: s.piecewise_constant(1.0, {3: -1.0}),
    r"piecewise_interpolate: shape must be one of \['cosine', 'linear'\]": lambda: s.piecewise_interpolate(
        1.0, {3: 1.0}, shape="sqrt"
    ),
    r"cosine_onecycle: pct_start must be within \[0, 1\], got 30": lambda: s.cosine_onecycle(1.0, 9, pct_start=30),
    r"linear_onecycle: pct_start must be within \[0, pct_final=0.2\], got 0.3": lambda: s.linear_onecycle(
        1.0, 9, pct_final=0.2
    ),
    "join: 2 schedules need 1 rising boundaries": lambda: s.join([s.constant(1.0)] * 2, [1, 2]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
