"""Kind 3, after the clip: finite loss and gradients, and an update that would not be. The state stays, and it is said."""

import pytest
import torch

import funzero as fz
from funzero.executor import fused
from funzero.executor.dispatch import Adam, Leaf, Lion, Moment, Momentum, update
from funzero.executor.flat import FlatState
from funzero.executor.plan import Plan
from funzero.executor.update import Clipped, Selection, update_leaves
from tests.cases.common import STAGES, close, difference, launch, linear, one_for_all, rows, whole
from tests.cases.test_kind3_nonfinite import composed_adam
from tests.ranks import pool

PURE = fz.precision.bf16_pure
HALF = fz.precision.Policy(
    "half", params=torch.float16, compute=torch.float16, master=torch.float32, loss_scale=fz.loss_scale.constant(1.0)
)
# name: (optimizer, precision, hyper-parameters of the bad step, gradient of "w" in the bad step, leaf to blame)
SPOILERS = {
    "0/0, fused": (lambda: fz.adam(0.1, eps=0.0), None, {}, [1.0, 1.0, 0.0, 1.0, 1.0], "params/w"),
    "0/0, composed": (lambda: composed_adam(0.1, eps=0.0), None, {}, [1.0, 1.0, 1.0, 1.0, 0.0], "params/w"),
    "0/0, rounded": (lambda: fz.adam(0.1, eps=0.0), PURE, {}, [0.0, 1.0, 1.0, 1.0, 1.0], "params/w"),
    "rate inf": (lambda: fz.adamw(0.1), None, {"learning_rate": float("inf")}, [1.0] * 5, "params/other"),
    "rate nan": (lambda: fz.sgd(0.1, momentum=0.9), None, {"learning_rate": float("nan")}, [1.0] * 5, "params/other"),
    "rate large": (lambda: fz.sgd(0.1), None, {"learning_rate": 1e38}, [1.0, 1.0, 1e4, 1.0, 1.0], "params/w"),
    "square": (lambda: fz.adam(0.1), None, {}, [1.0, 1.0, 1.0, 1e25, 1.0], "opt_state/scale_by_adam/nu/w"),
    "decay": (lambda: fz.adamw(1e3), None, {"weight_decay": 3e38}, [1.0] * 5, "params/other"),
    "half": (lambda: fz.adam(0.1), HALF, {"learning_rate": 1e5}, [1.0] * 5, "params/other"),
}


def spoil(mesh, stage, name):
    """Good, bad, bad, good: whole states before and after the bad ones, the end, metrics, and the limit's message."""
    make, policy, bad_hyper, bad, _ = SPOILERS[name]
    tx, params = make(), {"w": torch.ones(5), "other": torch.full((3,), 2.0)}
    options = {"precision": policy} if policy else {}
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, **options)
    state = fz.init_state(params, tx, specs=specs, **options)
    step = fz.make_step(linear, tx, specs=specs, max_skips=2, **options)
    good = rows(w=torch.ones(5), other=torch.ones(3))
    bad = rows(w=torch.tensor(bad), other=torch.ones(3))
    if "0/0" not in name:  # where an element has had a gradient, its second moment is not 0
        state, _ = step(state, good)
    before, hyper = whole(state), {n: 0.1 for n in bad_hyper}
    state = fz.with_hyperparams(state, bad_hyper)
    changed = whole(state)
    metrics = []
    for _ in range(2):
        state, m = step(state, bad)
        metrics.append(m)
    after = whole(state)
    try:
        step(state, good)
        text = "nothing raised"
    except fz.SkipLimitError as error:
        text = str(error)
    state = fz.with_hyperparams(state, hyper)
    patient = fz.make_step(linear, tx, specs=specs, **options)
    state, last = patient(state, good)
    return [before, changed, after, whole(state)], metrics, last, text


def spoiled_cells(rank, world):
    mesh = fz.make_mesh(dp=-1)
    return {(stage, name): spoil(mesh, stage, name) for stage in STAGES for name in SPOILERS}


@pytest.mark.parametrize("world", (1, 2))
def test_an_update_that_is_not_finite_leaves_the_state_bit_equal_and_says_so(world):
    results = pool(world).run(spoiled_cells)
    one_for_all([{f"{s} {n}": cell[0] for (s, n), cell in found.items()} for found in results])
    for found in results:
        for (stage, name), ((before, changed, after, end), metrics, last, text) in found.items():
            cell, blame = f"stage {stage}, {name}", SPOILERS[name][-1]
            assert not difference(after, changed), f"{cell}: {difference(after, changed)} changed"
            for i, m in enumerate(metrics):
                assert m.skipped and m.skipped_in_a_row == i + 1 and m.step == before["step"], cell
                assert m.grad_norm.isfinite() and m.loss.isfinite(), f"{cell}: gradients were meant to be finite"
            assert f"{blame} would not be finite" in text, f"{cell}: {text}"
            assert not last.skipped and last.step == before["step"] + 1 and last.skipped_in_a_row == 0, cell
            assert "params/w" in difference(end, after) and "params/other" in difference(end, after), cell
            assert all(x.isfinite().all() for x in end.values() if x.is_floating_point()), cell


def test_a_gradient_whose_square_overflows_is_used_once_it_is_clipped():
    for tx in (fz.adam(0.1), composed_adam(0.1)):
        state, step = launch({"w": torch.ones(2)}, tx, linear, fz.make_mesh(dp=-1), 0, step={"max_norm": 1.0})
        state, metrics = step(state, rows(w=torch.tensor([3e25, 4e25])))
        assert not metrics.skipped and close(metrics.grad_norm, 5e25, 1e-6)
        nu = state.opt_state["scale_by_adam"]["nu"]["w"]
        assert close(nu, torch.tensor([0.36e-3, 0.64e-3]), 1e-4)


@pytest.mark.parametrize("make", [lambda: fz.sgd(0.1), lambda: composed_adam(0.1), lambda: fz.adam(0.1)])
def test_an_infinity_that_was_there_before_is_no_reason(make):
    """A mask of -inf among the params takes part as a constant: its gradient is 0."""
    params = {"mask": torch.tensor([0.0, -torch.inf]), "w": torch.ones(2)}

    def loss(p, batch):
        return (torch.softmax(p["mask"], 0) * p["w"] * batch).sum()

    state, step = launch(params, make(), loss, fz.make_mesh(dp=-1), 0)
    state, metrics = step(state, torch.ones(1, 2))
    assert not metrics.skipped and state.params["mask"][1] == -torch.inf and state.params["w"][0] != 1


def running(params, batch, buffers, key):
    """The largest input enters a running value, not the loss."""
    return fz.Loss((params["w"] * batch["w"]).sum(), buffers={"scale": buffers["scale"] + batch["x"].max()})


def buffer_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        tx, params, buffers = fz.adam(0.1), {"w": torch.ones(3)}, {"scale": torch.ones(())}
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, buffers=fz.eval_shape(buffers))
        state = fz.init_state(params, tx, specs=specs, buffers=buffers)
        step = fz.make_step(running, tx, specs=specs, max_skips=1)
        x = torch.full((1, 1), torch.inf if rank == world - 1 else 1.0)
        before = whole(state)
        state, metrics = step(state, {"w": torch.ones(1, 3), "x": x})
        try:
            step(state, {"w": torch.ones(1, 3), "x": x})
            text = ""
        except fz.SkipLimitError as error:
            text = str(error)
        found[stage] = before, whole(state), state.buffers["scale"].clone(), metrics, text
    return found


@pytest.mark.parametrize("world", (1, 2))
def test_a_buffer_that_would_not_be_finite_refuses_the_step(world):
    for found in pool(world).run(buffer_cells):
        for stage, (before, after, scale, metrics, text) in found.items():
            assert metrics.skipped and not difference(after, before) and scale == 1, f"stage {stage}"
            assert "buffers/scale would not be finite" in text, f"stage {stage}: {text}"


def test_a_refused_update_leaves_the_loss_scale_alone():
    """It says nothing about overflow: the gradients were finite. Nor does it count towards growth."""
    tx = fz.sgd(0.1)
    state = fz.init_state({"w": torch.ones(2)}, tx, loss_scale=fz.loss_scale.dynamic(initial_power=3, window=2))
    step, good, scales = fz.make_step(linear, tx), rows(w=torch.ones(2)), []
    for rate in (0.1, float("inf"), 0.1, 0.1):
        before = fz.tree.map(torch.clone, state.loss_scale)
        state, metrics = step(fz.with_hyperparams(state, {"learning_rate": rate}), good)
        assert bool(metrics.skipped) == (rate == float("inf"))
        assert bool(metrics.skipped) == (not difference(state.loss_scale, before))
        scales.append(float(state.loss_scale.scale))
    assert scales[0] == scales[1] == 8.0 and scales[-1] == 16.0, scales


@pytest.mark.parametrize("tx", [fz.adam(0.1), composed_adam(0.1), composed_adam(0.1, eps=0.0), fz.adam(0.1, eps=0.0)])
@pytest.mark.parametrize("bad", [False, True])
def test_where_only_the_device_knows_the_flag_decides(tx, bad):
    """The form for accelerators, on the CPU: a flag as a tensor instead of a branch of the host."""
    params = {"w": torch.ones(4), "b": torch.ones(())}
    state = fz.init_state(params, tx)
    plan = Plan(state.specs, fz.precision.float32)
    selection = Selection(plan, plan.resolved(tx), (0, 1))
    flat, before = FlatState.open(state, state.specs), whole(state)
    eps = float(state.opt_state["scale_by_adam"]["hyperparams"]["eps"])
    value = 1.0 if not bad else 0.0 if eps == 0 else 1e30
    grads = [torch.ones(()), torch.tensor([1.0, 1.0, value, 1.0])]
    largest = torch.tensor(max(value, 2.0), dtype=torch.float64)
    clipped = Clipped(grads, largest, str)
    found = update_leaves(selection, flat, clipped, largest, torch.tensor(False), True)
    assert bool(found) == bad
    if bad:
        assert not difference(whole(flat.close(False)), before)
    else:
        assert not torch.equal(flat.params[1], before["params/w"])


@pytest.mark.parametrize("seed", range(40))
def test_what_is_called_tame_is_finite_at_the_edges(seed):
    """`is_tame` promises a finite update from any finite state: tried at extremes of gradients, moments and rates."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=g))]

    rate, decay = pick(1e-3, 1.0, 1e4, -1.0, 1e9), pick(0.0, 0.1, 1e3)
    b1, b2, eps = pick(0.0, 0.9, 0.9999), pick(0.0, 0.9, 0.99999), pick(1e-8, 1e-12, 1e-3)
    rule = pick(Adam(rate, b1, b2, eps), Lion(rate, b1, b2), Momentum(rate, b1, pick(True, False)), Momentum(rate))
    largest = pick(0.0, 1e-30, 1.0, 1.8e19)
    if not fused.is_tame(rule, decay, largest):
        assert rate > 1 or eps < 1e-8 or decay > 1 or b1 > 0.99
        return
    size = 1.8e19
    p = torch.tensor([3e37, -3e37, 0.0, 1.0])
    first = torch.tensor([size, -size, size, 0.0]) * (1 if pick(True, False) else 1e-25)
    second = torch.tensor([0.0, 3e38, 1e-38, 0.0])
    moments = {Adam: (first, second), Lion: (first,), Momentum: (first,)}[type(rule)] if rule != Momentum(rate) else ()
    grads = torch.tensor([largest, -largest, 0.0, largest])
    leaf = Leaf(p, grads, tuple(Moment(x) for x in moments), count=pick(1, 1000), weight_decay=decay)
    update([leaf], rule)
    assert all(bool(x.isfinite().all()) for x in (p, *moments)), (rule, decay, largest, p, moments)
