"""DeepSpeed's five learning-rate schedules, value for value, as funzero schedules.

The arguments have the names and defaults of DeepSpeed's `scheduler.params`.

[Note: counts] DeepSpeed's schedulers count t from -1, and its engine advances them after each applied update. So its
first update runs at t = -1, and funzero's count c of applied updates is t = c - 1. The warm-up schedules give the lowest
rate at t = -1 and again at t = 0: the first two updates use it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from funzero.transforms.schedules import Schedule


def warmup_lr(
    base_lr: float | None = None,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """WarmupLR: lr = min + (max - min) gamma; gamma = ln(t + 1) / ln W or t / W below W = max(2, steps), then 1.

    Args:
        base_lr: the optimizer's own rate, used where `warmup_max_lr` is None.
        warmup_type: "log" or "linear".

    >>> [float(warmup_lr(1.0, warmup_num_steps=4, warmup_type="linear")(c)) for c in range(6)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    """
    peak = base_lr if warmup_max_lr is None else warmup_max_lr
    if peak is None:
        raise ValueError("WarmupLR: without warmup_max_lr it takes the optimizer's rate; give base_lr or warmup_max_lr")
    gamma = _warmup("WarmupLR", warmup_num_steps, warmup_type, lambda t: torch.ones_like(t))
    return lambda count: warmup_min_lr + (peak - warmup_min_lr) * gamma(_t(count))


def warmup_decay_lr(
    base_lr: float | None = None,
    *,
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """WarmupDecayLR: as `warmup_lr`, but from W on gamma = max(0, (T - t) / max(1, T - W)), T = total_num_steps.

    Args:
        base_lr: not used: here the default of `warmup_max_lr` is a number.

    >>> s = warmup_decay_lr(total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear")
    >>> [float(s(c)) for c in range(9)]
    [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    steps = max(2, warmup_num_steps)

    def after(t: torch.Tensor) -> torch.Tensor:
        return ((total_num_steps - t) / max(1, total_num_steps - steps)).clamp(min=0)

    gamma = _warmup("WarmupDecayLR", warmup_num_steps, warmup_type, after)
    return lambda count: warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma(_t(count))


def warmup_cosine_lr(
    base_lr: float,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Schedule:
    """WarmupCosineLR: lr = base_lr * r; r = rmin + (1 - rmin) gamma below W, then max(0, c + (1 - c)(1 + cos pi p) / 2).

    Here p = min(1, (t - W + 1) / max(1, T - W)), T = total_num_steps. The first update, t = -1, uses 0 whatever
    `warmup_min_ratio` says.

    Args:
        base_lr: the optimizer's own rate.

    >>> s = warmup_cosine_lr(1.0, total_num_steps=4, warmup_num_steps=2, cos_min_ratio=0.0, warmup_type="linear")
    >>> [round(float(s(c)), 6) for c in range(6)]
    [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    """
    steps = max(2, warmup_num_steps)
    gamma = _warmup("WarmupCosineLR", warmup_num_steps, warmup_type, lambda t: torch.ones_like(t))

    def schedule(count: Any) -> torch.Tensor:
        t = _t(count)
        progress = ((t - steps + 1) / max(1, total_num_steps - steps)).clamp(max=1)
        fall = (cos_min_ratio + (1 - cos_min_ratio) * (1 + torch.cos(math.pi * progress)) / 2).clamp(min=0)
        rise = warmup_min_ratio + (1 - warmup_min_ratio) * gamma(t)
        return base_lr * torch.where(t < 0, 0.0, torch.where(t < steps, rise, fall))

    return schedule


def lr_range_test(
    base_lr: float | None = None,
    *,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Schedule:
    """LRRangeTest: lr = min (1 + rate (t + 1) / size), the quotient rounded down for a staircase.

    Args:
        base_lr: not used.

    >>> s = lr_range_test(lr_range_test_min_lr=1.0, lr_range_test_step_size=2, lr_range_test_staircase=True)
    >>> [float(s(c)) for c in range(5)]
    [1.0, 1.0, 2.0, 2.0, 3.0]
    """
    _positive("LRRangeTest", lr_range_test_step_size=lr_range_test_step_size)

    def schedule(count: Any) -> torch.Tensor:
        interval = (_t(count) + 1) / lr_range_test_step_size
        interval = interval.floor() if lr_range_test_staircase else interval
        return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)

    return schedule


def one_cycle(
    base_lr: float | None = None,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    **momentum: Any,
) -> Schedule:
    """OneCycle: lr = min + (max - min) s in the cycle, then min / (1 + rate (t - total + 1) / decay_step_size).

    s rises from 0 to 1 over the first steps and falls back over the second ones (`None`: as many), in stairs (`None`: as
    in the first half) if their count is above 0. It is a function of t + 1, so the cycle ends at t = total - 1. There is
    no decay where `decay_lr_rate` or `decay_step_size` is 0.

    Args:
        base_lr: not used. momentum: the arguments of `one_cycle_momentum`, so that one dict serves both.

    >>> s = one_cycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=2)
    >>> [float(s(c)) for c in range(6)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    unknown = sorted(momentum.keys() - {"cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"})
    if unknown:
        raise ValueError(f"OneCycle: unexpected arguments {unknown}")
    second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
    stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
    height = _cycle(cycle_first_step_size, second, cycle_first_stair_count, stairs)
    growth = _decay(cycle_first_step_size + second, decay_step_size, decay_lr_rate)

    def schedule(count: Any) -> torch.Tensor:
        t = _t(count)
        inside = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height(t)
        return torch.where(t < cycle_first_step_size + second, inside, cycle_min_lr / growth(t))

    return schedule


def one_cycle_momentum(
    *,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> Schedule:
    """OneCycle's b1: max - (max - min) s in the cycle, then max (1 + rate (t - total + 1) / decay_step_size).

    s is that of `one_cycle`. The first update, t = -1, uses `cycle_min_mom`: DeepSpeed sets it when it starts. While
    OneCycle cycles the momentum it also holds b2 at 0.99 (`ONE_CYCLE_B2`), whatever the optimizer says.

    >>> s = one_cycle_momentum(cycle_first_step_size=2)
    >>> [round(float(s(c)), 6) for c in range(6)]
    [0.8, 0.85, 0.8, 0.85, 0.9, 0.9]
    """
    second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
    stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
    height = _cycle(cycle_first_step_size, second, cycle_first_stair_count, stairs)
    growth = _decay(cycle_first_step_size + second, decay_step_size, decay_mom_rate)

    def schedule(count: Any) -> torch.Tensor:
        t = _t(count)
        inside = torch.where(t < 0, cycle_min_mom, cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height(t))
        return torch.where(t < cycle_first_step_size + second, inside, cycle_max_mom * growth(t))

    return schedule


ONE_CYCLE_B2 = 0.99
# By `scheduler.type`; each is called with the optimizer's own rate and the `params` of the same block.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": lr_range_test,
    "OneCycle": one_cycle,
}


def _t(count: Any) -> torch.Tensor:
    """DeepSpeed's t for a count of applied updates, see [Note: counts]."""
    return torch.as_tensor(count, dtype=torch.float64) - 1


def _positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{where}: {name} must be positive, got {value}")


def _warmup(where: str, num_steps: int, kind: str, after: Callable[[torch.Tensor], torch.Tensor]) -> Schedule:
    """gamma(t): 0 for t < 0, a rise below W, then `after`."""
    _positive(where, warmup_num_steps=num_steps)
    if kind not in ("log", "linear"):
        raise ValueError(f"{where}: warmup_type must be 'log' or 'linear', got {kind!r}")
    steps = max(2, num_steps)

    def gamma(t: torch.Tensor) -> torch.Tensor:
        begun = t.clamp(min=0)
        rise = torch.log(begun + 1) / math.log(steps) if kind == "log" else begun / steps
        return torch.where(t < steps, rise, after(t))

    return gamma


def _cycle(first: int, second: int, first_stairs: int, second_stairs: int) -> Schedule:
    """s(t): stairs are counted in whole updates, so that rounding cannot lose one."""
    _positive("OneCycle", cycle_first_step_size=first, cycle_second_step_size=second)

    def part(steps: torch.Tensor, length: int, stairs: int) -> torch.Tensor:
        return (steps * stairs / length).floor() / stairs if stairs > 0 else steps / length

    def height(t: torch.Tensor) -> torch.Tensor:
        done = (t + 1) % (first + second)
        rise, fall = part(done, first, first_stairs), part(first + second - done, second, second_stairs)
        return torch.where(done <= first, rise, fall)

    return height


def _decay(total: int, step_size: int, rate: float) -> Schedule:
    """1 + rate * (updates since the cycle) / step_size, or 1 where one of the two is 0."""
    if step_size == 0 or rate == 0:
        return lambda t: torch.ones_like(t)
    return lambda t: 1 + rate * (t - total + 1) / step_size
