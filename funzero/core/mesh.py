"""Meshes: named axes over the ranks of a job.

[Note: who talks to whom] A mesh is a value: axis names, sizes, and which of them are batch axes. The process groups that
serve it live in a `Comm`, made once by `make_mesh`, with one group for each set of axes larger than one rank, all
created at that moment on every rank, so no later call can wait for a group that a peer never makes.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from funzero.core import comm as comm_lib

BATCH_AXES = ("replicate", "dp", "ep")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A grid of ranks with named axes, outermost first.

    Attributes:
        names: axis names. sizes: ranks along each. batch: the axes whose ranks hold different samples.
        ranks: of each place in the flattened grid, the rank in the job; (): they are the same.
        rank: this process's place. device: where leaves live. comm: None for an abstract mesh, and for one that this process
            has no place in.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    batch: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    rank: int = dataclasses.field(default=0, compare=False)
    device: torch.device = dataclasses.field(default=torch.device("cpu"), compare=False)
    comm: "comm_lib.Comm | None" = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """Number of ranks along the given axes together."""
        return math.prod(self.axis_size(a) for a in axes)

    def axis_size(self, axis: str) -> int:
        """Number of ranks along one axis."""
        if axis not in self.names:
            raise ValueError(f"axis {axis!r} is not in the mesh {self.describe()}")
        return self.sizes[self.names.index(axis)]

    def coordinate(self, axis: str, rank: int | None = None) -> int:
        """Where `rank` (default: this one) stands along `axis`."""
        i = self.names.index(axis)
        return (self.rank if rank is None else rank) // math.prod(self.sizes[i + 1 :]) % self.sizes[i]

    def index(self, axes: Iterable[str], rank: int | None = None) -> int:
        """Position of `rank` in the row-major grid of the given axes, in the order given."""
        position = 0
        for axis in axes:
            position = position * self.axis_size(axis) + self.coordinate(axis, rank)
        return position

    def peers(self, axes: Iterable[str], rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, in the row-major order of `axes`."""
        axes = tuple(axes)
        others = [a for a in self.names if a not in axes]
        mine = [self.coordinate(a, rank) for a in others]
        same = [r for r in range(self.world) if [self.coordinate(a, r) for a in others] == mine]
        return tuple(sorted(same, key=lambda r: self.index(axes, r)))

    @property
    def here(self) -> bool:
        """Whether this process has a place in it; False for an abstract mesh."""
        return self.comm is not None

    def in_job(self, rank: int) -> int:
        """The rank in the job of a place in the grid."""
        return self.ranks[rank] if self.ranks else rank

    def places(self, group: Any) -> list[int]:
        """The places of a process group's ranks, in the group's own order."""
        ranks = comm_lib.group_ranks(group)
        return [self.ranks.index(r) for r in ranks] if self.ranks else ranks

    def control(self) -> "comm_lib.Comm":
        """The communicator, for small agreements between all ranks; raises for an abstract mesh."""
        if self.comm is None:
            raise ValueError(f"the mesh {self.describe()} is abstract: it has no processes; use make_mesh")
        return self.comm

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within the block an exception on this rank makes the peers fail too, with its cause; see [Note: a dead mesh]."""
        if self.comm is None or self.world == 1:
            yield
            return
        self.comm.check_alive()
        try:
            yield
        except BaseException as error:
            raise self.comm.failure(error) from error

    def gather_host(self, row: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, [world, len(row)]; `row` is 1-D on the CPU. A collective call."""
        if self.world == 1:
            return row.unsqueeze(0)
        with self.guard():
            return self.control().gather_host(row)

    def exchange_text(self, text: str) -> list[str]:
        """All ranks' texts (up to 4,000 bytes each), for messages. A collective call."""
        if self.world == 1:
            return [text]
        with self.guard():
            return self.control().exchange_text(text)

    def describe(self) -> str:
        """`(dp=2, tp=4)`."""
        return "(" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + ")"

    def group(self, axes: Iterable[str]) -> Any:
        """The process group of this rank's peers along `axes`; raises for an abstract mesh."""
        self.control().check_alive()
        return self.control().groups[frozenset(a for a in axes if self.axis_size(a) > 1)]


def _build(batch: Iterable[str] | None, axes: dict[str, int], world: int | None) -> Mesh:
    if not axes:
        axes = {"dp": -1}
    open_axes = [a for a, n in axes.items() if n == -1]
    if len(open_axes) > 1:
        raise ValueError(f"make_mesh: only one axis may be -1, got {open_axes}")
    wrong = [a for a, n in axes.items() if n != -1 and n < 1]
    if wrong:
        raise ValueError(f"make_mesh: axis sizes are positive or -1, got { ({a: axes[a] for a in wrong}) }")
    fixed = math.prod(n for n in axes.values() if n != -1)
    if world is None:
        world = fixed
    if world % fixed or (not open_axes and world != fixed):
        raise ValueError(
            f"make_mesh: {world} ranks do not fit the axes {axes} ({fixed} ranks); "
            f"start a multiple of {fixed} and leave one axis -1, or change the axes"
        )
    sizes = tuple(world // fixed if n == -1 else n for n in axes.values())
    names = tuple(axes)
    chosen = tuple(a for a in names if a in BATCH_AXES) if batch is None else tuple(batch)
    unknown = [a for a in chosen if a not in names]
    if unknown:
        raise ValueError(f"make_mesh: batch axes {unknown} are not among the axes {names}")
    return Mesh(names, sizes, chosen)


def abstract_mesh(*, batch: Iterable[str] | None = None, **axes: int) -> Mesh:
    """A mesh without processes, for specs, shapes and plans; no axis may be -1.

    >>> abstract_mesh(dp=4, tp=2).describe()
    '(dp=4, tp=2)'
    """
    return _build(batch, axes, None)


def local_mesh() -> Mesh:
    """A mesh of this process alone, with its device; it needs no process group."""
    device = comm_lib.local_device(int(os.environ.get("LOCAL_RANK", 0)))
    return Mesh(("dp",), (1,), ("dp",), device=device, comm=comm_lib.Comm({}, 0, (comm_lib.own_rank(),), device, 600))


def make_mesh(
    *,
    batch: Iterable[str] | None = None,
    ranks: Iterable[int] | None = None,
    timeout_s: float = 600,
    **axes: int,
) -> Mesh:
    """The mesh of this job, with its process groups.

    Under a launcher such as torchrun it initialises the default process group and the local device, if nobody has;
    without one it is a mesh of one rank.

    Args:
        batch: axes whose ranks hold different samples; default: those of `replicate`, `dp`, `ep` that are there.
        ranks: ranks of the job that are in the mesh, ascending; default: all. For the others it is a mesh without processes,
            for specs, shapes and `transfer`; they make it all the same, since this is a collective call of the whole job.
        timeout_s: seconds after which a collective that a peer does not join fails.
        axes: name and size of each axis, outermost first; one may be -1. Default: `dp=-1`.

    Raises:
        ValueError: the number of ranks does not fit the axes.
    """
    launched = comm_lib.is_initialized() or "RANK" in os.environ
    job = comm_lib.join(timeout_s) if launched else 1
    members = tuple(range(job)) if ranks is None else tuple(ranks)
    if list(members) != sorted(set(members)) or not set(members) <= set(range(job)):
        raise ValueError(f"make_mesh: ranks are some of the job's {job}, in ascending order, got {members}")
    mesh = _build(batch, axes, len(members))
    rank, device = comm_lib.place() if launched else (0, comm_lib.local_device(0))
    mesh = dataclasses.replace(mesh, ranks=() if len(members) == job else members, device=device)
    place = members.index(rank) if rank in members else -1
    mesh = dataclasses.replace(mesh, rank=max(0, place))
    wide = [a for a, n in zip(mesh.names, mesh.sizes, strict=True) if n > 1]
    rows: dict[frozenset[str], list[tuple[int, ...]]] = {}
    for count in range(1, len(wide) + 1):
        for axes_ in itertools.combinations(wide, count):
            rows[frozenset(axes_)] = sorted({tuple(sorted(mesh.peers(axes_, r))) for r in range(mesh.world)})
    comm = comm_lib.Comm(rows, place, members, device, timeout_s)
    return mesh if place < 0 else dataclasses.replace(mesh, comm=comm)
