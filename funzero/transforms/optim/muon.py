"""Muon: momentum whose matrices are made orthogonal by Newton and Schulz's iteration.

m' = beta m + (1 - beta) g,  M = beta m' / (1 - beta^(t+2)) + (1 - beta) g / (1 - beta^(t+1))  (nesterov, t from 0)
X_0 = M / (|M| + eps),  A = X X*,  X' = a X + (b A + c A A) X,  u = X_n * sqrt(max(1, columns / rows))

The singular values of u lie near 1, so the step is that of steepest descent under the spectral norm.

References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Bernstein and Newhouse, "Old
Optimizer, New Norm: An Anthology", 2024; Liu et al., "Muon is Scalable for LLM Training", 2025; Ahn et al., "Dion:
Distributed Orthonormalized Updates", 2025.
"""

import dataclasses
import math
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.chain import chain, partition
from funzero.transforms.moments import counts, first_moment, increment, zeros
from funzero.transforms.optim.adam import adamw

Coefficients = tuple[float, float, float] | tuple[tuple[float, float, float], ...]
STANDARD = (3.4445, -4.7750, 2.0315)
PRESETS: dict[str, Coefficients] = {
    "standard": STANDARD,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def orthogonalize(x: torch.Tensor, polynomials: list[tuple[float, ...]], eps: Any) -> torch.Tensor:
    """A matrix with the singular vectors of `x`, and singular values near 1 if the polynomials (a, b, c) bring them there.

    >>> orthogonalize(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), [(1.5, -0.5, 0.0)] * 5, 0.0).round()
    tensor([[1., 0.],
            [0., 1.]])
    """
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (torch.linalg.vector_norm(x) + eps)
    for a, b, c in polynomials:
        gram = x @ x.mH
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def scale_by_muon(
    ns_coeffs: Coefficients = STANDARD,
    ns_steps: int = 5,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
) -> Transform:
    """Muon's direction for matrices, without the factor for their shape; see the equations of this module.

    The state holds `mu` like the params, and an int32 `count` for each leaf. It works on whole leaves, on every rank.

    Args:
        ns_coeffs: the polynomial (a, b, c) of all `ns_steps` iterations, or one for each, of which the last `ns_steps`
            count.
        mu_dtype: of the momentum; None: the param's.
        adaptive: scales the direction by its inner product with the momentum.

    Raises ValueError at `init` for a leaf that is not a matrix: `muon` gives such leaves to AdamW.
    """
    hyper = Hyperparams({"beta": beta, "eps": eps}, count="schedule_count")
    polynomials = _polynomials(ns_coeffs, ns_steps)

    def init(params: Any) -> Any:
        return {
            **hyper.init(params),
            "count": counts(params),
            "mu": zeros(params, mu_dtype),
        }

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        b = h["beta"]

        def direction(path: str, m: torch.Tensor, g: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            if m.dim() != 2:
                raise ValueError(f"scale_by_muon: {path} has shape {tuple(m.shape)}, expected a matrix; use muon(...)")
            ahead = b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t) if nesterov else m / (1 - b**t)
            x = orthogonalize(ahead, polynomials, h["eps"])
            return (ahead.conj() * x).sum() * x if adaptive else x

        count, mu = increment(state["count"]), first_moment(updates, state["mu"], b)
        names, moments, treedef = tree_lib.flatten_with_paths(mu)
        rows = zip(names, moments, tree_lib.leaves(updates), tree_lib.leaves(count), strict=True)
        out = tree_lib.unflatten(treedef, [direction(*row) for row in rows])
        return out, {**hyper.advance(state), "count": count, "mu": mu}

    return leafwise("scale_by_muon", init, update, needs="leaf")


def _polynomials(coeffs: Coefficients, steps: int) -> list[tuple[float, ...]]:
    rows = [row if isinstance(row, tuple | list) else () for row in coeffs]
    one = len(coeffs) == 3 and not any(rows)
    if not one and not all(len(row) == 3 for row in rows):
        raise ValueError(f"muon: ns_coeffs is (a, b, c) or a tuple of such, got {coeffs!r}")
    if len(rows) > steps and not one:
        raise ValueError(f"muon: {len(rows)} polynomials in ns_coeffs, but ns_steps={steps}; raise ns_steps")
    return [tuple(coeffs)] * steps if one else [tuple(row) for row in rows]  # type: ignore[arg-type]


def scale_by_shape(consistent_rms: float | None = None) -> Transform:
    """u' = sqrt(max(1, columns / rows)) u for matrices, or consistent_rms * sqrt(max(rows, columns)) u.

    Args:
        consistent_rms: makes the rms of an orthogonal u' this, whatever its shape; 0.2 is about AdamW's.
    """

    def factor(x: torch.Tensor) -> float:
        rows, columns = x.shape
        if consistent_rms is not None:
            return consistent_rms * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, columns / rows)) if rows else 1.0

    def resolve(shapes: Any) -> Transform:
        factors = dict(zip(tree_lib.paths(shapes), map(factor, tree_lib.leaves(shapes)), strict=True))

        def scaled(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return tree_lib.map_with_path(lambda path, u: factors[path] * u, updates), state

        return leafwise("scale_by_shape", lambda params: {}, scaled)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return tree_lib.map(lambda u: factor(u) * u, updates), state

    return dataclasses.replace(leafwise("scale_by_shape", lambda params: {}, update, needs="leaf"), resolve=resolve)


def muon(
    learning_rate: Scalar,
    ns_coeffs: Coefficients | str = STANDARD,
    ns_steps: int = 5,
    beta: Scalar = 0.95,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    adam_b1: Scalar = 0.9,
    adam_b2: Scalar = 0.999,
    adam_eps_root: Scalar = 0.0,
    adam_weight_decay: Scalar = 0.0,
    adam_learning_rate: Scalar | None = None,
    consistent_rms: float | None = None,
) -> Transform:
    """Muon for leaves of two dims, AdamW for the others; Optax's formula and defaults.

    Args:
        learning_rate: a number, or a schedule of the count of applied updates.
        ns_coeffs: see `scale_by_muon`; or the name of a preset, "standard" or "dion".
        weight_decay, weight_decay_mask: of the matrices; the mask is a tree of bools like the params, or a function
            from (abstract, global) params to one.
        adam_learning_rate: of the other leaves; None: `learning_rate`.
        consistent_rms: see `scale_by_shape`.

    >>> tx = muon(0.02, adam_learning_rate=1e-3)
    >>> state = tx.init({"w": torch.zeros(2, 3), "bias": torch.zeros(3)})
    >>> list(state["muon"]["scale_by_muon"]["mu"]), list(state["adam"]["scale_by_adam"]["mu"])
    (['w'], ['bias'])
    """
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in PRESETS:
            raise ValueError(f"muon: ns_coeffs={ns_coeffs!r}; expected one of {sorted(PRESETS)} or numbers")
        ns_coeffs = PRESETS[ns_coeffs]
    matrices = chain(
        scale_by_muon(ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov=nesterov, adaptive=adaptive),
        scale_by_shape(consistent_rms),
        add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_learning_rate(learning_rate),
    )
    others = adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        nesterov=nesterov,
    )
    return partition({"muon": matrices, "adam": others}, _label_by_dims, name="muon")


def _label_by_dims(params: Any) -> Any:
    return tree_lib.map(lambda p: "muon" if p.dim() == 2 else "adam", params)
