"""Differences between torch versions, and every private name of torch that funzero uses."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils import _pytree as torch_pytree
from torch.utils import checkpoint as torch_checkpoint

MINIMUM_TORCH = (2, 11)


def check_torch_version(version: str) -> None:
    """Raises ImportError when torch is older than what funzero was tried on."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < MINIMUM_TORCH:
        raise ImportError(
            f"funzero needs torch >= {MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]}, found {version}; upgrade torch"
        )


def register_in_torch_pytree(cls: type, flatten: Any, unflatten: Any, names: Any) -> None:
    """Makes `cls` a node of torch's own pytree, which `torch.func` and `make_fx` use."""

    def with_keys(node: Any) -> Any:
        children, context = flatten(node)
        return [(torch_pytree.GetAttrKey(n), c) for n, c in zip(names(node), children, strict=True)], context

    torch_pytree.register_pytree_node(
        cls, flatten, unflatten, flatten_with_keys_fn=with_keys, serialized_type_name=f"funzero.{cls.__name__}"
    )


def inside_functorch() -> bool:
    """True within torch.func.grad, vmap, jvp and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


storage_use_count = torch._C._storage_Use_Count
UNSHARED = 2  # users of a storage that a single tensor refers to: the tensor, and the object that asks


def storage_is_shared(tensor: torch.Tensor) -> bool:
    """True if another tensor or storage object than `tensor` itself refers to its memory."""
    return storage_use_count(tensor.untyped_storage()._cdata) > UNSHARED


def run_first(tensor: torch.Tensor) -> None:
    """Makes a backward run the node of `tensor` before all others that are ready."""
    node: Any = tensor.grad_fn
    node._set_sequence_nr((1 << 63) - 1)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Within the block ops are not seen by selective activation checkpointing, which expects the same ops twice."""
    kinds = (torch_checkpoint._CachingTorchDispatchMode, torch_checkpoint._CachedTorchDispatchMode)
    with contextlib.ExitStack() as stack:
        while isinstance(_python_dispatch._get_current_dispatch_mode(), kinds):
            stack.enter_context(_python_dispatch._pop_mode_temporarily())
        yield


def saved_tensors_hooks_now() -> Any:
    """The innermost open pair of torch.autograd.graph.saved_tensors_hooks, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A clone whose memory is copied when one of the two is written to; at once if torch has not allocated it."""
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:  # a mapped file, or memory of numpy's
        return tensor.clone()


def is_lazy_clone(tensor: torch.Tensor) -> bool:
    """False once it was written to, or handed to a kernel that asks for memory it may write to."""
    return torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined]


def is_compiled(module: torch.nn.Module) -> bool:
    """True for what torch.compile(module) gives."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes a second, and without it nothing is
    return frames is not None and isinstance(module, frames.OptimizedModule)


def first_of(module: Any, *names: str) -> Any:
    """The first of these attributes that `module` has: for functions that newer versions renamed."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def default_store(distributed: Any) -> Any:
    """The key-value store behind the default process group."""
    return distributed.distributed_c10d._get_default_store()


def flatten_dense(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors laid end to end; a single one comes back as a view."""
    return torch._C._nn.flatten_dense_tensors(tensors)
