"""The kernels that the executor uses: the only importer of `funzero_kernels`."""

from collections.abc import Sequence

import torch

from funzero_kernels import reference
from funzero_kernels.reference import UNSCALED, Adam, Draw, Leaf, Lion, Moment, Momentum, Rule, Scale

__all__ = ["UNSCALED", "Adam", "Draw", "Leaf", "Lion", "Moment", "Momentum", "Rule", "Scale", "update"]


def update(leaves: Sequence[Leaf], rule: Rule, scale: Scale = UNSCALED, skip: torch.Tensor | None = None) -> None:
    """One update of each leaf in place; none if `skip`, a 0-dim bool, is true."""
    if skip is None or not bool(skip):
        reference.update(leaves, rule, scale)
