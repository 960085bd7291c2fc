"""Adagrad: each element has its own step, which only shrinks.

s' = s + |g|^2,  u = g / sqrt(s' + eps), and 0 where s' is 0

References: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import scale_by_learning_rate
from funzero.transforms.chain import chain
from funzero.transforms.moments import full, modulus2


def scale_by_rss(initial_accumulator_value: float = 0.1, eps: Scalar = 1e-7) -> Transform:
    """Division by the root of the sum of squares, see the equations of this module.

    Args:
        initial_accumulator_value: what s starts from.
    """
    hyper = Hyperparams({"eps": eps})

    def init(params: Any) -> Any:
        return {**hyper.init(params), "sum_of_squares": full(params, initial_accumulator_value)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        eps = hyper.read(state)["eps"]
        sums = tree_lib.map(lambda g, s: modulus2(g) + s, updates, state["sum_of_squares"])

        def divide(g: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            seen = (s.real if s.is_complex() else s) > 0
            return g * torch.where(seen, 1 / (s + eps).sqrt(), 0)

        return tree_lib.map(divide, updates, sums), {**hyper.advance(state), "sum_of_squares": sums}

    return leafwise("scale_by_rss", init, update)


def adagrad(learning_rate: Scalar, initial_accumulator_value: float = 0.1, eps: Scalar = 1e-7) -> Transform:
    """Adagrad; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.

    >>> sorted(adagrad(0.1).init({}))
    ['scale_by_learning_rate', 'scale_by_rss']
    """
    return chain(scale_by_rss(initial_accumulator_value, eps), scale_by_learning_rate(learning_rate), name="adagrad")
