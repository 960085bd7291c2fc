"""The shared library through ctypes, which releases the GIL during a call; `abi.h` in numpy's words.

Trusts its callers: `ops` has checked every shape, dtype and device before a pointer is taken here.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import reference
from . import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
_MOMENT = np.dtype(
    [("values", "u8"), ("scales", "u8"), ("book", "u8"), ("block", "i8"), ("dtype", "i4"), ("book_size", "i4")],
    align=True,
)
_DRAW = np.dtype(
    [("index", "u8"), ("start", "i8"), ("add", "u4"), ("then", "u4"), ("high", "u4"), ("kind", "i4")], align=True
)
_LEAF = np.dtype(
    [
        *((name, "u8") for name in ("param", "grad", "master")),
        ("n", "i8"),
        ("moments", _MOMENT, 2),
        ("draws", _DRAW, 3),
        *((name, "i4") for name in ("param_dtype", "grad_dtype")),
        *((name, "f4") for name in ("c1", "c2", "weight_decay")),
        ("decays", "i4"),
    ],
    align=True,
)
_FACTORS = "b1 rest1 b2 rest2 eps step divisor factor".split()
_RULE = np.dtype([("kind", "i4"), *((name, "f4") for name in _FACTORS)], align=True)
RUN = np.dtype([("x", "u8"), ("n", "i8"), ("chunk", "i8"), ("out", "u8"), ("dtype", "i4")], align=True)
Rows = np.ndarray[Any, np.dtype[np.void]]
_NO_MOMENT, _NO_DRAW = (0, 0, 0, 1, 0, 0), (0, 0, 0, 0, 0, 0)


class Library:
    """The kernels of one built library. level: 0 portable, 1 AVX2, 2 AVX-512; at most what this machine has."""

    def __init__(self, path: Any, level: int | None = None) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise build.BuildError(f"cannot load {path}: {error}") from error
        self._c.fz_sizes.restype = ctypes.c_int64
        if self._c.fz_sizes() != _LEAF.itemsize << 32 | RUN.itemsize << 16 | _RULE.itemsize:
            raise build.BuildError(f"{path} lays its structs out in another way")
        self._c.fz_update.argtypes = _types("plpii")
        self._c.fz_square_sums.argtypes = _types("plii")
        self._c.fz_accumulate.argtypes = _types("ppilfii")
        best = self._c.fz_best_level()
        self._level = best if level is None else min(level, best)

    def update(
        self, leaves: Sequence[reference.Leaf], rule: reference.Rule, scale: reference.Scale, threads: int
    ) -> None:
        """`reference.update` in one call."""
        self.update_rows(self.rows(leaves, rule), rule, scale, threads)

    def rows(self, leaves: Sequence[reference.Leaf], rule: reference.Rule) -> Rows:
        """What C reads of leaves."""
        return np.array([_row(leaf, rule) for leaf in leaves], _LEAF)

    def update_rows(self, rows: Rows, rule: reference.Rule, scale: reference.Scale, threads: int) -> None:
        """`update` of what `rows` gives."""
        numbers = np.array([_numbers(rule, scale)], _RULE)
        self._done(self._c.fz_update(rows.ctypes.data, len(rows), numbers.ctypes.data, threads, self._level))

    def square_sum(self, x: torch.Tensor, chunk: int, threads: int) -> torch.Tensor:
        """`reference.square_sum`; a chunk's sum is the same wherever it lies, at every level."""
        out = torch.empty(-(-x.numel() // chunk), dtype=torch.float64)
        self.square_sums(np.array([(x.data_ptr(), x.numel(), chunk, out.data_ptr(), DTYPES[x.dtype])], RUN), threads)
        return out

    def square_sums(self, runs: Rows, threads: int) -> None:
        """`square_sum` of many, in one call."""
        self._done(self._c.fz_square_sums(runs.ctypes.data, len(runs), threads, self._level))

    def accumulate(self, acc: torch.Tensor, grad: torch.Tensor, weight: float, threads: int) -> None:
        """`reference.accumulate`."""
        where = acc.data_ptr(), grad.data_ptr(), DTYPES[grad.dtype], acc.numel()
        self._done(self._c.fz_accumulate(*where, weight, threads, self._level))

    def _done(self, ok: int) -> None:
        if not ok:
            raise MemoryError("no memory for the scratch of the CPU kernels")


def _types(letters: str) -> list[Any]:
    known = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
    return [known[letter] for letter in letters]


def _numbers(rule: reference.Rule, scale: reference.Scale) -> tuple[float, ...]:
    if isinstance(rule, reference.Adam):
        head = (0, rule.b1, 1 - rule.b1, rule.b2, 1 - rule.b2, rule.eps)
    elif isinstance(rule, reference.Lion):
        head = (1, rule.b1, 1 - rule.b1, rule.b2, 1 - rule.b2, 0.0)
    elif rule.decay is not None:
        head = (3 if rule.nesterov else 2, rule.decay, 0.0, 0.0, 0.0, 0.0)
    else:
        head = (4, 0.0, 0.0, 0.0, 0.0, 0.0)
    return *head, -rule.learning_rate, scale.divisor, scale.factor


def _row(leaf: reference.Leaf, rule: reference.Rule) -> tuple[Any, ...]:
    param, grad, master = leaf.param, leaf.grad, leaf.master
    adam = isinstance(rule, reference.Adam)
    moments = [_moment(moment) for moment in leaf.moments]
    draws = [_draw(draw) for draw in leaf.draws]
    return (
        param.data_ptr(),
        grad.data_ptr(),
        0 if master is None else master.data_ptr(),
        param.numel(),
        moments + [_NO_MOMENT] * (2 - len(moments)),
        draws + [_NO_DRAW] * (3 - len(draws)),
        DTYPES[param.dtype],
        DTYPES[grad.dtype],
        1 - rule.b1**leaf.count if adam else 1.0,
        1 - rule.b2**leaf.count if adam else 1.0,
        leaf.weight_decay or 0.0,
        leaf.weight_decay is not None,
    )


def _moment(moment: reference.Moment) -> tuple[int, ...]:
    values = moment.values
    if moment.scales is None or moment.book is None:
        return values.data_ptr(), 0, 0, 1, DTYPES[values.dtype], 0
    book = moment.book
    return values.data_ptr(), moment.scales.data_ptr(), book.data_ptr(), moment.block, 3, book.numel()


def _draw(draw: reference.Draw) -> tuple[int, ...]:
    add, then, high = (word & 0xFFFFFFFF for word in draw.words)
    if isinstance(draw.index, range):
        return 0, draw.index.start, add, then, high, 1
    return draw.index.data_ptr(), 0, add, then, high, 2
