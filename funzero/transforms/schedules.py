"""Schedules: pure functions of the count of applied updates, which starts at 0.

They take a number or a tensor of counts of any shape, work in float64, and run under `torch.func.vmap`. Lengths and
boundaries are counts of updates.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Schedule = Callable[[Any], torch.Tensor]


def _count(count: Any) -> torch.Tensor:
    return torch.as_tensor(count, dtype=torch.float64)


def constant(value: float) -> Schedule:
    """The same value for ever."""
    return lambda count: torch.full_like(_count(count), value)


def linear(start: float, end: float, steps: int, *, begin: int = 0) -> Schedule:
    """From `start` at count `begin` and before to `end` at `begin + steps` and after, in a straight line.

    >>> float(linear(0.0, 1.0, 4)(1))
    0.25
    """
    _positive("linear", steps=steps)
    _not_negative("linear", begin=begin)
    return lambda count: start + (end - start) * ((_count(count) - begin) / steps).clamp(0, 1)


def polynomial(start: float, end: float, steps: int, *, power: float = 1.0, begin: int = 0) -> Schedule:
    """end + (start - end) * (1 - x)^power, where x goes from 0 at count `begin` to 1 at `begin + steps`.

    >>> float(polynomial(1.0, 0.0, 4, power=2.0)(2))
    0.25
    """
    _positive("polynomial", steps=steps, power=power)
    _not_negative("polynomial", begin=begin)
    return lambda count: end + (start - end) * (1 - ((_count(count) - begin) / steps).clamp(0, 1)) ** power


def exponential(
    start: float, rate: float, steps: int, *, begin: int = 0, staircase: bool = False, end: float | None = None
) -> Schedule:
    """start * rate^((t - begin) / steps), and `start` up to count `begin`.

    Args:
        rate: the factor gained every `steps` updates.
        staircase: the exponent is rounded down.
        end: where it stops: a lower bound if `rate` is below 1, otherwise an upper one.

    >>> [float(exponential(1.0, 0.5, 2, staircase=True)(t)) for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """
    _positive("exponential", rate=rate, steps=steps)
    _not_negative("exponential", begin=begin)

    def schedule(count: Any) -> torch.Tensor:
        exponent = ((_count(count) - begin) / steps).clamp(min=0)
        value = start * rate ** (exponent.floor() if staircase else exponent)
        if end is None:
            return value
        return value.clamp(min=end) if rate < 1 else value.clamp(max=end)

    return schedule


def cosine(start: float, steps: int, *, end: float = 0.0, exponent: float = 1.0) -> Schedule:
    """end + (start - end) * ((1 + cos(pi t / steps)) / 2)^exponent, and `end` after `steps`.

    References: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.

    >>> [round(float(cosine(1.0, 4)(t)), 6) for t in (0, 2, 4, 5)]
    [1.0, 0.5, 0.0, 0.0]
    """
    _positive("cosine", steps=steps, exponent=exponent)

    def schedule(count: Any) -> torch.Tensor:
        progress = (_count(count) / steps).clamp(0, 1)
        return end + (start - end) * (0.5 * (1 + torch.cos(math.pi * progress))) ** exponent

    return schedule


def warmup_cosine(
    peak: float, *, warmup: int, total: int, start: float = 0.0, end: float = 0.0, exponent: float = 1.0
) -> Schedule:
    """From `start` in a straight line to `peak` at `warmup`, then `cosine` down to `end` at `total` and after.

    Args:
        warmup, total: counts of updates; `total` includes the warm-up.
    """
    _positive("warmup_cosine", total=total)
    _expect(0 <= warmup < total, "warmup_cosine: warmup", f"within [0, total={total})", warmup)
    return _after_warmup(cosine(peak, total - warmup, end=end, exponent=exponent), start, peak, warmup)


def cosine_restarts(
    peak: float,
    steps: int,
    *,
    cycles: int,
    multiplier: float = 1.0,
    decay: float = 1.0,
    warmup: int = 0,
    start: float = 0.0,
    end: float = 0.0,
) -> Schedule:
    """Cycles of `warmup_cosine`, one after the other; after the last the value stays at `end`.

    Args:
        steps: the length of the first cycle, its warm-up included.
        cycles: how many.
        multiplier: each cycle is so many times as long as the one before, rounded to whole updates.
        decay: each cycle's peak is so many times that of the one before.
        warmup: the length of every cycle's straight line from `start` to its peak.

    References: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016.

    >>> [round(float(cosine_restarts(1.0, 2, cycles=2, multiplier=2)(t)), 6) for t in (0, 1, 2, 4, 6)]
    [1.0, 0.5, 1.0, 0.5, 0.0]
    """
    _positive("cosine_restarts", steps=steps, cycles=cycles, multiplier=multiplier, decay=decay)
    lengths = [round(steps * multiplier**i) for i in range(cycles)]
    _expect(
        0 <= warmup < min(lengths), "cosine_restarts: warmup", f"within [0, {min(lengths)}), the shortest cycle", warmup
    )
    parts = [
        warmup_cosine(peak * decay**i, warmup=warmup, total=length, start=start, end=end)
        for i, length in enumerate(lengths)
    ]
    return join(parts, list(itertools.accumulate(lengths))[:-1])


_DECAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + torch.cos(math.pi * x)),
    "sqrt": lambda x: 1 - torch.sqrt(x),
}


def warmup_stable_decay(
    peak: float,
    *,
    warmup: int,
    decay: int,
    total: int,
    start: float = 0.0,
    end: float = 0.0,
    shape: str = "linear",
) -> Schedule:
    """From `start` in a straight line to `peak` at `warmup`, level until `total - decay`, then down to `end` at `total`.

    Args:
        warmup, decay, total: counts of updates; `total` includes the other two.
        shape: how much is left at the part x of the decay: "linear" 1 - x, "cosine" (1 + cos(pi x)) / 2, or "sqrt"
            1 - sqrt(x).

    References: Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models", 2024; Hägele et al., "Scaling
    Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024 (for "sqrt").

    >>> [float(warmup_stable_decay(1.0, warmup=2, decay=4, total=10)(t)) for t in (0, 1, 2, 6, 8, 10)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _positive("warmup_stable_decay", decay=decay, total=total)
    _not_negative("warmup_stable_decay", warmup=warmup)
    _expect(total >= warmup + decay, "warmup_stable_decay: total", f"at least warmup + decay = {warmup + decay}", total)
    left = _falling("warmup_stable_decay", shape, tuple(_DECAYS))

    def fall(count: Any) -> torch.Tensor:
        return end + (peak - end) * left(((_count(count) - (total - decay - warmup)) / decay).clamp(0, 1))

    return _after_warmup(fall, start, peak, warmup)


def inverse_sqrt(peak: float, *, warmup: int, start: float = 0.0, timescale: float | None = None) -> Schedule:
    """From `start` in a straight line to `peak` at `warmup`, then peak * sqrt(s / (t - warmup + s)).

    Args:
        timescale: s, in updates; default: `warmup`, which makes it peak * sqrt(warmup / t).

    References: Vaswani et al., "Attention Is All You Need", 2017 (peak = 1 / sqrt(width * warmup), t from 1).

    >>> [float(inverse_sqrt(1.0, warmup=4)(t)) for t in (2, 4, 16)]
    [0.5, 1.0, 0.5]
    """
    _not_negative("inverse_sqrt", warmup=warmup)
    scale = warmup if timescale is None else timescale
    _expect(scale > 0, "inverse_sqrt: timescale (default: warmup)", "positive", scale)
    return _after_warmup(
        lambda count: peak * torch.sqrt(scale / (_count(count).clamp(min=0) + scale)), start, peak, warmup
    )


def piecewise_constant(start: float, scales: Mapping[int, float]) -> Schedule:
    """`start` times every factor whose boundary has been reached.

    Args:
        scales: {boundary: factor}; the factor counts from this count on.

    >>> [float(piecewise_constant(1.0, {2: 0.5, 4: 0.5})(t)) for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """
    points = _points("piecewise_constant", start, scales)

    def schedule(count: Any) -> torch.Tensor:
        t = _count(count)
        value = torch.full_like(t, start)
        for boundary, reached in points[1:]:
            value = torch.where(t < boundary, value, reached)
        return value

    return schedule


def piecewise_interpolate(start: float, scales: Mapping[int, float], *, shape: str = "linear") -> Schedule:
    """The values of `piecewise_constant` at its boundaries, and between them a line or half a cosine.

    Args:
        scales: {boundary: factor}; each is a factor to the value at the boundary before.
        shape: "linear" or "cosine".

    >>> [float(piecewise_interpolate(1.0, {2: 2.0, 4: 0.5})(t)) for t in (0, 1, 2, 3, 5)]
    [1.0, 1.5, 2.0, 1.5, 1.0]
    """
    points = _points("piecewise_interpolate", start, scales)
    return _through(points, _falling("piecewise_interpolate", shape, ("linear", "cosine")))


def cosine_onecycle(
    peak: float, steps: int, *, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> Schedule:
    """Half a cosine from peak / div_factor up to `peak`, and one down to peak / (div_factor * final_div_factor).

    Args:
        steps: of the whole cycle. pct_start: the part of it (0 to 1) that rises.

    References: Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates",
    2017.

    >>> [round(float(cosine_onecycle(1.0, 10)(t)), 6) for t in (0, 3, 10)]
    [0.04, 1.0, 4e-06]
    """
    _positive("cosine_onecycle", steps=steps, div_factor=div_factor, final_div_factor=final_div_factor)
    _expect(0 <= pct_start <= 1, "cosine_onecycle: pct_start", "within [0, 1]", pct_start)
    low = peak / div_factor
    points = [(0, low), (int(pct_start * steps), peak), (steps, low / final_div_factor)]
    return _through(points, _DECAYS["cosine"])


def linear_onecycle(
    peak: float,
    steps: int,
    *,
    pct_start: float = 0.3,
    pct_final: float = 0.85,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Straight lines from peak / div_factor up to `peak`, back, and down to peak / (div_factor * final_div_factor).

    Args:
        steps: of the whole cycle. pct_start, pct_final: the parts of it (0 to 1) at which `peak` is reached, and at
            which it is back.

    References: as for `cosine_onecycle`.

    >>> [round(float(linear_onecycle(1.0, 20)(t)), 6) for t in (0, 6, 17, 20)]
    [0.04, 1.0, 0.04, 4e-06]
    """
    _positive("linear_onecycle", steps=steps, div_factor=div_factor, final_div_factor=final_div_factor)
    _expect(0 <= pct_final <= 1, "linear_onecycle: pct_final", "within [0, 1]", pct_final)
    _expect(0 <= pct_start <= pct_final, "linear_onecycle: pct_start", f"within [0, pct_final={pct_final}]", pct_start)
    low = peak / div_factor
    points = [(0, low), (int(pct_start * steps), peak), (int(pct_final * steps), low), (steps, low / final_div_factor)]
    return _through(points, _DECAYS["linear"])


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


def _after_warmup(then: Schedule, start: float, peak: float, warmup: int) -> Schedule:
    return then if warmup == 0 else join([linear(start, peak, warmup), then], [warmup])


def _points(where: str, start: float, scales: Mapping[int, float]) -> list[tuple[int, float]]:
    """(count, value) at 0 and at every boundary."""
    found = [(0, start)]
    for boundary, factor in sorted(scales.items()):
        if boundary < 0 or factor < 0:
            raise ValueError(
                f"{where}: scales must map counts >= 0 to factors >= 0, got a factor of {factor} at {boundary}"
            )
        found.append((boundary, found[-1][1] * factor))
    return found


def _through(points: Sequence[tuple[int, float]], left: Callable[[torch.Tensor], torch.Tensor]) -> Schedule:
    """Through points (count, value) in rising order; `left(x)` of a difference remains at the part x of the way."""

    def schedule(count: Any) -> torch.Tensor:
        t = _count(count)
        value = torch.full_like(t, points[0][1])
        for (begin, low), (end, high) in itertools.pairwise(points):
            progress = ((t - begin) / max(end - begin, 1)).clamp(0, 1)
            value = torch.where(t < begin, value, high + (low - high) * left(progress))
        return torch.where(t < points[-1][0], value, points[-1][1])

    return schedule


def _positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{where}: {name} must be positive, got {value}")


def _not_negative(where: str, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{where}: {name} must be at least 0, got {value}")


def _expect(holds: bool, what: str, expectation: str, value: float) -> None:
    if not holds:
        raise ValueError(f"{what} must be {expectation}, got {value}")


def _falling(where: str, shape: str, known: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    if shape not in known:
        raise ValueError(f"{where}: shape must be one of {sorted(known)}, got {shape!r}")
    return _DECAYS[shape]
