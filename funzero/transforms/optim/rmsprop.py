"""RMSProp, plain and centered.

v' = decay v + (1 - decay) |g|^2,  m' = decay m + (1 - decay) g
u  = g / sqrt(s + eps), or g / (sqrt(s) + eps), where s = v', or v' - |m'|^2 when centered

References: Tieleman and Hinton, "Lecture 6.5: rmsprop", Neural Networks for Machine Learning, 2012; Graves, "Generating
Sequences With Recurrent Neural Networks", 2013 (centered).
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import scale_by_learning_rate, trace
from funzero.transforms.chain import chain
from funzero.transforms.moments import counts, debias, first_moment, full, increment, modulus2, second_moment, zeros


def scale_by_rms(
    decay: Scalar = 0.9,
    eps: Scalar = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> Transform:
    """u = g / sqrt(v' + eps), see the equations of this module.

    Args:
        initial_scale: what v starts from. eps_in_sqrt: whether eps is added before the root or after it.
        bias_correction: divides v' by 1 - decay^t'.
    """
    return _by_spread("scale_by_rms", decay, eps, initial_scale, eps_in_sqrt, bias_correction, centered=False)


def scale_by_stddev(
    decay: Scalar = 0.9,
    eps: Scalar = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> Transform:
    """u = g / sqrt(v' - |m'|^2 + eps): `scale_by_rms` around the mean, with the same arguments.

    With `bias_correction` the first variance is 0 up to rounding, so that eps alone decides the first update.
    """
    return _by_spread("scale_by_stddev", decay, eps, initial_scale, eps_in_sqrt, bias_correction, centered=True)


def _by_spread(
    name: str,
    decay: Scalar,
    eps: Scalar,
    initial_scale: float,
    eps_in_sqrt: bool,
    bias_correction: bool,
    centered: bool,
) -> Transform:
    hyper = Hyperparams({"decay": decay, "eps": eps}, count="schedule_count")

    def init(params: Any) -> Any:
        count = {"count": counts(params)} if bias_correction else {}
        mean = {"mu": zeros(params)} if centered else {}
        return {**hyper.init(params), **count, **mean, "nu": full(params, initial_scale)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        new = {"nu": second_moment(updates, state["nu"], h["decay"])}
        if centered:
            new["mu"] = first_moment(updates, state["mu"], h["decay"])
        averages = dict(new)
        if bias_correction:
            new["count"] = increment(state["count"])
            averages = {k: debias(x, h["decay"], new["count"]) for k, x in averages.items()}
        spread = averages["nu"]
        if centered:
            spread = tree_lib.map(lambda v, m: v - modulus2(m), spread, averages["mu"])

        def divide(g: torch.Tensor, s: torch.Tensor) -> Any:
            return g / ((s + h["eps"]).sqrt() if eps_in_sqrt else s.sqrt() + h["eps"])

        return tree_lib.map(divide, updates, spread), {**hyper.advance(state), **new}

    return leafwise(name, init, update)


def rmsprop(
    learning_rate: Scalar,
    decay: Scalar = 0.9,
    eps: Scalar = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: Scalar | None = None,
    nesterov: bool = False,
    *,
    bias_correction: bool = False,
) -> Transform:
    """RMSProp; Optax's formula and defaults. The trace, if any, is of the updates after the learning rate.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.
        centered: divides by the standard deviation, not by the root of the mean square.
        momentum: decay of the trace; None for no trace at all. nesterov: see `trace`.

    >>> sorted(rmsprop(1e-3, momentum=0.9).init({}))
    ['scale_by_learning_rate', 'scale_by_rms', 'trace']
    """
    scale = scale_by_stddev if centered else scale_by_rms
    direction = scale(decay, eps, initial_scale, eps_in_sqrt, bias_correction)
    last = () if momentum is None else (trace(momentum, nesterov),)
    return chain(direction, scale_by_learning_rate(learning_rate), *last, name="rmsprop")
