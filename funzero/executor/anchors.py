"""Autograd nodes by which a leaf meets its gradient exactly once in a micro-batch.

[Note: one anchor per leaf] The anchor of a leaf has its full shape and no memory of its own. Everything the loss
function does with the leaf hangs below it, so autograd sums all uses there before the anchor's backward hands the
complete gradient to the reduction: once, whatever was evicted, fetched again, or used first without gradient. The
gradient call differentiates with respect to an empty source tensor behind the anchor; a gradient that the loss
function takes itself ends at the anchor and leaves the reduction alone.

[Note: as soon as it is complete] The engine runs what was made last first. Anchors are made before the loss function runs,
so theirs would be the last turns: every gradient of the model would be there before the first is reduced. They are put in
front of everything that is ready, as torch puts the leaves of a graph.
"""

from collections.abc import Callable
from typing import Any

import torch

from funzero import _compat

OnGrad = Callable[[torch.Tensor], None]


class Anchor(torch.autograd.Function):
    """(source, data, on_grad) -> data as a child of source; backward gives the gradient to `on_grad`."""

    @staticmethod
    def forward(source: torch.Tensor, data: torch.Tensor, on_grad: OnGrad) -> torch.Tensor:
        return data.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.on_grad = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.on_grad(grad)
        return grad.new_empty(0), None, None


def anchored(source: torch.Tensor, data: torch.Tensor, on_grad: OnGrad) -> torch.Tensor:
    """`data` as a child of `source`; `on_grad` gets its gradient as soon as that is complete."""
    made: torch.Tensor = Anchor.apply(source, data, on_grad)
    _compat.run_first(made)
    return made


class Attach(torch.autograd.Function):
    """(anchor, raw) -> raw as a child of the anchor, with the identity as gradient."""

    @staticmethod
    def forward(anchor: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        return raw.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Recast(torch.autograd.Function):
    """(anchor, dtype) -> an anchor of the same leaf in another dtype, a child of the first."""

    @staticmethod
    def forward(anchor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return memoryless(tuple(anchor.shape), dtype, anchor.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.to(ctx.dtype), None


def new_source(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What the gradient call differentiates with respect to, in place of a leaf: an empty tensor."""
    return torch.empty(0, dtype=dtype, device=device, requires_grad=True)


def memoryless(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of full shape on the memory of one element."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)
