"""Schedules: pure functions of the count of applied updates, which starts at 0. They take a number or a 0-dim tensor."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Schedule = Callable[[Any], torch.Tensor]


def _count(count: Any) -> torch.Tensor:
    return torch.as_tensor(count, dtype=torch.float64)


def constant(value: float) -> Schedule:
    """The same value for ever."""
    return lambda count: torch.full_like(_count(count), value)


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` at count 0 to `end` at `steps` and after, in a straight line.

    >>> float(linear(0.0, 1.0, 4)(1))
    0.25
    """
    _positive(steps=steps)
    return lambda count: start + (end - start) * (_count(count) / steps).clamp(0, 1)


def warmup_cosine(peak: float, *, warmup: int, total: int, start: float = 0.0, end: float = 0.0) -> Schedule:
    """From `start` in a straight line to `peak` at `warmup`, then half a cosine down to `end` at `total` and after.

    Args:
        warmup, total: counts of updates; `total` includes the warm-up.

    References: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.
    """
    _positive(total=total)
    if not 0 <= warmup < total:
        raise ValueError(f"warmup_cosine: warmup must be within [0, total={total}), got {warmup}")

    def schedule(count: Any) -> torch.Tensor:
        t = _count(count)
        rise = start + (peak - start) * (t / max(warmup, 1)).clamp(0, 1)
        progress = ((t - warmup) / (total - warmup)).clamp(0, 1)
        return torch.where(t < warmup, rise, end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * progress)))

    return schedule


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other; at `boundaries[i]` the next begins at its own 0.

    >>> s = join([constant(1.0), linear(0.0, 1.0, 2)], [3])
    >>> [float(s(t)) for t in (2, 3, 4)]
    [1.0, 0.0, 0.5]
    """
    if len(schedules) != len(boundaries) + 1 or list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"join: {len(schedules)} schedules need {len(schedules) - 1} rising boundaries, got {list(boundaries)}"
        )

    def schedule(count: Any) -> torch.Tensor:
        t = _count(count)
        value = torch.as_tensor(schedules[0](t), dtype=torch.float64)
        for boundary, later in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(t < boundary, value, torch.as_tensor(later(t - boundary), dtype=torch.float64))
        return value

    return schedule


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
