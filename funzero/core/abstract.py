"""Abstract values: leaves with a shape and a dtype but no memory, and where a leaf was made from."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from funzero.core import tree as tree_lib
from funzero.core.spec import Layout, P, Spec

MAX_WORK = 1_000_000  # of the search for a common element of two views, before they are taken to overlap


class Placeholder(torch.Tensor):
    """A meta tensor that remembers the path of the leaf it was made from.

    `tx.init` run on placeholders tells which leaves of the optimizer's state belong to which param: what comes out of
    `torch.zeros_like(p)` or `p.new_zeros(...)` carries the path of `p`.
    """

    source: str | None = None
    block = 0  # see Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if not isinstance(out, torch.Tensor):
            return out
        sources = {x.source for x in (*args, *(kwargs or {}).values()) if isinstance(x, Placeholder)}
        return placeholder(out, sources.pop() if len(sources) == 1 else None)


def placeholder(like: torch.Tensor, source: str | None) -> Placeholder:
    """A placeholder with the shape and dtype of `like`."""
    with torch._C.DisableTorchFunctionSubclass():
        meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
        made = torch.Tensor._make_subclass(Placeholder, meta)
    made.source = source
    return made


class Source(NamedTuple):
    """The param that a leaf was made from: its path, and of how many of its elements each of the leaf's tells.

    `block` is 0 where nothing says so, see `zeros_per_block`.
    """

    path: str
    block: int = 0


def sources(init: Callable[[Any], Any], params: Any) -> tuple[Any, list[Source | None]]:
    """Runs `init` on placeholders of `params`: the abstract result, and for each leaf what it was made from, or None."""
    made = init(tree_lib.map_with_path(lambda path, x: placeholder(x, path), params))
    leaves, treedef = tree_lib.flatten(made)
    origin = [
        Source(x.source, x.block) if isinstance(x, Placeholder) and x.source is not None else None for x in leaves
    ]
    plain = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in map(_plain, leaves)]
    return tree_lib.unflatten(treedef, plain), origin


def mirrors(leaf: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """True if a leaf made from a param of this shape holds something for each element of it, so that it is cut alike.

    A 0-dim integer is a count, also when the param itself is 0-dim.
    """
    return tuple(leaf.shape) == tuple(shape) and (
        leaf.dim() > 0 or leaf.dtype.is_floating_point or leaf.dtype.is_complex
    )


def zeros_per_block(param: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros with one element for each `block` elements of the flattened param, the last of which may be fewer.

    Made in a transform's `init`, such a leaf is cut at the same chunks as its param. The transform's `quantum` must be
    a multiple of `block`, so that no block lies on two ranks.
    """
    made = param.new_zeros(math.ceil(param.numel() / block), dtype=dtype)
    if isinstance(made, Placeholder):
        made.block = block
    return made


def state_spec(leaf: torch.Tensor, source: Source | None, param: Layout | None, name: str) -> Spec:
    """The spec of a state leaf: its param's if it mirrors that, cut at the same chunks if it has blocks, else whole.

    Args:
        leaf: its global shape. source: what it was made from. param: the layout of that. name: of the leaf, for errors.

    Raises ValueError where blocks would depend on the mesh.
    """
    if source is None or param is None:
        return Spec()
    spec = param.spec
    if not source.block:
        return spec if mirrors(leaf, param.shape) else Spec()
    if param.mesh.size(spec.partition.axes) > 1:
        raise ValueError(
            f"{name}: has one element for each {source.block} of {source.path}, which {spec.partition} cuts: its blocks "
            "would depend on the mesh; give that leaf another optimizer by partition(...)"
        )
    if spec.quantum % source.block:
        raise ValueError(
            f"{name}: has one element for each {source.block} of {source.path}, whose chunks are multiples of "
            f"{spec.quantum}; the transform needs quantum={source.block}"
        )
    return dataclasses.replace(spec, partition=P(), quantum=spec.quantum // source.block)


def _plain(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.as_subclass(torch.Tensor) if isinstance(leaf, Placeholder) else leaf


InitThunk = Callable[[torch.Tensor], torch.Tensor]


def thunks_of(params: Any) -> dict[str, InitThunk] | None:
    """The init thunks, if that is what `params` is: a mapping, or an iterable of pairs, from path to thunk(key)."""
    if isinstance(params, (Mapping, Iterator)):
        items = dict(params)
    else:
        return None
    return items if items and all(callable(v) and not isinstance(v, torch.Tensor) for v in items.values()) else None


def eval_shape(params: Any) -> Any:
    """The tree of shapes and dtypes of `params`, as meta tensors (global view).

    Args:
        params: a tree of tensors, a function without arguments that makes one, or a mapping of path to
            thunk(key) -> tensor; functions run on the meta device.

    >>> eval_shape({"w": torch.ones(2, 3)})["w"].device.type
    'meta'
    """
    thunks, key = thunks_of(params), torch.zeros(2, dtype=torch.int64, device="cpu")  # keys live in host memory
    with torch.device("meta"):
        if thunks is not None:
            params = {path: thunk(key) for path, thunk in thunks.items()}
        elif callable(params) and not isinstance(params, torch.Tensor):
            params = params()
    return tree_lib.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), params)


def check_params(params: Any) -> None:
    """Refuses a tree made by hand that cannot be trained: None, non-tensors, grad-requiring or shared leaves.

    Raises TypeError or ValueError that names the path.
    """
    for path, leaf in zip(*tree_lib.flatten_with_none(params), strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"params/{path}: expected a tensor, got {type(leaf).__name__}; leave it out of the tree")
        if leaf.requires_grad:
            raise ValueError(f"params/{path}: requires grad; pass .detach() (funzero makes its own leaves)")
    _check_sharing(params)


def _check_sharing(params: Any) -> None:
    spans: list[tuple[int, int, str, torch.Tensor]] = []
    for path, leaf in zip(*tree_lib.flatten_with_paths(params)[:2], strict=True):
        if leaf.device.type != "meta" and leaf.numel():
            extent = 1 + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
            spans.append((leaf.data_ptr(), leaf.data_ptr() + extent * leaf.element_size(), path, leaf))
    spans.sort(key=lambda s: s[:2])
    reach = 0
    for i, (start, end, path, leaf) in enumerate(spans):
        if start < reach:
            for _, before_end, other, held in spans[:i]:
                if start < before_end and _overlap(leaf, held):
                    raise ValueError(
                        f"params/{path} shares memory with params/{other}: a leaf has one path; "
                        f"for a tied weight pass fz.tie(params, {{{path!r}: {other!r}}}), else .clone() one of them"
                    )
        reach = max(reach, end)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if some element lies in both; interleaved views, such as two columns of a matrix, do not overlap."""
    if a.device.type != "cpu":
        return True
    try:
        return bool(np.shares_memory(_as_numpy(a), _as_numpy(b), max_work=MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _as_numpy(x: torch.Tensor) -> "np.ndarray[Any, Any]":
    """The same memory as integers, since numpy does not know every dtype."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).numpy()
