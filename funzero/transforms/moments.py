"""Moving averages of gradients: what the optimizers of the Adam family share.

m' = decay * m + (1 - decay) * x; started at 0 and divided by 1 - decay^t, it is an average with weights that sum to 1.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib


def counts(params: Any) -> Any:
    """An int32 zero for each leaf: a leaf that takes no part in an update keeps its own count."""
    return tree_lib.map(lambda p: p.new_zeros((), dtype=torch.int32), params)


def zeros(params: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros like the params; `dtype`: another than theirs."""
    return tree_lib.map(lambda p: torch.zeros_like(p, dtype=dtype), params)


def full(params: Any, value: float) -> Any:
    """Leaves like the params, all of one value."""
    return tree_lib.map(lambda p: torch.full_like(p, float(value)), params)


def increment(count: Any) -> Any:
    """count + 1."""
    return tree_lib.map(lambda t: t + 1, count)


def first_moment(x: Any, m: Any, decay: Any) -> Any:
    """decay * m + (1 - decay) * x."""
    return tree_lib.map(lambda new, old: decay * old + (1 - decay) * new, x, m)


def second_moment(x: Any, v: Any, decay: Any) -> Any:
    """decay * v + (1 - decay) * |x|^2; of a complex leaf the squared modulus, kept complex as in Optax."""
    return tree_lib.map(lambda new, old: decay * old + (1 - decay) * modulus2(new), x, v)


def modulus2(x: torch.Tensor) -> torch.Tensor:
    """|x|^2 in the dtype of `x`."""
    return x.conj() * x


def debias(m: Any, decay: Any, count: Any) -> Any:
    """m / (1 - decay^t), with the count t of each leaf after its update."""
    return tree_lib.map(lambda x, t: x / (1 - decay**t), m, count)


def columns(names: tuple[str, ...], rows: list[tuple[torch.Tensor, ...]], like: Any) -> dict[str, Any]:
    """One tree like `like` for each name, from rows with one value for each name."""
    treedef = tree_lib.structure(like)
    return {name: tree_lib.unflatten(treedef, [row[i] for row in rows]) for i, name in enumerate(names)}


def is_zero(value: Any) -> bool:
    """True for the number 0, which needs no leaf and no arithmetic; False for tensors and schedules."""
    return isinstance(value, int | float) and value == 0
