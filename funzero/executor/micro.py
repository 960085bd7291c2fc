"""One micro-batch: the loss function, differentiated with respect to whole leaves."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.scope import scope
from funzero.executor.plan import Plan
from funzero.transforms.grad import Takes, as_loss, gradients
from funzero.transforms.losses import Loss
from funzero.transforms.rng import seeded


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


def differentiate(
    plan: Plan, loss_fn: Callable[..., Any], takes: Takes, leaves: list[torch.Tensor], micro: MicroBatch
) -> tuple[Loss, list[torch.Tensor | None]]:
    """The loss of a micro-batch, and the gradients of the trained leaves (whole pieces, None where there is none)."""
    versions = [x._version for x in leaves]
    with scope() as opened, seeded(micro.key, plan.mesh.device), torch.enable_grad():
        held = [x.detach() for x in leaves]
        wanted = [held[i].requires_grad_() for i in plan.trained]
        loss = call_loss(loss_fn, takes, tree_lib.unflatten(plan.specs.params.treedef, held), micro)
        opened.in_backward = True
        grads = gradients(loss.total, wanted)
    if [x._version for x in leaves] != versions:
        changed = next(i for i, (x, v) in enumerate(zip(leaves, versions, strict=True)) if x._version != v)
        path = plan.specs.params.layouts[changed].path
        raise RuntimeError(f"{path}: loss_fn wrote to this param in place; params are constants, return new values")
    return loss, grads


def cast_batch(plan: Plan, batch: Any) -> Any:
    """Floating leaves of a batch in the compute dtype of the policy."""
    if plan.policy.compute is None:
        return batch
    dtype = plan.policy.compute_dtype
    return tree_lib.map(lambda x: x.to(dtype(x.dtype)) if isinstance(x, torch.Tensor) else x, batch)
