"""Chunks, pieces, trees and the norm, for any shape, dtype and number of ranks."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funzero as fz
from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.core.spec import Layout, chunk_size
from funzero.executor import place
from funzero.transforms.norm import NormPlan

SAME_BORDERS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def flat_layout(n: int, ranks: int, quantum: int = 1, rank: int = 0) -> Layout:
    mesh = dataclasses.replace(fz.abstract_mesh(dp=ranks), rank=rank)
    return Layout("w", (n,), torch.float32, fz.Spec(flat=("dp",), quantum=quantum), mesh)


def lengths(layout: Layout) -> list[int]:
    return [hi - lo for lo, hi in map(layout.bounds, range(layout.ranks))]


@pytest.mark.parametrize(
    "n, ranks, right",
    [
        (10, 2, [5, 5]),
        (10, 3, [4, 4, 2]),
        (10, 4, [3, 3, 3, 1]),
        (0, 3, [0, 0, 0]),
        (1, 3, [1, 0, 0]),
        (3, 4, [1, 1, 1, 0]),
        (15, 4, [4, 4, 4, 3]),
        (64, 64, [1] * 64),
        (65, 2, [34, 31]),  # chunks of 2: 33 of them, 17 and 16
    ],
)
def test_the_pieces_of_the_design(n, ranks, right):
    assert lengths(flat_layout(n, ranks)) == right


@given(n=st.integers(0, 100_000), ranks=st.integers(1, 70), quantum=st.sampled_from([1, 2, 3, 16, 256]))
def test_runs_tile_the_piece_and_never_split_a_quantum(n, ranks, quantum):
    layout = flat_layout(n, ranks, quantum)
    ranges = [layout.bounds(i) for i in range(ranks)]
    assert ranges[0][0] == 0 and ranges[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), "no gap, no overlap"
    assert all(lo <= hi for lo, hi in ranges)
    assert all(lo % layout.chunk == 0 or lo == n for lo, _ in ranges), "a run begins at a chunk"
    assert layout.chunk >= 1 and (n == 0 or layout.chunk % quantum == 0)
    full = [hi - lo for lo, hi in ranges if hi - lo == layout.run]
    short = [hi - lo for lo, hi in ranges][len(full) :]
    assert all(x == 0 for x in short[1:]), "only the last run that holds anything is short"
    assert layout.chunks == math.ceil(n / layout.chunk), "k chunks are not empty"
    parts = 64 if 64 % ranks == 0 else 64 * math.ceil(ranks / 8)
    assert layout.chunk == max(1, math.ceil(math.ceil(n / parts) / quantum) * quantum), "c as in the note"


@given(n=st.integers(0, 100_000), quantum=st.sampled_from([1, 4, 48]))
def test_borders_are_equal_on_1_to_8_16_32_and_64_ranks(n, quantum):
    assert len({chunk_size(n, ranks, quantum) for ranks in SAME_BORDERS}) == 1


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
meshes = st.fixed_dictionaries({"dp": st.integers(1, 5), "tp": st.integers(1, 3)})


@given(
    shape=shapes,
    sizes=meshes,
    dim=st.integers(-1, 2),
    flat=st.sampled_from([(), ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")]),
    quantum=st.sampled_from([1, 2, 5]),
)
def test_pieces_of_all_ranks_together_are_the_leaf(shape, sizes, dim, flat, quantum):
    """Also with a dim cut over tp and the piece flat over dp."""
    mesh = fz.abstract_mesh(**sizes)
    cut = 0 <= dim < len(shape) and shape[dim] % sizes["tp"] == 0 and "tp" not in flat
    partition = fz.P(*[None] * dim, "tp") if cut else fz.P()
    leaf = torch.arange(math.prod(shape)).reshape(shape)
    base = Layout("w", shape, leaf.dtype, fz.Spec(partition, flat=flat, quantum=quantum), mesh)
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(mesh.world):
        layout = dataclasses.replace(base, mesh=dataclasses.replace(mesh, rank=rank))
        part = place.cut(leaf, layout)
        assert tuple(part.shape) == layout.local_shape
        key = mesh.index(partition.axes, rank), layout.index
        assert torch.equal(pieces.setdefault(key, part), part), "copies are equal"
    rows = []
    for at in range(mesh.size(partition.axes)):
        own = [pieces[at, i].reshape(-1) for i in range(mesh.size(flat))]
        rows.append(torch.cat(own).reshape(base.piece_shape))
    assert torch.equal(torch.cat(rows, dim) if cut else rows[0], leaf)


keys = st.text(alphabet="ab./%*", min_size=1, max_size=4)
trees = st.recursive(
    st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3)),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.just(None),
    ),
    max_leaves=8,
)


def same_tree(a: Any, b: Any) -> bool:
    if tree_lib.structure(a) != tree_lib.structure(b):
        return False
    return all(torch.equal(x, y) for x, y in zip(tree_lib.leaves(a), tree_lib.leaves(b), strict=True))


@given(tree=trees, seed=st.integers(0, 7))
def test_trees_round_trip(tree, seed):
    names, leaves, treedef = tree_lib.flatten_with_paths(tree)
    assert same_tree(tree_lib.unflatten(treedef, leaves), tree)
    assert len(set(names)) == len(names), "a path names one leaf"
    assert names == tree_lib.paths(tree) and len(leaves) == len(tree_lib.leaves(tree))
    dropped = {n for i, n in enumerate(names) if (i + seed) % 3 == 0}
    part = tree_lib.prune(tree, dropped.__contains__)
    assert tree_lib.paths(part) == [n for n in names if n not in dropped], "a pruned tree keeps the others' paths"
    assert same_tree(tree_lib.graft(tree, part), tree)
    doubled = tree_lib.map(lambda x: x * 2 + 1, part)
    grafted = tree_lib.graft(tree, doubled)
    for name, before, after in zip(names, leaves, tree_lib.leaves(grafted), strict=True):
        assert torch.equal(after, before if name in dropped else before * 2 + 1), name


@given(tree=trees, other=trees)
def test_a_known_structure_gives_the_same_leaves(tree, other):
    for like in (tree, tree_lib.map(lambda x: x + 1, tree), other):
        leaves, treedef = tree_lib.flatten_as(tree, tree_lib.flatten(like)[1])
        right, structure = tree_lib.flatten(tree)
        assert (
            treedef == structure
            and len(leaves) == len(right)
            and all(a is b for a, b in zip(leaves, right, strict=True))
        )


@given(items=st.dictionaries(keys, st.integers(), max_size=5), seed=st.randoms(use_true_random=False))
def test_the_order_in_which_a_dict_was_filled_does_not_matter(items, seed):
    shuffled = list(items)
    seed.shuffle(shuffled)
    other = {k: items[k] for k in shuffled}
    assert tree_lib.paths(other) == tree_lib.paths(items) and tree_lib.leaves(other) == tree_lib.leaves(items)


NAMES = ["blocks.0.qkv.weight", "blocks.0.qkv.bias", "blocks.10.experts.w", "experts.w", "head/weight", "w"]


@pytest.mark.parametrize(
    "glob, right",
    [
        ("*", [5]),
        ("**", [0, 1, 2, 3, 4, 5]),
        ("*.w", [3]),
        ("**.experts.*", [2, 3]),
        ("**.weight", [0]),
        ("**weight", [0, 4]),
        ("**/weight", [4]),
        ("blocks.*.qkv.*", [0, 1]),
        ("blocks.*", []),
        ("blocks.**", [0, 1, 2]),
        ("blocks.1*.experts.w", [2]),
        ("head/*", [4]),
        ("head.*", []),
    ],
)
def test_globs(glob, right):
    if not right:
        with pytest.raises(ValueError, match="matches no leaf; near it are"):
            tree_lib.match_globs([glob], NAMES, "rules")
        return
    hits = tree_lib.match_globs([glob], NAMES, "rules")
    assert [i for i, hit in enumerate(hits) if hit == glob] == right


@given(name=st.text(alphabet="ab./", min_size=1, max_size=8), other=st.text(alphabet="ab./*", min_size=1, max_size=6))
def test_a_star_stops_and_two_do_not(name, other):
    assert tree_lib.glob_pattern("**").fullmatch(name)
    assert bool(tree_lib.glob_pattern("*").fullmatch(name)) == ("." not in name and "/" not in name)
    hits = tree_lib.match_globs(["**", name], [name], "rules")
    assert hits == [name] and tree_lib.match_globs([name, "**"], [name], "rules") == ["**"], "the last match wins"
    if "*" not in other:
        assert bool(tree_lib.glob_pattern(other).fullmatch(name)) == (other == name), "dots are dots"


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cut_sums(leaves: list[torch.Tensor], spec: fz.Spec, mesh: fz.Mesh) -> torch.Tensor:
    """The slots of all ranks added; each slot has one writer, which is checked."""
    total, writers = torch.zeros(()), torch.zeros(())
    for rank in range(mesh.world):
        here = dataclasses.replace(mesh, rank=rank)
        layouts = tuple(Layout(f"w{i}", tuple(x.shape), x.dtype, spec, here) for i, x in enumerate(leaves))
        local = [place.cut(x, y).contiguous() for x, y in zip(leaves, layouts, strict=True)]
        with mock.patch.object(collectives, "exact_sum", lambda x, *_: x):
            sums = NormPlan(layouts).sums([x.clone() for x in local])
        total, writers = total + sums, writers + (sums != 0)
    assert mesh.size(spec.cut_axes) == 1 or (writers <= 1).all(), "a slot with two writers"
    return total


def check_norm(leaves: list[torch.Tensor], worlds: Any) -> None:
    whole = cut_sums(leaves, fz.Spec(), fz.abstract_mesh(dp=1))
    exact = math.sqrt(sum(x.abs().double().square().sum().item() for x in leaves))
    assert math.isclose(whole.sum().sqrt().item(), exact, rel_tol=1e-12, abs_tol=0)
    for world in worlds:
        found = cut_sums(leaves, fz.Spec(flat=("dp",)), fz.abstract_mesh(dp=world))
        assert torch.equal(found, whole), f"{world} ranks: {(found != whole).sum().item()} of {len(whole)} slots differ"
    found = cut_sums(leaves, fz.Spec(flat=("ep",)), fz.abstract_mesh(dp=2, ep=2))
    assert torch.equal(found, whole), "copies count once"


def draw_leaves(sizes: list[tuple[int, ...]], kinds: list[torch.dtype]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(k) * 3 for s, k in zip(sizes, kinds, strict=True)
    ]


leaf_sizes = st.one_of(shapes, st.integers(16_000, 70_000).map(lambda n: (n,)), st.just((129, 257)))


@pytest.mark.parametrize("count", [1, 2])
@given(data=st.lists(st.tuples(leaf_sizes, st.sampled_from(DTYPES)), min_size=1, max_size=4))
def test_the_norm_has_the_same_bits_on_1_to_8_ranks(count, data):
    leaves = draw_leaves([size for size, _ in data], [dtype for _, dtype in data])
    with threads(count):
        check_norm(leaves, (1, 2, 3, 8) if len(data) % 2 else (4, 5, 6, 7))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_of_large_leaves_has_the_same_bits(count, dtype):
    """Sizes at which the sum of a chunk takes another way: rows in tiles, a lone row, chunks longer than a tile."""
    sizes = [16_384, 64 * 2047 + 1, 64 * 2048, 262_145, 64 * 4096 * 2 + 63, 64 * 65_536 + 1]
    with threads(count):
        for n in sizes[: 6 if dtype == torch.float32 else 5]:
            check_norm(draw_leaves([(n,), (7,)], [dtype, dtype]), range(1, 9) if n < 300_000 else (2, 3, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[(5,)], [(5,), (3, 2)], [(20_000,)], [()], [(70_000,), (2,)]], ids=str)
def test_the_norm_does_not_write_into_gradients(sizes, dtype):
    leaves = draw_leaves(sizes, [dtype] * len(sizes))
    kept = [x.clone() for x in leaves]
    grads = dict(zip("abc", leaves, strict=False))
    norm = fz.global_norm(grads)
    assert all(torch.equal(x, y) for x, y in zip(leaves, kept, strict=True))
    _, same_norm = fz.clip_by_global_norm(grads, 1e-3)
    assert all(torch.equal(x, y) for x, y in zip(leaves, kept, strict=True))
    assert torch.equal(norm, same_norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 2)], ids=str)
def test_clip_and_finalize_keep_dtypes_of_0_dimensional_leaves_too(shape, dtype):
    grads = {"a": torch.ones(shape, dtype=dtype)}
    assert fz.clip_by_global_norm(grads, 0.5)[0]["a"].dtype == dtype
    acc = fz.accumulate((), grads, weight=2)
    assert fz.finalize(acc)["a"].dtype == acc.grads["a"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(
    ("shape", "partition"),
    [
        ((12,), fz.P("tp")),
        ((4, 6), fz.P("tp")),
        ((4, 6), fz.P(None, "tp")),
        ((4, 2, 3), fz.P(None, "tp")),
        ((5, 7), fz.P()),
    ],
)
def test_indices_of_all_ranks_are_those_of_the_leaf(shape: tuple[int, ...], partition: fz.P) -> None:
    """What a draw is made from: over the ranks, the values that `place.cut` takes from arange."""
    whole, seen = torch.arange(math.prod(shape)).view(shape), set()
    for rank in range(6):
        mesh = dataclasses.replace(fz.abstract_mesh(dp=3, tp=2), rank=rank)
        layout = Layout("w", shape, torch.int64, fz.Spec(partition, flat=("dp",)), mesh)
        own = list(layout.indices()) if isinstance(layout.indices(), range) else layout.indices().tolist()
        assert own == place.cut(whole, layout).reshape(-1).tolist()
        seen |= set(own)
    assert seen == set(range(math.prod(shape)))
