"""Leaves for the tests of the Triton backend: what an update may be given."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from kernels import reference
from kernels.reference import Adam, Draw, Leaf, Lion, Moment, Momentum, Rule

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
RULES: dict[str, Rule] = {
    "adam": Adam(1e-2, 0.9, 0.999, 1e-8),
    "lion": Lion(1e-3, 0.9, 0.99),
    "sgd": Momentum(0.1),
    "trace": Momentum(0.1, 0.9),
    "nesterov": Momentum(0.1, 0.9, nesterov=True),
}
MOMENTS = {"adam": 2, "lion": 1, "sgd": 0, "trace": 1, "nesterov": 1}
BOOKS = (torch.linspace(-1, 1, 255) ** 3, torch.logspace(-7, 0, 256))
SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e30, -1e30, 3.4e38, -3.4e38, 3.3961e38, 65504.0, 65520.0]
    + [float("inf"), float("-inf"), float("nan"), 1.00390625, 1.01171875]
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a leaf is kept in. moments: of each; an int is the block of 8-bit codes. draws: none, range, odd or index;
    odd: a range from an odd index.
    """

    rule: str
    param: torch.dtype = F32
    grad: torch.dtype = F32
    master: bool = False
    moments: tuple[Any, ...] = ()
    draws: str = "none"
    decay: float | None = None


def kinds(kept: list[Any]) -> Iterator[Kind]:
    """All combinations of rule, param, draws and moments, which are each of `kept`; gradient and decay by a fixed lot."""
    lot = random.Random(0)
    params = [(F32, False), (BF16, False), (BF16, True), (F16, False), (F16, True)]
    for rule, (param, master), held, draws in itertools.product(RULES, params, kept, ("none", "range", "odd", "index")):
        moments = (held if isinstance(held, tuple) else (held, held))[: MOMENTS[rule]]
        if moments or held is kept[0]:
            yield Kind(rule, param, lot.choice((F32, BF16, F16)), master, moments, draws, lot.choice((None, 0.1)))


def leaf_of(kind: Kind, n: int, special: bool = False, seed: int = 0) -> Leaf:
    """A leaf of a kind with n elements; special: some values of each tensor are among SPECIAL."""
    rng = torch.Generator().manual_seed(seed)

    def values(dtype: torch.dtype = F32) -> torch.Tensor:
        x = torch.randn(n, generator=rng)
        if special:
            drawn = SPECIAL[torch.randint(len(SPECIAL), (n,), generator=rng)]
            x = torch.where(torch.rand(n, generator=rng) < 0.02, drawn, x)
        return x.to(dtype)

    def moment(i: int) -> Moment:
        held = kind.moments[i]
        value = values().square() if i else values()
        if isinstance(held, torch.dtype):
            return Moment(value.to(held))
        kept = Moment(torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // held)), BOOKS[i], held)
        reference.store(kept, value, None)
        return kept

    def draw(i: int) -> Draw:
        words = torch.randint(-(1 << 31), 1 << 31, (3,), generator=rng).tolist()
        first = (1 << 33) - n // 4 * 2 + (kind.draws == "odd")
        index = torch.randint(1 << 40, (n,), generator=rng)
        return Draw(tuple(words), index if kind.draws == "index" else range(first, first + n))

    return Leaf(
        values(kind.param),
        values(kind.grad),
        tuple(map(moment, range(len(kind.moments)))),
        values() if kind.master else None,
        count=3,
        weight_decay=kind.decay,
        draws=() if kind.draws == "none" else tuple(map(draw, range(1 + len(kind.moments)))),
    )


def written(leaf: Leaf) -> dict[str, torch.Tensor]:
    """The tensors that an update may write, by name."""
    found = {"param": leaf.param, "master": leaf.master}
    for i, m in enumerate(leaf.moments):
        found |= {f"moment {i}": m.values, f"scales {i}": m.scales}
    return {name: x for name, x in found.items() if x is not None}


def copied(leaf: Leaf, device: Any = "cpu") -> Leaf:
    """The same leaf in storage of its own, there."""

    def copy(x: Any) -> Any:
        return x.to(device, copy=True) if isinstance(x, torch.Tensor) else x

    return dataclasses.replace(
        leaf,
        param=copy(leaf.param),
        grad=copy(leaf.grad),
        moments=tuple(Moment(*map(copy, m)) for m in leaf.moments),
        master=copy(leaf.master),
        draws=tuple(Draw(d.words, copy(d.index)) for d in leaf.draws),
    )


def differing(found: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements differ in their bits; any two NaN are equal."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    same = found.view(whole) == want.view(whole)
    if found.is_floating_point():
        same |= found.isnan() & want.isnan()
    return int((~same).sum())
