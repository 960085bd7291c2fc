"""Adafactor: second moments kept as the means of the rows and of the columns of their matrix.

G = |g|^2 + eps,  b = 1 - (t + 1 - step_offset)^-decay_rate  (t updates applied so far)
r' = b r + (1 - b) mean_col(G),  c' = b c + (1 - b) mean_row(G),  u = g / sqrt(r' c' / mean(r'))
Leaves that are not factored keep v' = b v + (1 - b) G,  u = g / sqrt(v').

References: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.average import ema
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import add_decayed_weights, scale, scale_by_learning_rate
from funzero.transforms.block import clip_by_block_rms, scale_by_param_block_rms
from funzero.transforms.chain import chain
from funzero.transforms.moments import columns, counts, increment

MOMENTS = ("v_row", "v_col", "v")


def factored_dims(shape: torch.Size, min_size: int) -> tuple[int, int] | None:
    """The second largest and the largest dim, if both have `min_size` elements; of equal dims the last counts as larger."""
    order = sorted(range(len(shape)), key=lambda d: shape[d])
    return (order[-2], order[-1]) if len(shape) > 1 and shape[order[-2]] >= min_size else None


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: Scalar = 0.8,
    step_offset: Scalar = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: Scalar = 1e-30,
) -> Transform:
    """u = g / sqrt(second moment), factored over the two largest dims; see the equations of this module.

    The state holds `v_row`, `v_col` and `v` for each leaf, of which those that it does not use have no elements, and an
    int32 `count`. Rows and columns are whole on every rank. The decay b is worked out in float64 (Optax: float32).

    Args:
        factored: False keeps a second moment for each element.
        min_dim_size_to_factor: leaves whose second largest dim is smaller are not factored.

    >>> state = scale_by_factored_rms(min_dim_size_to_factor=2).init({"w": torch.zeros(2, 3)})
    >>> [tuple(state[k]["w"].shape) for k in ("v_row", "v_col", "v")]
    [(2,), (3,), (0,)]
    """
    given = {"decay_rate": decay_rate, "step_offset": step_offset, "epsilon": epsilon}
    hyper = Hyperparams(given, count="schedule_count")

    def dims_of(x: torch.Tensor) -> tuple[int, int] | None:
        return factored_dims(x.shape, min_dim_size_to_factor) if factored else None

    def start(p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dims, none = dims_of(p), p.new_zeros(0)
        if dims is None:
            return none, p.new_zeros(0), torch.zeros_like(p)
        row, col = ([n for d, n in enumerate(p.shape) if d != gone] for gone in reversed(dims))
        return p.new_zeros(row), p.new_zeros(col), none

    def init(params: Any) -> Any:
        return {
            **hyper.init(params),
            "count": counts(params),
            **columns(MOMENTS, [start(p) for p in tree_lib.leaves(params)], params),
        }

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        trees = [tree_lib.leaves(tree) for tree in (updates, *(state[k] for k in MOMENTS), state["count"])]
        made: list[tuple[torch.Tensor, ...]] = []
        for g, row, col, v, count in zip(*trees, strict=True):
            b = 1 - (count.double() + 1 - h["step_offset"]) ** -h["decay_rate"]
            squares, dims = g.conj() * g + h["epsilon"], dims_of(g)
            if dims is None:
                v = b * v + (1 - b) * squares
                made.append((g * v.rsqrt(), row, col, v))
                continue
            small, large = dims
            row = b * row + (1 - b) * squares.mean(large)
            col = b * col + (1 - b) * squares.mean(small)
            ratio = row / row.mean(small - (small > large), keepdim=True)
            made.append((g * ratio.rsqrt().unsqueeze(large) * col.rsqrt().unsqueeze(small), row, col, v))
        named = columns(("out", *MOMENTS), made, updates)
        return named.pop("out"), {**hyper.advance(state), "count": increment(state["count"]), **named}

    return leafwise("scale_by_factored_rms", init, update, needs="leaf")


def adafactor(
    learning_rate: Scalar | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: Scalar = 0.8,
    decay_offset: Scalar = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Scalar | None = 1.0,
    momentum: Scalar | None = None,
    dtype_momentum: torch.dtype = torch.float32,
    *,
    weight_decay_rate: Scalar | None = None,
    eps: Scalar = 1e-30,
    factored: bool = True,
    weight_decay_mask: Any = None,
) -> Transform:
    """Adafactor; Optax's formula and defaults.

    Args:
        learning_rate: a number, a schedule of the count of applied updates, or None for no such factor.
        min_dim_size_to_factor: leaves whose second largest dim is smaller keep a second moment for each element.
        decay_offset: the count of updates at which fine-tuning began.
        multiply_by_parameter_scale: the step of a leaf is relative to max(rms(p), 1e-3).
        clipping_threshold: largest rms of a leaf's direction; None for no clip.
        momentum: decay of an average of the updates, of `dtype_momentum`; None for no average.
        weight_decay_rate: subtracted as weight_decay_rate * p, not multiplied by the learning rate; None for no decay.

    >>> sorted(adafactor(1e-3).init({"w": torch.zeros(200, 300)}))[-2:]
    ['scale_by_learning_rate', 'scale_by_param_block_rms']
    """
    parts = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold))
    if learning_rate is not None:
        parts.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    if momentum is not None:
        parts.append(ema(momentum, debias=False, accumulator_dtype=dtype_momentum))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*parts, scale(-1.0), name="adafactor")
