"""Hyper-parameters are leaves: set on a live or restored state, per path by partition, never a new step function."""

import pytest
import torch

import funzero as fz


def loss_fn(p, b):
    return sum((v * b.mean()).sum() for v in p.values())


def test_a_new_rate_takes_effect_at_the_next_step_of_the_same_function():
    state = fz.init_state({"w": torch.zeros(2)}, fz.sgd(1.0))
    step, batch = fz.make_step(loss_fn, fz.sgd(1.0)), torch.ones(1)
    state, _ = step(state, batch)
    state, _ = step(fz.with_hyperparams(state, {"learning_rate": 0.25}), batch)
    assert state.params["w"].tolist() == [-1.25, -1.25]


def test_a_name_sets_all_and_a_glob_one(tmp_path):
    tx = fz.partition({"a": fz.adamw(0.1, weight_decay=0.2), "b": fz.sgd(0.5)}, {"x": "a", "y": "b"})
    state = fz.init_state({"x": torch.ones(2), "y": torch.ones(2)}, tx)
    fz.save(tmp_path / "s", state)
    state = fz.restore(tmp_path / "s", like=fz.abstract_state({"x": torch.ones(2), "y": torch.ones(2)}, tx))
    both = fz.with_hyperparams(state, {"learning_rate": 2.0})
    one = fz.with_hyperparams(state, {"opt_state/b/**/learning_rate": 2.0, "weight_decay": torch.tensor(0.0)})

    def rates(s):
        found = dict(zip(fz.tree.paths(s.opt_state), fz.tree.leaves(s.opt_state), strict=True))
        return [round(float(v), 6) for k, v in found.items() if k.endswith(("learning_rate", "weight_decay"))]

    assert rates(state) == [0.2, 0.1, 0.5]
    assert rates(both) == [0.2, 2.0, 2.0]
    assert rates(one) == [0.0, 0.1, 2.0]
    assert both.opt_state["a"]["scale_by_learning_rate"]["hyperparams"]["learning_rate"].dtype == torch.float32


def test_names_that_are_not_there():
    state = fz.init_state({"w": torch.zeros(2)}, fz.adam(fz.schedules.constant(0.1)))
    for name in ("learning_rate", "beta1", "opt_state/step"):
        with pytest.raises(ValueError, match=r"with_hyperparams: .*matches no leaf"):
            fz.with_hyperparams(state, {name: 1.0})


@pytest.mark.parametrize("kind", ["adam", "partition"])
def test_apply_update_takes_none_for_frozen_leaves(kind):
    params = {"a": torch.ones(2), "b": torch.ones(2), "frozen": torch.ones(2)}
    parts = {"x": fz.adam(0.1), "y": fz.sgd(0.1)}
    tx = fz.adam(0.1) if kind == "adam" else fz.partition(parts, {"a": "x", "b": "y", "frozen": "x"})
    state = fz.init_state(params, tx, trainable={"a": True, "b": True, "frozen": False})
    for missing in (False, True):  # an unused leaf beside the frozen one
        grads = {"a": torch.ones(2), "b": None if missing else torch.ones(2), "frozen": None}
        new = fz.apply_update(tx, state, grads)
        assert torch.equal(new.params["frozen"], params["frozen"]) and new.params["a"][0] < 1
        assert (new.params["b"][0] < 1) != missing and new.opt_state.keys() == state.opt_state.keys()
