"""The functions of `reference`, each a launch of a program for every leaf. Nothing here waits for the device."""

from collections.abc import Sequence
from typing import Any

import torch
import triton

from .. import reference
from ..reference import UNSCALED, Adam, Draw, Leaf, Lion, Moment, Rule, Scale
from . import programs

BLOCK = 1024
PIECE = 16 * BLOCK
LANES = 64 if torch.version.hip else 32  # threads of a warp
# A product and a sum that become one operation round once where the reference rounds twice.
OPTIONS = {"enable_fp_fusion": False}


def update(leaves: Sequence[Leaf], rule: Rule, scale: Scale = UNSCALED, skip: torch.Tensor | None = None) -> None:
    """As `reference.update`; skip: 0-dim bool on the device, or None; where it is true nothing is written."""
    spans = list(map(_span, leaves))
    borders: dict[tuple[int, int], torch.Tensor] = {}
    for leaf, span in zip(leaves, spans, strict=True):
        if leaf.param.numel():
            with torch.cuda.device_of(leaf.param):
                moments = tuple(_held(m, borders) for m in leaf.moments)
                _update(leaf, moments, _numbers(leaf, rule, scale), skip, RULE=_name(rule), SPAN=span)


def square_sum(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """As `reference.square_sum`; the bits of a chunk's sum depend on nothing but the chunk."""
    n = x.numel()
    chunks, pieces = triton.cdiv(n, chunk), max(1, triton.cdiv(min(chunk, n), PIECE))
    parts = torch.empty(chunks * pieces, dtype=torch.float64, device=x.device)
    if not n:
        return parts
    with torch.cuda.device_of(x):
        args = (x, parts, n, chunk, pieces)
        programs.square_sum[(chunks * pieces,)](*args, PIECE=PIECE, BLOCK=BLOCK, num_warps=_warps(BLOCK), **OPTIONS)
        if pieces == 1:
            return parts
        sums = torch.empty(chunks, dtype=torch.float64, device=x.device)
        steps = triton.cdiv(pieces, BLOCK)
        programs.total[(chunks,)](parts, sums, pieces, STEPS=steps, BLOCK=BLOCK, num_warps=_warps(BLOCK), **OPTIONS)
    return sums


def accumulate(acc: torch.Tensor, grad: torch.Tensor, weight: float = 1.0) -> None:
    """As `reference.accumulate`."""
    args = (acc, grad, float(weight), acc.numel())
    if acc.numel():
        with torch.cuda.device_of(acc):
            grid = (triton.cdiv(acc.numel(), BLOCK),)
            programs.accumulate[grid](*args, BLOCK=BLOCK, num_warps=_warps(BLOCK), **OPTIONS)


def _warps(block: int) -> int:
    """Such that a thread has 8 elements, 16 bytes of bfloat16, where there are as many."""
    return min(8, max(1, block // (8 * LANES)))


def _span(leaf: Leaf) -> int:
    """Elements that one program updates."""
    blocks = {m.block for m in leaf.moments if m.scales is not None} or {BLOCK}
    if len(blocks) > 1:
        raise ValueError(f"moments of one leaf are kept in blocks of {sorted(blocks)}; one program needs equal ones")
    return blocks.pop()


def _update(
    leaf: Leaf, moments: tuple[programs.Held, ...], numbers: programs.Numbers, skip: torch.Tensor | None, **flags: Any
) -> None:
    block = triton.next_power_of_2(flags["SPAN"])
    draws: list[Any] = list(leaf.draws) or [None] * (1 + len(moments))
    if leaf.master is not None:
        draws[0] = None
    kept = [leaf.param, *(m.values for m in leaf.moments)]
    draws = [d if x.dtype == torch.bfloat16 else None for d, x in zip(draws, kept, strict=True)]
    n = leaf.param.numel()
    programs.update[(triton.cdiv(n, flags["SPAN"]),)](
        programs.Pointers(leaf.param, leaf.grad, leaf.master, skip, n),
        moments,
        tuple(map(_drawn, draws)),
        numbers,
        PAIRS=flags["SPAN"] % 2 == 0 and all(d is None or _starts_even(d) for d in draws),
        BLOCK=block,
        num_warps=_warps(block),
        **flags,
        **OPTIONS,
    )


def _held(moment: Moment, borders: dict[tuple[int, int], torch.Tensor]) -> programs.Held:
    if moment.scales is None:
        return programs.Held(moment.values, None, None, None, None)
    book = moment.book
    assert book is not None
    key = book.data_ptr(), book.numel()
    if key not in borders:
        borders[key] = (book[1:] + book[:-1]) / 2
    return programs.Held(moment.values, moment.scales, book, borders[key], book.numel() - 1)


def _drawn(draw: Draw | None) -> tuple[Any, ...] | None:
    if draw is None:
        return None
    first, index = (draw.index.start, ()) if isinstance(draw.index, range) else (0, (draw.index,))
    words = (*draw.words, first, first >> 32)
    return (*(float(half & 0xFFFF) for word in words for half in (word, word >> 16)), *index)


def _starts_even(draw: Draw) -> bool:
    return isinstance(draw.index, range) and draw.index.start % 2 == 0


def _numbers(leaf: Leaf, rule: Rule, scale: Scale) -> programs.Numbers:
    numbers = [-rule.learning_rate, scale.divisor, scale.factor, leaf.weight_decay]
    if isinstance(rule, reference.Momentum):
        numbers.append(rule.decay or 0.0)
    else:
        numbers += [rule.b1, 1 - rule.b1, rule.b2, 1 - rule.b2]
    if isinstance(rule, Adam):
        numbers += [1 - rule.b1**leaf.count, 1 - rule.b2**leaf.count, rule.eps]
    return programs.Numbers(*(x if x is None else float(x) for x in numbers))


def _name(rule: Rule) -> str:
    if isinstance(rule, Adam | Lion):
        return "adam" if isinstance(rule, Adam) else "lion"
    if rule.decay is None:
        return "sgd"
    return "nesterov" if rule.nesterov else "trace"
