"""Reduction of gradients from one layout to another, planned once for a list of leaves."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.core.collectives import travel_groups
from funzero.core.mesh import Mesh
from funzero.core.spec import Layout, Spec
from funzero.core.state import Accumulator, StateSpecs
from funzero.executor.plan import Plan


def _wide(layout: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if layout.mesh.axis_size(a) > 1)


@dataclasses.dataclass(frozen=True)
class _Route:
    """How one leaf gets from `src` to `dst`: summed into ranges, then summed whole over what is left."""

    dst: Layout
    scatter: bool
    rest: Layout | None

    @staticmethod
    def of(src: Layout, dst: Layout) -> "_Route":
        cut = tuple(a for a in dst.spec.flat if a not in src.spec.flat)
        left = _wide(dst, tuple(a for a in src.spec.unreduced if a not in (*cut, *dst.spec.unreduced)))
        rest = Layout(dst.path, dst.local_shape, dst.dtype, Spec(flat=left), dst.mesh) if left else None
        return _Route(dst, bool(_wide(dst, cut)), rest)


class ReducePlan:
    """Routes for a list of leaves; `run` takes and gives leaves in that order."""

    def __init__(self, src: tuple[Layout, ...], dst: tuple[Layout, ...]):
        self.routes = [_Route.of(a, b) for a, b in zip(src, dst, strict=True)]
        self._scatter = travel_groups([r.dst if r.scatter else None for r in self.routes])
        self._rest = travel_groups([r.rest for r in self.routes])
        self._reshaped = [i for i, (a, b) in enumerate(zip(src, dst, strict=True)) if b.is_flat and not a.is_flat]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums; large leaves by one collective each, small ones together. May write into the leaves."""
        out = list(leaves)
        for group in self._scatter:
            group.scatter(out)
        for group in self._rest:
            group.scatter(out)
            group.gather(out)
        for i in self._reshaped:
            out[i] = out[i].reshape(self.routes[i].dst.local_shape)
        return out


@functools.lru_cache(maxsize=64)
def reduce_plan(src: tuple[Layout, ...], dst: tuple[Layout, ...], comm: Any) -> ReducePlan:
    """The plan for these layouts; kept, since a loop asks for the same one each time. comm: of their mesh; one that was made
    anew equals the one before."""
    return ReducePlan(src, dst)


class SmallReductions:
    """Reduces in every micro-batch the small gradients of a layout that cuts its accumulator, in one bundle.

    Args:
        large: the trained leaves that are reduced one by one elsewhere.
    """

    def __init__(self, plan: Plan, large: frozenset[int]):
        accum = plan.specs.accum.layouts
        self._chosen = [i for i, x in enumerate(accum) if x.is_flat and i not in large]
        self._sources = tuple(plan.travelling(plan.micro_grads[i]) for i in self._chosen)
        self._plan = ReducePlan(self._sources, tuple(plan.travelling(accum[i]) for i in self._chosen))

    def run(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The same gradients, the small ones summed and cut; zeros stand for what this rank does not have."""
        if not self._chosen:
            return grads
        out = list(grads)
        filled = [or_zeros(grads[i], x) for i, x in zip(self._chosen, self._sources, strict=True)]
        for i, x in zip(self._chosen, self._plan.run(filled), strict=True):
            out[i] = x
        return out


def or_zeros(grad: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """A gradient in the layout's dtype; zeros where there is none."""
    if grad is None:
        return torch.zeros(layout.local_shape, dtype=layout.dtype, device=layout.mesh.device)
    return grad if grad.dtype == layout.dtype else grad.to(layout.dtype)


def agree_used(used: torch.Tensor, mesh: Mesh) -> list[bool]:
    """Which leaves took part on any rank; `used` is uint8 [leaves] in host memory."""
    rows = used.unsqueeze(0) if mesh.world == 1 else mesh.gather_host(used)
    return rows.amax(0).bool().tolist() if used.numel() else []


def reduce(acc: Accumulator, specs: StateSpecs) -> Accumulator:
    """Sums an accumulator over the batch axes: the one piece of the pure composition that communicates.

    Args:
        acc: laid out as `specs.accum` says, `None` where this rank got no gradient; every rank must hold one.

    Returns: an accumulator whose grads are laid out as `specs.grads`, `None` where no rank got a gradient, and whose
    weight, loss, aux and used flags are global.
    """
    mesh = specs.mesh
    names, given = tree_lib.flatten_with_none(acc.grads)
    used = agree_used(acc.used, mesh)
    src, dst = specs.accum.layouts, specs.grads.layouts
    keep = [i for i, flag in enumerate(used) if flag]
    filled = [_filled(given[i], src[i]) for i in keep]
    sums = reduce_plan(tuple(src[i] for i in keep), tuple(dst[i] for i in keep), mesh.comm).run(filled)
    by_path = dict.fromkeys(names) | {names[i]: x for i, x in zip(keep, sums, strict=True)}

    def total(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_sum(x, mesh, mesh.batch)

    return dataclasses.replace(
        acc,
        grads=tree_lib.map_with_path_and_none(lambda path, _: by_path[path], acc.grads),
        weight=total(acc.weight),
        loss=total(acc.loss),
        aux=tree_lib.map(total, acc.aux),
        used=torch.tensor(used, dtype=torch.uint8),
    )


def _filled(grad: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """A gradient that may be summed in place: a copy, or zeros where there is none."""
    if grad is None:
        return torch.zeros(layout.local_shape, dtype=layout.dtype, device=layout.mesh.device)
    return grad.to(layout.dtype, copy=True).contiguous()
