"""Trees of tensors from one group of ranks to another, or from one layout to another."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from funzero.core import tree as tree_lib
from funzero.core.post import POST
from funzero.core.spec import Layout, Specs
from funzero.transforms.grad import differentiable


def transfer(x: Any, from_specs: Specs, to_specs: Specs, *, handle: int = 0) -> Any:
    """Moves a tree of local leaves from the ranks and the layout of one `Specs` to those of another.

    Every rank of either mesh calls it; no other rank takes part, and a sender does not wait. Calls are matched by handle:
    of two that are under way between the same ranks, with handles of their own, either may be taken first. A leaf that the
    sending ranks have copies of is sent by the first of them; one that is `unreduced` there is added up by who receives it;
    one that is `unreduced` here is given to the first rank, and the others get zeros.

    Args:
        x: local leaves, on the ranks of `from_specs`; ignored on others. from_specs, to_specs: the same leaves (shapes and
            dtypes) on one mesh or two, such as `Specs.bind(mesh, Spec(P("dp")), shapes)`; see `make_mesh(ranks=)`.
        handle: a number not below 0.

    Returns: local leaves on the ranks of `to_specs`, else None. Where a rank is in both, autograd goes through, and its
    backward is a transfer too, which all these ranks must join. Between separate groups the cotangent goes back by
    `transfer(cotangent, to_specs.transposed(), from_specs.transposed())`.

    Raises ValueError by path for leaves that differ or do not fit; MeshError names a rank that is gone.

    >>> import torch, funzero as fz
    >>> mesh = fz.make_mesh(dp=1)
    >>> rows = fz.Specs.bind(mesh, fz.Spec(fz.P("dp")), torch.empty(4, 2, device="meta"))
    >>> transfer(torch.ones(4, 2), rows, rows).shape
    torch.Size([4, 2])
    """
    route = Route.of(from_specs, to_specs)
    leaves: list[torch.Tensor] = []
    if route.sends:
        leaves, treedef = tree_lib.flatten(x)
        if treedef != from_specs.treedef:
            differ = sorted(set(tree_lib.paths(x)) ^ set(tree_lib.paths(from_specs.tree)))[:3]
            raise ValueError(f"transfer: x has other leaves than from_specs; they differ at {differ}")
        for leaf, layout in zip(leaves, from_specs.layouts, strict=True):
            if tuple(leaf.shape) != layout.local_shape or leaf.dtype != layout.dtype:
                here = tree_lib.dtype_and_shape(layout.dtype, layout.local_shape)
                raise ValueError(f"transfer: {layout.path or 'x'}: expected {here}, got {tree_lib.describe(leaf)}")
    if handle < 0:
        raise ValueError(f"transfer: a handle is not below 0, got {handle}")
    if route.sends and route.receives:
        return tree_lib.unflatten(to_specs.treedef, _Move.apply(route, handle, *leaves))
    made = route.run(leaves, handle)
    return tree_lib.unflatten(to_specs.treedef, made) if route.receives else None


class _Move(torch.autograd.Function):
    """A transfer on a rank that sends and receives."""

    @staticmethod
    def forward(ctx: Any, route: "Route", handle: int, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.route, ctx.handle = route, handle
        made = route.run(leaves, handle)
        ctx.mark_non_differentiable(*(x for x in made if not differentiable(x)))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = zip(grads, ctx.route.target.layouts, strict=True)
        filled = [torch.zeros(x.local_shape, dtype=x.dtype, device=x.mesh.device) if g is None else g for g, x in pairs]
        back = _Move.apply(ctx.route.back, ctx.handle, *filled)
        return None, None, *(x if differentiable(x) else None for x in back)


@dataclasses.dataclass(frozen=True)
class Route:
    """Which elements go from which rank to which."""

    source: Specs
    target: Specs

    @staticmethod
    def of(source: Specs, target: Specs) -> "Route":
        """Between two layouts of the same leaves."""
        return Route.made(source, target, source.mesh.comm, target.mesh.comm)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def made(source: Specs, target: Specs, source_comm: Any, target_comm: Any) -> "Route":
        """The same. The last two: who serves the meshes, which an equal mesh need not share."""
        if source.treedef != target.treedef:
            differ = sorted(set(tree_lib.paths(source.tree)) ^ set(tree_lib.paths(target.tree)))[:3]
            raise ValueError(f"transfer: from_specs and to_specs have other leaves; they differ at {differ}")
        for a, b in zip(source.layouts, target.layouts, strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                sides = [tree_lib.dtype_and_shape(x.dtype, x.shape) for x in (a, b)]
                raise ValueError(f"transfer: {a.path or 'x'}: is {sides[0]} in from_specs, {sides[1]} in to_specs")
        return Route(source, target)

    @functools.cached_property
    def back(self) -> "Route":
        """The transpose."""
        return Route(self.target.transposed(), self.source.transposed())

    @property
    def sends(self) -> bool:
        """Whether this process has a part of what is sent."""
        return self.source.mesh.here

    @property
    def receives(self) -> bool:
        """Whether it gets one."""
        return self.target.mesh.here

    def run(self, leaves: Sequence[torch.Tensor], handle: int) -> list[torch.Tensor]:
        """Sends, then receives."""
        if self.sends:
            mesh = self.source.mesh
            for place in range(self.target.mesh.world):
                cuts = self._cuts(mesh.rank, place)
                if cuts:
                    parts = [_bytes(leaves[i].detach(), where) for i, where, _ in cuts]
                    POST.send(self.target.mesh.in_job(place), handle, torch.cat(parts) if len(parts) > 1 else parts[0])
        return self._receive(handle) if self.receives else []

    def _receive(self, handle: int) -> list[torch.Tensor]:
        mesh = self.target.mesh
        out = [torch.zeros(x.local_shape, dtype=x.dtype, device=mesh.device) for x in self.target.layouts]
        for place in range(self.source.mesh.world):
            cuts = self._cuts(place, mesh.rank)
            if not cuts:
                continue
            names = ", ".join(self.target.layouts[i].path or "x" for i, _, _ in cuts[:3])
            data, at = POST.receive(self.source.mesh.in_job(place), handle, names), 0
            for i, _, where in cuts:
                into = out[i] if isinstance(where, tuple) else out[i].view(-1)
                shape = where.shape if isinstance(where, torch.Tensor) else into[where].shape
                size = shape.numel() * into.itemsize
                found = data[at : at + size].clone().view(into.dtype).view(shape).to(mesh.device)
                into[where] = found if not self.source.layouts[i].spec.unreduced else into[where] + found
                at += size
        return out

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int], list[tuple[int, Any, Any]]]:
        return {}

    def _cuts(self, source: int, target: int) -> list[tuple[int, Any, Any]]:
        """For each leaf of which something goes from a place to a place: (leaf, where in the one, where in the other)."""
        if (source, target) not in self._known:
            found = []
            for i, (a, b) in enumerate(zip(self.source.layouts, self.target.layouts, strict=True)):
                copies = [n for n in a.mesh.names if n not in (*a.spec.cut_axes, *a.spec.unreduced)]
                if a.mesh.index(copies, source) or b.mesh.index(b.spec.unreduced, target):
                    continue
                where = _overlap(a, source, b, target)
                if where is not None:
                    found.append((i, *where))
            self._known[source, target] = found
        return self._known[source, target]


def _overlap(a: Layout, source: int, b: Layout, target: int) -> tuple[Any, Any] | None:
    """Where the elements that two places both have lie in the local leaf of each: boxes, or of the flattened leaf slices or
    index tensors."""
    if a.is_flat or b.is_flat:
        return _overlap_flat(_elements(a, source), _elements(b, target))
    one, two, both = a.box_of(source), b.box_of(target), []
    for x, y in zip(one, two, strict=True):
        lo, hi = max(x.start, y.start), min(x.stop, y.stop)
        if lo >= hi:
            return None
        both.append((lo, hi))
    found = [tuple(slice(lo - s.start, hi - s.start) for (lo, hi), s in zip(both, x, strict=True)) for x in (one, two)]
    return found[0], found[1]


def _overlap_flat(one: Any, two: Any) -> tuple[Any, Any] | None:
    if isinstance(one, range) and isinstance(two, range):
        lo, hi = max(one.start, two.start), min(one.stop, two.stop)
        return None if lo >= hi else (slice(lo - one.start, hi - one.start), slice(lo - two.start, hi - two.start))
    _, first, second = np.intersect1d(np.asarray(one), np.asarray(two), assume_unique=True, return_indices=True)
    return (torch.from_numpy(first), torch.from_numpy(second)) if len(first) else None


def _elements(layout: Layout, place: int) -> Any:
    """Which elements of the flattened global leaf a place has, in the order of its local leaf: a range, or an array."""
    bounds = layout.bounds(layout.mesh.index(layout.spec.flat, place)) if layout.is_flat else (0, layout.n)
    if layout.mesh.size(layout.spec.partition.axes) == 1:
        return range(*bounds)
    every = np.arange(int(np.prod(layout.shape, dtype=np.int64))).reshape(layout.shape)
    return every[layout.box_of(place)].reshape(-1)[slice(*bounds)]


def _bytes(leaf: torch.Tensor, where: Any) -> torch.Tensor:
    """Some elements, uint8 in host memory of their own."""
    part = leaf[where] if isinstance(where, tuple) else leaf.reshape(-1)[where]
    return part.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
