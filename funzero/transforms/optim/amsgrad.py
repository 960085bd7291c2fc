"""AMSGrad: Adam whose second moment never falls.

m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) |g|^2,  w' = max(w, v' / (1 - b2^t'))
u  = (m' / (1 - b1^t')) / (sqrt(w' + eps_root) + eps)

References: Reddi, Kale, Kumar, "On the Convergence of Adam and Beyond", 2018.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import scale_by_learning_rate
from funzero.transforms.chain import chain
from funzero.transforms.moments import counts, debias, first_moment, increment, second_moment, zeros


def scale_by_amsgrad(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> Transform:
    """AMSGrad's direction, see the equations of this module.

    Args:
        bias_correction_mu, bias_correction_nu: whether m' and v' are divided by 1 - decay^t'; for v' before the maximum.
    """
    hyper = Hyperparams({"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}, count="schedule_count")

    def init(params: Any) -> Any:
        moments = {name: zeros(params) for name in ("mu", "nu", "nu_max")}
        return {**hyper.init(params), "count": counts(params), **moments}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        count = increment(state["count"])
        mu, nu = first_moment(updates, state["mu"], h["b1"]), second_moment(updates, state["nu"], h["b2"])
        m_hat = debias(mu, h["b1"], count) if bias_correction_mu else mu
        v_hat = debias(nu, h["b2"], count) if bias_correction_nu else nu
        nu_max = tree_lib.map(_larger, state["nu_max"], v_hat)
        out = tree_lib.map(lambda m, w: m / ((w + h["eps_root"]).sqrt() + h["eps"]), m_hat, nu_max)
        return out, {**hyper.advance(state), "count": count, "mu": mu, "nu": nu, "nu_max": nu_max}

    return leafwise("scale_by_amsgrad", init, update)


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The larger of two second moments, whose imaginary parts are 0."""
    return torch.maximum(a.real, b.real).to(a.dtype) if a.is_complex() else torch.maximum(a, b)


def amsgrad(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> Transform:
    """AMSGrad; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.

    >>> sorted(amsgrad(1e-3).init({}))
    ['scale_by_amsgrad', 'scale_by_learning_rate']
    """
    direction = scale_by_amsgrad(b1, b2, eps, eps_root, bias_correction_mu, bias_correction_nu)
    return chain(direction, scale_by_learning_rate(learning_rate), name="amsgrad")
