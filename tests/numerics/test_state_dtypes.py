"""BR31 and deepspeed.md 3.12: saving and restoring changes no dtype and no bit, and the run goes on with the same bits."""

import itertools

import pytest
import torch

import funzero as fz

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def loss_fn(p, b):
    return (p["w"].float() * b.float()).square().sum()


def policy_of(param, moment):
    options = {"rounding": "stochastic"} if param == torch.bfloat16 else {}
    return fz.precision.Policy(f"{param} {moment}", params=param, moments=moment, **options)


@pytest.mark.parametrize(("param", "moment"), [*itertools.product(FLOATS, FLOATS)])
def test_br31_every_pair_of_dtypes_comes_back(tmp_path, param, moment):
    policy, tx = policy_of(param, moment), fz.adamw(0.01)
    params = {"w": torch.linspace(-1, 1, 77, dtype=torch.float64)}
    make = lambda: fz.make_step(loss_fn, tx, precision=policy, donate=False)  # noqa: E731
    state, batch = fz.init_state(params, tx, precision=policy, key=2), torch.linspace(0.3, 1.7, 77).unsqueeze(0)
    for _ in range(3):
        state, _ = make()(state, batch)
    assert state.params["w"].dtype == param
    assert {state.opt_state["scale_by_adam"][m]["w"].dtype for m in ("mu", "nu")} == {moment}
    fz.save(tmp_path / "s", state)
    again = fz.restore(tmp_path / "s", like=fz.abstract_state(params, tx, precision=policy))
    for _ in range(2):
        for path, a, b in zip(*tree_rows(state), fz.tree.leaves(again), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), path
        (state, _), (again, _) = make()(state, batch), make()(again, batch)


def tree_rows(tree):
    return fz.tree.paths(tree), fz.tree.leaves(tree)


def test_float32_moments_of_bf16_params_keep_their_low_bits(tmp_path):
    tx, policy = fz.adamw(0.1), fz.precision.bf16_master
    state = fz.init_state({"w": torch.ones(4)}, tx, precision=policy)
    state.opt_state["scale_by_adam"]["mu"]["w"].fill_(1 + 2**-10)
    fz.save(tmp_path / "s", state)
    again = fz.restore(tmp_path / "s", like=fz.abstract_state({"w": torch.ones(4)}, tx, precision=policy))
    mu = again.opt_state["scale_by_adam"]["mu"]["w"]
    assert mu.dtype == torch.float32 and mu.tolist() == [1 + 2**-10] * 4


def test_the_loss_scale_is_saved_with_its_counters(tmp_path):
    tx, scaling = fz.sgd(0.1), fz.loss_scale.dynamic(5, window=3, hysteresis=2)
    state = fz.init_state({"w": torch.ones(4)}, tx, loss_scale=scaling)
    step = fz.make_step(lambda p, b: (p["w"] * b).sum(), tx)
    for g in (1.0, 1.0, float("inf")):
        state, _ = step(state, torch.full((1,), g))
    fz.save(tmp_path / "s", state)
    again = fz.restore(tmp_path / "s", like=fz.abstract_state({"w": torch.ones(4)}, tx, loss_scale=scaling))
    assert [x.tolist() for x in fz.tree.leaves(again.loss_scale)] == [32.0, 0, 1, False]
    assert again.loss_scale.scaling == scaling
