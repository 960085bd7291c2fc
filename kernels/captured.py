"""The kernels as custom ops of torch, one call a leaf, so that make_fx and torch.compile see what is read and written."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import reference, run

_NAME = "funzero_kernels"
_RULES = {rule.__name__: rule for rule in (reference.Adam, reference.Lion, reference.Momentum)}
_SCHEMAS = {
    # blocks: 0 for a moment that is not in codes; scales and books: of those that are. rule: a class of `reference`, with
    # its fields in `numbers` (without decay: the rate alone). words: three for each draw; starts: of ranges, where
    # `indices` has None.
    "update": "(Tensor(a!) param, Tensor grad, Tensor(b!)? master, Tensor(c!)[] values, Tensor(d!)[] scales, "
    "Tensor[] books, SymInt[] blocks, str rule, float[] numbers, float[] scale, SymInt count, float? weight_decay, "
    "SymInt[] words, SymInt[] starts, Tensor?[] indices, int? threads) -> ()",
    "square_sum": "(Tensor x, SymInt chunk, int? threads) -> Tensor",
    "accumulate": "(Tensor(a!) acc, Tensor grad, float weight, int? threads) -> ()",
}


def update(leaf: reference.Leaf, rule: reference.Rule, scale: reference.Scale, threads: int | None) -> None:
    """`run.update` of one leaf, through the custom op."""
    numbers = [float(x) for x in rule if x is not None]
    coded = [m for m in leaf.moments if m.scales is not None]
    torch.ops.funzero_kernels.update(
        leaf.param,
        leaf.grad,
        leaf.master,
        [m.values for m in leaf.moments],
        [m.scales for m in coded],
        [m.book for m in coded],
        [0 if m.scales is None else m.block for m in leaf.moments],
        type(rule).__name__,
        numbers[:1] if isinstance(rule, reference.Momentum) and rule.decay is None else numbers,
        list(scale),
        leaf.count,
        leaf.weight_decay,
        [word for draw in leaf.draws for word in draw.words],
        [draw.index.start if isinstance(draw.index, range) else 0 for draw in leaf.draws],
        [None if isinstance(draw.index, range) else draw.index for draw in leaf.draws],
        threads,
    )


def square_sum(x: torch.Tensor, chunk: int, threads: int | None) -> torch.Tensor:
    """`run.square_sum`, through the custom op."""
    out: torch.Tensor = torch.ops.funzero_kernels.square_sum(x, chunk, threads)
    return out


def accumulate(acc: torch.Tensor, grad: torch.Tensor, weight: float, threads: int | None) -> None:
    """`run.accumulate`, through the custom op."""
    torch.ops.funzero_kernels.accumulate(acc, grad, weight, threads)


def _update(param: torch.Tensor, grad: torch.Tensor, master: torch.Tensor | None, *rest: Any) -> None:
    values, scales, books, blocks, name, numbers, scale, count, weight_decay, *draws, threads = rest
    rule = _RULES[name](*numbers)
    moments = tuple(_moments(values, iter(scales), iter(books), blocks))
    leaf = reference.Leaf(param, grad, moments, master, count, weight_decay, tuple(_draws(param.numel(), *draws)))
    run.update([leaf], rule, reference.Scale(*scale), threads)


def _moments(
    values: Sequence[torch.Tensor],
    scales: Iterator[torch.Tensor],
    books: Iterator[torch.Tensor],
    blocks: Sequence[int],
) -> Iterator[reference.Moment]:
    for kept, block in zip(values, blocks, strict=True):
        yield reference.Moment(kept, next(scales), next(books), block) if block else reference.Moment(kept)


def _draws(
    n: int, words: Sequence[int], starts: Sequence[int], indices: Sequence[torch.Tensor | None]
) -> Iterator[reference.Draw]:
    for i, (start, index) in enumerate(zip(starts, indices, strict=True)):
        add, then, high = words[3 * i : 3 * i + 3]
        yield reference.Draw((add, then, high), range(start, start + n) if index is None else index)


def _register() -> None:
    kernels = {"update": _update, "square_sum": run.square_sum, "accumulate": run.accumulate}
    fakes = {
        "update": lambda *_: None,
        "square_sum": lambda x, chunk, threads: x.new_empty(-(-x.numel() // chunk), dtype=torch.float64),
        "accumulate": lambda *_: None,
    }
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"{_NAME}::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"{_NAME}::{name}", "default", kernels[name])
        torch.library.register_fake(f"{_NAME}::{name}", fakes[name])


if not hasattr(torch.ops.funzero_kernels, "update"):  # a second copy of this package in one process may not define them
    _register()
