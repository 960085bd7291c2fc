"""Modules as pure functions: params that are not the module's own, and a module that is as it was afterwards."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funzero as fz


class Checkpointed(nn.Module):
    """Recomputes its middle in the backward, through its own attributes."""

    def __init__(self, use=True):
        super().__init__()
        self.use = use
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def part(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x):
        return (checkpoint(self.part, x, use_reentrant=False) if self.use else self.part(x)).square().sum()


def other_params(module):
    torch.manual_seed(1)
    return {k: torch.randn_like(v) for k, v in fz.split_module(module)[0].items()}


@pytest.mark.parametrize("on_meta", [False, True])
def test_recomputation_sees_the_params_that_were_given(on_meta):
    module, x = Checkpointed(), torch.randn(3, 4, dtype=torch.float64)
    params = other_params(module)
    plain = Checkpointed(use=False)
    want, _ = fz.grad_fn(lambda p: fz.functional_call(plain, p, x))(params)
    module = module.to("meta") if on_meta else module
    got, _ = fz.grad_fn(lambda p: fz.functional_call(module, p, x))(params)
    assert all(torch.equal(got[k], want[k]) for k in want)
    state = fz.init_state(params, fz.sgd(1.0))
    new, _ = fz.make_step(lambda p, b: fz.functional_call(module, p, x), fz.sgd(1.0))(state, {})
    assert all(torch.allclose(new.params[k], params[k] - want[k], rtol=1e-14) for k in want)


def test_two_trees_in_one_graph_with_recomputation_are_refused():
    module, x = Checkpointed(), torch.randn(3, 4, dtype=torch.float64)
    params = other_params(module)
    teacher = {k: v + 1 for k, v in params.items()}

    def loss(p):
        return fz.functional_call(module, p, x) - fz.functional_call(module, teacher, x)

    with pytest.raises(RuntimeError, match=r"two trees of params in one graph .* fz\.remat"):
        fz.grad_fn(loss)(params)
    module.use = False
    grads, _ = fz.grad_fn(loss)(params)
    want, _ = fz.grad_fn(lambda p: fz.functional_call(module, p, x))(params)
    assert all(torch.equal(grads[k], want[k]) for k in want)


def test_the_module_is_as_it_was():
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)).eval()
    before = copy.deepcopy(module.state_dict())
    params, buffers = fz.split_module(module)
    params = {k: v + 1 for k, v in params.items()}

    def loss(p):
        out, new = fz.functional_call(module, p, torch.randn(5, 3), buffers=buffers, training=True)
        assert int(new["2.num_batches_tracked"]) == 1 and int(buffers["2.num_batches_tracked"]) == 0
        return out.square().sum()

    for run in (lambda: fz.grad_fn(loss)(params), lambda: loss(params)):
        run()
        assert not any(m.training for m in module.modules())
        assert all(torch.equal(module.state_dict()[k], v) for k, v in before.items())

    def fails(p):
        fz.functional_call(module, p, torch.randn(5, 3))
        raise KeyError("stop")

    with pytest.raises(KeyError):
        fz.grad_fn(fails)(params)
    assert all(torch.equal(module.state_dict()[k], v) for k, v in before.items())


def test_a_written_constant_buffer_is_an_error():
    module = nn.BatchNorm1d(3)
    with pytest.raises(RuntimeError, match=r"wrote to its buffer .* pass buffers="):
        fz.functional_call(module, fz.split_module(module)[0], torch.randn(5, 3))
    assert int(module.num_batches_tracked) == 0 and module.running_mean.tolist() == [0.0] * 3


@pytest.mark.parametrize("change", [{"weight": None}, {"extra": torch.ones(1)}])
def test_names_that_do_not_fit(change):
    module = nn.Linear(2, 2)
    params = {k: v for k, v in {**fz.split_module(module)[0], **change}.items() if v is not None}
    with pytest.raises(ValueError, match="functional_call: params do not fit the module"):
        fz.functional_call(module, params, torch.ones(1, 2))


def test_a_module_changed_since_is_seen():
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    ones = {"0.weight": torch.ones(2, 2)}
    assert fz.functional_call(module, ones, torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert fz.functional_call(module, ones, torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    assert module[0].weight.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_recurrent_modules_use_what_they_are_given():
    module, x = nn.LSTM(3, 3), torch.randn(2, 1, 3)
    params = other_params(module)
    twin = nn.LSTM(3, 3)
    twin.load_state_dict(params)
    assert torch.equal(fz.functional_call(module, params, x)[0], twin(x)[0])


def test_init_module_and_load_module():
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    thunks = fz.init_module(module)
    a = fz.init_state(thunks, fz.sgd(0.1), key=1)
    b = fz.init_state(iter(thunks.items()), fz.sgd(0.1), key=1)
    c = fz.init_state(thunks, fz.sgd(0.1), key=2)
    assert all(torch.equal(a.params[k], b.params[k]) for k in thunks)
    assert not torch.equal(a.params["1.weight"], c.params["1.weight"])
    assert a.params["2.weight"].tolist() == [1.0] * 4 and float(a.params["1.weight"].abs().max()) <= 0.5
    state = torch.get_rng_state()
    fz.init_state(thunks, fz.sgd(0.1))
    assert torch.equal(torch.get_rng_state(), state), "global generators are left as they were"
    fz.load_module(module, a)
    assert all(torch.equal(v, a.params[k]) for k, v in module.named_parameters())


def test_init_thunks_may_draw_by_their_key():
    thunks = {"w": lambda key: fz.random.normal(key, (70, 50)), "b": lambda key: fz.random.uniform(key, 3) - 0.5}
    shapes = fz.eval_shape(thunks)
    assert {n: tuple(x.shape) for n, x in shapes.items()} == {"w": (70, 50), "b": (3,)}
    assert all(x.is_meta for x in shapes.values())
    made = fz.init_state(thunks, fz.sgd(0.1), key=1).params
    assert 0.9 < float(made["w"].std()) < 1.1 and bool((made["b"] != 0).all())
