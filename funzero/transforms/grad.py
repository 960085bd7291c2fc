"""Gradients of a loss function, as a pure function of a tree of params."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from funzero import _compat
from funzero.core import tree as tree_lib
from funzero.core.scope import scope
from funzero.transforms.losses import Loss

LossFn = Callable[..., Any]


def as_loss(value: Any) -> Loss:
    """What a loss function returned, as a checked `Loss`."""
    loss = value if isinstance(value, Loss) else Loss(value)
    if not isinstance(loss.total, torch.Tensor) or loss.total.dim() != 0:
        found = f"shape {list(loss.total.shape)}" if isinstance(loss.total, torch.Tensor) else type(loss.total).__name__
        raise ValueError(
            f"loss_fn must return a 0-dim tensor or fz.Loss with one, got {found}; sum it and give a weight"
        )
    if not loss.total.dtype.is_floating_point:
        raise ValueError(f"loss_fn must return a real floating-point loss, got {loss.total.dtype}")
    return loss


def detached(loss: Loss) -> Loss:
    """The same values, out of the autograd graph."""
    values: Loss = tree_lib.map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, loss)
    return values


@dataclasses.dataclass(frozen=True)
class Takes:
    """Which of the optional keywords a loss function has."""

    key: bool
    buffers: bool

    @staticmethod
    def of(loss_fn: LossFn) -> "Takes":
        """Read from the signature."""
        try:
            names = set(inspect.signature(loss_fn).parameters)
        except (TypeError, ValueError):
            names = set()
        return Takes("key" in names, "buffers" in names)


def differentiable(leaf: torch.Tensor) -> bool:
    """True if a leaf can have a gradient."""
    return leaf.dtype.is_floating_point or leaf.dtype.is_complex


def grad_fn(loss_fn: LossFn, *, trainable: Any = None) -> Callable[..., tuple[Any, Loss]]:
    """The gradient of a loss function's total with respect to its first argument.

    Args:
        loss_fn: `loss_fn(params, *args, **kwargs)` gives a 0-dim tensor or a `Loss`.
        trainable: tree of bools like params; other leaves get no gradient. Default: all.

    Returns: a function that gives (grads, Loss). `grads` has the structure of params, undivided, with `None` where a
    leaf (an unused, frozen or integer one) has no gradient. The params passed in are not touched.

    >>> grads, loss = grad_fn(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([3.0, 4.0]))
    >>> grads["w"].tolist()
    [3.0, 4.0]
    """

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Loss]:
        if _compat.inside_functorch():
            return _by_functorch(loss_fn, params, args, kwargs, trainable)
        leaves, treedef = tree_lib.flatten(params)
        flags = [True] * len(leaves) if trainable is None else tree_lib.leaves(trainable)
        with scope() as opened, torch.enable_grad():
            held = [x.detach() for x in leaves]
            wanted = [x.requires_grad_() for x, flag in zip(held, flags, strict=True) if flag and differentiable(x)]
            loss = as_loss(loss_fn(tree_lib.unflatten(treedef, held), *args, **kwargs))
            opened.in_backward = True
            found = iter(gradients(loss.total, wanted))
        grads = [next(found) if x.requires_grad else None for x in held]
        return tree_lib.unflatten(treedef, grads), detached(loss)

    return run


def gradients(
    total: torch.Tensor, wanted: list[torch.Tensor], cotangent: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """The gradients of a 0-dim tensor times a cotangent (None: 1), None where it does not depend on a leaf."""
    if not wanted or not total.requires_grad:
        return [None] * len(wanted)
    if cotangent is None:
        return list(torch.autograd.grad(total, wanted, allow_unused=True))
    total = total.to(torch.promote_types(total.dtype, torch.float32))  # a scale may be beyond float16
    return list(torch.autograd.grad(total, wanted, cotangent.to(total.dtype), allow_unused=True))


def _by_functorch(loss_fn: LossFn, params: Any, args: Any, kwargs: Any, trainable: Any) -> tuple[Any, Loss]:
    """Within vmap, jacrev and the like, where torch.autograd.grad is refused; unused leaves get zeros there."""
    leaves, treedef = tree_lib.flatten(params)
    flags = [True] * len(leaves) if trainable is None else tree_lib.leaves(trainable)
    wanted = tuple(i for i, (x, flag) in enumerate(zip(leaves, flags, strict=True)) if flag and differentiable(x))

    def total(*chosen: torch.Tensor) -> tuple[torch.Tensor, Loss]:
        held = list(leaves)
        for i, x in zip(wanted, chosen, strict=True):
            held[i] = x
        with scope():
            loss = as_loss(loss_fn(tree_lib.unflatten(treedef, held), *args, **kwargs))
        return loss.total, loss

    found, loss = torch.func.grad(total, argnums=tuple(range(len(wanted))), has_aux=True)(*(leaves[i] for i in wanted))
    grads: list[Any] = [None] * len(leaves)
    for i, g in zip(wanted, found, strict=True):
        grads[i] = g
    return tree_lib.unflatten(treedef, grads), loss
