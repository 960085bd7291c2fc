"""Loss scaling: a number in the state that keeps small float16 gradients from vanishing.

A dynamic scale halves when gradients overflow and doubles after a while without. With window w, counting finite steps
since the start or the last overflow from 0: step n doubles the scale if n > 0 and n is a multiple of w. With hysteresis h
the first h - 1 overflows since the last growth are let pass without halving.

References: Micikevicius et al., "Mixed Precision Training", 2017.
"""

import dataclasses
from typing import Any

import torch

from funzero.core.tree import node, static

FACTOR = 2.0
ON_MINIMUM = ("skip", "raise")


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How a loss scale moves; made by `constant` and `dynamic`.

    Attributes:
        initial: the scale at the start. window: None for a scale that never moves.
        hysteresis, consecutive_hysteresis, minimum, on_minimum: see `dynamic`.
    """

    initial: float
    window: int | None = None
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    on_minimum: str = "skip"

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise ValueError(f"loss_scale: the scale must be positive and finite, got {self.initial}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"loss_scale: window is at least 1, got {self.window}")
        if self.hysteresis < 1:
            raise ValueError(f"loss_scale: hysteresis is at least 1, got {self.hysteresis}")
        if self.window is not None and not 0 < self.minimum <= self.initial:
            raise ValueError(f"loss_scale: minimum must be within (0, {self.initial}], got {self.minimum}")
        if self.on_minimum not in ON_MINIMUM:
            raise ValueError(f"loss_scale: on_minimum is one of {ON_MINIMUM}, got {self.on_minimum!r}")

    def init(self, device: torch.device) -> "LossScale":
        """The scale at the start."""
        return LossScale(
            scale=torch.tensor(self.initial, dtype=torch.float32, device=device),
            finite=torch.zeros((), dtype=torch.int32, device=device),
            patience=torch.tensor(self.hysteresis, dtype=torch.int32, device=device),
            exhausted=torch.zeros((), dtype=torch.bool, device=device),
            scaling=self,
        )


@node
class LossScale:
    """A loss scale as it is in the state; all leaves are 0-dim.

    Attributes:
        scale: float32. finite: int32, finite steps since the last overflow. patience: int32, overflows that it takes to
            halve. exhausted: bool, the last step overflowed at the minimum.
        scaling: how it moves; static metadata.
    """

    scale: torch.Tensor
    finite: torch.Tensor
    patience: torch.Tensor
    exhausted: torch.Tensor
    scaling: Scaling = static(default=Scaling(1.0))


def constant(scale: float) -> Scaling:
    """A scale that never moves; a step that overflows is skipped all the same."""
    return Scaling(float(scale))


def dynamic(
    initial_power: int = 16,
    window: int = 2000,
    hysteresis: int = 1,
    consecutive_hysteresis: bool = False,
    minimum: float = 1.0,
    on_minimum: str = "skip",
) -> Scaling:
    """A scale that halves on overflow and doubles after `window` finite steps.

    Args:
        initial_power: it starts at 2 ** initial_power.
        hysteresis: the overflow from which on each one halves.
        consecutive_hysteresis: a finite step restores the hysteresis; without it only a growth does.
        minimum: it never gets smaller. A step that overflows there is skipped and reported like any other.
        on_minimum: "raise": the call after such a step raises `fz.LossScaleError`.
    """
    return Scaling(2.0**initial_power, window, hysteresis, consecutive_hysteresis, float(minimum), on_minimum)


def update(scale: LossScale, finite: torch.Tensor | bool) -> LossScale:
    """The scale after a step; `finite`: 0-dim bool, whether all its gradients were.

    >>> scale = dynamic(initial_power=8, window=2).init(torch.device("cpu"))
    >>> for finite in (True, True, True, False):
    ...     scale = update(scale, finite)
    >>> float(scale.scale)
    256.0
    """
    rule = scale.scaling
    if rule.window is None:
        return scale
    ok = torch.as_tensor(finite, device=scale.scale.device)
    zero, full = torch.zeros_like(scale.finite), torch.full_like(scale.patience, rule.hysteresis)
    grows = ok & (scale.finite > 0) & (scale.finite % rule.window == 0)
    halves = ~ok & (scale.patience <= 1)
    lower = (scale.scale / FACTOR).clamp(min=rule.minimum)
    restored = grows | (ok if rule.consecutive_hysteresis else torch.zeros_like(ok))
    return LossScale(
        scale=torch.where(grows, scale.scale * FACTOR, torch.where(halves, lower, scale.scale)),
        finite=torch.where(ok, scale.finite + 1, zero),
        patience=torch.where(restored, full, torch.where(ok, scale.patience, (scale.patience - 1).clamp(min=1))),
        exhausted=halves & (scale.scale <= rule.minimum),
        scaling=rule,
    )


def as_scaling(value: Any) -> Scaling | None:
    """A `Scaling` from what a user may pass: one, a number, or None."""
    if value is None or isinstance(value, Scaling):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return constant(value)
    raise TypeError(f"loss_scale: expected a number, fz.loss_scale.dynamic(...) or None, got {value!r}")


def power_above(weight: torch.Tensor | int) -> torch.Tensor:
    """2 ** ceil(log2(max(weight, 1))), 0-dim float64: exact, since it comes from the exponent.

    A sum over that many samples is about so many times larger than one sample; dividing its cotangent by this keeps
    float16 gradients in range, and multiplying a power of two back in float32 changes no bit.
    """
    mantissa, exponent = torch.frexp(torch.as_tensor(weight, dtype=torch.float64).clamp(min=1))
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))
