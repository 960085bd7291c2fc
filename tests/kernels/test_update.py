"""Updates have the reference's bits: over dtypes, rules, draws, sizes, special values, threads and levels."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference import UNSCALED, Adam, Leaf, Moment, Rule, Scale
from tests.kernels.common import (
    LEVELS,
    RULES,
    book,
    copy,
    draws,
    expected,
    floats,
    levels,
    library,
    moment,
    same,
    written,
)

SIZES = (0, 1, 7, 1023, 1025, 4099)
DTYPES = ("float32", "bfloat16", "float16")
KEPT = ("float32", "bfloat16", "codes64", "codes96")
SCALE = Scale(3.0, 0.7)


def leaf(rule: Rule, n: int, param: str, grad: str, kept: str, master: bool, drawn: str, special=False, seed=0) -> Leaf:
    """A leaf of [n]."""
    g = torch.Generator().manual_seed(seed)
    count = 2 if isinstance(rule, Adam) else 0 if rule == RULES["descent"] else 1
    return Leaf(
        floats(n, getattr(torch, param), g, special),
        floats(n, getattr(torch, grad), g, special),
        tuple(moment(kept, n, i == 1, g, special) for i in range(count)),
        floats(n, torch.float32, g, special) if master else None,
        count=seed % 5 + 1,
        weight_decay=None if seed % 2 else 0.1,
        draws=draws(drawn, n, 1 + count),
    )


def check(leaves: list[Leaf], rule: Rule, scale: Scale, level: int, threads: int = 1) -> None:
    """The library against the reference."""
    wanted, got = expected(leaves, rule, scale), [copy(x) for x in leaves]
    library(level).update(got, rule, scale, threads)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for name, x in written(b).items():
            same(written(a)[name], x, f"leaf {i} of {leaves[i].param.numel()}: {name}")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("rule", RULES)
def test_product(rule, kept, level):
    at = LEVELS.index(level)
    if at not in levels():
        pytest.skip(f"this machine has no {level}")
    kinds = list(itertools.product(DTYPES, DTYPES, (False, True), ("none", "range", "odd", "index")))
    leaves = [
        leaf(RULES[rule], n, param, grad, kept, master, drawn, special, seed)
        for special in (False, True)
        for seed, (param, grad, master, drawn) in enumerate(kinds)
        for n in (SIZES[seed % 6], SIZES[(seed + 3 * special + 1) % 6])
    ]
    check(leaves, RULES[rule], SCALE, at, threads=1 + at)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "scale",
    [
        UNSCALED,
        Scale(8.0),
        Scale(2.0**-126, 0.5),
        Scale(2.0**127),
        Scale(-4.0),
        Scale(2.0**-149),
        Scale(1.0, 0.3),
        Scale(0.0, 1.0),
        Scale(1e-30, 1e30),
    ],
)
def test_scales(rule, scale):
    leaves = [
        leaf(RULES[rule], 1025, "float32", g, "float32", False, "none", s, 0) for g in DTYPES for s in (False, True)
    ]
    check(leaves, RULES[rule], scale, 2)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads(threads):
    rule = RULES["adam"]
    kinds = [("bfloat16", "codes96", "range"), ("float32", "float32", "none"), ("bfloat16", "bfloat16", "index")]
    kinds += [("bfloat16", "bfloat16", "range"), ("bfloat16", "bfloat16", "odd")]
    sizes = (70_001, 3, 66_000, 70_003, 50_000)
    leaves = [leaf(rule, n, p, p, k, False, d) for n, (p, k, d) in zip(sizes, kinds, strict=True)]
    check(leaves, rule, SCALE, 2, threads)


def test_block_is_longer_than_the_leaf():
    check([leaf(RULES["adam"], 4099, "float32", "float32", "codes100000", False, "none")], RULES["adam"], UNSCALED, 2)


def test_blocks_differ_between_moments():
    g = torch.Generator().manual_seed(0)
    for first, second in (("codes7", "codes1000"), ("codes2048", "float32"), ("bfloat16", "codes3")):
        moments = moment(first, 9001, False, g), moment(second, 9001, True, g)
        x = Leaf(floats(9001, torch.bfloat16, g, False), floats(9001, torch.bfloat16, g, False), moments)
        check([x], RULES["adam"], UNSCALED, 2)


def test_every_bfloat16_and_float16_is_read_and_written():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    rule = RULES["descent"]._replace(learning_rate=-1.0)  # p' = p + g
    for dtype in (torch.bfloat16, torch.float16):
        for level in levels():
            x = Leaf(torch.zeros(1 << 16), every.view(dtype))
            check([x, Leaf(every.view(dtype).clone(), x.grad)], rule, UNSCALED, level)


@pytest.mark.parametrize("size", [1, 2, 16, 255])
def test_books_of_fewer_values(size):
    g = torch.Generator().manual_seed(size)
    x = leaf(RULES["adam"], 1025, "float32", "float32", "codes64", False, "none", special=True)
    moments = tuple(
        m._replace(values=torch.randint(size, (1025,), generator=g, dtype=torch.uint8), book=book(i == 0, size))
        for i, m in enumerate(x.moments)
    )
    for level in levels():
        check([dataclasses.replace(x, moments=moments)], RULES["adam"], UNSCALED, level)


def books():
    """Books of several shapes: dense at 0, at 1 and nowhere; with equal values, and with values past 1."""
    even = torch.linspace(-1, 1, 256)
    yield from (even, even**3, even.sign() * even.abs() ** 0.1, torch.logspace(-7, 0, 256), torch.logspace(-30, 0, 255))
    yield from (even * 5, even * 1e-9, 1 - torch.logspace(-3, -7, 200), torch.zeros(17), even.round(decimals=1))
    yield from (torch.tensor([-0.0, 0.0, 0.0, 1e-45]), torch.tensor([1.0]), torch.tensor([-3e38, 3e38]))


@pytest.mark.parametrize("number", range(13))
def test_values_at_and_beside_the_borders_of_a_book(number):
    one = list(books())[number]
    at = torch.cat([(one[1:] + one[:-1]) / 2, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-30, -1e-8, 2.0**-25, -1.0])])
    at = torch.cat([at, at.nextafter(torch.tensor(9.0)), at.nextafter(torch.tensor(-9.0))]).clamp(-1, 1)
    grad = torch.cat([torch.ones(1), at])
    n = len(grad)
    kept = Moment(torch.zeros(n, dtype=torch.uint8), torch.zeros(1), one, n)
    for level in levels():
        check([Leaf(torch.zeros(n), grad, (kept,))], RULES["trace"], UNSCALED, level)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_and_their_neighbours_round_as_in_torch(dtype):
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float().view(torch.int32)
    low = (1 << 15) if dtype == torch.bfloat16 else (1 << 12)
    patterns = torch.cat([halves + low + d for d in (-1, 0, 1)] + [torch.arange(0x33000000 - 9, 0x33000000 + 9)])
    x = patterns.to(torch.int32).view(torch.float32)
    for level in levels():
        check([Leaf(torch.zeros_like(x, dtype=dtype), torch.zeros_like(x), (), x)], RULES["descent"], UNSCALED, level)


@pytest.mark.parametrize(
    "start", [0, 1, (1 << 32) - 3, (1 << 33) - 1, (1 << 33) - 2, (1 << 33) - 1025, (1 << 40) + 12345, 1 << 62]
)
def test_indices_of_draws(start):
    g = torch.Generator().manual_seed(start % 7)
    p = floats(3000, torch.bfloat16, g, False)
    for kind in ("range", "index"):
        leaves = [Leaf(p, floats(3000, torch.float32, g, False), draws=draws(kind, 3000, 1, start))]
        for level in levels():
            check(leaves, RULES["descent"], UNSCALED, level)


@pytest.mark.parametrize("rule", RULES)
def test_pairs_with_values_that_are_not_drawn(rule):
    """One in each of some units, among them NaN that a draw would carry into the sign: then none of the unit is in pairs."""
    n, patterns = 9000, (0x7F7F0001, 0x7F7F8000, -0x800001, 0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, 0x7F7F0000)
    grad = torch.zeros(n, dtype=torch.int32)
    grad[700::1030] = torch.tensor((patterns * 2)[:9], dtype=torch.int64).to(torch.int32)
    for dtype, start, level in itertools.product((torch.float32, torch.bfloat16, torch.float16), (0, 1), levels()):
        x = leaf(RULES[rule], n, "bfloat16", "float32", "bfloat16", False, "none")
        g = grad.view(torch.float32).to(dtype) if dtype == torch.float32 else (grad >> 16).to(torch.int16).view(dtype)
        for m in x.moments:
            m.values[:5000] = 0
        x = dataclasses.replace(x, grad=g, draws=draws("range", n, 1 + len(x.moments), start))
        check([x], RULES[rule], UNSCALED, level)
        check([x], RULES[rule], SCALE, level)


def test_draws_of_unequal_parity_and_kind():
    rule = RULES["adam"]
    for first, second, third in itertools.product(("range", "odd", "index"), repeat=3):
        x = leaf(rule, 3001, "bfloat16", "bfloat16", "bfloat16", False, "none")
        mixed = tuple(draws(kind, 3001, 3)[i] for i, kind in enumerate((first, second, third)))
        check([dataclasses.replace(x, draws=mixed)], rule, UNSCALED, levels()[-1])


@given(
    st.sampled_from(list(RULES)),
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(KEPT), st.booleans(), st.integers(0, 99)), max_size=4),
    st.floats(1e-6, 1e6),
    st.integers(0, 2),
)
def test_lists_of_leaves(name, kinds, divisor, level):
    rule = RULES[name]
    leaves = [leaf(rule, n, "bfloat16", "float16", k, m, "range", s % 2 == 1, s) for n, k, m, s in kinds]
    check(leaves, rule, Scale(divisor, 0.5), min(level, levels()[-1]), threads=2)
