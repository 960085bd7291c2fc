"""Collectives on leaves: gather and reduce of flat runs, one leaf at a time or many small ones in a bundle.

A gather is send and receive into slices of the output. A reduction is an all-to-all followed by a fixed binary tree of
adds, so its bits depend on the ranks' values alone and not on the backend.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from funzero.core import comm
from funzero.core.mesh import Mesh
from funzero.core.spec import Layout

BUNDLE_BYTES = 64 * 1024
SUM_BYTES = 64 * 1024 * 1024
Indices = npt.NDArray[np.int32]


def on_device(indices: Indices, device: torch.device) -> torch.Tensor:
    """An index table as a tensor."""
    return torch.from_numpy(indices).to(device)


def tree_sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Adds equally shaped tensors in a fixed binary tree; may write into the rows.

    The sum of two or more has memory of its own: as one of the rows it would keep all of them.
    """
    level = list(rows)
    while len(level) > 2:
        pairs = [level[i].add_(level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0] + level[1] if len(level) == 2 else level[0]


def all_sum(x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
    """The sum of `x` over the ranks of `axes`, in a fixed tree, equal on all of them.

    A rank sees the values of all others: for small tensors. A large one goes in slices, within `SUM_BYTES` of memory.
    """
    world = mesh.size(axes)
    if world == 1:
        return x
    flat = x.contiguous().view(-1)
    out = torch.empty_like(flat)
    for mine, total in zip(*(t.split(max(1, SUM_BYTES // (world * x.itemsize))) for t in (flat, out)), strict=True):
        rows = mine.new_empty(world * mine.numel())
        comm.all_gather_equal(rows, mine, mesh.group(axes)).wait()
        total.copy_(tree_sum(list(rows.view(world, -1))))
    return out.view(x.shape)


def all_max(x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
    """The largest value of each element over the ranks of `axes`; bools count as 0 and 1."""
    if mesh.size(axes) == 1:
        return x
    flat = x.contiguous().view(-1)
    flat = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
    rows = flat.new_empty(mesh.size(axes) * flat.numel())
    comm.all_gather_equal(rows, flat, mesh.group(axes)).wait()
    return rows.view(mesh.size(axes), -1).amax(0).to(x.dtype).view(x.shape)


def mean_buffer(own: torch.Tensor, share: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The mean by weight of a float buffer over the batch axes, the largest value of another.

    Where all ranks agree the value stays as it is: a mean would change its last bit, or make NaN of an infinity.
    """
    if not own.dtype.is_floating_point:
        return all_max(own, mesh, mesh.batch)
    same = all_max(own, mesh, mesh.batch) == -all_max(-own, mesh, mesh.batch)
    part = torch.where(share == 0, 0.0, own.to(torch.float64) * share)
    return torch.where(same, own, all_sum(part, mesh, mesh.batch).to(own.dtype))


def exact_sum(x: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
    """The sum over `axes` where at most one rank's value of each element is not zero: exact in any order. In place."""
    if mesh.size(axes) > 1:
        comm.all_reduce_sum(x, mesh.group(axes))
    return x


class Pending:
    """A collective under way; `wait()` finishes it and returns its result."""

    def __init__(self, works: list[comm.Work], finish: Callable[[], torch.Tensor], keep: torch.Tensor | None = None):
        self._works, self._finish = works, finish
        self._keep = keep  # the buffer of a send must live until the send is done

    def wait(self) -> torch.Tensor:
        """Waits, and does the local arithmetic that is left."""
        for work in self._works:
            work.wait()
        return self._finish()


def post_gather(piece: torch.Tensor, layout: Layout, out: torch.Tensor | None = None) -> Pending:
    """Posts the gather of a flat leaf.

    Args:
        piece: this rank's 1-D range.
        out: 1-D of `layout.n` elements to gather into; its own range may already be the piece itself.

    Returns: pending tensor of shape `layout.piece_shape`.
    """
    if out is None:
        out = piece.new_empty(layout.n)
    own = out[slice(*layout.bounds(layout.index))]
    if own.data_ptr() != piece.data_ptr():
        own.copy_(piece)
    works = _exchange_runs(own, out, layout)
    return Pending(works, lambda: out.view(layout.piece_shape))


def _exchange_runs(own: torch.Tensor, out: torch.Tensor, layout: Layout) -> list[comm.Work]:
    peers = layout.mesh.peers(layout.spec.flat)
    sends, recvs = [], []
    for step in range(1, len(peers)):
        to, source = (layout.index + step) % len(peers), (layout.index - step) % len(peers)
        lo, hi = layout.bounds(source)
        if own.numel():
            sends.append((own, layout.mesh.in_job(peers[to])))
        if hi > lo:
            recvs.append((out[lo:hi], layout.mesh.in_job(peers[source])))
    return comm.send_recv(sends, recvs, layout.mesh.group(layout.spec.flat)) if sends or recvs else []


def _group_order(layout: Layout) -> list[int]:
    """Positions along `flat`, in the rank order of the process group."""
    mesh = layout.mesh
    return [mesh.index(layout.spec.flat, rank) for rank in mesh.places(mesh.group(layout.spec.flat))]


def post_reduce_scatter(full: torch.Tensor, layout: Layout) -> Pending:
    """Posts the sum of `full` (shape `layout.piece_shape`) over `layout.spec.flat`; pending: this rank's 1-D range."""
    flat = full.contiguous().view(-1)
    if layout.ranks == 1:
        return Pending([], lambda: flat)
    order = _group_order(layout)
    lengths = [hi - lo for lo, hi in map(layout.bounds, order)]
    if order != sorted(order):
        flat = torch.cat([flat[slice(*layout.bounds(i))] for i in order])
    mine = layout.local_shape[0]
    rows = flat.new_empty(mine * layout.ranks)
    work = comm.all_to_all(rows, flat, [mine] * layout.ranks, lengths, layout.mesh.group(layout.spec.flat))
    return Pending([work], lambda: _by_position(rows.view(layout.ranks, mine), order), keep=flat)


def _by_position(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Adds rows that came in group order, in the order of their positions along the axes."""
    ranked = sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])
    return tree_sum([row for _, row in ranked])


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Small leaves with the same flat axes that travel in one collective, by copy."""

    layouts: tuple[Layout, ...]

    # Index tables are numpy arrays, so that between steps no tensors live but those of the state.
    @functools.cached_property
    def _send_order(self) -> Indices:
        """For the leaves laid end to end: the element order that sorts by destination rank, then by leaf."""
        starts = [0, *itertools.accumulate(x.n for x in self.layouts)]
        parts = [
            np.arange(start + lo, start + hi, dtype=np.int32)
            for i in _group_order(self.layouts[0])
            for start, x in zip(starts, self.layouts, strict=False)
            for lo, hi in [x.bounds(i)]
        ]
        return np.concatenate(parts)

    @functools.cached_property
    def _leaf_order(self) -> Indices:
        """The inverse: where each element of the leaves laid end to end stands in rank order."""
        return np.argsort(self._send_order).astype(np.int32)

    @functools.cached_property
    def _by_rank(self) -> list[int]:
        return [sum(hi - lo for x in self.layouts for lo, hi in [x.bounds(i)]) for i in _group_order(self.layouts[0])]

    def gather(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole leaves, shape `piece_shape` each, as views of one buffer."""
        first = self.layouts[0]
        own = torch.cat([p.view(-1) for p in pieces])
        out = own.new_empty(sum(self._by_rank))
        parts = list(out.split(self._by_rank))
        mesh = first.mesh
        ranks = mesh.places(mesh.group(first.spec.flat))
        parts[ranks.index(mesh.rank)].copy_(own)
        others = [(part, mesh.in_job(r)) for part, r in zip(parts, ranks, strict=True) if r != mesh.rank]
        sends = [(own, r) for _, r in others] if own.numel() else []
        recvs = [(part, r) for part, r in others if part.numel()]
        for work in comm.send_recv(sends, recvs, first.mesh.group(first.spec.flat)):
            work.wait()
        whole = out.index_select(0, on_device(self._leaf_order, out.device)).split([x.n for x in self.layouts])
        return [w.view(x.piece_shape) for w, x in zip(whole, self.layouts, strict=True)]

    def post_reduce_scatter(self, fulls: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Posts the sums over the flat axes; the call that comes back waits and returns 1-D ranges."""
        first = self.layouts[0]
        flat = torch.cat([x.reshape(-1) for x in fulls])
        send = flat.index_select(0, on_device(self._send_order, flat.device))
        mine = sum(x.local_shape[0] for x in self.layouts)
        rows = send.new_empty(mine * first.ranks)
        group = first.mesh.group(first.spec.flat)
        work = comm.all_to_all(rows, send, [mine] * first.ranks, self._by_rank, group)

        def finish(keep: torch.Tensor = send) -> list[torch.Tensor]:
            work.wait()
            total = _by_position(rows.view(first.ranks, mine), _group_order(first))
            return list(total.split([x.local_shape[0] for x in self.layouts]))

        return finish


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves of a list that travel in one collective: one large leaf, or small ones with equal axes and dtype."""

    indices: tuple[int, ...]
    bundle: Bundle

    def scatter(self, leaves: list[torch.Tensor]) -> None:
        """Replaces whole pieces by this rank's ranges of their sums."""
        if len(self.indices) == 1:
            leaves[self.indices[0]] = post_reduce_scatter(leaves[self.indices[0]], self.bundle.layouts[0]).wait()
            return
        parts = self.bundle.post_reduce_scatter([leaves[i] for i in self.indices])()
        for i, part in zip(self.indices, parts, strict=True):
            leaves[i] = part

    def gather(self, leaves: list[torch.Tensor]) -> None:
        """Replaces ranges by whole pieces."""
        if len(self.indices) == 1:
            leaves[self.indices[0]] = post_gather(leaves[self.indices[0]], self.bundle.layouts[0]).wait()
            return
        for i, x in zip(self.indices, self.bundle.gather([leaves[i] for i in self.indices]), strict=True):
            leaves[i] = x


def travel_groups(layouts: Sequence[Layout | None]) -> list[Group]:
    """Groups the leaves that have a layout here: those below 64 KiB together, the others alone."""
    groups: dict[object, tuple[list[int], list[Layout]]] = {}
    for i, layout in enumerate(layouts):
        if layout is not None:
            small = layout.n * layout.dtype.itemsize < BUNDLE_BYTES
            key = (layout.spec.flat, layout.dtype) if small else i
            indices, members = groups.setdefault(key, ([], []))
            indices.append(i)
            members.append(layout)
    return [Group(tuple(indices), Bundle(tuple(members))) for indices, members in groups.values()]
