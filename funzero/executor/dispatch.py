"""The kernels that the executor uses: the only importer of `funzero_kernels`."""

from collections.abc import Sequence
from typing import Any

import torch

from funzero.transforms.norm import chunk_squares
from funzero_kernels import ops
from funzero_kernels.batch import Batch
from funzero_kernels.checks import FLOATS
from funzero_kernels.ops import UNSCALED, Adam, Draw, Leaf, Lion, Moment, Momentum, Rule, Scale

__all__ = [
    "UNSCALED",
    "Adam",
    "Batch",
    "Draw",
    "Leaf",
    "Lion",
    "Moment",
    "Momentum",
    "Rule",
    "Scale",
    "square_sums",
    "update",
    "update_batch",
]


def update(leaves: Sequence[Leaf], rule: Rule, scale: Scale = UNSCALED, skip: torch.Tensor | None = None) -> None:
    """One update of each leaf in place; none if `skip`, a 0-dim bool, is true."""
    if skip is None or not bool(skip):
        ops.update(leaves, rule, scale)


def update_batch(batch: Batch, *how: Any, skip: torch.Tensor | None) -> None:
    """`batch.update(*how)`; nothing if `skip` is true."""
    if skip is None or not bool(skip):
        batch.update(*how, torch.get_num_threads())


def square_sums(flat: torch.Tensor, chunk: int) -> torch.Tensor:
    """`chunk_squares`, by the kernel where there is one for it: other bits, but as equal for every layout."""
    if flat.device.type != "cpu" or flat.dtype not in FLOATS:
        return chunk_squares(flat, chunk)
    return ops.square_sum(flat, chunk, torch.get_num_threads())
