"""Transforms that look at a leaf as a whole: at its norm, its root mean square, its means.

rms(x) = sqrt(sum |x_i|^2 / n). Sums run in float64 over all n elements of the whole leaf: `reduce(path, x)` adds what the
ranks that share a leaf have found.

References: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018; You et al., "Large
Batch Training of Convolutional Networks", 2017; Yong et al., "Gradient Centralization: A New Optimization Technique for
Deep Neural Networks", 2020.
"""

from collections.abc import Callable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Reduce, Scalar, Transform, leafwise, need_params, unshared
from funzero.transforms.norm import chunk_squares


def square_sum(x: torch.Tensor) -> torch.Tensor:
    """sum |x_i|^2 of a tensor: 0-dim float64."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    return chunk_squares(flat, max(1, flat.numel())).sum()


def rms(path: str, x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """The root mean square of the whole leaf that `x` is a piece of: 0-dim float64."""
    total = square_sum(x)
    squares, count = reduce(path, torch.stack([total, total.new_tensor(x.numel())])).unbind()
    return (squares / count).sqrt()


def map_leaves(fn: Callable[..., torch.Tensor], updates: Any, params: Any) -> Any:
    """Applies `fn(path, u, p)` to each leaf."""
    names, found, treedef = tree_lib.flatten_with_paths(updates)
    return tree_lib.unflatten(
        treedef, [fn(n, u, p) for n, u, p in zip(names, found, tree_lib.leaves(params), strict=True)]
    )


def clip_by_block_rms(threshold: Scalar) -> Transform:
    """u' = u / max(1, rms(u) / threshold), for each leaf.

    >>> import torch
    >>> tx, g = clip_by_block_rms(1.0), {"w": torch.tensor([3.0, 3.0])}
    >>> tx.update(g, tx.init(g))[0]["w"]
    tensor([1., 1.])
    """
    hyper = Hyperparams({"threshold": threshold})

    def update(updates: Any, state: Any, params: Any = None, *, reduce: Reduce = unshared) -> tuple[Any, Any]:
        limit = hyper.read(state)["threshold"]

        def clip(path: str, u: torch.Tensor) -> torch.Tensor:
            excess: torch.Tensor = rms(path, u, reduce) / limit
            return u / excess.clamp(min=1.0)

        return tree_lib.map_with_path(clip, updates), hyper.advance(state)

    return leafwise("clip_by_block_rms", hyper.init, update, needs="norm")


def scale_by_param_block_rms(min_scale: Scalar = 1e-3) -> Transform:
    """u' = u * max(rms(p), min_scale), for each leaf.

    >>> import torch
    >>> tx, p = scale_by_param_block_rms(), {"w": torch.tensor([2.0, 2.0])}
    >>> tx.update({"w": torch.ones(2)}, tx.init(p), p)[0]["w"]
    tensor([2., 2.])
    """
    hyper = Hyperparams({"min_scale": min_scale})

    def update(updates: Any, state: Any, params: Any = None, *, reduce: Reduce = unshared) -> tuple[Any, Any]:
        need_params(params, "scale_by_param_block_rms")
        least = hyper.read(state)["min_scale"]

        def scale(path: str, u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            size = rms(path, p, reduce)
            return u * torch.where(size <= least, least, size)

        return map_leaves(scale, updates, params), hyper.advance(state)

    return leafwise("scale_by_param_block_rms", hyper.init, update, needs="norm")


def scale_by_trust_ratio(min_norm: Scalar = 0.0, trust_coefficient: Scalar = 1.0, eps: Scalar = 0.0) -> Transform:
    """u' = u * trust_coefficient * |p| / (|u| + eps), for each leaf; u' = u where |p| or |u| is 0.

    Args:
        min_norm: smaller norms count as this.

    >>> import torch
    >>> tx, p = scale_by_trust_ratio(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update({"w": torch.tensor([0.0, 0.5])}, tx.init(p), p)[0]["w"]
    tensor([0., 5.])
    """
    hyper = Hyperparams({"min_norm": min_norm, "trust_coefficient": trust_coefficient, "eps": eps})

    def update(updates: Any, state: Any, params: Any = None, *, reduce: Reduce = unshared) -> tuple[Any, Any]:
        need_params(params, "scale_by_trust_ratio")
        h = hyper.read(state)

        def scale(path: str, u: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            norms = reduce(path, torch.stack([square_sum(p), square_sum(u)])).sqrt()
            size, step = torch.where(norms <= h["min_norm"], h["min_norm"], norms).unbind()
            ratio = h["trust_coefficient"] * size / (step + h["eps"])
            return u * torch.where((size == 0) | (step == 0), 1.0, ratio)

        return map_leaves(scale, updates, params), hyper.advance(state)

    return leafwise("scale_by_trust_ratio", hyper.init, update, needs="norm")


def centralize() -> Transform:
    """u' = u - mean(u) over all dims but the first, for leaves of two dims and more.

    >>> import torch
    >>> tx, g = centralize(), {"w": torch.tensor([[1.0, 3.0], [0.0, 4.0]])}
    >>> tx.update(g, tx.init(g))[0]["w"]
    tensor([[-1.,  1.],
            [-2.,  2.]])
    """

    def center(u: torch.Tensor) -> torch.Tensor:
        return u - u.mean(tuple(range(1, u.dim())), keepdim=True) if u.dim() > 1 else u

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return tree_lib.map(center, updates), state

    return leafwise("centralize", lambda params: {}, update, needs="leaf")
