"""transfer: values between groups and layouts, and the dot-product identity of its transpose."""

import functools
import itertools
from typing import Any

import pytest
import torch

import funzero as fz
from tests.ranks import pool

F64 = torch.float64
SHAPES = {"a": (12, 3), "b": (5,), "c": ()}
P = fz.P


@functools.cache
def mesh(ranks: tuple[int, ...], axes: tuple[tuple[str, int], ...]) -> fz.Mesh:
    """Made once on each process: a mesh opens sockets."""
    return fz.make_mesh(ranks=ranks, **dict(axes))


def specs_of(kind: str, on: fz.Mesh) -> fz.Specs:
    """A layout of the leaves by name."""
    shapes = {n: torch.empty(s, dtype=F64, device="meta") for n, s in SHAPES.items()}
    whole, first = fz.Spec(), on.names[0]
    made = {
        "rows": lambda: {"a": fz.Spec(P(first)), "b": whole, "c": whole},
        "columns": lambda: {"a": fz.Spec(P(None, first)), "b": whole, "c": whole},
        "copies": lambda: {n: whole for n in SHAPES},
        "flat": lambda: {n: fz.Spec(flat=(first,)) for n in SHAPES},
        "parts": lambda: {n: fz.Spec(unreduced=(first,)) for n in SHAPES},
        "both": lambda: {"a": fz.Spec(P(on.names[-1]), flat=(first,)), "b": fz.Spec(flat=on.names), "c": whole},
    }
    return fz.Specs.bind(on, made[kind](), shapes)


PAIR, LATE, THREE = ((0, 1), (("dp", 2),)), ((2, 3), (("dp", 2),)), ((1, 2, 3), (("dp", 3),))
ALL, GRID, ONE = ((0, 1, 2, 3), (("dp", 4),)), ((0, 1, 2, 3), (("dp", 2), ("tp", 2))), ((3,), (("dp", 1),))
MOVES = [
    (PAIR, "rows", LATE, "rows"),
    (PAIR, "rows", LATE, "copies"),
    (PAIR, "copies", LATE, "rows"),
    (PAIR, "rows", THREE, "rows"),
    (THREE, "rows", PAIR, "flat"),
    (THREE, "columns", ALL, "rows"),
    (ALL, "flat", ONE, "copies"),
    (ONE, "rows", ALL, "copies"),
    (ALL, "rows", ALL, "copies"),
    (ALL, "copies", ALL, "flat"),
    (PAIR, "parts", LATE, "rows"),
    (ALL, "parts", PAIR, "flat"),
    (LATE, "flat", ALL, "parts"),
    (GRID, "both", PAIR, "rows"),
    (PAIR, "flat", GRID, "both"),
    (GRID, "both", GRID, "rows"),
]


def value() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=made, dtype=F64) for n, s in SHAPES.items()}


def local(specs: fz.Specs, kind: str, rank: int) -> Any:
    """This rank's leaves of `value()`; of sums, parts that add up to it."""
    if not specs.mesh.here:
        return None
    if kind == "parts":
        share = (1 + specs.mesh.rank) / sum(range(1, specs.mesh.world + 1))
        return {n: x * share for n, x in value().items()}
    return fz.shard(value(), specs)


def dot(a: Any, b: Any) -> float:
    return 0.0 if a is None else sum(float((a[n] * b[n]).sum()) for n in a)


def moves(rank: int, world: int) -> list[tuple[bool, float, float]]:
    out = []
    for (one, kind, two, other), handle in zip(MOVES, itertools.count(), strict=False):
        source, target = specs_of(kind, mesh(*one)), specs_of(other, mesh(*two))
        x, want = local(source, kind, rank), local(target, other, rank)
        y = fz.transfer(x, source, target, handle=handle)
        right = (y is None) == (want is None)
        if y is not None and other != "parts":
            exact = kind != "parts"
            close = torch.equal if exact else functools.partial(torch.allclose, rtol=1e-14)
            right = right and all(close(y[n], want[n]) for n in y)
        made = torch.Generator().manual_seed(100 * handle + rank)
        c = None if y is None else {n: torch.randn(t.shape, generator=made, dtype=F64) for n, t in y.items()}
        back = fz.transfer(c, target.transposed(), source.transposed(), handle=handle)
        out.append((right, dot(y, c), dot(x, back)))
    return out


def test_values_and_the_dot_product_identity():
    ranks = pool(4).run(moves)
    for i, move in enumerate(MOVES):
        assert all(found[i][0] for found in ranks), f"{move}: {[found[i][0] for found in ranks]}"
        there, back = (sum(found[i][k] for found in ranks) for k in (1, 2))
        assert there != 0 and abs(there - back) <= 1e-12 * abs(there), f"{move}: {there}, {back}"


def through_autograd(rank: int, world: int) -> list[bool]:
    """Where a rank is on both sides, backward is the same transfer."""
    out = []
    for one, kind, two, other in (
        (ALL, "rows", ALL, "copies"),
        (GRID, "both", GRID, "rows"),
        (ALL, "parts", ALL, "flat"),
    ):
        source, target = specs_of(kind, mesh(*one)), specs_of(other, mesh(*two))
        x = {n: t.clone().requires_grad_() for n, t in local(source, kind, rank).items()}
        y = fz.transfer(x, source, target)
        c = {n: torch.full_like(t, 1.0 + rank) for n, t in y.items()}
        found = torch.autograd.grad(list(y.values()), list(x.values()), list(c.values()))
        want = fz.transfer(c, target.transposed(), source.transposed())
        out.append(all(torch.equal(a, b) for a, b in zip(found, want.values(), strict=True)))
    return out


def test_backward_of_a_transfer():
    assert pool(4).run(through_autograd) == [[True] * 3] * 4


def out_of_order(rank: int, world: int) -> list[float]:
    """Sent as 5, 6, 5; taken as 6, 5, 5."""
    shape = torch.empty((), device="meta")
    a, b = (fz.Specs.bind(mesh((r,), (("dp", 1),)), fz.Spec(), shape) for r in (0, 1))
    if rank == 0:
        for value, handle in ((1.0, 5), (2.0, 6), (3.0, 5)):
            fz.transfer(torch.tensor(value), a, b, handle=handle)
        return []
    if rank == 1:
        return [float(fz.transfer(None, a, b, handle=h)) for h in (6, 5, 5)]
    return []


def test_messages_are_found_by_their_handle():
    assert pool(2).run(out_of_order)[1] == [2.0, 1.0, 3.0]


def test_an_abstract_mesh_before_one_with_processes():
    shape = torch.empty(2, device="meta")
    here, nowhere = (fz.Specs.bind(m, fz.Spec(), shape) for m in (fz.make_mesh(dp=1), fz.abstract_mesh(dp=1)))
    assert fz.transfer(torch.ones(2), nowhere, nowhere) is None
    assert fz.transfer(torch.ones(2), here, here).tolist() == [1.0, 1.0]


def test_what_does_not_fit():
    one = fz.make_mesh(dp=1)
    a, b = (fz.Specs.bind(one, fz.Spec(), {"x": torch.empty(s, device="meta")}) for s in (2, 3))
    with pytest.raises(ValueError, match=r"transfer: x: is float32\[2\] in from_specs, float32\[3\] in to_specs"):
        fz.transfer({"x": torch.ones(2)}, a, b)
    with pytest.raises(ValueError, match=r"transfer: x: expected float32\[2\], got float32\[4\]"):
        fz.transfer({"x": torch.ones(4)}, a, a)
    with pytest.raises(ValueError, match=r"differ at \['x', 'y'\]"):
        fz.transfer({"y": torch.ones(2)}, a, a)
    with pytest.raises(ValueError, match="not below 0"):
        fz.transfer({"x": torch.ones(2)}, a, a, handle=-1)
    for ranks in ((1,), (0, 0)):
        with pytest.raises(ValueError, match="ascending order"):
            fz.make_mesh(ranks=ranks, dp=-1)
