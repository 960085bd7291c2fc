"""Layouts beyond plain data parallel: copies of shards (HSDP), leaves used by some ranks, low precision compute."""

import pytest
import torch

import funzero as fz
from funzero.executor import placement
from tests.ranks import RankError, pool

F64 = torch.float64


def setting(dtype=F64):
    g = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(24, 24, generator=g, dtype=F64).to(dtype),
        "e0": torch.randn(24, 24, generator=g, dtype=F64).to(dtype),
        "e1": torch.randn(24, 24, generator=g, dtype=F64).to(dtype),
        "b": torch.randn(7, generator=g, dtype=F64).to(dtype),
    }
    x = torch.randn(8, 24, generator=g, dtype=F64).to(dtype)
    return params, x


def routed(p, b):
    """Which expert a micro-batch uses depends on its data."""
    expert = p["e0"] if float(b["x"].sum()) > 0 else p["e1"]
    y = torch.tanh(b["x"] @ p["w"]) @ expert
    return fz.Loss(y.square().sum() + p["b"].sum() * len(y), weight=len(y))


def one_process(steps, loss_fn, dtype=F64, precision=None):
    params, x = setting(dtype)
    tx = fz.adamw(0.01)
    state = fz.init_state(params, tx)
    step = fz.make_step(loss_fn, tx, accumulate=8, max_norm=1.0, precision=precision)
    for t in range(steps):
        state, _ = step(state, {"x": x.roll(t, 1)})
    return state.params


def run(rank, world, options):
    placement.BUNDLE_BYTES, before = 512, placement.BUNDLE_BYTES
    try:
        params, x = setting(options.get("dtype", F64))
        tx, mesh = fz.adamw(0.01), fz.make_mesh(**options["mesh"])
        specs = fz.zero_specs(params, tx, mesh, stage=options["stage"], replicate=options.get("replicate"))
        state = fz.init_state(params, tx, specs=specs)
        each = 8 // mesh.size(mesh.batch)
        step = fz.make_step(
            options["loss"],
            tx,
            specs=specs,
            accumulate=each,
            max_norm=1.0,
            leaf_use=options.get("leaf_use", "same"),
            gather_budget=options.get("budget"),
            precision=options.get("precision"),
        )
        for t in range(options.get("steps", 4)):
            state, _ = step(state, fz.data.local({"x": x.roll(t, 1)}, mesh, accumulate=each))
        return fz.gather(state.params, specs.params)
    finally:
        placement.BUNDLE_BYTES = before


def dense(p, b):
    y = torch.tanh(b["x"] @ p["w"]) @ p["e0"] @ p["e1"]
    return fz.Loss(y.square().sum() + p["b"].sum() * len(y), weight=len(y))


def assert_close(got, want, tolerance=1e-12):
    for k in want:
        assert float((got[k] - want[k]).abs().max() / want[k].abs().max()) < tolerance, k


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_copies_of_shards(stage):
    options = {
        "mesh": {"replicate": 2, "dp": 2},
        "replicate": "replicate",
        "stage": stage,
        "loss": dense,
        "budget": 8000,
    }
    want = one_process(4, dense)
    for got in pool(4).run(run, options):
        assert_close(got, want)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_params_take_any_use(stage):
    want = one_process(4, routed)
    for got in pool(2).run(run, {"mesh": {"dp": 2}, "stage": stage, "loss": routed}):
        assert_close(got, want)


@pytest.mark.parametrize("budget", [None, 6000])
def test_cut_params_take_any_use_when_asked(budget):
    want = one_process(4, routed)
    for world in (2, 4):
        options = {"mesh": {"dp": world}, "stage": 3, "loss": routed, "leaf_use": "any", "budget": budget}
        for got in pool(world).run(run, options):
            assert_close(got, want)


def late(p, b):
    """Uses another leaf from the second step on."""
    late.calls = getattr(late, "calls", 0) + 1
    return ((b["x"] @ p["w"]) @ (p["e0"] if late.calls <= 4 else p["e1"])).square().sum()


def test_cut_params_used_otherwise_are_an_error_that_names_the_leaf():
    with pytest.raises(RankError, match=r'params/e1: rank \d uses this leaf .*leaf_use="any"'):
        pool(2).run(run, {"mesh": {"dp": 2}, "stage": 3, "loss": late})


def seen_dtypes(p, b):
    assert {str(x.dtype) for x in fz.tree.leaves(p)} == {"torch.bfloat16"} and b["x"].dtype == torch.bfloat16
    return dense(p, b)


def test_bf16_mixed_is_the_same_in_every_layout():
    """Gradients of a micro-batch have equal bits, and sums of a few bf16 numbers are exact in float32 or nearly so."""
    want = one_process(1, seen_dtypes, torch.float32, fz.precision.bf16_mixed)
    for stage in range(4):
        options = {
            "mesh": {"dp": 2},
            "stage": stage,
            "loss": seen_dtypes,
            "dtype": torch.float32,
            "precision": fz.precision.bf16_mixed,
            "steps": 1,
        }
        for got in pool(2).run(run, options):
            assert {x.dtype for x in got.values()} == {torch.float32}
            assert_close(got, want, 1e-5)
