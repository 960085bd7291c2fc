"""Rematerialisation: a function forgets what it computed, and computes it again in the backward.

The gradients have the same bits, and random masks repeat. What is kept is a policy:

- "nothing": only the inputs are kept.
- "everything": all is kept; the function as it is.
- "matmuls": results of matrix products, convolutions and attention are kept, what lies between them is not.
- a tuple of names: values marked by `keep(x, name)` are kept; what leads to them is still computed again.
- "host": all is kept, in host memory (pinned, where the device can read that): nothing is computed again, but every value
  travels twice. Params are left where they are. On the CPU it changes nothing.

References: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022 (the selective form).
"""

import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from funzero import _compat
from funzero.core import scope

POLICIES = ("nothing", "everything", "matmuls", "host")
Fn = TypeVar("Fn", bound=Callable[..., Any])
Policy = str | tuple[str, ...]

_aten = torch.ops.aten
_MATMULS = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.convolution.default),
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
_naming: contextvars.ContextVar[str | None] = contextvars.ContextVar("funzero_keep", default=None)


def keep(x: torch.Tensor, name: str) -> torch.Tensor:
    """The same value, under a name that a policy of `remat` can keep.

    >>> keep(torch.ones(2), "attention").tolist()
    [1.0, 1.0]
    """
    token = _naming.set(name)
    try:
        return x.view_as(x)
    finally:
        _naming.reset(token)


def checked_policy(policy: Any) -> Policy:
    """A policy of this module, or an error that lists them."""
    if isinstance(policy, str) and policy in POLICIES:
        return policy
    if not isinstance(policy, str) and isinstance(policy, Iterable):
        names = tuple(policy)
        if names and all(isinstance(n, str) for n in names):
            return names
    raise ValueError(f"remat: policy is one of {POLICIES} or a tuple of names given to fz.keep, got {policy!r}")


def remat(fn: Fn, policy: Any = "nothing") -> Fn:
    """`fn`, computed again in the backward instead of remembered.

    Args:
        fn: any function of tensors; params may come in as arguments (`fz.functional_call` inside it is fine) or from
            outside. It must compute the same values the second time.
        policy: what is kept, see above.

    Returns: a function of the same arguments with the same values and gradients, of any order.

    >>> x = torch.ones(3, requires_grad=True)
    >>> torch.autograd.grad(remat(torch.tanh)(x).sum(), x)[0].shape
    torch.Size([3])
    """
    kept = checked_policy(policy)
    if kept == "everything":
        return fn

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if kept == "host":
            with torch.autograd.graph.saved_tensors_hooks(*_host_hooks()):
                return fn(*args, **kwargs)
        if kept == "nothing":
            return checkpoint(fn, *args, use_reentrant=False, **kwargs)
        contexts = functools.partial(create_selective_checkpoint_contexts, _choice(kept))
        return checkpoint(fn, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run  # type: ignore[return-value]


def _choice(kept: Policy) -> Callable[..., CheckpointPolicy]:
    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        chosen = op in _MATMULS if kept == "matmuls" else _naming.get() in kept
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def _host_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """How autograd saves and gets back a value; what the hooks around these already save by name stays theirs."""
    outer_pack, outer_unpack = _compat.saved_tensors_hooks_now() or (_same, _same)
    surrounding = scope.current()
    params = surrounding.params if surrounding is not None else ()
    stay = frozenset(x.untyped_storage()._cdata for x in params)

    def pack(x: torch.Tensor) -> tuple[torch.device | None, Any]:
        packed = outer_pack(x)
        if packed is not x or _stays(x, stay):
            return None, packed
        home = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        return x.device, home.copy_(x, non_blocking=True)  # on the stream that reads it again

    def unpack(packed: tuple[torch.device | None, Any]) -> torch.Tensor:
        device, held = packed
        found: torch.Tensor = outer_unpack(held) if device is None else held.to(device, non_blocking=True)
        return found

    return pack, unpack


def _same(x: Any) -> Any:
    return x


def _stays(x: torch.Tensor, stay: frozenset[int]) -> bool:
    """True for what is in host memory already, and for params: leaves of the graph, those of a step, and their views."""
    source = x if x._base is None else x._base
    is_param = (source.is_leaf and source.requires_grad) or x.untyped_storage()._cdata in stay
    return is_param or _in_host_memory(x)


def _in_host_memory(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def checked_rules(rules: Mapping[str, Any] | None) -> tuple[tuple[str, Policy], ...]:
    """{glob of module paths: policy} as pairs."""
    if rules is None:
        return ()
    if not isinstance(rules, Mapping):
        raise TypeError(f"remat: expected {{glob of module paths: policy}}, got {rules!r}")
    return tuple((glob, checked_policy(policy)) for glob, policy in rules.items())
