"""Adan: Adam with a moving average of the gradients' differences.

d  = g - g_before (0 in the first update),  t' = t + 1
m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) d,  n' = b3 n + (1 - b3) |g + (1 - b2) d|^2
u  = (m' / (1 - b1^t') + (1 - b2) v' / (1 - b2^t')) / (sqrt(n' / (1 - b3^t') + eps_root) + eps)

References: Xie et al., "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", 2022.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.chain import chain
from funzero.transforms.moments import counts, debias, first_moment, increment, second_moment, zeros


def scale_by_adan(
    b1: Scalar = 0.98, b2: Scalar = 0.92, b3: Scalar = 0.99, eps: Scalar = 1e-8, eps_root: Scalar = 0.0
) -> Transform:
    """Adan's direction, see the equations of this module.

    The state holds `m`, `v`, `n` and the last gradient `g` like the params, and an int32 `count` for each leaf.
    """
    hyper = Hyperparams({"b1": b1, "b2": b2, "b3": b3, "eps": eps, "eps_root": eps_root}, count="schedule_count")

    def init(params: Any) -> Any:
        return {**hyper.init(params), "count": counts(params), **{name: zeros(params) for name in "mvng"}}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        ahead = 1 - h["b2"]
        difference = tree_lib.map(
            lambda g, before, t: torch.where(t == 0, torch.zeros_like(g), g - before),
            updates,
            state["g"],
            state["count"],
        )
        count = increment(state["count"])
        m, v = first_moment(updates, state["m"], h["b1"]), first_moment(difference, state["v"], h["b2"])
        n = second_moment(tree_lib.map(lambda g, d: g + ahead * d, updates, difference), state["n"], h["b3"])
        out = tree_lib.map(
            lambda m, v, n: (m + ahead * v) / ((n + h["eps_root"]).sqrt() + h["eps"]),
            debias(m, h["b1"], count),
            debias(v, h["b2"], count),
            debias(n, h["b3"], count),
        )
        g = tree_lib.map(torch.clone, updates)  # the caller's gradients are not part of the state
        return out, {**hyper.advance(state), "count": count, "m": m, "v": v, "n": n, "g": g}

    return leafwise("scale_by_adan", init, update)


def adan(
    learning_rate: Scalar,
    b1: Scalar = 0.98,
    b2: Scalar = 0.92,
    b3: Scalar = 0.99,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
) -> Transform:
    """Adan with decoupled weight decay; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.
        mask: which leaves decay, see `add_decayed_weights`.

    >>> sorted(adan(1e-3).init({}))
    ['add_decayed_weights', 'scale_by_adan', 'scale_by_learning_rate']
    """
    return chain(
        scale_by_adan(b1, b2, b3, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
        name="adan",
    )
