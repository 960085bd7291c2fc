"""Loaders over arrays whose position survives a restart on another number of ranks.

[Note: data position] The order of an epoch is a function of (seed, epoch) alone. The position is the number of items
that all ranks together have taken from it, so it says nothing of ranks, batch size or `accumulate`: those may change
between a stop and a resume, and what follows is the rest of the same order. A step takes the next n = min(batch, rest)
items, u = n / accumulate for each of its micro-batches in time; time i of rank r of R gets the items from
i u + floor(u r / R) to i u + floor(u (r + 1) / R). A full batch is so cut as `local` cuts it. At the end of an epoch ranks
may differ by one row a micro-batch, and a rank without rows gets `EMPTY`: nothing is lost, nothing comes twice, and
all ranks take the same number of steps.
"""

from collections.abc import Iterator
from typing import Any, Protocol, Self, final, runtime_checkable

import numpy as np
import torch

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh, local_mesh
from funzero.data.batches import EMPTY, to_device
from funzero.transforms import random


@runtime_checkable
class Stateful(Protocol):
    """An iterator of batches whose position can be saved.

    `state_dict`, taken between two steps, is a small dict that JSON can hold and counts every batch handed out so far;
    an iterator made alike goes on after them once `load_state_dict` has been given it.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@final
class ArrayLoader:
    """An iterator of this rank's batches of a tree of arrays. See [Note: data position].

    A state may be loaded under another mesh, batch, accumulate, drop_last or epochs: what follows is every item not yet
    taken in this epoch, once, and then the next epochs. No generator is read or moved; no call is a collective.

    Args:
        tree: tensors or numpy arrays (a memmap too) that share dim 0, the items; equal on every rank. Only this rank's
            rows are read. Other leaves are handed on as they are.
        batch: items in a step over all ranks together, a multiple of ranks x accumulate.
        mesh: its batch axes are what batches are cut over, its device is where they are put; default: this process alone.
        seed: of the order; with `shuffle=False` the order is 0, 1, 2, ... in every epoch. The order of one epoch is held
            in host memory, 8 bytes an item.
        accumulate: that of the step. It must divide the items of an epoch, or `drop_last` be set.
        drop_last: leave out the end of an epoch that is no full batch. Otherwise it is the last step, where ranks differ in
            rows and may get `fz.data.EMPTY`; with a weight in `fz.Loss` every item still counts the same.
        epochs: the iteration stops after as many; default: never.

    Yields local trees: tensors of the dtype of their leaf, [batch / ranks, ...], in the time order that `step` cuts again.

    Raises:
        ValueError: sizes do not fit one another, or a loaded state is not of these items and this order.

    >>> loader = ArrayLoader({"x": torch.arange(6) * 10}, batch=4, shuffle=False)
    >>> next(loader)["x"].tolist(), loader.state_dict()["position"]
    ([0, 10, 20, 30], 4)
    >>> next(loader)["x"].tolist(), next(loader)["x"].tolist()
    ([40, 50], [0, 10, 20, 30])
    """

    def __init__(
        self,
        tree: Any,
        batch: int,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        shuffle: bool = True,
        accumulate: int = 1,
        drop_last: bool = False,
        epochs: int | None = None,
    ) -> None:
        self._tree, self._items = tree, _items(tree)
        self._mesh = local_mesh() if mesh is None else mesh
        self._batch, self._accumulate = int(batch), int(accumulate)
        self._seed, self._shuffle = int(seed), bool(shuffle)
        self._drop_last, self._epochs = drop_last, epochs
        self._epoch = self._position = 0
        self._order: tuple[int, torch.Tensor] | None = None
        self._check_sizes()
        self._check_rest(self._items)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        epoch, position = self._epoch, self._position
        if not self._count(position):
            epoch, position = epoch + 1, 0
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        count = self._count(position)
        axes = self._mesh.batch
        chosen = self._order_of(epoch)[position : position + count]
        rows = own_part(chosen, self._accumulate, self._mesh.size(axes), self._mesh.index(axes))
        batch = tree_lib.map(self._take(rows), self._tree) if len(rows) else EMPTY
        self._epoch, self._position = epoch, position + count  # not before: a read that fails may be tried again
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far; equal on all ranks."""
        return {"epoch": self._epoch, "position": self._position, **self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        check_facts(state, self._facts())
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= self._items:
            raise ValueError(
                f"data state: expected an epoch from 0 and a position within 0..{self._items}, "
                f"got epoch={epoch}, position={position}"
            )
        self._check_rest(self._items - position)
        self._epoch, self._position = epoch, position

    def _facts(self) -> dict[str, Any]:
        """What a position means nothing without."""
        return {"items": self._items, "seed": self._seed, "shuffle": self._shuffle}

    def _count(self, position: int) -> int:
        """How many items the step at this position takes; 0 at the end of the epoch."""
        rest = self._items - position
        return 0 if self._drop_last and rest < self._batch else min(self._batch, rest)

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self._items, self._seed if self._shuffle else None, epoch)
        return self._order[1]

    def _take(self, rows: torch.Tensor) -> Any:
        def take(leaf: Any) -> Any:
            if not _has_items(leaf):
                return leaf
            index = rows.to(leaf.device) if isinstance(leaf, torch.Tensor) else rows.numpy()
            return to_device(leaf[index], self._mesh.device)

        return take

    def _check_sizes(self) -> None:
        parts = self._mesh.size(self._mesh.batch) * self._accumulate
        if self._batch < 1 or self._accumulate < 1 or self._batch % parts:
            raise ValueError(
                f"data loader: batch={self._batch} is not a positive multiple of ranks x accumulate = "
                f"{self._mesh.size(self._mesh.batch)} x {self._accumulate}"
            )
        if self._items < (self._batch if self._drop_last else 1):
            raise ValueError(
                f"data loader: {self._items} items make no batch of {self._batch} (drop_last={self._drop_last})"
            )
        if self._epochs is not None and self._epochs < 1:
            raise ValueError(f"data loader: epochs must be at least 1, or None, got {self._epochs}")

    def _check_rest(self, rest: int) -> None:
        if not self._drop_last and rest % self._accumulate:
            raise ValueError(
                f"data loader: the {rest} items to the end of the epoch do not split into accumulate={self._accumulate} "
                "micro-batches; choose an accumulate that divides them, or drop_last=True to leave out the last ones"
            )


@final
class TokenLoader:
    """An iterator of this rank's windows of one long run of tokens; order and position are those of `ArrayLoader`.

    Item i is the tokens from i * length to (i + 1) * length, both included: every token but the first is a label once
    in an epoch, and (len(tokens) - 1) % length tokens at the end are never used.

    Args:
        tokens: integers, 1-D: a tensor or a numpy array (a memmap too), equal on every rank.
        length: labels in a window.
        batch, mesh, seed, shuffle, accumulate, drop_last, epochs: as in `ArrayLoader`, in windows.

    Yields local trees {"tokens", "labels"}: int64 [batch / ranks, length]; a label is the token after its token.

    Raises:
        ValueError, TypeError: as `ArrayLoader`; too few tokens; not whole numbers; a loaded state of another length.

    >>> loader = TokenLoader(torch.arange(7), length=3, batch=2, shuffle=False)
    >>> next(loader)["labels"].tolist()
    [[1, 2, 3], [4, 5, 6]]
    """

    def __init__(
        self,
        tokens: torch.Tensor | np.ndarray,
        length: int,
        batch: int,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        shuffle: bool = True,
        accumulate: int = 1,
        drop_last: bool = False,
        epochs: int | None = None,
    ) -> None:
        self._length = int(length)
        self._windows = ArrayLoader(
            _windows(tokens, length),
            batch,
            mesh=mesh,
            seed=seed,
            shuffle=shuffle,
            accumulate=accumulate,
            drop_last=drop_last,
            epochs=epochs,
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        windows = next(self._windows)
        if windows is EMPTY:
            return EMPTY
        windows = windows.to(torch.int64)
        return {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far; equal on all ranks."""
        return {**self._windows.state_dict(), "length": self._length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken."""
        check_facts(state, {"length": self._length})
        self._windows.load_state_dict(state)


def epoch_order(items: int, seed: int | None, epoch: int) -> torch.Tensor:
    """The order of one epoch, int64 [items] in host memory; without a seed, 0, 1, 2, ..."""
    if seed is None:
        return torch.arange(items, device="cpu")
    return random.permutation(random.fold_in(random.key(seed), epoch), items, device="cpu")


def own_part(chosen: torch.Tensor, accumulate: int, ranks: int, rank: int) -> torch.Tensor:
    """This rank's part of one step's items, time by time; `accumulate` divides their number, `ranks` need not."""
    times = chosen.view(accumulate, -1)
    size = times.shape[1]
    return times[:, size * rank // ranks : size * (rank + 1) // ranks].flatten()


def check_facts(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises ValueError, naming all that differs, unless `state` is a position in what `own` describes."""
    missing = [name for name in ("epoch", "position", *own) if name not in state]
    if missing:
        raise ValueError(
            f"data state: {missing} are not in it, only {sorted(state)}; was it taken from another loader?"
        )
    different = [f"{name}={state[name]!r} in the state, {own[name]!r} here" for name in own if state[name] != own[name]]
    if different:
        raise ValueError(f"data state: it was taken from other data: {'; '.join(different)}")


def _has_items(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _items(tree: Any) -> int:
    paths, leaves, _ = tree_lib.flatten_with_paths(tree)
    sizes = {path: len(leaf) for path, leaf in zip(paths, leaves, strict=True) if _has_items(leaf)}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"data loader: expected tensors or numpy arrays that share dim 0, got the lengths {sizes}")
    return next(iter(sizes.values()))


def _windows(tokens: torch.Tensor | np.ndarray, length: int) -> torch.Tensor | np.ndarray:
    """All windows, [items, length + 1], as a view."""
    if not isinstance(tokens, torch.Tensor | np.ndarray) or tokens.ndim != 1:
        raise TypeError(f"tokens: expected a 1-D tensor or numpy array, got {getattr(tokens, 'shape', type(tokens))}")
    if isinstance(tokens, torch.Tensor):
        whole = not (tokens.is_floating_point() or tokens.is_complex())
    else:
        whole = tokens.dtype.kind in "iu"
    if not whole:
        raise TypeError(f"tokens: expected integers, got {tokens.dtype}")
    if length < 1 or len(tokens) <= length:
        raise ValueError(f"tokens: a window of length={length} needs {max(length, 1) + 1} tokens, got {len(tokens)}")
    if isinstance(tokens, torch.Tensor):
        return tokens.unfold(0, length + 1, length)
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
