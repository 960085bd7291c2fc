"""Compositions of transforms."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from funzero.core import tree as tree_lib
from funzero.transforms.base import Transform, skip_missing

Mask = Any


def call_directly(part: Transform, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """How composites run their parts when every leaf is whole."""
    return part.update(updates, state, params)


def part_names(parts: tuple[Transform, ...]) -> tuple[str, ...]:
    """The entries of a chain's state: the transforms' names, repeats numbered from 1."""
    seen: dict[str, int] = {}
    names = []
    for part in parts:
        count = seen.get(part.name, 0)
        seen[part.name] = count + 1
        names.append(f"{part.name}_{count}" if count else part.name)
    return tuple(names)


def chain(*parts: Transform, name: str = "chain") -> Transform:
    """Applies transforms one after the other.

    Returns: a transform whose state is a dict with one entry for each part, named after it.

    >>> import torch
    >>> import funzero as fz
    >>> tx = fz.chain(fz.scale_by_adam(), fz.scale_by_learning_rate(1e-3))
    >>> sorted(tx.init({"w": torch.zeros(2)}))
    ['scale_by_adam', 'scale_by_learning_rate']
    """
    names = part_names(parts)

    def init(params: Any) -> Any:
        return {n: p.init(params) for n, p in zip(names, parts, strict=True)}

    def update(updates: Any, state: Any, params: Any = None, *, call: Any = call_directly) -> tuple[Any, Any]:
        new = {}
        for n, part in zip(names, parts, strict=True):
            updates, new[n] = call(part, updates, state[n], params)
        return updates, new

    return Transform(
        init,
        skip_missing(update, init),
        needs="element",
        quantum=_common_quantum(parts),
        name=name,
        parts=parts,
        resolve=lambda shapes: chain(*(resolved(p, shapes) for p in parts), name=name),
        separate=all(p.separate for p in parts),
    )


def _common_quantum(parts: tuple[Transform, ...]) -> int:
    quanta = {p.quantum for p in parts}
    largest = max(quanta, default=1)
    if any(largest % q for q in quanta):
        raise ValueError(f"the quanta {sorted(quanta)} of these transforms do not divide one another")
    return largest


def resolved(tx: Transform, shapes: Any) -> Transform:
    """`tx` with its masks and labels evaluated on abstract global shapes."""
    return tx.resolve(shapes) if tx.resolve is not None else tx


def mask_paths(mask: Mask, params: Any) -> frozenset[str]:
    """The paths at which a mask is True.

    Args:
        mask: a tree of bools with the structure of `params`, or a function from params to one.

    Raises ValueError when the mask has other leaves than `params`.
    """
    values = mask(params) if callable(mask) else mask
    names, flags, _ = tree_lib.flatten_with_paths(values)
    missing = sorted(set(tree_lib.paths(params)) - set(names))
    if missing:
        raise ValueError(f"mask: its leaves are not those of params; it has no entry for {missing[:3]}")
    wrong = [n for n, f in zip(names, flags, strict=True) if not isinstance(f, bool)]
    if wrong:
        raise TypeError(f"mask: {wrong[0]} must be True or False")
    return frozenset(n for n, f in zip(names, flags, strict=True) if f)


def masked(inner: Transform, mask: Mask) -> Transform:
    """Applies `inner` to the leaves where `mask` is True; the updates of the others pass through.

    Args:
        mask: tree of bools with the structure of params, or a function from params to one (global shapes).
    """
    made = partition({"masked": inner, "rest": None}, _labels_of_mask(mask), name=f"masked_{inner.name}")

    def resolve(shapes: Any) -> Transform:
        kept = mask_paths(mask, shapes)
        fixed = resolved(inner, tree_lib.prune(shapes, lambda path: path not in kept))
        return dataclasses.replace(resolved(made, shapes), fused=("masked", (fixed, kept)))

    return dataclasses.replace(made, resolve=resolve)


def _labels_of_mask(mask: Mask) -> Callable[[Any], Any]:
    def labels(params: Any) -> Any:
        kept = mask_paths(mask, params)
        return tree_lib.map_with_path(lambda path, _: "masked" if path in kept else "rest", params)

    return labels


def partition(transforms: Mapping[str, Transform | None], labels: Any, *, name: str = "partition") -> Transform:
    """Applies to each leaf the transform of its label.

    Args:
        transforms: by label; None lets the updates pass. A label may have no leaf.
        labels: tree of labels with the structure of params, or a function from params to one (global shapes).

    Raises ValueError for a label without a transform.
    """
    active = {k: t for k, t in transforms.items() if t is not None}

    def paths_by_label(params: Any) -> dict[str, frozenset[str]]:
        names, found, _ = tree_lib.flatten_with_paths(labels(params) if callable(labels) else labels)
        by_path = dict(zip(names, found, strict=True))
        for path in tree_lib.paths(params):
            if by_path.get(path) not in transforms:
                raise ValueError(
                    f"partition: {path} has label {by_path.get(path)!r}; expected one of {sorted(transforms)}"
                )
        return {k: frozenset(p for p, label in by_path.items() if label == k) for k in active}

    def only(tree: Any, kept: frozenset[str]) -> Any:
        return tree_lib.prune(tree, lambda path: path not in kept)

    def init(params: Any) -> Any:
        return {k: active[k].init(only(params, kept)) for k, kept in paths_by_label(params).items()}

    def update(updates: Any, state: Any, params: Any = None, *, call: Any = call_directly) -> tuple[Any, Any]:
        new = {}
        for k, kept in paths_by_label(updates if params is None else params).items():
            part = None if params is None else only(params, kept)
            changed, new[k] = call(active[k], only(updates, kept), state[k], part)
            updates = tree_lib.graft(updates, changed)
        return updates, new

    def resolve(shapes: Any) -> Transform:
        groups = paths_by_label(shapes)
        fixed = {k: resolved(t, only(shapes, groups[k])) for k, t in active.items()}
        rest = {k: None for k, t in transforms.items() if t is None}
        by_path = {p: k for k, paths in groups.items() for p in paths}
        other = next(iter(rest), None)

        def frozen_labels(params: Any) -> Any:
            return tree_lib.map_with_path(lambda path, _: by_path.get(path, other), params)

        return partition({**fixed, **rest}, frozen_labels, name=name)

    return Transform(
        init,
        skip_missing(update, init),
        needs="element",
        quantum=_common_quantum(tuple(active.values())),
        name=name,
        parts=tuple(active.values()),
        resolve=resolve,
        separate=all(t.separate for t in active.values()),
    )
