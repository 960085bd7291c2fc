"""LARS: momentum over gradients that are decayed, and scaled for each leaf by its trust ratio.

u = g + weight_decay * p,  t' = -learning_rate * trust_coefficient * |p| / (|u| + eps) * u + momentum * t,  p' = p + t'

References: You et al., "Large Batch Training of Convolutional Networks", 2017.
"""

from typing import Any

from funzero.core import tree as tree_lib
from funzero.transforms.base import Scalar, Transform
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate, trace
from funzero.transforms.block import scale_by_trust_ratio
from funzero.transforms.chain import chain, masked


def lars(
    learning_rate: Scalar,
    weight_decay: Scalar = 0.0,
    weight_decay_mask: Any = True,
    trust_coefficient: Scalar = 0.001,
    eps: Scalar = 0.0,
    trust_ratio_mask: Any = True,
    momentum: Scalar = 0.9,
    nesterov: bool = False,
) -> Transform:
    """LARS; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.
        weight_decay_mask, trust_ratio_mask: True for all leaves, a tree of bools like the params, or a function from
            (abstract, global) params to one.

    >>> import torch
    >>> sorted(lars(0.1).init({"w": torch.zeros(2)}))[1:3]
    ['scale_by_learning_rate', 'scale_by_trust_ratio']
    """
    trust = scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps)
    return chain(
        add_decayed_weights(weight_decay, _mask(weight_decay_mask)),
        trust if trust_ratio_mask is True else masked(trust, _mask(trust_ratio_mask)),
        scale_by_learning_rate(learning_rate),
        trace(momentum, nesterov),
        name="lars",
    )


def _mask(mask: Any) -> Any:
    """A bool stands for all leaves."""
    if isinstance(mask, bool):
        return None if mask else lambda params: tree_lib.map(lambda _: False, params)
    return mask
