"""Stand-ins: what a loss function sees in place of a cut leaf. They know their shape, and become data on first use."""

from collections.abc import Callable
from typing import Any

import torch

from funzero import _compat
from funzero.executor.forms import DTYPES

_PROPERTIES = (
    "shape",
    "dtype",
    "ndim",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "is_sparse",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_quantized",
    "names",
    "itemsize",
    "nbytes",
    "is_nested",
    "is_mkldnn",
    "is_xpu",
    "is_mps",
    "grad",
    "grad_fn",
    "output_nr",
    "_version",
)
_METHODS = (
    "dim",
    "size",
    "stride",
    "numel",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "nelement",
    "element_size",
    "__len__",
    "get_device",
    "storage_offset",
    "is_signed",
    "type",
    "ndimension",
    "is_inference",
)


def _facts() -> set[Any]:
    """Getters that a stand-in answers without data."""
    slots = [getattr(torch.Tensor, n, None) for n in _PROPERTIES]
    methods = [getattr(torch.Tensor, n) for n in _METHODS if hasattr(torch.Tensor, n)]
    return {s.__get__ for s in slots if s is not None} | {*methods, torch.is_floating_point, torch.is_complex}


FACTS = _facts()
_CASTS = {
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
}
_OF_ANCHOR = {torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad}
_NAMED = {"__setitem__", "__set__", "set_", "resize_", "resize_as_"}


NO_FUNCTORCH = (
    "torch.func within a loss cannot see through a cut leaf; take torch.autograd.grad, "
    "or keep leaves whole with persist_below or stage <= 2"
)


class StandIn(torch.Tensor):
    """A leaf without data.

    Attributes:
        path: for messages. fetch: gives the data, tracked by autograd where gradients are on. cast: the same in another
            dtype. child: another stand-in of the same leaf, below this one in the graph. anchor: see [Note: one anchor
            per leaf]; None for a leaf that does not train.
    """

    path: str
    fetch: Callable[[], torch.Tensor]
    cast: Callable[[torch.dtype], torch.Tensor]
    child: Callable[[], torch.Tensor]
    anchor: torch.Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTS and not (func is torch.Tensor.type and len(args) > 1):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.__repr__:
            return f"StandIn({args[0].path}, shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        _refuse(func, args, kwargs)
        if func is torch.Tensor.view_as and args[0] is (
            args[1] if len(args) > 1 else kwargs.get("other")
        ):  # to differentiate with respect to one use of it
            return args[0].child()
        dtype = _cast_to(func, args, kwargs)
        if dtype is not None:
            return args[0] if dtype == args[0].dtype else args[0].cast(dtype)
        pick = _anchor_of if func in _OF_ANCHOR else _data_of
        return func(*replaced(args, StandIn, pick), **replaced(kwargs, StandIn, pick))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Ops that reach the stand-in below the Python layer, such as from a user's autograd.Function."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*replaced(args, StandIn, _raw_of), **replaced(kwargs or {}, StandIn, _raw_of))


def _refuse(func: Any, args: Any, kwargs: Any) -> None:
    """In-place writes and function transforms, by the name of the leaf."""
    if _compat.inside_functorch():
        path = next(x.path for x in _flat((*args, *kwargs.values())) if isinstance(x, StandIn))
        raise RuntimeError(f"{path}: {NO_FUNCTORCH}")
    name = getattr(func, "__name__", "")
    written = kwargs.get("out")
    if args and (name in _NAMED or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")):
        written = args[0]
    if isinstance(written, StandIn) and name != "requires_grad_":
        raise RuntimeError(
            f"{written.path}: loss_fn writes to this param in place ({name}); params are constants, return new values"
        )


def _cast_to(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype if a call does nothing but cast a stand-in to another float."""
    if not args or not isinstance(args[0], StandIn):
        return None
    if func in _CASTS and len(args) == 1 and not kwargs:
        return _CASTS[func]
    if func is torch.Tensor.to:
        plain = kwargs.keys() <= {"dtype", "device", "other", "non_blocking"}
        values = [*args[1:], *(v for k, v in kwargs.items() if k != "non_blocking")]
        wanted = [_target(x, args[0]) for x in values]
        if plain and all(d in DTYPES for d in wanted):
            return next((d for d in wanted if d != args[0].dtype), args[0].dtype)
    if func in (torch.Tensor.type, torch.Tensor.type_as) and len(args) == 2 and not kwargs:
        wanted = [_target(args[1], args[0])]
        return wanted[0] if wanted[0] in DTYPES else None
    return None


def _target(value: Any, leaf: StandIn) -> torch.dtype | None:
    """The dtype that an argument of `to` asks for; None for a move or anything else."""
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype if value.device == leaf.device else None
    if isinstance(value, str | torch.device):
        return leaf.dtype if torch.device(value) == leaf.device else None
    return None


def _flat(values: Any) -> Any:
    for x in values:
        if isinstance(x, list | tuple):
            yield from _flat(x)
        else:
            yield x


def replaced(value: Any, kind: type, pick: Callable[[Any], Any]) -> Any:
    """Arguments of an op with `pick(x)` in place of each x of a kind of tensor."""
    if isinstance(value, kind):
        return pick(value)
    if isinstance(value, tuple):
        made = [replaced(x, kind, pick) for x in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if isinstance(value, list):
        return [replaced(x, kind, pick) for x in value]
    if isinstance(value, dict):
        return {k: replaced(v, kind, pick) for k, v in value.items()}
    return value


def _data_of(leaf: StandIn) -> torch.Tensor:
    return leaf.fetch()


def _raw_of(leaf: StandIn) -> torch.Tensor:
    with torch.no_grad():
        return leaf.fetch()


def _anchor_of(leaf: StandIn) -> torch.Tensor:
    return leaf.fetch() if leaf.anchor is None else leaf.anchor


def bare(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> StandIn:
    """A stand-in without a graph."""
    return torch.Tensor._make_wrapper_subclass(StandIn, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


class Born(torch.autograd.Function):
    """anchor -> its stand-in, with the identity as gradient: for uses that go below the Python layer."""

    @staticmethod
    def forward(anchor: torch.Tensor) -> torch.Tensor:
        return bare(tuple(anchor.shape), anchor.dtype, anchor.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad
