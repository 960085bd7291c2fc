"""Trees: nested containers with tensors at their leaves, addressed by path strings.

optree does the work, in the namespace "funzero". Dicts are walked in sorted order of their keys, as in JAX, so two
ranks that fill a dict in another order still agree. `None` is no leaf: it is an empty node.
"""

import contextlib
import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

import optree
import torch

from funzero import _compat

NAMESPACE = "funzero"
Tree = Any
T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A field of a node that is metadata and not a child; it must be hashable."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def node(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass that optree and torch's pytree both know as a container of its fields."""
    final = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(final)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(tree: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(tree, f) for f in children], tuple(getattr(tree, f) for f in statics)

    def build(context: tuple[Any, ...], values: Iterable[Any]) -> Any:
        return final(**dict(zip(children, values, strict=True)), **dict(zip(statics, context, strict=True)))

    register(final, lambda tree: (*flatten(tree), children), build, optree.GetAttrEntry)
    return final


def register(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], tuple[Any, ...], tuple[str, ...]]],
    build: Callable[[tuple[Any, ...], Iterable[Any]], Any],
    entry: type = optree.MappingEntry,
) -> None:
    """Makes `cls` a node of both pytrees.

    Args:
        flatten: node -> (children, hashable metadata, name of each child). build: (metadata, children) -> node.
    """
    optree.register_pytree_node(cls, flatten, build, path_entry_type=entry, namespace=NAMESPACE)  # type: ignore[arg-type]
    _compat.register_in_torch_pytree(
        cls,
        lambda tree: flatten(tree)[:2],
        lambda values, context: build(context, values),
        lambda tree: flatten(tree)[2],
    )


def flatten(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of `tree` in canonical order, and its structure."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def flatten_as(tree: Tree, treedef: optree.PyTreeSpec | None) -> tuple[list[Any], optree.PyTreeSpec]:
    """`flatten`, in a fifth of the time for a tree of tensors that has this structure: no keys are sorted."""
    if treedef is not None:
        with contextlib.suppress(ValueError):
            found = treedef.flatten_up_to(tree)
            if all(issubclass(kind, torch.Tensor) for kind in {type(x) for x in found}):  # and no container or None
                return found, treedef
    return flatten(tree)


def unflatten(treedef: optree.PyTreeSpec, leaves: Iterable[Any]) -> Tree:
    """The inverse of `flatten`."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of `tree` in canonical order."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def map_until(stop: type, fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Applies `fn` to each leaf and to each node of type `stop`, which it replaces."""
    return optree.tree_map(fn, tree, is_leaf=lambda x: isinstance(x, stop), namespace=NAMESPACE)


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies `fn` to each leaf of `tree` and the leaves at the same places of `rest`; returns a tree like the first."""
    return optree.tree_map(fn, tree, *rest, namespace=NAMESPACE)


def structure(tree: Tree) -> optree.PyTreeSpec:
    """The structure of `tree` without its leaves; comparable and hashable."""
    return optree.tree_structure(tree, namespace=NAMESPACE)


def escape(entry: Any) -> str:
    """One entry of a path as text, with `/` and `%` percent-escaped."""
    return str(entry).replace("%", "%25").replace("/", "%2F")


def flatten_with_paths(tree: Tree) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """Paths such as `opt_state/scale_by_adam/mu/w`, leaves, structure."""
    entries, found, treedef = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    return ["/".join(escape(e) for e in path) for path in entries], found, treedef


def paths(tree: Tree) -> list[str]:
    """The path of each leaf, in the order of `leaves`."""
    return flatten_with_paths(tree)[0]


def map_with_path(fn: Callable[..., Any], tree: Tree) -> Tree:
    """Applies `fn(path, leaf)` to each leaf."""
    names, found, treedef = flatten_with_paths(tree)
    return unflatten(treedef, [fn(n, x) for n, x in zip(names, found, strict=True)])


def containers(tree: Tree) -> dict[str, str]:
    """{path: kind} of each container, such as "dict", "list" or the name of a class; `None` is a "NoneType"."""
    out: dict[str, str] = {}

    def walk(spec: optree.PyTreeSpec, path: str) -> None:
        if spec.type is not None:
            out[path] = "dict" if issubclass(spec.type, dict) else spec.type.__name__
            for entry, child in zip(spec.entries(), spec.children(), strict=True):
                walk(child, f"{path}/{escape(entry)}" if path else escape(entry))

    walk(structure(tree), "")
    return out


def prefix_path(prefix: str, path: str) -> str:
    """Joins two paths, either of which may be empty."""
    return f"{prefix}/{path}" if prefix and path else prefix or path


@functools.singledispatch
def show(tree: Tree) -> str:
    """A table with a line for each leaf: path, dtype and shape, layout, memory.

    Takes `StateSpecs`, `Specs`, a `TrainState`, or any tree of tensors.
    """
    names, found, _ = flatten_with_paths(tree)
    return table([(n or ".", describe(x)) for n, x in zip(names, found, strict=True)])


def describe(leaf: Any) -> str:
    """A leaf in short, such as `float32[768,256]`."""
    if isinstance(leaf, torch.Tensor):
        return dtype_and_shape(leaf.dtype, tuple(leaf.shape))
    return repr(leaf)


def dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """`float32[768,256]`."""
    return f"{str(dtype).removeprefix('torch.')}[{','.join(str(n) for n in shape)}]"


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows of text with their columns aligned."""
    if not rows:
        return "(no leaves)"
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


@functools.lru_cache(maxsize=1024)
def glob_pattern(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression: `*` stops at `/` and `.`, `**` does not, and `**.` or `**/` may match nothing."""
    out, i = "", 0
    while i < len(glob):
        if glob.startswith(("**.", "**/"), i):
            out, i = out + f"(?:.*{re.escape(glob[i + 2])})?", i + 3
        elif glob.startswith("**", i):
            out, i = out + ".*", i + 2
        elif glob[i] == "*":
            out, i = out + "[^/.]*", i + 1
        else:
            out, i = out + re.escape(glob[i]), i + 1
    return re.compile(out)


def match_globs(globs: Iterable[str], names: list[str], what: str, kind: str = "leaf") -> list[str | None]:
    """For each name the last glob that matches it, or None.

    Raises ValueError for a glob that matches no name, with the names that come nearest.
    """
    result: list[str | None] = [None] * len(names)
    for glob in globs:
        pattern = glob_pattern(glob)
        hits = [i for i, name in enumerate(names) if pattern.fullmatch(name)]
        if not hits:
            near = difflib.get_close_matches(glob, names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"{what}: {glob!r} matches no {kind}; near it are {near} (`*` stops at '/' and '.', `**` does not)"
            )
        for i in hits:
            result[i] = glob
    return result


def prune(tree: Tree, drop: Callable[[str], bool]) -> Tree:
    """`tree` without the leaves whose path `drop` accepts: dict keys go, other containers hold `()` in their place."""

    def walk(sub: Tree, path: str) -> Tree:
        if optree.tree_is_leaf(sub, namespace=NAMESPACE):
            return _DROPPED if drop(path) else sub
        children, metadata, entries, rebuild = optree.tree_flatten_one_level(sub, namespace=NAMESPACE)
        kept = [walk(c, prefix_path(path, escape(e))) for c, e in zip(children, entries, strict=True)]
        if type(sub) is dict:
            return {e: c for e, c in zip(entries, kept, strict=True) if c is not _DROPPED}
        filled: list[Any] = [() if c is _DROPPED else c for c in kept]
        return rebuild(metadata, filled)

    result = walk(tree, "")
    return () if result is _DROPPED else result


_DROPPED = object()


def graft(whole: Tree, part: Tree) -> Tree:
    """`whole` with its leaves replaced by those that `part` has at the same paths."""
    new = dict(zip(*flatten_with_paths(part)[:2], strict=True))
    return map_with_path(lambda path, leaf: new.get(path, leaf), whole)


def flatten_with_none(tree: Tree) -> tuple[list[str], list[Any]]:
    """Paths and leaves, where `None` counts as a leaf: for checking trees that users made."""
    entries, found, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    return ["/".join(escape(e) for e in path) for path in entries], found


def map_with_path_and_none(fn: Callable[[str, Any], Any], tree: Tree) -> Tree:
    """Applies `fn(path, leaf)` where `None` counts as a leaf."""
    entries, found, treedef = optree.tree_flatten_with_path(tree, none_is_leaf=True, namespace=NAMESPACE)
    names = ["/".join(escape(e) for e in path) for path in entries]
    return optree.tree_unflatten(treedef, [fn(n, x) for n, x in zip(names, found, strict=True)])
