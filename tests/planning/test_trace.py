"""The abstract run of a loss sees the bytes of an eager one, op for op."""

import itertools

import pytest
import torch

import funzero as fz
from funzero.executor.plan import Plan
from funzero.planning.trace import trace
from funzero.transforms.precision import checked
from funzero.transforms.remat import checked_rules
from tests.planning.common import Living, model_and_batch

REMAT = {"nothing": {"blocks.*": "nothing"}, "matmuls": {"blocks.*": "matmuls"}, "none": None}


def timeline(loss_fn, params, batch, *, accumulate=1, remat=None, precision=None, buffers=()):
    specs = fz.zero_specs(params, fz.sgd(0.1), fz.abstract_mesh(dp=1), stage=0, precision=precision, buffers=buffers)
    return trace(loss_fn, Plan(specs, checked(precision)), batch, accumulate, checked_rules(remat))


@pytest.mark.parametrize("remat", REMAT)
def test_the_peak_is_that_of_an_eager_run(remat):
    model, batch = model_and_batch()
    params = fz.split_module(model)[0]
    rules = REMAT[remat]

    def loss_fn(p, b):
        return fz.functional_call(model, p, *b)

    found = timeline(loss_fn, params, batch, remat=rules)
    state = fz.init_state(params, fz.sgd(0.1))
    step = fz.make_step(loss_fn, fz.sgd(0.1), remat=rules)
    with Living([*fz.tree.leaves(state), *batch]) as living:
        step(state, batch)
    # This step keeps the gradients that have landed; a timeline no longer counts them.
    landed = itertools.accumulate((e.held for e in found.events), initial=0)
    high = max(e.high + n for e, n in zip(found.events, landed, strict=False))
    assert high <= living.peak <= 1.01 * high, "beside the loss and gradients a step has only scalars here"


def test_what_is_saved_for_the_backward_is_that_of_an_eager_run():
    model, batch = model_and_batch()
    params = {n: p.requires_grad_() for n, p in fz.split_module(model)[0].items()}
    saved, own = {}, {p.untyped_storage()._cdata for p in params.values()} | {x.untyped_storage()._cdata for x in batch}

    def pack(x):
        saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = fz.functional_call(model, params, *batch)
    kept = sum(s.nbytes() for key, s in saved.items() if key not in own)
    found = timeline(lambda p, b: fz.functional_call(model, p, *b), fz.eval_shape(params), batch)
    at_loss = next(e for e in found.events if e.backward)
    # Between the loss and the first use of a param in the backward nothing is given back but the loss's own part.
    assert at_loss.high >= kept + loss.nbytes
    last_forward = [e for e in found.events if not e.backward][-1]
    assert last_forward.now <= kept + 2 * loss.nbytes


def test_uses_and_gradients_come_in_order():
    def loss_fn(p, b):
        return ((b @ p["a"]).tanh() @ p["b"]).sum() + 0 * p["frozen"].sum()

    params = {"a": torch.empty(4, 4), "b": torch.empty(4, 4), "frozen": torch.empty(3), "unused": torch.empty(2)}
    found = timeline(loss_fn, fz.eval_shape(params), torch.ones(2, 4))
    assert found.uses == [0, 1, 2, 1]
    assert sorted(e.leaf for e in found.events if e.kind == "grad") == [0, 1, 2]
    assert all(e.backward for e in found.events if e.kind == "grad")


def test_a_batch_of_shapes_is_cut_into_micro_batches():
    class Shape:
        shape, dtype = (8, 4), torch.float32

    seen = []

    def loss_fn(p, b):
        seen.append((tuple(b["x"].shape), b["scale"]))
        return (b["x"] @ p["a"]).sum()

    timeline(loss_fn, {"a": torch.empty(4, 4)}, {"x": Shape(), "scale": 3}, accumulate=4)
    assert seen == [((2, 4), 3)]


def test_keys_buffers_and_dropout():
    def loss_fn(p, b, *, key, buffers):
        x = fz.random.dropout(b @ p["a"], 0.1, key)
        x = x * fz.random.normal(key, x.shape)
        return fz.Loss(torch.nn.functional.dropout(x, 0.5).sum(), buffers={"n": buffers["n"] + 1})

    found = timeline(loss_fn, {"a": torch.empty(4, 4)}, torch.ones(2, 4), buffers={"n": torch.zeros(3)})
    assert [e.kind for e in found.events][-2:] == ["grad", "end"]


def test_compute_dtype_halves_activations():
    model, batch = model_and_batch()
    params = fz.split_module(model)[0]
    wide, low = (
        timeline(lambda p, b: fz.functional_call(model, p, *b), params, batch, precision=p)
        for p in (fz.precision.float32, fz.precision.bf16_mixed)
    )
    assert 0.4 < low.activations / wide.activations < 0.6


def test_a_loss_that_looks_at_values_is_refused():
    with pytest.raises(ValueError, match="loss_fn looks at the values of a tensor"):
        timeline(lambda p, b: p["a"].sum() * float(b.sum()), {"a": torch.empty(4)}, torch.ones(2))


def test_rows_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="3 rows do not split into accumulate=2"):
        timeline(lambda p, b: (b @ p["a"]).sum(), {"a": torch.empty(4)}, torch.ones(3, 4), accumulate=2)
