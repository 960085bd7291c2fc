"""`python -m tests.kernels.triton_equality GROUP ...` with TRITON_INTERPRET=1: prints what differs from the reference."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kernels import reference, triton
from kernels.reference import UNSCALED, Leaf, Moment, Scale
from tests.kernels.triton_leaves import (
    BF16,
    BOOKS,
    F16,
    F32,
    RULES,
    SPECIAL,
    Kind,
    copied,
    differing,
    kinds,
    leaf_of,
    written,
)

GROUPS: dict[str, Callable[[], Iterator[str]]] = {}


def group(fn: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
    """Adds a group of checks; it yields what is wrong."""
    GROUPS[fn.__name__] = fn
    return fn


def compared(label: str, want: Leaf, rule: str, scale: Scale) -> Iterator[str]:
    """Where the backends' updates of a leaf differ."""
    found = copied(want)
    reference.update([want], RULES[rule], scale)
    triton.update([found], RULES[rule], scale)
    for name, x in written(found).items():
        count = differing(x, written(want)[name])
        if count:
            yield f"{label}: {count} of {x.numel()} differ in {name}"


def differences(kind: Kind, n: int, special: bool) -> Iterator[str]:
    """Where the updates of a leaf of a kind differ."""
    yield from compared(f"{kind}, n = {n}, special = {special}", leaf_of(kind, n, special), kind.rule, Scale(3.0, 0.7))


@group
def floats() -> Iterator[str]:
    """Moments in float32 and bfloat16."""
    for i, kind in enumerate(kinds([F32, BF16, (BF16, F32)])):
        yield from differences(kind, (1500, 1024, 1, 16, 2049)[i % 5], special=i % 3 == 0)


@group
def codes() -> Iterator[str]:
    """Moments in 8 bits."""
    for i, kind in enumerate(kinds([256, (101, BF16), (F32, 600)])):
        yield from differences(kind, (300, 1, 512, 601, 77)[i % 5], special=i % 3 == 0)


@group
def patterns() -> Iterator[str]:
    """Any bits of float32 on their way into a moment: most of all NaN, subnormal numbers and those that may overflow."""
    bits = torch.randint(-(1 << 31), 1 << 31, (6000,))
    ends = torch.randint(0x7F7E0000, 0x7F810000, (2000,)) - torch.randint(2, (2000,)) * (1 << 31)
    small = torch.randint(0x00FFFFFF, (2000,)) - torch.randint(2, (2000,)) * (1 << 31)
    nan = torch.randint(0x7FFF0000, 1 << 31, (100,))
    grad = torch.cat([bits, ends, small, nan]).to(torch.int32).view(F32)
    for dtype, held, draws in itertools.product((F32, BF16, F16), (F32, BF16), ("none", "range")):
        kind = Kind("trace", moments=(held,), draws=draws)
        leaf = leaf_of(kind, len(grad))
        leaf.moments[0].values.zero_()
        yield from compared(f"{kind}, {dtype}", dataclasses.replace(leaf, grad=grad.to(dtype)), "trace", UNSCALED)


@group
def borders() -> Iterator[str]:
    """A value on a border between two of the book has the lower code."""
    for book in BOOKS:
        kept = Moment(torch.zeros(256, dtype=torch.uint8), torch.zeros(1), book, 256)
        grad = torch.ones(256)
        grad[1 : len(book)] = (book[1:] + book[:-1]) / 2
        yield from compared("borders", Leaf(torch.zeros(256), grad, (kept,)), "trace", UNSCALED)


@group
def sizes() -> Iterator[str]:
    """Leaves of other sizes, among them an empty one."""
    for n, special in itertools.product((0, 3, 1023, 4096, 20000), (False, True)):
        yield from differences(Kind("adam", BF16, F32, moments=(BF16, BF16), draws="range", decay=0.1), n, special)
        if n < 20000:
            yield from differences(Kind("adam", BF16, F32, True, (256, 256), decay=0.1), n, special)


@group
def skips() -> Iterator[str]:
    """With `skip` nothing is written, or all."""
    for kind in (Kind("adam", BF16, F32, True, (256, 256)), Kind("trace", BF16, F32, False, (BF16,), "range")):
        before = leaf_of(kind, 600)
        found, want = copied(before), copied(before)
        triton.update([found], RULES[kind.rule], skip=torch.tensor(True))
        if any(differing(x, written(before)[name]) for name, x in written(found).items()):
            yield f"{kind} is written although it is skipped"
        triton.update([found], RULES[kind.rule], skip=torch.tensor(False))
        reference.update([want], RULES[kind.rule])
        if any(differing(x, written(want)[name]) for name, x in written(found).items()):
            yield f"{kind} differs with a skip that is false"


@group
def several() -> Iterator[str]:
    """Leaves of one call: all are updated, each in its form."""
    want = [leaf_of(Kind("lion", p, moments=(m,)), n) for p, m, n in ((F32, F32, 5), (BF16, 256, 700), (F16, BF16, 0))]
    found = [copied(x) for x in want]
    reference.update(want, RULES["lion"])
    triton.update(found, RULES["lion"])
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        yield from (f"leaf {i} differs in {name}" for name, x in written(a).items() if differing(x, written(b)[name]))


@group
def unequal_blocks() -> Iterator[str]:
    """Are refused before anything is written."""
    before = [leaf_of(Kind("adam", moments=blocks), 300) for blocks in ((F32, F32), (256, 100))]
    found = [copied(x) for x in before]
    try:
        triton.update(found, RULES["adam"])
        yield "blocks of 256 and 100 in one leaf are accepted"
    except ValueError:
        if differing(found[0].param, before[0].param):
            yield "a leaf is written before another is refused"


@group
def square_sums() -> Iterator[str]:
    """Sums of squares: exact where they are integers, else to the last places; what is not finite stays so."""
    for dtype, n, chunk in itertools.product((F32, BF16, F16), (0, 1, 5000, 20000), (7, 1000, 16384, 40000)):
        if n // chunk > 100:
            continue
        x = torch.randint(-9, 9, (n,)).to(dtype)
        if not torch.equal(triton.square_sum(x, chunk), reference.square_sum(x, chunk)):
            yield f"integers of {dtype}, n = {n}, chunk = {chunk}"
        x = torch.randn(n).to(dtype)
        if not torch.allclose(triton.square_sum(x, chunk), reference.square_sum(x, chunk), rtol=1e-14, atol=0):
            yield f"{dtype}, n = {n}, chunk = {chunk}"
    for value in (1e30, float("inf"), float("nan")):
        x = torch.ones(5000)
        x[3000] = value
        found, want = triton.square_sum(x, 1000), reference.square_sum(x, 1000)
        if not torch.allclose(found, want, rtol=1e-14, equal_nan=True):
            yield f"{value} gives {found.tolist()}"


@group
def accumulations() -> Iterator[str]:
    """acc + weight * grad."""
    for dtype, n, weight in itertools.product((F32, BF16, F16), (0, 1, 1500), (1.0, 0.3)):
        grad, found = SPECIAL.repeat(n)[:n].to(dtype), torch.randn(n)
        want = found.clone()
        triton.accumulate(found, grad, weight)
        reference.accumulate(want, grad, weight)
        if differing(found, want):
            yield f"{dtype}, n = {n}, weight = {weight}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    sys.exit("\n".join(problem for name in sys.argv[1:] for problem in GROUPS[name]()) or 0)
