"""Leaves for the kernels, and comparison bit for bit."""

import dataclasses
import functools

import torch

from kernels import reference
from kernels.cpu import build
from kernels.cpu.library import Library
from kernels.reference import Adam, Draw, Leaf, Lion, Moment, Momentum

RULES = {
    "adam": Adam(3e-3, 0.9, 0.95, 1e-8),
    "lion": Lion(1e-3, 0.9, 0.99),
    "descent": Momentum(0.1),
    "trace": Momentum(0.1, 0.9),
    "nesterov": Momentum(0.1, 0.9, True),
}
LEVELS = ("portable", "avx2", "avx512")
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 6e-8, 3e-8, 65504.0, 65519.9, 65520.0, -7e4, 3.3895e38, 3.4e38, -3.4028e38]
SPECIAL += [float("inf"), float("-inf"), float("nan"), 1.0, 1.00390625, 1.01171875, 2.0**-14, 2.0**-25, 1e-30, 1e30]


@functools.cache
def library(level: int) -> Library:
    """The built library, held to a level."""
    return Library(build.library(), level)


def levels() -> list[int]:
    """Those that this machine has."""
    return list(range(library(2)._level + 1))


@functools.cache
def book(signed: bool, size: int = 256) -> torch.Tensor:
    """Values in ascending order, denser near zero."""
    values = torch.linspace(-1 if signed else 0, 1, size)
    return (values.abs() ** 2 * values.sign()).contiguous()


def floats(n: int, dtype: torch.dtype, generator: torch.Generator, special: bool) -> torch.Tensor:
    """Magnitudes from 1e-6 to 10, or special values at random places."""
    x = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-6, 2, (n,), generator=generator)
    if special:
        x = torch.where(torch.rand(n, generator=generator) < 0.3, x, pick(n, generator))
    return shifted(x.to(dtype))


def pick(n: int, generator: torch.Generator) -> torch.Tensor:
    """Special values."""
    return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n,), generator=generator)]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element into a storage."""
    return torch.cat([x.new_zeros(1), x])[1:]


def moment(kept: str, n: int, second: bool, generator: torch.Generator, special: bool = False) -> Moment:
    """A moment kept as float32, bfloat16, or codes in blocks: `codes64`."""
    if not kept.startswith("codes"):
        x = floats(n, getattr(torch, kept), generator, special)
        return Moment(x.abs() if second else x)
    block = int(kept.removeprefix("codes"))
    codes = torch.randint(256, (n,), generator=generator, dtype=torch.uint8)
    scales = floats(-(-n // block), torch.float32, generator, special).abs()
    return Moment(shifted(codes), scales, book(not second), block)


def draws(kind: str, n: int, count: int, start: int = (1 << 33) - 600) -> tuple[Draw, ...]:
    """Draws by range, from an even or an odd index, or by index, over a border of a pair's high word; or none."""
    if kind == "none":
        return ()
    start += kind == "odd"
    index = shifted(torch.arange(n).flip(0) * 104729 + start) if kind == "index" else range(start, start + n)
    return tuple(Draw((7 * i - 3, -5 - i, 11 + i), index) for i in range(count))


def copy(leaf: Leaf) -> Leaf:
    """A leaf with memory of its own for what is written."""
    moments = tuple(
        m._replace(values=shifted(m.values), scales=None if m.scales is None else m.scales.clone())
        for m in leaf.moments
    )
    master = None if leaf.master is None else shifted(leaf.master)
    return dataclasses.replace(leaf, param=shifted(leaf.param), moments=moments, master=master)


def written(leaf: Leaf) -> dict[str, torch.Tensor]:
    """What an update writes, by name."""
    found = {"param": leaf.param} | ({} if leaf.master is None else {"master": leaf.master})
    for i, m in enumerate(leaf.moments):
        found[f"values{i}"] = m.values
        if m.scales is not None:
            found[f"scales{i}"] = m.scales
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns; every NaN counts as one."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(whole) if x.is_floating_point() else x


def same(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Asserts equality bit for bit."""
    wrong = (bits(got) != bits(wanted)).nonzero().view(-1)
    assert not len(wrong), f"{name}: {len(wrong)} differ, first {int(wrong[0])}: {got[wrong[0]]} not {wanted[wrong[0]]}"


def expected(leaves: list[Leaf], rule: reference.Rule, scale: reference.Scale) -> list[Leaf]:
    """What the reference makes of copies."""
    after = [copy(leaf) for leaf in leaves]
    reference.update(after, rule, scale)
    return after
