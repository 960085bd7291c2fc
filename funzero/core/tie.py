"""Tied leaves in trees made by hand: one leaf, seen under several paths."""

from collections.abc import Iterable, Mapping
from typing import Any

from funzero.core import tree as tree_lib


class Tied(dict[str, Any]):
    """A dict in which some leaves are the same tensor as others; as a tree it has each leaf once, see `tie`."""

    def __init__(self, values: Mapping[str, Any], aliases: tuple[tuple[str, str], ...]):
        super().__init__(values)
        self.aliases = aliases


def tie(params: Mapping[str, Any], aliases: Mapping[str, str]) -> Tied:
    """A params tree in which the leaf at each alias is the one at another path.

    The alias has no gradient, moment or checkpoint entry of its own. Inside the loss function both paths give the same
    tensor, so its gradient is the sum of both uses.

    Args:
        params: nested dicts of tensors; what it holds at an alias is dropped.
        aliases: {alias path: path of the leaf}.

    Raises ValueError for a path that is not there.

    >>> import torch
    >>> tree_lib.paths(tie({"head": torch.ones(2), "tok": torch.ones(2)}, {"head": "tok"}))
    ['tok']
    """
    names = tree_lib.paths(params)
    for alias, path in aliases.items():
        if path not in names or path in aliases:
            raise ValueError(f"tie: {alias!r} is tied to {path!r}, which is not a leaf; the leaves are {names[:6]}")
    return _fill(dict(params), tuple(sorted(aliases.items())))


def _fill(values: dict[str, Any], aliases: tuple[tuple[str, str], ...]) -> Tied:
    """Writes each alias into copies of the dicts on its way."""
    by_path = dict(zip(*tree_lib.flatten_with_paths(values)[:2], strict=True))
    for alias, path in aliases:
        *outer, last = alias.split("/")
        place = values
        for entry in outer:
            place[entry] = dict(place.get(entry, {}))
            place = place[entry]
        place[last] = by_path.get(path, ())
    return Tied(values, aliases)


def _flatten(tied: Tied) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
    hidden = {alias for alias, _ in tied.aliases}
    shown = tree_lib.prune(dict(tied), hidden.__contains__)
    keys = tuple(sorted(shown))
    return [shown[k] for k in keys], (keys, tied.aliases), keys


def _unflatten(context: tuple[Any, ...], children: Iterable[Any]) -> Tied:
    keys, aliases = context
    return _fill(dict(zip(keys, children, strict=True)), aliases)


tree_lib.register(Tied, _flatten, _unflatten)
