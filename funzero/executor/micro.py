"""One micro-batch: its input, and the call of the loss function."""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.executor.plan import Plan
from funzero.transforms.grad import Takes, as_loss
from funzero.transforms.losses import Loss


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one call of the loss function sees besides the params."""

    batch: Any
    key: torch.Tensor
    buffers: Any


def call_loss(loss_fn: Callable[..., Any], takes: Takes, params: Any, micro: MicroBatch) -> Loss:
    """The loss, checked."""
    extra: dict[str, Any] = {"key": micro.key} if takes.key else {}
    if takes.buffers:
        extra["buffers"] = micro.buffers
    loss = as_loss(loss_fn(params, micro.batch, **extra))
    if takes.buffers and loss.buffers is None:
        raise ValueError("loss_fn takes buffers but its fz.Loss has none: return Loss(..., buffers=new_buffers)")
    return loss


def casting(plan: Plan) -> AbstractContextManager[Any]:
    """What a loss function runs under: autocast if the policy says so."""
    if plan.policy.cast != "autocast":
        return contextlib.nullcontext()
    return torch.autocast(plan.mesh.device.type, dtype=plan.policy.compute)


def cast_batch(plan: Plan, batch: Any) -> Any:
    """Floating leaves of a batch in the compute dtype of the policy."""
    if plan.policy.compute is None:
        return batch
    dtype = plan.policy.compute_dtype
    return tree_lib.map(lambda x: x.to(dtype(x.dtype)) if isinstance(x, torch.Tensor) else x, batch)
