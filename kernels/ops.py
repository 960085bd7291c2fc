"""The kernels, on whatever device their tensors are: checked, then run at once, or captured as custom ops.

What they compute is written in `reference`, which every backend reproduces; on a CPU bit for bit, on any number of
threads. Tensors that are written must not overlap others of the same call.
"""

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import captured, run
from .reference import UNSCALED, Adam, Draw, Leaf, Lion, Moment, Momentum, Rule, Scale

__all__ = [
    "UNSCALED",
    "Adam",
    "Draw",
    "Leaf",
    "Lion",
    "Moment",
    "Momentum",
    "Rule",
    "Scale",
    "accumulate",
    "square_sum",
    "update",
]


def update(leaves: Sequence[Leaf], rule: Rule, scale: Scale = UNSCALED, threads: int | None = None) -> None:
    """One update of each leaf in place, all in one pass; `reference` says what of.

    Args:
        leaves: shapes, dtypes and devices as `Leaf` and `Moment` say.
        threads: of the CPU; None: torch.get_num_threads().

    Raises: ValueError: names the tensor that has a wrong shape, dtype, device or layout; nothing is written then.
    """
    if not _seen([leaf.param for leaf in leaves]):
        run.update(leaves, rule, scale, threads)
        return
    for leaf in leaves:
        captured.update(leaf, rule, scale, threads)


def square_sum(x: torch.Tensor, chunk: int, threads: int | None = None) -> torch.Tensor:
    """Sums of squares of chunks of `chunk` elements: float64 [ceil(n / chunk)]; the last chunk may be shorter.

    On a CPU a chunk's sum has the same bits on any number of threads, and in any tensor that holds this chunk. An
    element that is not finite makes its sum so.

    Args:
        x: [n], contiguous; float32, bfloat16 or float16.
        threads: of the CPU; None: torch.get_num_threads().

    Raises: ValueError: what is wrong with `x` or `chunk`.
    """
    return captured.square_sum(x, chunk, threads) if _seen([x]) else run.square_sum(x, chunk, threads)


def accumulate(acc: torch.Tensor, grad: torch.Tensor, weight: float = 1.0, threads: int | None = None) -> None:
    """acc = acc + weight * grad in place, in float32, each operation rounded once.

    Args:
        acc: [n] float32, contiguous. grad: [n], float32, bfloat16 or float16, contiguous, on the same device.
        threads: of the CPU; None: torch.get_num_threads().

    Raises: ValueError: what is wrong with `acc` or `grad`.
    """
    go = captured.accumulate if _seen([acc, grad]) else run.accumulate
    go(acc, grad, weight, threads)


def _seen(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether something other than plain execution must see the calls: a compiler, a mode, or a class of tensors."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    return any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors)
