"""Runs kernels at once: checks, then the backend of each device."""

from collections.abc import Sequence

import torch

from . import checks, reference
from .backends import backend


def update(leaves: Sequence[reference.Leaf], rule: reference.Rule, scale: reference.Scale, threads: int | None) -> None:
    """`ops.update`."""
    for i, leaf in enumerate(leaves):
        checks.leaf(leaf, rule, f"leaves[{i}]")
    by_device: dict[str, list[reference.Leaf]] = {}
    for leaf in leaves:
        by_device.setdefault(leaf.param.device.type, []).append(leaf)
    for device_type, some in by_device.items():
        backend(device_type).update(some, rule, scale, _count(threads))
    torch.autograd.graph.increment_version([x for leaf in leaves for x in _written(leaf)])


def square_sum(x: torch.Tensor, chunk: int, threads: int | None) -> torch.Tensor:
    """`ops.square_sum`."""
    checks.tensor(x, "x", checks.FLOATS, x.numel(), x.device)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, must be at least 1")
    return backend(x.device.type).square_sum(x, chunk, _count(threads))


def accumulate(acc: torch.Tensor, grad: torch.Tensor, weight: float, threads: int | None) -> None:
    """`ops.accumulate`."""
    checks.tensor(acc, "acc", (torch.float32,), acc.numel(), acc.device)
    checks.tensor(grad, "grad", checks.FLOATS, acc.numel(), acc.device)
    backend(acc.device.type).accumulate(acc, grad, weight, _count(threads))
    torch.autograd.graph.increment_version([acc])


def _count(threads: int | None) -> int:
    return torch.get_num_threads() if threads is None else max(threads, 1)


def _written(leaf: reference.Leaf) -> list[torch.Tensor]:
    kept = [x for moment in leaf.moments for x in (moment.values, moment.scales) if x is not None]
    return [leaf.param, *kept] if leaf.master is None else [leaf.param, leaf.master, *kept]
