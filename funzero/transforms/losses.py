"""Losses: what a loss function returns, and cross entropy as a sum with its count."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from funzero.core import tree as tree_lib
from funzero.core.tree import node


@node
class Loss:
    """What `loss_fn` may return in place of a 0-dim tensor.

    Attributes:
        total: 0-dim, the sum over this micro-batch that is differentiated.
        weight: what the sum is divided by over all micro-batches and batch ranks (such as a count of tokens);
            `None`: every micro-batch counts 1.
        aux: tree of 0-dim extras, reported as means by weight; `Sum(x)` leaves are added.
        buffers: the new buffers, if the loss function took `buffers`.
    """

    total: torch.Tensor
    weight: torch.Tensor | None = None
    aux: Any = dataclasses.field(default_factory=dict)
    buffers: Any = None


@dataclasses.dataclass(frozen=True)
class Sum:
    """Marks an extra (a leaf of `Loss.aux`) that is added over micro-batches and ranks rather than averaged."""

    value: Any


_SUM_ENTRY = "+"  # the entry of the value in a path, so that a path tells a Sum from a dict
tree_lib.register(Sum, lambda s: ([s.value], (), (_SUM_ENTRY,)), lambda _, values: Sum(*values))


def aux_of_paths(by_path: Mapping[str, torch.Tensor]) -> Any:
    """A tree of extras rebuilt from its paths, as nested dicts."""
    root: dict[str, Any] = {}
    for path, leaf in by_path.items():
        entries = path.split("/")
        value: Any = leaf
        if entries[-1] == _SUM_ENTRY:
            value = Sum(leaf)
            entries.pop()
        place = root
        for entry in entries[:-1]:
            place = place.setdefault(entry, {})
        place[entries[-1]] = value
    return root


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy summed over all positions, and how many there were.

    Args:
        logits: [..., classes], any float dtype; the sum is in float32 or wider.
        labels: [...] int64; positions that hold `ignore_index` do not count.

    Returns: (sum, 0-dim float; count, 0-dim int64).

    >>> total, count = cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
    >>> int(count), round(float(total), 4)
    (2, 2.7726)
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"cross_entropy: logits {list(logits.shape)} need labels {list(logits.shape[:-1])}, got {list(labels.shape)}"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=ignore_index, reduction="sum")
    return total, (labels != ignore_index).sum()
