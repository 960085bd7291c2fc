"""Agreements between ranks over the CPU group: the header of each call, and errors that all can still raise.

[Note: the header] Each call of a step begins with one 64-byte row from every rank: what it is about to do, whether it
has a batch, a hash of its batch's structure, a hash of the layout, and whether it met an error. Mistakes that can be
seen before the first collective are so raised on every rank, and the mesh lives on.
"""

import dataclasses
import zlib
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.transforms.losses import aux_of_paths

ACCUMULATE, UPDATE, STEP, EVAL = 1, 2, 3, 4
_NAMES = {ACCUMULATE: "step.accumulate", UPDATE: "step.update", STEP: "step", EVAL: "eval"}


@dataclasses.dataclass(frozen=True)
class Header:
    """What one rank says; `error` is a mistake found in its input."""

    action: int
    has_batch: bool
    batch: str
    layout: int
    error: Exception | None = None

    def row(self) -> torch.Tensor:
        """The header as int64 [8]."""
        signature = zlib.crc32(self.batch.encode()) if self.has_batch else 0
        return torch.tensor([self.action, self.has_batch, signature, self.layout, self.error is not None, 0, 0, 0])


def describe_batch(batch: Any) -> str:
    """Structure and dtypes of a batch; lengths may differ between ranks and are left out."""
    names, leaves, _ = tree_lib.flatten_with_paths(batch)
    words = [f"{n}: {_kind(x)}" for n, x in zip(names, leaves, strict=True)]
    return "{" + ", ".join(words) + "}"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {leaf.dim()}-d"
    return type(leaf).__name__


def agree(mesh: Mesh, header: Header) -> torch.Tensor:
    """All ranks' headers, int64 [world, 8].

    Raises ValueError on all ranks for a mistake on any, or when batches or layouts differ.
    """
    if mesh.world == 1:
        if header.error is not None:
            raise header.error
        return header.row().unsqueeze(0)
    rows = mesh.gather_host(header.row())
    if rows[:, 4].any():
        _raise_first(mesh, rows[:, 4].tolist(), header.error)
    fed = [r for r in range(mesh.world) if rows[r, 1]]
    if len({int(rows[r, 2]) for r in fed}) > 1:
        texts = mesh.exchange_text(header.batch if header.has_batch else "no batch")
        raise ValueError(f"batch: its structure or dtypes differ between ranks: {_by_rank(texts)}; make them equal")
    if len(set(rows[:, 3].tolist())) > 1:
        raise ValueError("step: the ranks hold states of different layouts or steps; build specs and step alike on all")
    return rows


def _raise_first(mesh: Mesh, flags: list[int], own: Exception | None) -> None:
    texts = mesh.exchange_text("" if own is None else str(own))
    rank = next(r for r, flag in enumerate(flags) if flag)
    kind = ValueError if own is None else type(own)
    raise kind(f"rank {rank}: {texts[rank]}") from own


def _by_rank(texts: list[str]) -> str:
    return "; ".join(f"rank {r}: {t}" for r, t in enumerate(texts))


def check_actions(rows: torch.Tensor) -> None:
    """Refuses calls that cannot be matched: ranks within one window may differ in calls of accumulate, in no other way."""
    actions = set(rows[:, 0].tolist())
    if len(actions) > 1 and actions != {ACCUMULATE, UPDATE}:
        names = {r: _NAMES[a] for r, a in enumerate(rows[:, 0].tolist())}
        raise ValueError(f"the ranks call different functions at the same time: {names}")


def common_aux(mesh: Mesh, aux: Any) -> Any:
    """The tree of a loss's extras, with zeros on a rank that had no data and so does not know it.

    Such a rank learns the paths from a peer, and builds nested dicts of them.
    """
    if mesh.world == 1:
        return aux
    names, leaves, _ = tree_lib.flatten_with_paths(aux)
    counts = mesh.gather_host(torch.tensor([len(leaves)])).view(-1).tolist()
    if len(set(counts)) == 1:
        return aux
    texts = mesh.exchange_text("\n".join(names))
    known = {t for t in texts if t}
    if len(known) > 1:
        raise ValueError(f"Loss.aux: its leaves differ between ranks: {_by_rank(texts)}; return the same on all")
    if leaves:
        return aux
    return aux_of_paths({n: torch.zeros((), dtype=torch.float64, device=mesh.device) for n in known.pop().split("\n")})
