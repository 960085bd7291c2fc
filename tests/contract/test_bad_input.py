"""Bad input: a clear error that names leaf, expectation, finding and fix, and nothing changed."""

import collections
import dataclasses

import pytest
import torch

import funzero as fz
from funzero import _compat
from tests.ranks import RankError, pool


def make(loss_fn=lambda p, b: (p["w"] * b["x"].mean()).sum(), stage=0, **options):
    params = {"w": torch.ones(4), "b": torch.ones(3)}
    tx = fz.sgd(0.1)
    specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=stage)
    return fz.init_state(params, tx, specs=specs), fz.make_step(loss_fn, tx, specs=specs, **options)


def refused(text, run, *args, kind=(ValueError, TypeError, RuntimeError)):
    with pytest.raises(kind) as error:
        run(*args)
    assert text in str(error.value), str(error.value)


def unchanged(state):
    whole = state.params["w"].tolist() == [1.0] * 4 and state.params["b"].tolist() == [1.0] * 3
    return whole and int(state.step) == 0


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": torch.ones(5)}, "batch: 5 rows do not split into accumulate=2"),
        ({"x": torch.ones(4), "y": torch.ones(6, 2)}, "batch: the leaves must share dim 0, got {'x': 4, 'y': 6}"),
        ({"x": torch.ones(4, device="meta")}, "batch/x: is on meta, the mesh is on cpu"),
    ],
)
def test_batches(batch, text):
    state, step = make(accumulate=2)
    refused(text, step, state, batch)
    assert unchanged(state)
    state, _ = step(state, {"x": torch.ones(4)})
    assert int(state.step) == 1, "the state is still good"


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda p, b: p["w"] * 2, "0-dim tensor or fz.Loss with one, got shape [4]"),
        (lambda p, b: 3.0, "0-dim tensor or fz.Loss with one, got float"),
        (lambda p, b: None, "got NoneType"),
        (lambda p, b: p["w"].sum().to(torch.int64), "real floating-point loss, got torch.int64"),
        (lambda p, b, buffers: p["w"].sum(), "takes buffers but its fz.Loss has none"),
        (lambda p, b: p["w"].add_(1.0).sum(), "in-place"),
    ],
)
def test_losses(loss_fn, text):
    state, step = make(loss_fn)
    refused(text, step, state, {"x": torch.ones(4)})
    assert unchanged(state)


def write_without_gradient(p):
    with torch.no_grad():
        p["b"].add_(1.0)


def write_to_data(p):
    p["b"].data.mul_(2.0).add_(1.0)


def write_by_copy(p):
    with torch.no_grad():
        p["b"][:1].copy_(torch.tensor([7.0]))


WRITES = [write_without_gradient, write_to_data, write_by_copy]


@pytest.mark.parametrize("write", WRITES)
def test_in_place_write_names_the_param_and_changes_nothing(write):
    def loss_fn(p, b):
        write(p)
        return p["w"].sum()

    state, step = make(loss_fn)
    refused("params/b: loss_fn wrote to this param in place", step, state, {"x": torch.ones(4)})
    assert unchanged(state)
    with pytest.raises(RuntimeError, match="params/b: loss_fn wrote"):
        fz.make_eval(loss_fn)(state, {"x": torch.ones(4)})
    assert unchanged(state)


def test_in_place_write_in_a_later_step_spends_the_state():
    bad = False

    def loss_fn(p, b):
        if bad:
            write_without_gradient(p)
        return p["w"].sum()

    state, step = make(loss_fn)
    state, _ = step(state, {"x": torch.ones(4)})
    bad = True
    refused("params/b: loss_fn wrote to this param in place", step, state, {"x": torch.ones(4)})
    with pytest.raises(fz.SpentStateError, match="restore a checkpoint"):
        step(state, {"x": torch.ones(4)})


def test_donated_state_used_again():
    state, step = make()
    new, _ = step(state, {"x": torch.ones(4)})
    with pytest.raises(fz.DonatedError, match="use the state that step returned, or make_step"):
        step(state, {"x": torch.ones(4)})
    with pytest.raises(fz.DonatedError):
        state.params["w"] + 1
    assert new.params["w"].tolist() != [1.0] * 4


def test_not_donated_state_stays():
    state, step = make(donate=False)
    new, _ = step(state, {"x": torch.ones(4)})
    assert unchanged(state)
    again, _ = step(state, {"x": torch.ones(4)})
    assert torch.equal(new.params["w"], again.params["w"])


Pair = collections.namedtuple("Pair", ["a", "b"])
SHARED = torch.ones(4)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"a": {"w": None}}, "params/a/w: expected a tensor, got NoneType"),
        (Pair(torch.ones(2), 3), "params/1: expected a tensor, got int"),
        ([torch.ones(2), "x"], "params/1: expected a tensor, got str"),
        ({"w": torch.ones(2, requires_grad=True)}, "params/w: requires grad; pass .detach()"),
        ({"a": SHARED, "b": SHARED}, "fz.tie(params, {'"),
        ({"a": SHARED[:3], "b": SHARED[2:]}, "shares memory with params/"),
    ],
)
def test_params_made_by_hand(params, text):
    refused(text, fz.init_state, params, fz.sgd(0.1))


def test_interleaved_views_are_two_leaves():
    base = torch.arange(6.0).view(3, 2)
    state = fz.init_state({"a": base[:, 0], "b": base[:, 1]}, fz.sgd(0.1))
    assert state.params["a"].tolist() == [0.0, 2.0, 4.0]


def test_a_tied_tree_trains_as_one_leaf():
    w = torch.ones((), dtype=torch.float64)
    params = fz.tie({"tok": w, "head": w}, {"head": "tok"})
    state = fz.init_state(params, fz.sgd(0.1))
    step = fz.make_step(lambda p, b: p["tok"] * 2 + p["head"] * 3, fz.sgd(0.1))
    state, metrics = step(state, {})
    assert float(state.params["tok"]) == float(state.params["head"]) == 0.5
    assert float(metrics.grad_norm) == 5.0
    assert fz.tree.paths(state.params) == ["tok"]


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda: fz.make_step(None, fz.sgd(0.1), accumulate=0), "accumulate is at least 1, got 0"),
        (lambda: fz.make_step(None, fz.sgd(0.1), reduction="avg"), "reduction is 'mean' or 'sum', got 'avg'"),
        (lambda: fz.make_step(None, fz.sgd(0.1), max_norm=0.0), "max_norm must be positive or None, got 0.0"),
        (lambda: fz.make_step(None, fz.sgd(0.1), gather_budget=0), "gather_budget is positive bytes or None, got 0"),
        (lambda: fz.make_step(None, fz.sgd(0.1), leaf_use="all"), "leaf_use is 'same' or 'any', got 'all'"),
        (lambda: fz.make_step(None, fz.sgd(0.1), precision="bf16"), "precision: expected one of"),
        (lambda: fz.make_mesh(dp=3), "1 ranks do not fit the axes {'dp': 3}"),
        (lambda: fz.make_mesh(dp=-1, tp=-1), "only one axis may be -1"),
        (lambda: fz.make_mesh(dp=0), "axis sizes are positive or -1"),
        (lambda: _compat.check_torch_version("2.10.1+cpu"), "funzero needs torch >= 2.11, found 2.10.1+cpu"),
    ],
)
def test_options(run, text):
    refused(text, run, kind=(ValueError, TypeError, ImportError))


def test_a_state_of_another_layout():
    state, _ = make()
    other = fz.zero_specs({"w": torch.ones(5)}, fz.sgd(0.1), fz.make_mesh(dp=-1), stage=0)
    step = fz.make_step(lambda p, b: p["w"].sum(), fz.sgd(0.1), specs=other)
    refused("the state's layout is not the step's", step, state, {})
    assert unchanged(state)


def run_batches_differ(rank, world, kind):
    state, step = make(stage=3, accumulate=2)
    batch = {"x": torch.ones(4)}
    if rank == 1:
        batch = {"dtype": {"x": torch.ones(4).double()}, "tree": {"y": torch.ones(4)}, "rows": {"x": torch.ones(3)}}[
            kind
        ]
    try:
        step(state, batch)
    except ValueError as error:
        state, metrics = step(state, {"x": torch.ones(4)})  # the mesh lives on
        return str(error), int(metrics.step)
    return "no error", 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("dtype", "rank 0: {x: float32 1-d}; rank 1: {x: float64 1-d}"),
        ("tree", "rank 0: {x: float32 1-d}; rank 1: {y: float32 1-d}"),
        ("rows", "3 rows do not split into accumulate=2"),
    ],
)
def test_batches_that_differ_between_ranks(kind, text):
    for message, steps in pool(2).run(run_batches_differ, kind):
        assert text in message
        assert steps == 1


def extras_differ(rank, world):
    params, tx = {"w": torch.ones(4)}, fz.sgd(0.1)
    state = fz.init_state(params, tx, specs=fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=1))
    step = fz.make_step(lambda p, b: fz.Loss(p["w"].sum(), aux={"ab"[rank]: 1.0}), tx)
    return step(state, {})[1].aux


def test_extras_of_other_names_are_not_added_up():
    with pytest.raises(RankError, match=r"Loss\.aux: its leaves differ between ranks: rank 0: a; rank 1: b"):
        pool(2).run(extras_differ)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x.double(), r"params/w: the layout says float32\[.*\] in device memory on cpu here, got float64"),
        (lambda x: x[:1].clone(), r"params/w: the layout says"),
        (lambda x: x.t().contiguous().t(), r"params/w: .* not contiguous"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_a_state_put_together_by_hand_is_looked_at(make, text):
    w = torch.arange(6.0).view(2, 3)
    state = fz.init_state({"w": w}, fz.adam(0.1))
    step = fz.make_step(lambda p, b: p["w"].sum(), fz.adam(0.1), donate=False)
    state, _ = step(state, {})
    changed = dataclasses.replace(state, params={"w": make(state.params["w"])})
    with pytest.raises(ValueError, match=text):
        step(changed, {})
    moments = dict(state.opt_state["scale_by_adam"], mu={"w": torch.zeros(7)})
    changed = dataclasses.replace(state, opt_state={**state.opt_state, "scale_by_adam": moments})
    with pytest.raises(ValueError, match=r"opt_state/scale_by_adam/mu/w: .* got float32\[7\]"):
        step(changed, {})
    assert int(step(state, {})[1].step) == 2
