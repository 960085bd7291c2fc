"""LAMB: Adam's direction, decayed, and scaled for each leaf by |p| / |u|.

u = adam(g) + weight_decay * p,  p' = p - learning_rate * (|p| / |u|) * u

References: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
"""

from typing import Any

from funzero.transforms.base import Scalar, Transform
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.block import scale_by_trust_ratio
from funzero.transforms.chain import chain
from funzero.transforms.optim.adam import scale_by_adam


def lamb(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
) -> Transform:
    """LAMB; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.
        mask: which leaves decay: a tree of bools like the params, or a function from (abstract, global) params to one.

    >>> import torch
    >>> sorted(lamb(1e-3).init({"w": torch.zeros(2)}))[1:3]
    ['scale_by_adam', 'scale_by_learning_rate']
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
        name="lamb",
    )
