"""Batches: cutting a global one over ranks and time, and ranks whose data end at different times."""

from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import numpy as np
import torch

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh


@final
class Empty:
    """The type of `EMPTY`."""

    def __repr__(self) -> str:
        return "fz.data.EMPTY"


EMPTY: Final = Empty()


def _rows(tree: Any) -> int | None:
    """Length of dim 0 that all tensor leaves with dims share; None if there is no such leaf."""
    sizes = {
        path: x.shape[0]
        for path, x in zip(*tree_lib.flatten_with_paths(tree)[:2], strict=True)
        if isinstance(x, torch.Tensor) and x.dim()
    }
    if len(set(sizes.values())) > 1:
        raise ValueError(f"batch: the leaves must share dim 0, got {sizes}")
    return next(iter(sizes.values()), None)


def split(batch: Any, parts: int, what: str = "accumulate") -> list[Any]:
    """Cuts a batch along dim 0 into equal parts, as views; 0-dim and non-tensor leaves go to every part.

    Raises ValueError when dim 0 does not divide.
    """
    rows = _rows(batch)
    if rows is not None and rows % parts:
        raise ValueError(
            f"batch: {rows} rows do not split into {what}={parts} micro-batches; "
            f"give a multiple of {parts} rows, or change {what}"
        )
    if parts == 1:
        return [batch]
    leaves, treedef = tree_lib.flatten(batch)
    pieces = [x.chunk(parts) if isinstance(x, torch.Tensor) and x.dim() else [x] * parts for x in leaves]
    if rows == 0:
        pieces = [[x] * parts for x in leaves]
    return [tree_lib.unflatten(treedef, [p[i] for p in pieces]) for i in range(parts)]


def local(batch: Any, mesh: Mesh, accumulate: int = 1) -> Any:
    """This rank's part of a global batch.

    The batch is cut along dim 0 into accumulate x ranks micro-batches; the rank gets those numbered r, r + ranks, ...
    one after the other, which `step` cuts again in time order. So the number of ranks and `accumulate` can change
    while their product stays, and the micro-batches are the same.

    Args:
        batch: global view, equal on every rank; tensor leaves share dim 0, which accumulate x ranks must divide.
        mesh: its batch axes are what the batch is cut over.

    >>> import funzero as fz
    >>> fz.data.local({"x": torch.arange(8)}, fz.abstract_mesh(dp=2), accumulate=2)["x"].tolist()
    [0, 1, 4, 5]
    """
    ranks, index = mesh.size(mesh.batch), mesh.index(mesh.batch)
    parts = split(batch, accumulate * ranks, "accumulate x ranks")
    mine = parts[index::ranks]
    if len(mine) == 1:
        return mine[0]

    def join(*xs: Any) -> Any:
        return torch.cat(xs) if isinstance(xs[0], torch.Tensor) and xs[0].dim() else xs[0]

    return tree_lib.map(join, *mine)


def each_rank(iterator: Iterable[Any], mesh: Mesh, policy: str = "weighted") -> Iterator[Any]:
    """Batches of this rank's own iterator, such that all ranks take the same number of steps. A collective call each.

    Args:
        policy: "weighted": until every rank is done; a rank that has ended gets `EMPTY`, which `step` takes with
            weight 0. "shortest": until the first rank is done.

    Raises ValueError when no rank can take a single step.
    """
    if policy not in ("weighted", "shortest"):
        raise ValueError(f"each_rank: policy is 'weighted' or 'shortest', got {policy!r}")
    source, steps = iter(iterator), 0
    while True:
        batch, error = EMPTY, None
        try:
            batch = next(source, EMPTY)
        except Exception as found:  # the peers wait for this rank's word, so it is raised on all of them
            error = found
        row = torch.tensor([batch is not EMPTY, error is not None], dtype=torch.uint8)
        have, failed = mesh.gather_host(row).unbind(1)
        if failed.any():
            texts = mesh.exchange_text("" if error is None else f"{type(error).__name__}: {error}")
            rank = int(failed.argmax())
            raise RuntimeError(f"each_rank: the data of rank {rank} failed: {texts[rank]}") from error
        if not (have.any() if policy == "weighted" else have.all()):
            if steps == 0:
                empty = [r for r, flag in enumerate(have.tolist()) if not flag]
                raise ValueError(f"each_rank: no step in this epoch: ranks {empty} have no batch (policy {policy!r})")
            return
        steps += 1
        yield batch


def to_device(leaf: Any, device: torch.device) -> Any:
    """A tensor or numpy array as a tensor on `device`, without a copy where there need be none; other leaves as they are."""
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
