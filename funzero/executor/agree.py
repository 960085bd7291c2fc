"""Agreements between ranks over the CPU group: the header of each call, and errors that all can still raise.

[Note: the header] Each call of a step begins with one 64-byte row from every rank: what it is about to do, whether it
has a batch, a hash of its batch's structure, a hash of the layout, and whether it met an error. Mistakes that can be
seen before the first collective are so raised on every rank, and the mesh lives on.
"""

import dataclasses
import zlib
from typing import Any

import torch

from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.executor.plan import Plan
from funzero.executor.window import Window
from funzero.transforms.losses import aux_of_paths

ACCUMULATE, UPDATE, STEP, EVAL, VJP, PULL = range(1, 7)
_NAMES = {ACCUMULATE: "step.accumulate", UPDATE: "step.update", STEP: "step", EVAL: "eval", VJP: "vjp", PULL: "pull"}


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
    _check_actions(rows)
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


def _check_actions(rows: torch.Tensor) -> None:
    """Refuses calls that cannot be matched: ranks within one window may differ in calls of accumulate, in no other way."""
    actions = set(rows[:, 0].tolist())
    if len(actions) > 1 and actions != {ACCUMULATE, UPDATE}:
        names = {r: _NAMES[a] for r, a in enumerate(rows[:, 0].tolist())}
        raise ValueError(f"the ranks call different functions at the same time: {names}")


def close_window(plan: Plan, window: Window) -> tuple[list[bool], torch.Tensor, torch.Tensor, Any]:
    """What the ranks together have in a window: used flags (by any rank), weight, loss, and extras (batch sums).

    On the CPU all but the extras travel in one row; elsewhere the scalars stay on the device.
    """
    mesh = plan.mesh
    if mesh.world == 1:
        return window.used, window.weight.clone(), window.loss.clone(), tree_lib.map(torch.clone, window.aux)
    names = tree_lib.paths(window.aux)
    signature = zlib.crc32("\n".join(names).encode()) if names else 0
    scalars = torch.stack([window.weight, window.loss])
    on_host = scalars.device.type == "cpu"
    flags = torch.tensor([signature, *window.used], dtype=torch.float64)
    rows = mesh.gather_host(torch.cat([scalars, flags]) if on_host else flags)
    if on_host:
        peers = mesh.peers(mesh.batch)
        total, rows = collectives.tree_sum([rows[r, :2].clone() for r in peers]), rows[:, 2:]
    else:
        total = collectives.all_sum(scalars, mesh, mesh.batch)
    weight, loss = total.unbind()
    aux = window.aux
    if rows[:, 0].any():
        aux = _total_aux(mesh, aux, len(set(rows[:, 0].tolist())) == 1)
    return rows[:, 1:].any(0).tolist(), weight.clone(), loss.clone(), aux


def _total_aux(mesh: Mesh, aux: Any, known: bool) -> Any:
    """Sums of extras over the batch axes. A rank that had no data learns their paths from a peer."""
    if not known:
        names, leaves, _ = tree_lib.flatten_with_paths(aux)
        texts = mesh.exchange_text("\n".join(names))
        kinds = {t for t in texts if t}
        if len(kinds) > 1:
            raise ValueError(f"Loss.aux: its leaves differ between ranks: {_by_rank(texts)}; return the same on all")
        if not leaves:
            zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
            aux = aux_of_paths({n: zero for n in kinds.pop().split("\n")})
    leaves, treedef = tree_lib.flatten(aux)
    return tree_lib.unflatten(treedef, collectives.all_sum(torch.stack(leaves), mesh, mesh.batch).unbind())
