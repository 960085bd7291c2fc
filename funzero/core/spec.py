"""Specs: the layout of a leaf as a value.

[Note: flat cuts] ZeRO cuts the *flattened local piece* of a leaf into ranges, since the shape does not matter to
element-wise arithmetic. The piece of n elements is cut into chunks of c = ceil(n / 64) elements, rounded up to
`quantum`; k = ceil(n / c) of them are not empty. Each rank owns ceil(k / ranks) chunks in a row (a *run*), the last
ranks fewer or none. The chunk borders do not depend on the number of ranks as long as it divides 64 or is at most 8,
so sums per chunk have the same bits in every such layout, and blocks of quantised states are never split.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh

MEMORY_KINDS = ("device", "host", "disk")
CHUNKS = 64


@dataclasses.dataclass(frozen=True, init=False)
class P:
    """A partition: for each dim `None` (not cut), an axis, or a tuple of axes. Missing entries are `None`.

    >>> P("tp", None)
    P('tp', None)
    """

    entries: tuple[str | tuple[str, ...] | None, ...]

    def __init__(self, *entries: str | Iterable[str] | None):
        clean = tuple(e if e is None or isinstance(e, str) else tuple(e) for e in entries)
        object.__setattr__(self, "entries", clean)
        axes = self.axes
        if len(set(axes)) != len(axes):
            raise ValueError(f"{self}: an axis can cut only one dim")

    def __repr__(self) -> str:
        return f"P({', '.join(repr(e) for e in self.entries)})"

    def of_dim(self, dim: int) -> tuple[str, ...]:
        """The axes that cut `dim`."""
        entry = self.entries[dim] if dim < len(self.entries) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, in the order of the dims."""
        return tuple(a for d in range(len(self.entries)) for a in self.of_dim(d))


@dataclasses.dataclass(frozen=True)
class Spec:
    """The layout of one leaf.

    Attributes:
        partition: how the dims are cut over the mesh.
        flat: axes over which the flattened piece is cut into ranges, see [Note: flat cuts].
        memory: `device`, `host` or `disk`.
        quantum: chunks are multiples of so many elements.
        unreduced: axes over which the global leaf is the sum of the ranks' values.
        folder: of leaves on disk; not part of the layout, and ranks and runs may have different ones.
    """

    partition: P = P()
    flat: tuple[str, ...] = ()
    memory: str = "device"
    quantum: int = 1
    unreduced: tuple[str, ...] = ()
    folder: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.memory not in MEMORY_KINDS:
            raise ValueError(f"memory is one of {MEMORY_KINDS}, got {self.memory!r}")
        for name in ("flat", "unreduced"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"Spec({name}={getattr(self, name)!r}): give a tuple of axes")
        if not isinstance(self.partition, P):
            raise TypeError(f"Spec(partition={self.partition!r}): give a P(...)")
        used = [*self.partition.axes, *self.flat, *self.unreduced]
        twice = sorted({a for a in used if used.count(a) > 1})
        if twice:
            raise ValueError(f"{self}: the axes {twice} are used twice; an axis cuts once, or is unreduced")

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different parts."""
        return (*self.partition.axes, *self.flat)


def chunk_size(n: int, ranks: int, quantum: int = 1) -> int:
    """Elements of a chunk when a piece of n elements is cut flat over `ranks`; at least 1."""
    parts = CHUNKS if CHUNKS % ranks == 0 else CHUNKS * math.ceil(ranks / 8)
    return max(1, math.ceil(math.ceil(n / parts) / quantum) * quantum)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A spec bound to its mesh and to the global shape and dtype of its leaf; all counts are elements.

    Raises ValueError when the spec does not fit the leaf.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    mesh: Mesh

    def __post_init__(self) -> None:
        spec, where = self.spec, self.path or "leaf"
        for said, axes in (
            (spec.partition, spec.partition.axes),
            (f"flat={spec.flat}", spec.flat),
            (f"unreduced={spec.unreduced}", spec.unreduced),
        ):
            for axis in axes:
                if axis not in self.mesh.names:
                    raise ValueError(f"{where}: {said} names axis {axis!r}, not in the mesh {self.mesh.describe()}")
        if len(spec.partition.entries) > len(self.shape):
            raise ValueError(
                f"{where}: {spec.partition} has {len(spec.partition.entries)} entries, leaf has shape {list(self.shape)}"
            )
        for dim, size in enumerate(self.shape):
            parts = self.mesh.size(spec.partition.of_dim(dim))
            if size % parts:
                raise ValueError(
                    f"{where}: {spec.partition} needs dim {dim} divisible by {parts}, got {size}; "
                    "pad it or cut another dim"
                )

    @functools.cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of this rank's piece before the flat cut."""
        return tuple(s // self.mesh.size(self.spec.partition.of_dim(d)) for d, s in enumerate(self.shape))

    @functools.cached_property
    def n(self) -> int:
        """Elements of the piece before the flat cut."""
        return math.prod(self.piece_shape)

    @functools.cached_property
    def ranks(self) -> int:
        """Ranks that share the piece."""
        return self.mesh.size(self.spec.flat)

    @functools.cached_property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return chunk_size(self.n, self.ranks, self.spec.quantum)

    @functools.cached_property
    def chunks(self) -> int:
        """Chunks that are not empty."""
        return math.ceil(self.n / self.chunk)

    @functools.cached_property
    def run(self) -> int:
        """Elements of a full run; the last ranks own fewer."""
        return math.ceil(self.chunks / self.ranks) * self.chunk

    def bounds(self, index: int) -> tuple[int, int]:
        """First element and end of the range that the index-th rank along `flat` owns."""
        return min(index * self.run, self.n), min((index + 1) * self.run, self.n)

    @functools.cached_property
    def index(self) -> int:
        """This rank's position along `flat`."""
        return self.mesh.index(self.spec.flat)

    @functools.cached_property
    def is_flat(self) -> bool:
        """True if the leaf is stored as a 1-D range; on one rank nothing is cut, and it keeps its shape."""
        return self.ranks > 1

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank stores."""
        lo, hi = self.bounds(self.index)
        return (hi - lo,) if self.is_flat else self.piece_shape

    @functools.cached_property
    def local_bytes(self) -> int:
        """Bytes that this rank stores."""
        return math.prod(self.local_shape) * self.dtype.itemsize

    @functools.cached_property
    def box(self) -> tuple[slice, ...]:
        """Where this rank's piece lies in the global leaf."""
        return self.box_of(self.mesh.rank)

    def box_of(self, rank: int) -> tuple[slice, ...]:
        """Where the piece of `rank` lies in the global leaf."""
        out = []
        for dim, size in enumerate(self.piece_shape):
            at = self.mesh.index(self.spec.partition.of_dim(dim), rank)
            out.append(slice(at * size, (at + 1) * size))
        return tuple(out)

    def indices(self) -> "range | torch.Tensor":
        """Where this rank's elements lie in the flattened global leaf: a range, or int64 [local elements]."""
        lo, hi = self.bounds(self.index) if self.is_flat else (0, self.n)
        if self.mesh.size(self.spec.partition.axes) == 1:
            return range(lo, hi)
        at = torch.zeros((), dtype=torch.int64)
        for dim, (size, part) in enumerate(zip(self.shape, self.box, strict=True)):
            start, stop, _ = part.indices(size)
            at = at.unsqueeze(-1) + torch.arange(start, stop) * math.prod(self.shape[dim + 1 :])
        return at.reshape(-1)[lo:hi]

    def with_spec(self, **changes: Any) -> "Layout":
        """The same leaf with other fields in its spec."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))

    def columns(self) -> tuple[str, ...]:
        """The line of `fz.tree.show`."""
        spec = self.spec
        words = [str(spec.partition)] if spec.partition.axes else []
        words += [f"flat={'+'.join(spec.flat)}"] if spec.flat else []
        words += [f"unreduced={'+'.join(spec.unreduced)}"] if spec.unreduced else []
        return (
            self.path,
            tree_lib.dtype_and_shape(self.dtype, self.shape),
            " ".join(words) or "replicated",
            spec.memory,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Specs:
    """A tree of specs bound to its mesh and to each leaf's global shape and dtype.

    Attributes:
        mesh: the mesh. treedef: structure of the tree. layouts: one `Layout` a leaf, in tree order.
    """

    mesh: Mesh
    treedef: Any
    layouts: tuple[Layout, ...]

    @staticmethod
    def bind(mesh: Mesh, specs: Any, shapes: Any, prefix: str = "") -> "Specs":
        """Binds a tree of `Spec` to a tree of (meta) tensors with the global shapes.

        Args:
            specs: a tree of `Spec` with the structure of `shapes`, or one `Spec` for every leaf.
            shapes: tree of tensors, of which only shape and dtype are read (global view).
            prefix: put before each path, for messages and globs.
        """
        names, found, treedef = tree_lib.flatten_with_paths(shapes)
        given = [specs] * len(found) if isinstance(specs, Spec) else tree_lib.leaves(specs)
        if len(given) != len(found) or (not isinstance(specs, Spec) and tree_lib.paths(specs) != names):
            raise ValueError(f"{prefix or 'specs'}: the tree of specs has other leaves than the tree of shapes")
        layouts = [
            Layout(tree_lib.prefix_path(prefix, n), tuple(x.shape), x.dtype, s, mesh)
            for n, x, s in zip(names, found, given, strict=True)
        ]
        return Specs(mesh, treedef, tuple(layouts))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Specs):
            return NotImplemented
        return (self.treedef, self.layouts) == (other.treedef, other.layouts)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.treedef, self.layouts))

    @functools.cached_property
    def tree(self) -> Any:
        """The tree of `Spec`."""
        return tree_lib.unflatten(self.treedef, [x.spec for x in self.layouts])

    @functools.cached_property
    def by_path(self) -> dict[str, Layout]:
        """Layouts by path."""
        return {x.path: x for x in self.layouts}

    def abstract(self, *, local: bool = False) -> Any:
        """A tree of meta tensors with the global (or this rank's local) shapes."""
        return tree_lib.unflatten(
            self.treedef,
            [torch.empty(x.local_shape if local else x.shape, dtype=x.dtype, device="meta") for x in self.layouts],
        )

    def map(self, change: Any) -> "Specs":
        """The same leaves with `change(layout) -> layout` applied to each."""
        return Specs(self.mesh, self.treedef, tuple(change(x) for x in self.layouts))

    def transposed(self) -> "Specs":
        """How cotangents of leaves in this layout are laid out: of a value that ranks have copies of, each has a part of the
        sum, and of a value that is such a sum, each has a copy."""

        def swap(x: Layout) -> Layout:
            copies = tuple(a for a in x.mesh.names if a not in (*x.spec.cut_axes, *x.spec.unreduced))
            return x.with_spec(unreduced=copies)

        return self.map(swap)

    @property
    def local_bytes(self) -> int:
        """Bytes that this rank stores."""
        return sum(x.local_bytes for x in self.layouts)


@tree_lib.show.register
def _show_specs(specs: Specs) -> str:
    return tree_lib.table([x.columns() for x in specs.layouts])
