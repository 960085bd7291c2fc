"""Donation: the storage of the old state is used for the new one, and the old leaves raise when touched.

[Note: who may write] A leaf's storage is reused only if no other tensor or storage object refers to it; otherwise the
leaf is copied. That is local memory only: no collective depends on it, so ranks may differ.
"""

from collections.abc import Iterable
from typing import Any

import torch

from funzero import _compat
from funzero.core.errors import DonatedError, SpentStateError


class _Donated(torch.Tensor):
    """What a donated leaf becomes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise DonatedError(
            "this leaf was donated to step(); use the state that step returned, or make_step(donate=False)"
        )


class _Spent(torch.Tensor):
    """What the leaves of a state become when a step fails after they have changed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise SpentStateError(
            "this state is spent: a step failed after this leaf had changed, so the state is a mixture of two steps; "
            "restore a checkpoint"
        )


def poison(leaves: Iterable[torch.Tensor], *, spent: bool = False) -> None:
    """Makes leaves raise on use."""
    kind = _Spent if spent else _Donated
    for leaf in leaves:
        leaf.__class__ = kind


def check_usable(leaf: torch.Tensor) -> None:
    """Raises for a leaf that was donated or is spent."""
    if isinstance(leaf, _Donated | _Spent):
        type(leaf).__torch_function__(None, ())


def make_writable(leaves: list[torch.Tensor], places: list[int], donate: bool) -> None:
    """Replaces leaves by new ones that may be written to: on the same storage if it may be reused, else copies."""
    if not donate:
        for i in places:
            leaves[i] = leaves[i].clone()
        return
    users, most = _compat.storage_use_count, _compat.UNSHARED
    for i in places:
        leaf = leaves[i]
        leaves[i] = leaf.data if users(leaf.untyped_storage()._cdata) <= most else leaf.clone()


def private(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same gradients, each on memory that nothing else refers to: autograd may hand out one tensor twice."""
    seen: set[int] = set()
    out = []
    for x in leaves:
        out.append(x.clone() if id(x) in seen or _compat.storage_is_shared(x) else x)
        seen.add(id(x))
    return out
