"""The small transforms that optimizers are made of."""

import dataclasses
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise, need_params
from funzero.transforms.chain import masked


def identity() -> Transform:
    """Leaves the updates as they are."""
    return leafwise("identity", lambda params: {}, lambda updates, state, params=None: (updates, state))


def scale(factor: Scalar) -> Transform:
    """u' = factor * u. A schedule is evaluated at the number of updates applied so far, from 0."""
    return _scale("scale", "factor", factor, 1.0)


def scale_by_learning_rate(learning_rate: Scalar, *, flip_sign: bool = True) -> Transform:
    """u' = -learning_rate * u.

    Args:
        learning_rate: a number, or a schedule: a function of the count of applied updates (0-dim float64, from 0).
        flip_sign: False for u' = learning_rate * u.
    """
    if not flip_sign:
        made = _scale("scale_by_learning_rate", "learning_rate", learning_rate, 1.0)
        return dataclasses.replace(made, fused=None)  # the fused kernels descend
    return _scale("scale_by_learning_rate", "learning_rate", learning_rate, -1.0)


def scale_by_schedule(schedule: Any) -> Transform:
    """u' = schedule(count) * u, with the count of applied updates from 0."""
    return _scale("scale_by_schedule", "factor", schedule, 1.0)


def _scale(name: str, key: str, value: Scalar, sign: float) -> Transform:
    hyper = Hyperparams({key: value})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = sign * hyper.read(state)[key]
        return tree_lib.map(lambda u: u * factor, updates), hyper.advance(state)

    return leafwise(name, hyper.init, update, fused=(name, (hyper,)))


def add_decayed_weights(weight_decay: Scalar = 0.0, mask: Any = None) -> Transform:
    """u' = u + weight_decay * p, for the leaves where `mask` is True (default: all).

    A leaf with zero gradient decays; one without gradient does not.
    """
    hyper = Hyperparams({"weight_decay": weight_decay})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        need_params(params, "add_decayed_weights")
        decay = hyper.read(state)["weight_decay"]
        return tree_lib.map(lambda u, p: u + decay * p, updates, params), hyper.advance(state)

    inner = leafwise("add_decayed_weights", hyper.init, update, fused=("add_decayed_weights", (hyper,)))
    return inner if mask is None else masked(inner, mask)


def clip(max_delta: Scalar) -> Transform:
    """u' = u within [-max_delta, max_delta], element by element; real leaves only.

    >>> tx = clip(1.0)
    >>> tx.update({"w": torch.tensor([0.5, -3.0])}, tx.init({"w": torch.zeros(2)}))[0]["w"]
    tensor([ 0.5000, -1.0000])
    """
    hyper = Hyperparams({"max_delta": max_delta})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        limit = hyper.read(state)["max_delta"]
        return tree_lib.map(lambda u: torch.clamp(u, -limit, limit), updates), hyper.advance(state)

    return leafwise("clip", hyper.init, update)


def trace(decay: Scalar, nesterov: bool = False) -> Transform:
    """Momentum: t' = g + decay * t; the update is t', or g + decay * t' with `nesterov`.

    References: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; Sutskever et al.,
    "On the importance of initialization and momentum in deep learning", 2013.
    """
    hyper = Hyperparams({"decay": decay})

    def init(params: Any) -> Any:
        return {**hyper.init(params), "trace": tree_lib.map(torch.zeros_like, params)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        d = hyper.read(state)["decay"]
        new = tree_lib.map(lambda g, t: g + d * t, updates, state["trace"])
        out = tree_lib.map(lambda g, t: g + d * t, updates, new) if nesterov else new
        return out, {**hyper.advance(state), "trace": new}

    return leafwise("trace", init, update, fused=("trace", (hyper, nesterov)))
