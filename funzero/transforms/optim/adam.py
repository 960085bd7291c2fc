"""Adam and AdamW.

m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) |g|^2,  t' = t + 1
u  = (m' / (1 - b1^t')) / (sqrt(v' / (1 - b2^t') + eps_root) + eps)

References: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014; Loshchilov and Hutter, "Decoupled Weight
Decay Regularization", 2017.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.chain import chain
from funzero.transforms.moments import counts, debias, first_moment, increment, is_zero, second_moment, zeros


def scale_by_adam(
    b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8, eps_root: Scalar = 0.0, *, nesterov: bool = False
) -> Transform:
    """Adam's direction, see the equations of this module.

    The state holds `mu` and `nu` like the params, and an int32 `count` for each leaf: a leaf that took no part in an
    update keeps its own. For complex leaves nu is the mean of the squared modulus, as in Optax.

    Args:
        eps_root: inside the root; above 0 it makes the update differentiable where v is 0.
        nesterov: the direction of Nadam, see `nadam`.
    """
    rootless = is_zero(eps_root)
    hyper = Hyperparams(
        {"b1": b1, "b2": b2, "eps": eps} | ({} if rootless else {"eps_root": eps_root}), count="schedule_count"
    )

    def init(params: Any) -> Any:
        return {**hyper.init(params), "count": counts(params), "mu": zeros(params), "nu": zeros(params)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        b1, b2, eps = h["b1"], h["b2"], h["eps"]
        count = increment(state["count"])
        mu, nu = first_moment(updates, state["mu"], b1), second_moment(updates, state["nu"], b2)

        def direction(m: torch.Tensor, v: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            v_hat = v / (1 - b2**t)
            step: torch.Tensor = m / ((v_hat if rootless else v_hat + h["eps_root"]).sqrt() + eps)
            return step

        if nesterov:
            ahead, now = debias(mu, b1, increment(count)), debias(updates, b1, count)
            m_hat = tree_lib.map(lambda m, g: b1 * m + (1 - b1) * g, ahead, now)
        else:
            m_hat = debias(mu, b1, count)
        out = tree_lib.map(direction, m_hat, nu, count)
        return out, {**hyper.advance(state), "count": count, "mu": mu, "nu": nu}

    fused = ("scale_by_adam", (hyper,)) if rootless and not nesterov else None
    return leafwise("scale_by_adam", init, update, fused=fused)


def adam(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    *,
    nesterov: bool = False,
) -> Transform:
    """Adam: `chain(scale_by_adam, scale_by_learning_rate)`; Optax's formula and defaults."""
    direction = scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov)
    return chain(direction, scale_by_learning_rate(learning_rate), name="adam")


def adamw(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    eps_root: Scalar = 0.0,
    nesterov: bool = False,
) -> Transform:
    """Adam with decoupled weight decay: p' = p - learning_rate * (u + weight_decay * p); Optax's defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.
        mask: which leaves decay: a tree of bools like the params, or a function from (abstract, global) params to one.
        eps_root, nesterov: see `scale_by_adam`.

    >>> import funzero as fz
    >>> tx = fz.adamw(fz.schedules.warmup_cosine(3e-4, warmup=200, total=10_000), weight_decay=0.1)
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
        name="adamw",
    )
