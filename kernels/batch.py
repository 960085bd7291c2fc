"""Updates of the same many leaves again and again: checked and laid out once, then a pointer for each tensor is all it costs."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from . import checks, reference, run
from .backends import backend
from .cpu.library import Library
from .reference import Leaf, Moment, Rule, Scale

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
