"""The loss scale as a pure function: traces of DeepSpeed's ZeRO path (deepspeed.md 1.3), limits, errors."""

import math

import pytest
import torch

from funzero.transforms import loss_scale

CPU = torch.device("cpu")


def trace(scaling, steps):
    """The scale after each step; "O" is an overflow, "." is none."""
    scale, out = scaling.init(CPU), []
    for step in steps:
        before = [x.dtype for x in (scale.scale, scale.finite, scale.patience, scale.exhausted)]
        scale = loss_scale.update(scale, torch.tensor(step == "."))
        assert [x.dtype for x in (scale.scale, scale.finite, scale.patience, scale.exhausted)] == before
        out.append(int(scale.scale))
    return out


@pytest.mark.parametrize(
    ("options", "steps", "want"),
    [
        ({"window": 2}, ".......", [256, 256, 512, 512, 1024, 1024, 2048]),
        ({"window": 2, "hysteresis": 2}, "OO...OO", [256, 128, 128, 128, 256, 256, 128]),
        ({"window": 1000, "hysteresis": 2}, "O.O.O", [256, 256, 128, 128, 64]),
        ({"window": 1000, "hysteresis": 2, "consecutive_hysteresis": True}, "O.O.O", [256] * 5),
        ({"window": 1}, "...", [256, 512, 1024]),
        ({"window": 1000, "minimum": 64}, "OOO.O", [128, 64, 64, 64, 64]),
        ({"window": 2, "hysteresis": 3}, "OOOO...O", [256, 256, 128, 64, 64, 64, 128, 128]),
    ],
)
def test_traces(options, steps, want):
    assert trace(loss_scale.dynamic(initial_power=8, **options), steps) == want


def test_a_constant_scale_stays():
    assert trace(loss_scale.constant(48.0), "O..O.") == [48] * 5


def test_exhausted_says_that_the_last_step_overflowed_at_the_minimum():
    scale = loss_scale.dynamic(initial_power=1, hysteresis=2).init(CPU)
    seen = []
    for finite in (False, False, False, True, False):
        scale = loss_scale.update(scale, finite)
        seen.append((float(scale.scale), bool(scale.exhausted)))
    assert seen == [(2.0, False), (1.0, False), (1.0, True), (1.0, False), (1.0, True)]


@pytest.mark.parametrize("weight", [0, 0.3, 1, 1.5, 2, 3, 4, 5, 1023, 1024, 1025, 2.0**40 + 1])
def test_power_above(weight):
    want = 2.0 ** math.ceil(math.log2(max(weight, 1)))
    assert float(loss_scale.power_above(torch.tensor(weight, dtype=torch.float64))) == want


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: loss_scale.constant(0), "positive and finite, got 0"),
        (lambda: loss_scale.dynamic(window=0), "window is at least 1, got 0"),
        (lambda: loss_scale.dynamic(hysteresis=0), "hysteresis is at least 1, got 0"),
        (lambda: loss_scale.dynamic(minimum=0), "minimum must be within"),
        (lambda: loss_scale.dynamic(on_minimum="stop"), "on_minimum is one of"),
    ],
)
def test_mistakes(make, text):
    with pytest.raises(ValueError, match=text):
        make()
