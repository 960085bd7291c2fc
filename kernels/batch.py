"""Updates of the same many leaves again and again: checked and laid out once, then a pointer for each tensor is all it costs."""

import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import checks, reference, run
from .backends import backend
from .cpu.library import DTYPES, RUN, Library
from .reference import Leaf, Moment, Rule, Scale

_dtype = operator.attrgetter("dtype")
Columns = Sequence[Sequence[torch.Tensor]]


class Batch:
    """Leaves of fixed sizes, dtypes and weight decay, without draws and codes.

    Args:
        leaves: examples, at least one, all with a master or all without. rule: its kind and flags; the numbers may change.

    Raises ValueError for leaves that no kernel takes.
    """

    def __init__(self, leaves: Sequence[Leaf], rule: Rule):
        for i, leaf in enumerate(leaves):
            checks.leaf(leaf, rule, f"leaves[{i}]")
            if leaf.draws or any(m.scales is not None for m in leaf.moments):
                raise ValueError(f"leaves[{i}]: a batch takes no draws and no codes")
        self._decays = [leaf.weight_decay is not None for leaf in leaves]
        self._sizes = [leaf.param.numel() for leaf in leaves]
        self._has_master = any(leaf.master is not None for leaf in leaves)
        found = backend(leaves[0].param.device.type)
        self._library = found if isinstance(found, Library) else None
        self._rows: Any = self._library.rows(leaves, rule) if self._library else None
        self._places: dict[int, list[int]] = {i: [] for i in range(5)}
        self._busy = threading.Lock()

    def update(
        self, columns: Columns, counts: Sequence[int], weight_decay: float, rule: Rule, scale: Scale, threads: int
    ) -> None:
        """One update in place.

        Args:
            columns: params, gradients, each moment, and masters if there are any; one contiguous tensor of any shape for
                each leaf, part of no graph of autograd.
            counts: of each leaf, this update included. weight_decay: of the leaves that decay.

        Raises ValueError for leaves of other sizes than the examples, and for some that are not contiguous. Dtypes and
        devices are not looked at again, and nothing of a column that lies where it lay at the last call, but for the
        gradients, whose memory comes and goes.
        """
        if self._library is None:
            for column in columns:
                self._check(column)
            run.update(self._leaves(columns, counts, weight_decay), rule, scale, threads)
            return
        with self._busy:
            self._fill(columns, counts, weight_decay, rule)
            self._library.update_rows(self._rows, rule, scale, threads)

    def _check(self, column: Sequence[torch.Tensor]) -> None:
        # By `map`: a fifth of the time of a comprehension.
        if list(map(torch.Tensor.numel, column)) != self._sizes or not all(map(torch.Tensor.is_contiguous, column)):
            raise ValueError(
                "the leaves have other sizes than those that the batch was made with, or are not contiguous"
            )

    def _fill(self, columns: Columns, counts: Sequence[int], weight_decay: float, rule: Rule) -> None:
        rows = self._rows
        values = rows["moments"]["values"]
        fields = [rows["param"], rows["grad"], *(values[:, i] for i in range(len(columns) - 2 - self._has_master))]
        fields += [rows["master"]] * self._has_master
        for i, (field, column) in enumerate(zip(fields, columns, strict=True)):
            places = list(map(torch.Tensor.data_ptr, column))
            if i == 1 or places != self._places[i]:
                self._check(column)
                self._places[i] = []  # until it is whole
                field[:] = places
                self._places[i] = places
        rows["weight_decay"] = weight_decay
        if isinstance(rule, reference.Adam):
            same = len(set(counts)) == 1
            for name, beta in (("c1", rule.b1), ("c2", rule.b2)):
                rows[name] = 1 - beta ** counts[0] if same else [1 - beta**t for t in counts]

    def _leaves(self, columns: Columns, counts: Sequence[int], weight_decay: float) -> list[Leaf]:
        flat = [[x.view(-1) for x in column] for column in columns]
        made = []
        for row, count, decays in zip(zip(*flat, strict=True), counts, self._decays, strict=True):
            param, grad, *rest = row
            master = rest.pop() if self._has_master else None
            kept = tuple(Moment(x) for x in rest)
            made.append(Leaf(param, grad, kept, master, count, weight_decay if decays else None))
        return made


class Squares:
    """Sums of squares of the same many tensors on the CPU, again and again; see `ops.square_sum`.

    Args:
        rows: (elements, chunk, place of the first sum, dtype) of each tensor.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int, torch.dtype]]):
        if any(dtype not in checks.FLOATS or chunk < 1 for _, chunk, _, dtype in rows):
            raise ValueError(f"expected dtypes among {checks.FLOATS} and chunks of at least 1, got {rows}")
        self._given = list(rows)
        self._sizes, self._dtypes = [n for n, *_ in rows], [dtype for *_, dtype in rows]
        self._size = max((first - -n // chunk for n, chunk, first, _ in rows), default=0)
        self._runs = np.array([(0, n, chunk, 0, DTYPES[dtype]) for n, chunk, _, dtype in rows], RUN)
        self._first = np.array([8 * first for _, _, first, _ in rows], np.uint64)
        self._busy = threading.Lock()

    def fill(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], threads: int) -> None:
        """Writes the sums of each tensor to its places of `out`, float64 1-D; all are contiguous.

        Raises ValueError for tensors of other sizes or dtypes than were told.
        """
        if out.numel() < self._size:
            raise ValueError(f"out has {out.numel()} elements, must have at least {self._size}; make it larger")
        if list(map(torch.Tensor.numel, tensors)) != self._sizes or list(map(_dtype, tensors)) != self._dtypes:
            rows = enumerate(zip(tensors, self._sizes, self._dtypes, strict=True))
            i, x, n, dtype = next((i, *row) for i, row in rows if (row[0].numel(), row[0].dtype) != row[1:])
            raise ValueError(f"tensors[{i}] is {x.dtype} of {x.numel()} elements, must be {dtype} of {n}, as was told")
        found = backend("cpu")
        if not isinstance(found, Library):
            for x, (n, chunk, first, _) in zip(tensors, self._given, strict=True):
                out[first : first - -n // chunk] = found.square_sum(x.view(-1), chunk, threads)
            return
        with self._busy:
            self._runs["x"] = list(map(torch.Tensor.data_ptr, tensors))
            self._runs["out"] = self._first + np.uint64(out.data_ptr())
            found.square_sums(self._runs, threads)
