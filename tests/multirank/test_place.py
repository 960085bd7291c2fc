"""Placing leaves on ranks: shard, gather, reshard, and the texts of specs that do not fit."""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch

import funzero as fz
from funzero.core import collectives
from tests.cases.training import assert_close, flat, mesh_of, same_bits
from tests.ranks import pool

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SHAPES = ((), (1,), (0,), (0, 8), (3,), (5, 3), (10,), (7, 2, 2), (4, 6), (64,), (65, 3), (20_011,))
AXES = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2}],
    3: [{"dp": 3}],
    4: [{"dp": 4}, {"dp": 2, "ep": 2}, {"dp": 2, "tp": 2}],
}
SPECS = {
    "dp": [fz.Spec(flat=("dp",)), fz.Spec(flat=("dp",), quantum=4), fz.Spec()],
    "tp": [fz.Spec(fz.P("tp")), fz.Spec(fz.P(None, "tp"))],
    "dp,ep": [
        fz.Spec(flat=("dp", "ep")),
        fz.Spec(flat=("ep", "dp")),
        fz.Spec(flat=("ep",)),
        fz.Spec(fz.P("ep"), ("dp",)),
    ],
    "dp,tp": [
        fz.Spec(fz.P(None, "tp"), flat=("dp",)),
        fz.Spec(fz.P("tp", "dp")),
        fz.Spec(fz.P(("tp", "dp"))),
        fz.Spec(fz.P(("dp", "tp"))),
        fz.Spec(fz.P("tp"), flat=("dp",), quantum=3),
    ],
}


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, NaN and infinities among them, as a leaf that is not contiguous where it has two dims."""
    generator = torch.Generator().manual_seed(len(shape) + math.prod(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    leaf = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return leaf.mT.contiguous().mT if len(shape) == 2 else leaf


def fits(shape: tuple[int, ...], spec: fz.Spec, mesh: fz.Mesh) -> bool:
    dims = len(spec.partition.entries)
    return len(shape) >= dims and all(shape[d] % mesh.size(spec.partition.of_dim(d)) == 0 for d in range(dims))


def round_trips(rank: int, world: int) -> list[str]:
    """What went wrong, by cell; and the number of cells."""
    wrong, count = [], 0
    for axes in AXES[world]:
        mesh = mesh_of(tuple(axes.items()))
        for i, spec in enumerate(SPECS[",".join(axes)]):
            chosen = itertools.product([s for s in SHAPES if fits(s, spec, mesh)], DTYPES)
            tree = {f"{d}{s}": bits(s, d) for s, d in itertools.islice(chosen, i % 2, None, 2)}
            kept = {n: x.clone() for n, x in tree.items()}
            specs = fz.Specs.bind(mesh, spec, tree)
            local = fz.shard(tree, specs)
            back = fz.gather(local, specs)
            for layout, (name, x) in zip(specs.layouts, sorted(tree.items()), strict=True):
                where = f"{axes}, {spec}, {name}, rank {rank}"
                count += 1
                if not same_bits(back[name], kept[name]):
                    wrong.append(f"{where}: gather(shard(x)) is not x")
                if tuple(local[name].shape) != layout.local_shape or not local[name].is_contiguous():
                    wrong.append(f"{where}: stored as {tuple(local[name].shape)}, the layout says {layout.local_shape}")
                for other in (tree[name], back[name]):
                    if local[name].numel() and local[name].untyped_storage()._cdata == other.untyped_storage()._cdata:
                        wrong.append(f"{where}: shares memory")
                if not same_bits(x, kept[name]):
                    wrong.append(f"{where}: the input changed")
    return [*wrong, str(count)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gather_of_shard_is_the_tree(world):
    for found in pool(world).run(round_trips):
        assert found[:-1] == []
        assert int(found[-1]) >= 50, "cells that were tried"


def params() -> dict[str, torch.Tensor]:
    shapes = {"big": (130, 131), "m": (5, 3), "s": (), "z": (0, 8), "ten": (10,)}
    return {n: torch.linspace(-1, 1, max(1, math.prod(s)), dtype=torch.float64)[: math.prod(s)].reshape(s)
            for n, s in shapes.items()}  # fmt: skip


def loss_fn(p: Any, x: torch.Tensor) -> fz.Loss:
    return fz.Loss(sum(((w.reshape(-1, 1) * x - 1) ** 2).sum() for w in p.values()), weight=len(x))


def whole(state: fz.TrainState) -> dict[str, torch.Tensor]:
    """All leaves of a state, whole."""
    found = {f: fz.gather(getattr(state, f), s) for f, s in state.specs.fields.items() if f != "accum"}
    return flat(found | {"step": state.step, "skips": state.skips, "key": state.key})


def stage_specs(mesh: fz.Mesh, tx: fz.Transform) -> list[fz.StateSpecs]:
    return [fz.zero_specs(fz.eval_shape(params()), tx, mesh, stage=stage) for stage in range(4)]


def live_reshard(rank: int, world: int, axes: tuple[tuple[str, int], ...]) -> dict[str, tuple[Any, Any, Any, Any]]:
    """By pair of stages: a state, the same after reshard, and both after one more step."""
    # torch's fused AdamW gives the tail of a piece other last bits than its body, so its pieces differ by stage
    mesh, tx, out = mesh_of(axes), fz.chain(fz.scale_by_adam(), fz.scale(-0.1)), {}
    specs = stage_specs(mesh, tx)
    step = fz.make_step(loss_fn, tx, max_norm=0.5, donate=False)
    xs = [torch.linspace(0.5, 1.5, 4, dtype=torch.float64) + 0.1 * rank + t for t in range(2)]
    for a, b in itertools.product(range(4), repeat=2):
        state, _ = step(fz.init_state(params(), tx, specs=specs[a]), xs[0])
        moved = fz.reshard(state, specs[b])
        assert moved.specs == specs[b]
        out[f"{a} to {b}"] = whole(state), whole(moved), whole(step(state, xs[1])[0]), whole(step(moved, xs[1])[0])
    return out


@pytest.mark.parametrize("axes", [(("dp", 2),), (("dp", 3),), (("dp", 2), ("ep", 2))], ids=["2", "3", "2x2"])
def test_reshard_between_all_stages(axes):
    """Ranks' gradients are added in one fixed tree, so even the next step has the same bits at every stage."""
    world = math.prod(n for _, n in axes)
    for rank, found in enumerate(pool(world).run(live_reshard, axes)):
        for pair, (before, moved, next_before, next_moved) in found.items():
            for path, x in before.items():
                assert same_bits(moved[path], x), f"stage {pair}, {path}, rank {rank} of {world}: moved"
            for path, x in next_before.items():
                where = f"stage {pair}, {path}, rank {rank} of {world}: one more step"
                assert same_bits(next_moved[path], x), where
            assert any(not torch.equal(next_before[p], x) for p, x in before.items()), "the step must move something"


def mid_window(rank: int, world: int) -> dict[str, Any]:
    """A window that is begun at one stage and ended at another."""
    mesh, tx, out = mesh_of((("dp", world),)), fz.adamw(0.1), {}
    specs, step = stage_specs(mesh, tx), fz.make_step(loss_fn, tx, max_norm=0.5)
    xs = [torch.linspace(0.5, 1.5, 4, dtype=torch.float64) + 0.1 * rank + t for t in range(2)]
    for a, b in itertools.product(range(4), repeat=2):
        state = step.accumulate(fz.init_state(params(), tx, specs=specs[a]), xs[0])
        state = step.accumulate(fz.reshard(state, specs[b]), xs[1])
        out[f"{a} to {b}"] = whole(step.update(state)[0])
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
def test_reshard_in_the_middle_of_a_window(world):
    results = pool(world).run(mid_window)
    right = results[0]["0 to 0"]
    x = torch.cat(
        [torch.linspace(0.5, 1.5, 4, dtype=torch.float64) + 0.1 * r + t for r in range(world) for t in (0, 1)]
    )
    leaves = {n: w.requires_grad_() for n, w in params().items()}
    loss = loss_fn(leaves, x)
    (loss.total / loss.weight).backward()
    torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)
    torch.optim.AdamW(leaves.values(), lr=0.1, weight_decay=1e-4, foreach=False).step()
    for name, w in leaves.items():  # clip_grad_norm_ adds 1e-6 to the norm; Adam's first step hardly sees it
        assert_close(right[f"params/{name}"], w.detach(), f"stage 0, {name}", 1e-6)
    for rank, found in enumerate(results):
        for pair, tree in found.items():
            for path, y in right.items():
                assert_close(tree[path], y, f"stage {pair}, {path}, rank {rank} of {world}")


TREE = {"blocks": {"wq": torch.empty(30, 4, device="meta"), "bias": torch.empty(30, device="meta")}}


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"rules": {"blocks/wq": fz.P("tpp")}},
            r"params/blocks/wq: P\('tpp'\) names axis 'tpp', not in the mesh \(dp=2, tp=4\)",
        ),
        ({"axis": "ddp"}, r"params/blocks/bias: .*'ddp'.* not in the mesh \(dp=2, tp=4\)"),
        ({"axis": "ddp"}, r"flat=\('ddp',\)|flat=ddp|flat over 'ddp'"),  # it must say where the axis stands
        ({"replicate": "node"}, r"replicate='node' is not an axis of the mesh \(dp=2, tp=4\)"),
        (
            {"rules": {"blocks/wq": fz.P("tp", None)}},
            r"params/blocks/wq: P\('tp', None\) needs dim 0 divisible by 4, got 30; pad it or",
        ),
        ({"rules": {"blocks/bias": fz.P(None, "tp")}}, r"params/blocks/bias: .* has 2 entries, leaf has shape \[30\]"),
        ({"rules": {"**.wk": fz.P("tp")}}, r"rules: '\*\*\.wk' matches no leaf; near it are \[.*blocks/wq.*\]"),
        ({"rules": {"params/blocks/wq": fz.P("tp")}}, r"rules: 'params/blocks/wq' matches no leaf; near it are"),
        ({"trainable": {"blocks/wz": False}}, r"trainable: 'blocks/wz' matches no leaf; near it are \['blocks/wq'"),
        ({"stage": 4}, r"stage is 0, 1, 2 or 3, got 4"),
    ],
)
def test_messages_of_specs_that_do_not_fit(options, text):
    mesh = fz.abstract_mesh(dp=2, tp=4)
    with pytest.raises(ValueError, match=text):
        fz.zero_specs(TREE, fz.sgd(0.1), mesh, **{"stage": 3} | options)


def test_messages_of_specs_made_by_hand():
    with pytest.raises(ValueError, match=r"P\('tp', 'tp'\): an axis can cut only one dim"):
        fz.P("tp", "tp")
    with pytest.raises(ValueError, match=r"the axes \['dp'\] are used twice"):
        fz.Spec(fz.P("dp"), flat=("dp",))
    with pytest.raises(TypeError, match=r"Spec\(flat='dp'\): give a tuple of axes"):
        fz.Spec(flat="dp")
    with pytest.raises(ValueError, match=r"memory is one of .*'disk'.*, got 'gpu'"):
        fz.Spec(memory="gpu")
    mesh = fz.abstract_mesh(dp=2)
    specs = fz.Specs.bind(mesh, fz.Spec(flat=("dp",)), {"w": torch.empty(4, 3)}, "params")
    with pytest.raises(ValueError, match=r"params/w: the spec says a global shape \(4, 3\), got \(12,\)"):
        fz.shard({"w": torch.empty(12)}, specs)
    with pytest.raises(ValueError, match=r"other leaves than its specs; they differ at \['v', 'w'\]"):
        fz.gather({"v": torch.empty(6)}, specs)


def run_sums(rank, world):
    mesh = fz.make_mesh(dp=-1)
    out = []
    for n in (0, 1, 7, 1000):
        leaf = torch.rand(n, generator=torch.Generator().manual_seed(rank)).view(-1, 1)
        with mock.patch.object(collectives.comm, "all_gather_equal", wraps=collectives.comm.all_gather_equal) as gather:
            whole = collectives.all_sum(leaf, mesh, ("dp",))
            gather.reset_mock()
            with mock.patch.object(collectives, "SUM_BYTES", 64):
                sliced = collectives.all_sum(leaf, mesh, ("dp",))
        out.append((leaf, (whole, sliced), max((call.args[0].nbytes for call in gather.call_args_list), default=0)))
    return out


def test_sums_in_slices_have_the_same_bits():
    ranks = pool(3).run(run_sums)
    for (a, totals, most), (b, _, _), (c, _, _) in zip(*ranks, strict=True):
        assert all(torch.equal(x, (a + b) + c) and x.shape == a.shape for x in totals)
        assert most <= 64
