"""Lion: the sign of an interpolated momentum.

u = sign(b1 m + (1 - b1) g),  m' = b2 m + (1 - b2) g

References: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.chain import chain
from funzero.transforms.moments import first_moment, zeros

MODES = ("hard", "smooth", "refined")


def scale_by_lion(b1: Scalar = 0.9, b2: Scalar = 0.99, *, mode: str = "hard", smooth_beta: Scalar = 1.0) -> Transform:
    """Lion's direction, see the equations of this module; of a complex number x the sign is x / |x|.

    Args:
        mode: `hard`: sign(x). `smooth`: tanh(smooth_beta * x). `refined`: x where |x| < 1, else sign(x).
    """
    if mode not in MODES:
        raise ValueError(f"scale_by_lion(mode={mode!r}): expected one of {MODES}")
    smooth = {"smooth_beta": smooth_beta} if mode == "smooth" else {}
    hyper = Hyperparams({"b1": b1, "b2": b2, **smooth})

    def init(params: Any) -> Any:
        return {**hyper.init(params), "mu": zeros(params)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)

        def direction(x: torch.Tensor) -> torch.Tensor:
            if mode == "smooth":
                return torch.tanh(h["smooth_beta"] * x)
            sign = torch.sgn(x)
            return torch.where(x.abs() < 1, x, sign) if mode == "refined" else sign

        out = tree_lib.map(direction, first_moment(updates, state["mu"], h["b1"]))
        return out, {**hyper.advance(state), "mu": first_moment(updates, state["mu"], h["b2"])}

    fused = ("scale_by_lion", (hyper,)) if mode == "hard" else None
    return leafwise("scale_by_lion", init, update, fused=fused)


def lion(
    learning_rate: Scalar, b1: Scalar = 0.9, b2: Scalar = 0.99, weight_decay: Scalar = 1e-3, mask: Any = None
) -> Transform:
    """Lion with decoupled weight decay; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates; 3 to 10 times smaller than for Adam.
        mask: which leaves decay, see `add_decayed_weights`.

    >>> sorted(lion(1e-4).init({}))
    ['add_decayed_weights', 'scale_by_learning_rate', 'scale_by_lion']
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
        name="lion",
    )
