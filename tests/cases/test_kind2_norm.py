"""Kind 2: the global norm, and clipping by it."""

import collections
import math
import warnings

import pytest
import torch

import funzero as fz
from funzero import P, Spec
from tests.cases.common import (
    STAGES,
    WORLDS,
    close,
    difference,
    launch,
    linear,
    one_for_all,
    params_of,
    rows,
)
from tests.ranks import pool

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def cut(tree, specs, mesh):
    """Whole gradients cut as `specs` (by name) say, and the bound specs."""
    bound = fz.Specs.bind(mesh, specs, tree)
    return fz.shard(tree, bound), bound


def br07_clip_cells(rank, world):
    """Each layout of the same gradients: local parts, norm before and after, and local parts after the clip."""
    dp, tp = fz.make_mesh(dp=-1), fz.make_mesh(tp=-1)
    both = fz.make_mesh(dp=2, tp=-1) if world > 1 else fz.make_mesh(dp=1, tp=1)
    layouts = {
        "flat over dp": (dp, Spec(flat=("dp",))),
        "partition over tp": (tp, Spec(P("tp"))),
        "flat over dp, copies over tp": (both, Spec(flat=("dp",))),
        "flat over both": (both, Spec(flat=("dp", "tp"))),
        "partition over tp, flat over dp": (both, Spec(P("tp"), flat=("dp",))),
        "copies": (dp, Spec()),
    }
    found = {}
    for name, (mesh, spec) in layouts.items():
        for dtype in DTYPES:
            names = ("ab",) if dtype == torch.bfloat16 else ("ab", "ba")
            for sharded, copied in names:  # either may come first in the tree
                grads = {sharded: torch.tensor([3.0, 0, 0, 4], dtype=dtype), copied: torch.tensor([12.0], dtype=dtype)}
                local, specs = cut(grads, {sharded: spec, copied: Spec()}, mesh)
                clipped, norm = fz.clip_by_global_norm(local, 6.5, specs=specs)
                back = fz.gather(clipped, specs)
                alone = fz.global_norm(local, specs)
                found[f"{name} {dtype} {sharded}"] = [
                    norm,
                    alone,
                    local[sharded],
                    clipped[sharded],
                    clipped[copied],
                    back,
                ]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br07_copies_count_once_and_shards_are_summed(world):
    results = pool(world).run(br07_clip_cells)
    for rank, cells in enumerate(results):
        for cell, (norm, alone, local, sharded, copied, back) in cells.items():
            where = f"rank {rank} {cell}: norm {norm}, right 13, copies counted twice 17.69, shards not summed 12.37"
            assert norm.dtype == torch.float64 and norm == 13.0 and alone == 13.0, where
            assert torch.equal(sharded, local / 2), f"rank {rank} {cell}: {sharded} from {local}"
            assert torch.equal(copied, torch.tensor([6.0], dtype=local.dtype)), f"rank {rank} {cell}: {copied}"
            assert sorted(back[cell[-1]].tolist()) == [0, 0, 1.5, 2], f"rank {rank} {cell}: {back}"
    if world == 2:
        parts = [cells["flat over dp torch.float64 a"][3].tolist() for cells in results]
        assert parts == [[1.5, 0], [0, 2]]


def br07_ones_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for n in (1, 2, 3, 10, 129, 40_000):
        for dtype in (torch.float64, torch.float32):
            local, specs = cut({"w": torch.ones(n, dtype=dtype)}, {"w": Spec(flat=("dp",))}, mesh)
            found[f"{n} {dtype}"] = [len(local["w"]), fz.global_norm(local, specs)]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br07_ones_over_ranks_give_the_root_of_their_number(world):
    results = pool(world).run(br07_ones_cells)
    for rank, cells in enumerate(results):
        for cell, (_, norm) in cells.items():
            assert norm.item() == math.sqrt(int(cell.split()[0])), f"rank {rank} {cell}: {norm}"
    assert [cells["10 torch.float64"][0] for cells in results] == {1: [10], 2: [5, 5], 4: [3, 3, 3, 1]}[world]


def br07_step_cells(rank, world):
    found = {}
    meshes = {"dp": (fz.make_mesh(dp=-1), None)}
    if world > 1:
        meshes["replicate=2, dp"] = (fz.make_mesh(replicate=2, dp=-1), "replicate")
    for name, (mesh, replicate) in meshes.items():
        for stage in STAGES:
            for dtype in (torch.float64, torch.float32):
                for k in (1, 2):
                    params = {"s": torch.zeros(4, dtype=dtype), "r": torch.zeros(1, dtype=dtype)}
                    grads = {"s": torch.tensor([3.0, 0, 0, 4], dtype=dtype), "r": torch.tensor([12.0], dtype=dtype)}
                    options = {"max_norm": 6.5, "accumulate": k}
                    specs = {"replicate": replicate, "persist_below": 2}
                    state, step = launch(params, fz.sgd(1.0), linear, mesh, stage, step=options, **specs)
                    batch = fz.tree.map(lambda x, k=k: x.expand(k, *x.shape[1:]).clone(), rows(**grads))
                    state, metrics = step(state, batch)
                    found[f"{name} stage {stage} {dtype} k={k}"] = [metrics.grad_norm, params_of(state)]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br07_a_step_clips_by_the_same_norm_at_every_stage(world):
    for cell, (norm, params) in one_for_all(pool(world).run(br07_step_cells)).items():
        assert norm == 13.0, f"{cell}: norm {norm}"
        assert params["r"].tolist() == [-6.0] and params["s"].tolist() == [-1.5, 0, 0, -2], f"{cell}: {params}"


PLACES = {  # mesh axes, whole gradient of the experts, and their spec
    "one rank": (1, {"dp": 1}, [[6.0], [8.0]], Spec(P("ep"))),
    "an expert a rank": (2, {"ep": 2}, [[6.0], [8.0]], Spec(P("ep"))),
    "both on rank 0": (2, {"ep": 2}, [[6.0], [8.0], [0.0], [0.0]], Spec(P("ep"))),
    "both on rank 1": (2, {"ep": 2}, [[0.0], [0.0], [6.0], [8.0]], Spec(P("ep"))),
    "each on 2 of 4 ranks": (4, {"dp": 2, "ep": 2}, [[6.0], [8.0]], Spec(P("ep"))),
    "each on 2 of 4 ranks, ep outside": (4, {"ep": 2, "dp": 2}, [[6.0], [8.0]], Spec(P("ep"))),
    "an expert over 2 of 4 ranks": (4, {"dp": 2, "ep": 2}, [[6.0, 0], [0, 8.0]], Spec(P("ep"), flat=("dp",))),
    "two leading experts on 4 ranks": (4, {"ep": 4}, [[6.0], [8.0], [0.0], [0.0]], Spec(P("ep"))),
}


def br08_clip_cells(rank, world):
    found = {}
    for name, (needed, axes, experts, spec) in PLACES.items():
        if needed != world:
            continue
        mesh = fz.make_mesh(**({"ep": 1} | axes))
        grads = {"shared": torch.tensor([24.0]), "experts": torch.tensor(experts)}
        local, specs = cut(grads, {"shared": Spec(), "experts": spec}, mesh)
        clipped, norm = fz.clip_by_global_norm(local, 13.0, specs=specs)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            unaware, dense = fz.clip_by_global_norm(local, 12.0, specs=specs, expert_aware=False)
        back = [fz.gather(clipped, specs), fz.gather(unaware, specs)]
        found[name] = [norm, dense, torch.tensor(len(said)), back, grads]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br08_the_norm_counts_each_expert_once_wherever_it_lives(world):
    cells = one_for_all(pool(world).run(br08_clip_cells))
    assert cells
    for cell, (norm, dense, said, (clipped, unaware), grads) in cells.items():
        assert norm == 26.0, f"{cell}: {norm}, right 26; mean 25.02, experts dropped 24, shared twice 35.38"
        assert clipped["shared"].tolist() == [12.0], f"{cell}: {clipped}"
        assert torch.equal(clipped["experts"], grads["experts"] / 2), f"{cell}: {clipped}"
        assert dense == 24.0 and said == 1, f"{cell}: without the experts {dense}, {said} warnings"
        assert not difference(unaware, fz.tree.map(lambda g: g / 2, grads)), f"{cell}: {unaware}"


def br08_step_cells(rank, world):
    found = {}
    shapes = {1: ({"dp": 1, "ep": 1},), 2: ({"ep": 2}, {"dp": 2, "ep": 1}), 4: ({"dp": 2, "ep": 2}, {"ep": 2, "dp": 2})}
    for axes in shapes[world]:
        mesh = fz.make_mesh(**axes)
        first, experts = mesh.coordinate("ep") * 2 // mesh.axis_size("ep"), 2 // mesh.axis_size("ep")
        for stage in STAGES:
            for k in (1, 2):
                params = {"shared": torch.zeros(1), "experts": torch.zeros(2, 5)}
                options = {"max_norm": 13.0, "accumulate": k}
                rules = {"experts": P("ep")}
                state, step = launch(params, fz.sgd(1.0), linear, mesh, stage, step=options, rules=rules)
                # the experts of a rank see the tokens of all ranks of its ep group, so their sum is that much larger
                here = torch.tensor([[6.0, 0, 0, 0, 0], [0, 0, 8.0, 0, 0]])[first : first + experts]
                grads = rows(shared=torch.tensor([24.0]), experts=here * mesh.axis_size("ep"))
                state, metrics = step(state, fz.tree.map(lambda x, k=k: torch.cat([x] * k), grads))
                found[f"{axes} stage {stage} k={k}"] = [metrics.grad_norm, params_of(state)]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br08_a_step_scales_shared_and_expert_leaves_by_one_factor(world):
    for cell, (norm, params) in one_for_all(pool(world).run(br08_step_cells)).items():
        assert norm == 26.0, f"{cell}: {norm}, right 26"
        assert params["shared"].tolist() == [-12.0], f"{cell}: {params}"
        assert params["experts"].tolist() == [[-3.0, 0, 0, 0, 0], [0, 0, -4.0, 0, 0]], f"{cell}: {params}"


Pair = collections.namedtuple("Pair", "first second")
A, B = torch.tensor([6.0, 0.0]), torch.tensor([[8.0]])
TREES = {
    "dict": {"a": A, "b": B},
    "dict in other order": {"b": B, "a": A},
    "tuple": (A, B),
    "list": [A, B],
    "namedtuple": Pair(A, B),
    "nested": {"x": [A, {"y": (B,)}], "z": ()},
    "with None": {"a": A, "b": B, "c": None},
    "a leaf": torch.tensor([6.0, 8.0]),
    "0-dim leaves": {"a": torch.tensor(6.0), "b": torch.tensor(8.0)},
    "float64": {"a": A.double(), "b": B.double()},
    "bfloat16": {"a": A.bfloat16(), "b": B.bfloat16()},
    "mixed dtypes": {"a": torch.tensor(6.0, dtype=torch.bfloat16), "b": torch.tensor(8.0, dtype=torch.float64)},
}


@pytest.mark.parametrize("form", TREES)
def test_br09_the_output_of_a_clip_is_clipped(form):
    grads = TREES[form]
    before = fz.tree.map(torch.clone, grads)
    clipped, norm = fz.clip_by_global_norm(grads, 1.0)
    leaves = fz.tree.leaves(clipped)
    assert norm == 10.0 and fz.tree.structure(clipped) == fz.tree.structure(grads)
    again = torch.cat([x.double().flatten() for x in leaves]).norm()
    tolerance = 1e-6 if "16" not in form and "mixed" not in form else 2**-8
    assert close(again, 1.0, tolerance), f"{form}: norm of the output {again}"
    assert close(fz.clip_by_global_norm(clipped, 1.0)[1], 1.0, tolerance)
    assert not difference(grads, before), "the input changed"
    assert [x.dtype for x in leaves] == [x.dtype for x in fz.tree.leaves(grads)]


@pytest.mark.parametrize("form", TREES)
def test_br09_a_norm_below_the_limit_changes_nothing(form):
    clipped, norm = fz.clip_by_global_norm(TREES[form], 10.0)
    assert norm == 10.0
    assert not difference(clipped, TREES[form])


def one_shot_forms():
    return {
        "generator": (x for x in (A, B)),
        "iterator": iter([A, B]),
        "map": map(torch.clone, (A, B)),
        "dict values": {"a": A, "b": B}.values(),
        "generator inside": {"a": A, "b": (x for x in (B,))},
        "number": {"a": A, "b": 8.0},
    }


@pytest.mark.parametrize("form", one_shot_forms())
def test_br09_forms_that_are_not_trees_of_tensors_are_refused(form):
    with pytest.raises(TypeError, match=r"expected a tensor, got .*pass a tree of tensors"):
        fz.clip_by_global_norm(one_shot_forms()[form], 1.0)
    with pytest.raises(TypeError, match=r"expected a tensor, got .*pass a tree of tensors"):
        fz.global_norm(one_shot_forms()[form])


def test_br09_an_empty_tree_has_norm_zero_and_a_bad_limit_is_refused():
    clipped, norm = fz.clip_by_global_norm({}, 1.0)
    assert clipped == {} and norm == 0.0
    zeros, norm = fz.clip_by_global_norm({"a": torch.zeros(3)}, 1.0)
    assert norm == 0.0 and torch.equal(zeros["a"], torch.zeros(3))
    with pytest.raises(ValueError, match="max_norm must be positive, got 0"):
        fz.clip_by_global_norm({"a": A}, 0.0)


def br09_step_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for name in ("dict", "nested", "namedtuple", "0-dim leaves"):
            grads = TREES[name]
            coefficients = [g.unsqueeze(0) for g in fz.tree.leaves(grads)]

            def loss_fn(params, batch):
                return sum((p * c).sum() for p, c in zip(fz.tree.leaves(params), batch, strict=True))

            params = fz.tree.map(torch.zeros_like, grads)
            state, step = launch(params, fz.sgd(1.0), loss_fn, mesh, stage, step={"max_norm": 1.0})
            before = fz.tree.map(torch.clone, coefficients)
            state, metrics = step(state, coefficients)
            changed = torch.tensor(len(difference(coefficients, before)))
            found[f"stage {stage} {name}"] = [metrics.grad_norm, changed, params_of(state)]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br09_a_step_reports_the_norm_and_clips_too(world):
    for cell, (norm, changed, params) in one_for_all(pool(world).run(br09_step_cells)).items():
        moved = torch.cat([x.double().flatten() for x in fz.tree.leaves(params)]).norm()
        assert norm == 10.0 and not changed, f"{cell}: norm {norm}, {changed} leaves of the batch changed"
        assert close(moved, 1.0, 1e-6), f"{cell}: moved by {moved}, right 1, not clipped 10"
