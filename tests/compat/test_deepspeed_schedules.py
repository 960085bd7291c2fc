"""DeepSpeed's schedules: values worked out by hand from its formulas, at funzero's counts (t = count - 1)."""

import math

import pytest
import torch

from funzero.compat.deepspeed import schedules as ds

LOG3, LOG5 = math.log(3), math.log(5)
CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 4, "cycle_second_step_size": 2}
MOM = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "cycle_min_mom": 0.5, "cycle_max_mom": 0.9}

# name: (schedule, {count: value})
CASES = {
    "warmup_log": (  # W = 5: ln(t + 1) / ln 5 for t = 0..4, which reaches 1 at t = 4
        lambda: ds.warmup_lr(warmup_min_lr=1.0, warmup_max_lr=3.0, warmup_num_steps=5),
        {0: 1.0, 1: 1.0, 2: 1 + 2 * math.log(2) / LOG5, 4: 1 + 2 * math.log(4) / LOG5, 5: 3.0, 6: 3.0, 1000: 3.0},
    ),
    "warmup_linear": (
        lambda: ds.warmup_lr(8.0, warmup_num_steps=4, warmup_type="linear"),
        {0: 0.0, 1: 0.0, 2: 2.0, 3: 4.0, 4: 6.0, 5: 8.0, 99: 8.0},
    ),
    "warmup_default": (
        lambda: ds.warmup_lr(2.0),
        {0: 0.0, 1: 0.0, 10: 2 * math.log(10) / math.log(1000), 1000: 2.0, 1001: 2.0},
    ),
    "warmup_max_before_base": (lambda: ds.warmup_lr(2.0, warmup_max_lr=5.0), {0: 0.0, 2000: 5.0}),
    "warmup_of_one_step_takes_two_log": (  # W = max(2, 1): ln 1 / ln 2 = 0, ln 2 / ln 2 = 1
        lambda: ds.warmup_lr(8.0, warmup_num_steps=1),
        {0: 0.0, 1: 0.0, 2: 8.0, 3: 8.0},
    ),
    "warmup_of_one_step_takes_two_linear": (
        lambda: ds.warmup_lr(8.0, warmup_num_steps=1, warmup_type="linear"),
        {0: 0.0, 1: 0.0, 2: 4.0, 3: 8.0},
    ),
    "decay_linear": (  # W = 4, T = 8: (8 - t) / 4 from t = 4
        lambda: ds.warmup_decay_lr(
            total_num_steps=8, warmup_min_lr=1.0, warmup_max_lr=9.0, warmup_num_steps=4, warmup_type="linear"
        ),
        {0: 1.0, 1: 1.0, 2: 3.0, 4: 7.0, 5: 9.0, 6: 7.0, 8: 3.0, 9: 1.0, 10: 1.0, 500: 1.0},
    ),
    "decay_log": (
        lambda: ds.warmup_decay_lr(total_num_steps=7, warmup_num_steps=3),
        {0: 0.0, 1: 0.0, 2: 1e-3 * math.log(2) / LOG3, 3: 1e-3, 4: 1e-3, 5: 0.75e-3, 8: 0.0, 9: 0.0},
    ),
    "decay_total_within_warmup": (  # T - W < 1 counts as 1: max(0, 3 - t)
        lambda: ds.warmup_decay_lr(total_num_steps=3, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear"),
        {4: 0.75, 5: 0.0, 6: 0.0},
    ),
    "cosine_linear": (  # W = 2, T = 6: p = (t - 1) / 4
        lambda: ds.warmup_cosine_lr(
            2.0, total_num_steps=6, warmup_min_ratio=0.5, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear"
        ),
        {
            0: 0.0,  # not the ratio 0.5
            1: 1.0,
            2: 1.5,
            3: 2 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2),
            4: 2 * (0.1 + 0.9 / 2),
            6: 0.2,
            7: 0.2,
            60: 0.2,
        },
    ),
    "cosine_log_default": (
        lambda: ds.warmup_cosine_lr(2.0, total_num_steps=3000),
        {
            0: 0.0,
            1: 0.0,
            10: 2 * math.log(10) / math.log(1000),
            1000: 2.0,
            2000: 2 * (1e-4 + (1 - 1e-4) / 2),
            3000: 2e-4,
            9000: 2e-4,
        },
    ),
    "cosine_total_within_warmup": (
        lambda: ds.warmup_cosine_lr(1.0, total_num_steps=2, warmup_num_steps=2, warmup_type="linear"),
        {2: 0.5, 3: 1e-4, 4: 1e-4},
    ),
    "cosine_never_below_zero": (
        lambda: ds.warmup_cosine_lr(1.0, total_num_steps=4, warmup_num_steps=2, cos_min_ratio=-0.5),
        {4: 0.0, 5: 0.0},
    ),
    "range": (
        lambda: ds.lr_range_test(lr_range_test_step_size=4, lr_range_test_step_rate=2.0),
        {0: 1e-3, 1: 1.5e-3, 4: 3e-3, 10: 6e-3},
    ),
    "range_stairs": (
        lambda: ds.lr_range_test(
            lr_range_test_min_lr=2.0,
            lr_range_test_step_size=4,
            lr_range_test_step_rate=0.5,
            lr_range_test_staircase=True,
        ),
        {0: 2.0, 3: 2.0, 4: 3.0, 7: 3.0, 8: 4.0},
    ),
    "range_default": (lambda: ds.lr_range_test(), {0: 1e-3, 1000: 1.5e-3, 2000: 2e-3}),
    "one_cycle": (
        lambda: ds.one_cycle(**CYCLE),
        {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0, 5: 2.0, 6: 1.0, 7: 1.0, 100: 1.0},
    ),
    "one_cycle_decay": (  # from t = 6, count 7: 1 / (1 + 0.5 (t - 5) / 2)
        lambda: ds.one_cycle(**CYCLE, decay_lr_rate=0.5, decay_step_size=2),
        {5: 2.0, 6: 1.0, 7: 1 / 1.25, 8: 1 / 1.5, 10: 0.5},
    ),
    "one_cycle_no_decay_step": (lambda: ds.one_cycle(**CYCLE, decay_lr_rate=0.5), {6: 1.0, 7: 1.0, 50: 1.0}),
    "one_cycle_stairs": (  # two stairs up, and as many down: 0, 0, 1/2, 1/2, 1, 1/2, 0
        lambda: ds.one_cycle(**CYCLE, cycle_first_stair_count=2),
        {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0, 4: 3.0, 5: 2.0, 6: 1.0},
    ),
    "one_cycle_stairs_apart": (
        lambda: ds.one_cycle(**CYCLE, cycle_first_stair_count=0, cycle_second_stair_count=1),
        {0: 1.0, 1: 1.5, 4: 3.0, 5: 1.0, 6: 1.0},
    ),
    "one_cycle_default": (
        lambda: ds.one_cycle(cycle_min_lr=0.0, cycle_max_lr=4.0, cycle_momentum=True, cycle_min_mom=0.7),
        {0: 0.0, 500: 1.0, 2000: 4.0, 3000: 2.0, 4000: 0.0, 4001: 0.0},
    ),
    "momentum": (  # the first update has the lowest
        lambda: ds.one_cycle_momentum(**MOM),
        {0: 0.5, 1: 0.8, 2: 0.7, 4: 0.5, 5: 0.7, 6: 0.9, 7: 0.9, 100: 0.9},
    ),
    "momentum_decay": (
        lambda: ds.one_cycle_momentum(**MOM, decay_mom_rate=0.1, decay_step_size=2),
        {6: 0.9, 7: 0.9 * 1.05, 8: 0.9 * 1.1},
    ),
    "momentum_no_decay_step": (lambda: ds.one_cycle_momentum(**MOM, decay_mom_rate=0.1), {7: 0.9, 8: 0.9}),
    "momentum_stairs": (
        lambda: ds.one_cycle_momentum(**MOM, cycle_first_stair_count=2, cycle_second_stair_count=1),
        {0: 0.5, 1: 0.9, 2: 0.7, 3: 0.7, 4: 0.5, 5: 0.9, 6: 0.9},
    ),
    "momentum_default": (lambda: ds.one_cycle_momentum(), {0: 0.8, 2000: 0.8, 4000: 0.9, 9000: 0.9}),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name):
    make, want = CASES[name]
    schedule = make()
    assert {c: float(schedule(c)) for c in want} == pytest.approx(want, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", CASES)
def test_takes_tensors_of_counts(name):
    schedule, counts = CASES[name][0](), torch.arange(20, dtype=torch.int32)
    want = torch.stack([schedule(int(c)) for c in counts])
    assert torch.allclose(schedule(counts), want, rtol=1e-14, atol=0.0)
    assert torch.allclose(torch.func.vmap(schedule)(counts), want, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("stairs", [3, 7])
def test_stairs_reach_the_peak_whatever_the_rounding(stairs):
    for first in range(3, 60):
        s = ds.one_cycle(
            cycle_min_lr=0.0,
            cycle_max_lr=1.0,
            cycle_first_step_size=first,
            cycle_second_step_size=first + 5,
            cycle_first_stair_count=stairs,
        )
        assert float(s(first)) == 1.0 and float(s(2 * first + 5)) == 0.0


def test_by_type():
    params = {"warmup_num_steps": 2, "warmup_type": "linear"}
    for kind, make in ds.SCHEDULES.items():
        more = {
            "WarmupLR": params,
            "WarmupDecayLR": {**params, "total_num_steps": 4},
            "WarmupCosineLR": {**params, "total_num_steps": 4},
            "LRRangeTest": {},
            "OneCycle": {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_momentum": False},
        }[kind]
        assert float(make(0.5, **more)(0)) == (1e-3 if kind == "LRRangeTest" else 0.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ds.warmup_lr(), "WarmupLR: without warmup_max_lr .* give base_lr or warmup_max_lr"),
        (lambda: ds.warmup_lr(1.0, warmup_num_steps=0), "WarmupLR: warmup_num_steps must be positive, got 0"),
        (
            lambda: ds.warmup_decay_lr(total_num_steps=3, warmup_type="cubic"),
            "WarmupDecayLR: warmup_type must be 'log' or 'linear', got 'cubic'",
        ),
        (lambda: ds.lr_range_test(lr_range_test_step_size=0), "lr_range_test_step_size must be positive, got 0"),
        (lambda: ds.one_cycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycel=1), r"unexpected arguments \['cycel'\]"),
        (
            lambda: ds.one_cycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_second_step_size=0),
            "OneCycle: cycle_second_step_size must be positive, got 0",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
