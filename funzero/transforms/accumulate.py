"""Accumulation: sums of gradients over micro-batches, and their division by the sum of weights."""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.state import EMPTY_NODE, Accumulator
from funzero.transforms.losses import Loss, Sum


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 or the leaf's dtype, whichever is wider."""
    return torch.promote_types(dtype, torch.float32)


def accumulate(acc: Any, grads: Any, weight: Any = 1, *, loss: Loss | None = None) -> Accumulator:
    """Adds the gradient of one micro-batch; never communicates.

    Args:
        acc: an `Accumulator`, or `()` to begin.
        grads: undivided gradients (tree; `None` where a leaf got none), summed in float32 or wider.
        weight: what this micro-batch counts; taken from `loss` when that is given.
        loss: its total and aux are summed too.

    Returns: a new accumulator; a leaf that never got a gradient holds `None` and is marked unused.
    """
    if loss is not None:
        weight = 1 if loss.weight is None else loss.weight
    names, given = tree_lib.flatten_with_none(grads)
    device = next((g.device for g in given if g is not None), torch.device("cpu"))
    used = torch.tensor([g is not None for g in given], dtype=torch.uint8)
    scalar = torch.as_tensor(weight, dtype=torch.float64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device) if loss is None else loss.total.to(torch.float64)
    aux = EMPTY_NODE if loss is None else weigh_aux(loss.aux, scalar)
    one = torch.ones((), dtype=torch.int32)
    if acc is None or acc == EMPTY_NODE:
        sums = {n: None if g is None else _widen(g) for n, g in zip(names, given, strict=True)}
        return Accumulator(_rebuilt(grads, sums), scalar, total, aux, one, used)
    old = dict(zip(*tree_lib.flatten_with_none(acc.grads), strict=True))
    if list(old) != names:
        raise ValueError(
            f"accumulate: the gradients have other leaves than the accumulator, at {sorted(set(old) ^ set(names))[:3]}"
        )
    sums = {n: _add(old[n], g) for n, g in zip(names, given, strict=True)}
    return Accumulator(
        _rebuilt(grads, sums),
        acc.weight + scalar,
        acc.loss + total,
        tree_lib.map(torch.add, acc.aux, aux),
        acc.times + one,
        torch.maximum(acc.used, used),
    )


def _widen(grad: torch.Tensor) -> torch.Tensor:
    """In the accumulation dtype, and never the caller's own tensor, which may change."""
    return grad.to(accumulation_dtype(grad.dtype), copy=True)


def _add(old: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None:
        return old
    return _widen(grad) if old is None else old + grad.to(accumulation_dtype(grad.dtype))


def _rebuilt(like: Any, by_path: dict[str, Any]) -> Any:
    return tree_lib.map_with_path_and_none(lambda path, _: by_path[path], like)


def weigh_aux(aux: Any, weight: torch.Tensor | int) -> Any:
    """Extras as float64 sums: times the weight, except below `Sum`."""

    def one(value: Any) -> Any:
        if isinstance(value, Sum):
            return Sum(torch.as_tensor(value.value).detach().to(torch.float64))
        return torch.as_tensor(value).detach().to(torch.float64) * weight

    return tree_lib.map_until(Sum, one, aux)


def mean_aux(aux: Any, weight: torch.Tensor) -> Any:
    """Extras as reported: sums divided by the weight, and what `Sum` marks as it is."""
    return tree_lib.map_until(Sum, lambda x: x.value if isinstance(x, Sum) else x / weight, aux)


def finalize(acc: Accumulator, *, reduction: str = "mean") -> Any:
    """The gradients of the window: sums divided by the sum of weights; never communicates.

    Args:
        reduction: "mean", or "sum" to divide by nothing.

    Returns: tree of gradients, `None` for leaves that got none. With a weight of 0 the sums come back undivided.
    """
    divisor = torch.where(acc.weight == 0, torch.ones_like(acc.weight), acc.weight)
    if reduction == "sum":
        return acc.grads
    return tree_lib.map(lambda g: (g / divisor.to(g.device)).to(g.dtype), acc.grads)
