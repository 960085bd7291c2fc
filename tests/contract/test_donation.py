"""Donation: which states a failed update spends, and which states own their leaves."""

import pytest
import torch

import funzero as fz


def failing(params):
    """An optimizer whose update raises."""

    def update(updates, state, params=None):
        raise ArithmeticError("no update")

    tx = fz.Transform(lambda params: {}, update, needs="element")
    return tx, fz.init_state(params, tx)


@pytest.mark.parametrize("donate", [True, False])
def test_a_failure_in_the_update_spends_only_a_donated_state(donate):
    tx, state = failing({"w": torch.ones(2)})
    step = fz.make_step(lambda p, b: p["w"].sum(), tx, donate=donate)
    with pytest.raises(ArithmeticError):
        step(state, {})
    check_spent(state, donate)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("make", [fz.adam, lambda rate: fz.chain(fz.scale_by_adam(), fz.scale(-rate))])
def test_a_failure_after_leaves_have_changed_spends_a_donated_state(make, donate, monkeypatch):
    def fails(selection, flat):
        raise ArithmeticError("no gather")

    monkeypatch.setattr("funzero.executor.update.make_whole", fails)
    monkeypatch.setattr("funzero.executor.composed.make_whole", fails)
    tx, params = make(0.1), {"w": torch.ones(2)}
    state, step = fz.init_state(params, tx), fz.make_step(lambda p, b: p["w"].sum(), tx, donate=donate)
    with pytest.raises(ArithmeticError):
        step(state, {})
    check_spent(state, donate)


def check_spent(state, spent):
    if spent:
        with pytest.raises(fz.SpentStateError, match="restore a checkpoint"):
            state.params["w"] + 1
    else:
        assert state.params["w"].tolist() == [1.0, 1.0]


def test_a_state_may_keep_the_params_that_were():
    def update(updates, state, params=None):
        return fz.tree.map(lambda g: -g, updates), {"old": params}

    tx = fz.Transform(lambda params: {"old": fz.tree.map(torch.zeros_like, params)}, update, needs="element")
    state, step = fz.init_state({"w": torch.ones(2)}, tx), fz.make_step(lambda p, b: p["w"].sum(), tx)
    for i in range(3):
        state, _ = step(state, {})
        assert state.opt_state["old"]["w"].tolist() == [1.0 - i] * 2 and state.params["w"].tolist() == [-float(i)] * 2


def test_a_resharded_state_does_not_poison_the_one_it_came_from():
    params, tx = {"w": torch.ones(4)}, fz.adam(0.1)
    specs = [fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=stage) for stage in (0, 3)]
    old = fz.init_state(params, tx, specs=specs[0])
    new = fz.reshard(old, specs[1])
    fz.make_step(lambda p, b: p["w"].sum(), tx)(new, {})
    assert int(old.step) == 0 and old.key.tolist() == [0, 0] and old.params["w"].tolist() == [1.0] * 4
