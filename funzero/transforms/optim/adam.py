"""Adam and AdamW.

m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) |g|^2,  t' = t + 1
u  = (m' / (1 - b1^t')) / (sqrt(v' / (1 - b2^t')) + eps)

References: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014; Loshchilov and Hutter, "Decoupled Weight
Decay Regularization", 2017.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.chain import chain


def scale_by_adam(
    b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8, eps_root: Scalar = 0.0, *, nesterov: bool = False
) -> Transform:
    """Adam's direction, see the equations of this module.

    The state holds `mu` and `nu` like the params, and an int32 `count` for each leaf: a leaf that took no part in an
    update keeps its own. For complex leaves nu is the mean of the squared modulus, as in Optax.
    """
    rootless = isinstance(eps_root, int | float) and eps_root == 0
    hyper = Hyperparams({"b1": b1, "b2": b2, "eps": eps} | ({} if rootless else {"eps_root": eps_root}))

    def init(params: Any) -> Any:
        return {
            **hyper.init(params),
            "count": tree_lib.map(lambda p: p.new_zeros((), dtype=torch.int32), params),
            "mu": tree_lib.map(torch.zeros_like, params),
            "nu": tree_lib.map(torch.zeros_like, params),
        }

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        b1, b2, eps = h["b1"], h["b2"], h["eps"]
        count = tree_lib.map(lambda c: c + 1, state["count"])
        mu = tree_lib.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state["mu"])
        nu = tree_lib.map(lambda g, v: b2 * v + (1 - b2) * (g.conj() * g), updates, state["nu"])

        def direction(m: torch.Tensor, v: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            m_hat = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t) if nesterov else m / (1 - b1**t)
            v_hat = v / (1 - b2**t)
            step: torch.Tensor = m_hat / ((v_hat if rootless else v_hat + h["eps_root"]).sqrt() + eps)
            return step

        return tree_lib.map(direction, mu, nu, count, updates), {**state, "count": count, "mu": mu, "nu": nu}

    fused = ("scale_by_adam", (hyper,)) if rootless and not nesterov else None
    return leafwise("scale_by_adam", init, update, fused=fused)


def adam(learning_rate: Scalar, b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8) -> Transform:
    """Adam: `chain(scale_by_adam, scale_by_learning_rate)`; Optax's formula and defaults."""
    return chain(scale_by_adam(b1, b2, eps), scale_by_learning_rate(learning_rate), name="adam")


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

    >>> import funzero as fz
    >>> tx = fz.adamw(fz.schedules.warmup_cosine(3e-4, warmup=200, total=10_000), weight_decay=0.1)
    """
    return chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
        name="adamw",
    )
