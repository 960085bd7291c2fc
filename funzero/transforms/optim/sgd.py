"""Stochastic gradient descent, with momentum on request: p' = p - learning_rate * t', t' = g + momentum * t."""

from funzero.transforms.base import Scalar, Transform
from funzero.transforms.basic import scale_by_learning_rate, trace
from funzero.transforms.chain import chain


def sgd(learning_rate: Scalar, momentum: Scalar | None = None, nesterov: bool = False) -> Transform:
    """Gradient descent; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates (from 0).
        momentum: decay of the trace; None for no trace at all.
    """
    parts = (scale_by_learning_rate(learning_rate),)
    return chain(*parts, name="sgd") if momentum is None else chain(trace(momentum, nesterov), *parts, name="sgd")
