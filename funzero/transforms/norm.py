"""The global norm, and the clip by it.

[Note: one norm for every layout] Squares are summed in float64 for each chunk of a leaf (the chunks of a flat cut,
whether the leaf is cut or not). A rank puts the sums it owns into a vector that has one slot for every chunk of every
piece of every leaf; of ranks that hold copies only the first fills its slots. The sum of these vectors over the mesh
is exact, since each slot has one writer, and every rank adds the same slots in the same order. So each element counts
once, experts need no special case, and the norm has the same bits on any number of ranks.
"""

import bisect
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from funzero import _compat
from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh, abstract_mesh
from funzero.core.spec import Layout, Spec, Specs

SMALL_BYTES = 64 * 1024
TILE = 131_072
EXPERT_AXES = ("ep",)


@dataclasses.dataclass(frozen=True)
class NormPlan:
    """Where the chunks of some leaves lie, worked out once. `layouts` are those of the gradients handed to `norm`."""

    layouts: tuple[Layout, ...]

    @functools.cached_property
    def _slots(self) -> tuple[list[int], int]:
        """First slot of each leaf, and the number of slots."""
        starts, total = [], 0
        for x in self.layouts:
            starts.append(total)
            total += x.mesh.size(x.spec.partition.axes) * x.chunks
        return starts, total

    def _owned(self, i: int) -> tuple[int, int]:
        """The slots that this rank fills for leaf i; none if a copy on an earlier rank does."""
        x = self.layouts[i]
        copies = [a for a in x.mesh.names if a not in x.spec.cut_axes]
        if self._cut and x.mesh.index(copies):
            return 0, 0
        lo, hi = x.bounds(x.index)
        first = self._slots[0][i] + x.mesh.index(x.spec.partition.axes) * x.chunks
        return first + lo // x.chunk, first + -(-hi // x.chunk)

    @functools.cached_property
    def _cut(self) -> bool:
        """True if some leaf is in parts on several ranks; if none is, every rank sums everything for itself."""
        return any(x.mesh.size(x.spec.cut_axes) > 1 for x in self.layouts)

    @functools.cached_property
    def _small(self) -> tuple[list[int], collectives.Indices]:
        """The small leaves that this rank owns, and the slot of each of their elements, laid end to end."""
        chosen, slots = [], []
        for i, x in enumerate(self.layouts):
            first, end = self._owned(i)
            if end > first and x.n * x.dtype.itemsize < SMALL_BYTES:
                chosen.append(i)
                lo, hi = x.bounds(x.index)
                count, chunk = (hi - lo) * _components(x), x.chunk * _components(x)
                slots.append(first + np.arange(count, dtype=np.int32) // np.int32(chunk))
        return chosen, np.concatenate(slots) if slots else np.zeros(0, dtype=np.int32)

    @functools.cached_property
    def _complex(self) -> list[bool]:
        return [self.layouts[i].dtype.is_complex for i in self._small[0]]

    @functools.cached_property
    def _large(self) -> list[tuple[int, int, int, int]]:
        """(leaf, first slot, end, chunk size) of the other leaves that this rank owns."""
        small = set(self._small[0])
        rows = [(i, *self._owned(i), x.chunk) for i, x in enumerate(self.layouts)]
        return [row for row in rows if row[2] > row[1] and row[0] not in small]

    def norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """The global norm of local leaves laid out as `layouts`: 0-dim float64, equal on all ranks."""
        return self.sums(grads).sum().sqrt()

    def first_bad(self, sums: torch.Tensor) -> str:
        """The path of the first leaf whose sum of squares is not finite, or of none."""
        bad = (~torch.isfinite(sums)).nonzero()
        if not len(bad):
            return "no leaf (the loss is not finite)"
        return self.layouts[bisect.bisect_right(self._slots[0], int(bad[0])) - 1].path

    @functools.cached_property
    def order(self) -> list[int]:
        """The leaves that `sums` reads here, in its order; each is read once."""
        return [*self._small[0], *(row[0] for row in self._large)]

    @functools.cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """(leaf, first slot, elements of a chunk) of each leaf that this rank owns."""
        rows = [(i, *self._owned(i)) for i in range(len(self.layouts))]
        return [
            (i, first, self.layouts[i].chunk * _components(self.layouts[i])) for i, first, end in rows if end > first
        ]

    def sums(
        self,
        grads: Sequence[torch.Tensor],
        device: torch.device | None = None,
        fill: Callable[[torch.Tensor, Sequence[torch.Tensor]], None] | None = None,
    ) -> torch.Tensor:
        """Sums of squares in their slots: float64 1-D, equal on all ranks.

        Args:
            grads: local leaves laid out as `layouts`. device: of the sums; default: that of the gradients.
            fill: given sums and gradients, fills the slots of `rows`.
        """
        if device is None:
            device = grads[0].device if grads else torch.device("cpu")
        sums = torch.zeros(self._slots[1], dtype=torch.float64, device=device)
        (fill or self._fill)(sums, grads)
        if self._cut:
            mesh = self.layouts[0].mesh
            collectives.exact_sum(sums, mesh, mesh.names)
        return sums

    def _fill(self, sums: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        chosen, slots = self._small
        if chosen:
            parts = [grads[i] for i in chosen] if len(chosen) < len(self.layouts) else list(grads)
            if any(self._complex):
                parts = [_real(x) if odd else x for x, odd in zip(parts, self._complex, strict=True)]
            flat = _compat.flatten_dense(parts).double()
            sums.index_add_(0, collectives.on_device(slots, sums.device), flat.square())
        for i, first, end, chunk in self._large:
            sums[first:end] = chunk_squares(_real(grads[i]).view(-1), chunk * _components(self.layouts[i]))


def _components(layout: Layout) -> int:
    return 2 if layout.dtype.is_complex else 1


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.contiguous()) if x.is_complex() else x if x.is_contiguous() else x.contiguous()


def chunk_squares(flat: torch.Tensor, chunk: int) -> torch.Tensor:
    """Sums of squares of each `chunk` elements of a 1-D tensor (the last may be short): float64 [chunks].

    The bits of a chunk's sum do not depend on how many other chunks the tensor has.
    """
    full = flat.numel() // chunk
    sums = [_row_squares(flat[: full * chunk].view(full, chunk))] if full else []
    if flat.numel() > full * chunk:
        sums.append(_row_squares(flat[full * chunk :].view(1, -1)))
    return torch.cat(sums) if sums else flat.new_zeros(0, dtype=torch.float64)


def _row_squares(rows: torch.Tensor) -> torch.Tensor:
    """Sums of squares of each row, float64, through tiles that stay in a processor's cache."""
    count, width = rows.shape
    if rows.device.type != "cpu":
        norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return norms.square_()
    if width >= TILE // 2:
        return torch.stack([_dots(row) for row in rows])
    step = TILE // width
    if count == 1:  # torch sums a lone row in another order than one of several
        return _row_squares(rows.expand(2, width))[:1]
    if count % step == 1:
        return torch.cat([_row_squares(rows[:-1]), _row_squares(rows[-1:])])
    return torch.cat([torch.linalg.vector_norm(t.double(), dim=1) for t in rows.split(step)]).square_()


def _dots(row: torch.Tensor) -> torch.Tensor:
    tiles = [tile.double() for tile in row.split(TILE)]
    return torch.stack([torch.dot(t, t) for t in tiles]).sum()


def plan_of(layouts: tuple[Layout, ...]) -> NormPlan:
    """The plan for these layouts; kept, since a loop asks for the same one each time."""
    return _plan(layouts, layouts[0].mesh.comm if layouts else None)


@functools.lru_cache(maxsize=64)
def _plan(layouts: tuple[Layout, ...], comm: Any) -> NormPlan:
    """comm: of the mesh; a mesh that was made anew equals the one before."""
    return NormPlan(layouts)


def whole_layouts(tree: Any, mesh: Mesh | None = None) -> tuple[Layout, ...]:
    """Layouts that say: every leaf is whole here."""
    mesh = mesh or abstract_mesh(dp=1)
    names, found, _ = tree_lib.flatten_with_paths(tree)
    return tuple(Layout(n, tuple(x.shape), x.dtype, Spec(), mesh) for n, x in zip(names, found, strict=True))


def _counted(grads: Any, specs: Specs | None) -> tuple[list[torch.Tensor], tuple[Layout, ...]]:
    names, found, _ = tree_lib.flatten_with_paths(grads)
    for name, leaf in zip(names, found, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"grads/{name}: expected a tensor, got {type(leaf).__name__}; pass a tree of tensors")
    if specs is None:
        return found, whole_layouts(grads)
    layouts = dict(zip(tree_lib.paths(specs.tree), specs.layouts, strict=True))
    unknown = [n for n in names if n not in layouts]
    if unknown:
        raise ValueError(f"grads/{unknown[0]}: the specs have no such leaf")
    chosen = tuple(layouts[n] for n in names)
    for name, leaf, x in zip(names, found, chosen, strict=True):
        if tuple(leaf.shape) != x.local_shape:
            raise ValueError(
                f"grads/{name}: the spec says a local shape {x.local_shape}, got {tuple(leaf.shape)}; shard it"
            )
        if x.spec.unreduced:
            raise ValueError(f"grads/{name}: still unreduced over {x.spec.unreduced}; call fz.reduce first")
    return found, chosen


def global_norm(grads: Any, specs: Specs | None = None) -> torch.Tensor:
    """The 2-norm of all gradients together: sqrt(sum of |g|^2), each element of each leaf counted once.

    Args:
        grads: tree of local leaves; leaves may be missing (`None`).
        specs: how they are cut; default: all whole in this process.

    Returns: 0-dim float64, equal on every rank.

    >>> float(global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}))
    5.0
    """
    found, layouts = _counted(grads, specs)
    return plan_of(layouts).norm(found)


def clip_by_global_norm(
    grads: Any, max_norm: float, *, specs: Specs | None = None, expert_aware: bool = True
) -> tuple[Any, torch.Tensor]:
    """grads * min(1, max_norm / norm).

    Args:
        grads: tree of local leaves; not changed.
        max_norm: positive.
        specs: how the leaves are cut; default: all whole.
        expert_aware: False leaves out of the norm (and still scales) the leaves that an expert axis cuts.

    Returns: the clipped gradients, and the norm before the clip (0-dim float64). A norm that is not finite gives
    gradients that are not: a step skips them.

    References: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    found, layouts = _counted(grads, specs)
    keep = [i for i, x in enumerate(layouts) if expert_aware or not set(x.spec.partition.axes) & set(EXPERT_AXES)]
    if len(keep) < len(layouts):
        warnings.warn(
            f"clip_by_global_norm: {len(layouts) - len(keep)} expert leaves are not in the norm", stacklevel=2
        )
    norm = plan_of(tuple(layouts[i] for i in keep)).norm([found[i] for i in keep])
    factor = clip_factor(norm, max_norm)
    return tree_lib.map(lambda g: (g * factor.to(g.device)).to(g.dtype), grads), norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / norm), 0-dim; NaN if the norm is."""
    return (max_norm / norm).clamp(max=1.0)


def host_clip_factor(norm: float, max_norm: float) -> float:
    """The same of numbers."""
    return max_norm / norm if not norm <= max_norm else 1.0
