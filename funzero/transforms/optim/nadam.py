"""Nadam and NadamW: Adam with Nesterov's momentum.

m^ = b1 m' / (1 - b1^(t'+1)) + (1 - b1) g / (1 - b1^t'),  u = m^ / (sqrt(v' / (1 - b2^t') + eps_root) + eps)

References: Dozat, "Incorporating Nesterov Momentum into Adam", 2016; Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2017.
"""

from typing import Any

from funzero.transforms.base import Scalar, Transform
from funzero.transforms.optim.adam import adam, adamw


def nadam(
    learning_rate: Scalar, b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8, eps_root: Scalar = 0.0
) -> Transform:
    """Nadam: `adam(..., nesterov=True)`; Optax's formula and defaults.

    >>> sorted(nadam(1e-3).init({}))
    ['scale_by_adam', 'scale_by_learning_rate']
    """
    return adam(learning_rate, b1, b2, eps, eps_root, nesterov=True)


def nadamw(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    eps_root: Scalar = 0.0,
) -> Transform:
    """Nadam with decoupled weight decay: `adamw(..., nesterov=True)`.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.
        mask: which leaves decay, see `add_decayed_weights`.

    >>> sorted(nadamw(1e-3, weight_decay=0.1).init({}))
    ['add_decayed_weights', 'scale_by_adam', 'scale_by_learning_rate']
    """
    return adamw(learning_rate, b1, b2, eps, weight_decay, mask, eps_root=eps_root, nesterov=True)
