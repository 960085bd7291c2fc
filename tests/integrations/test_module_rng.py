"""`functional_call(..., rng=key)`: dropout is a function of the key, and torch's global generators notice nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funzero as fz
from funzero.core.scope import scope
from funzero.transforms.rng import fold_in, make_key, seed_of

KEY, OTHER = make_key(1), make_key(2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)


class MultiHead(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2, dropout=0.5), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(8, 8, num_layers=2, dropout=0.5)

    def forward(self, x):
        return self.cells(x)[0]


class Checkpointed(nn.Module):
    """Two parts with dropout, which run again in the backward."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x):
        for part in (self.first, self.second):
            x = part(x) if self.mode is None else checkpoint(part, x, use_reentrant=self.mode)
        return x


MODULES = {
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.AlphaDropout(0.5)),
    "sdpa": Attention,
    "multihead": lambda: MultiHead(False),
    "multihead_weights": lambda: MultiHead(True),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5),
    "lstm": Recurrent,
    "checkpointed": lambda: Checkpointed(False),
}


@pytest.fixture(autouse=True)
def global_generator_stays():
    """Modules and inputs are made with it, so tests hand back what they took through `made`."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def made(make):
    """A module, params that are not its own, and an input."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().train()
        params = {k: 0.5 * torch.randn_like(v) for k, v in fz.split_module(module)[0].items()}
        return module, params, torch.randn(3, 5, 8)


@pytest.mark.parametrize("name", MODULES)
def test_a_call_is_a_function_of_its_key(name):
    module, params, x = made(MODULES[name])
    first = fz.functional_call(module, params, x, rng=KEY)
    assert torch.equal(first, fz.functional_call(module, params, x, rng=KEY.clone()))
    assert torch.equal(first, fz.functional_call(module, params, x, rng=1)), "a seed is a key"
    assert not torch.equal(first, fz.functional_call(module, params, x, rng=OTHER))
    assert not torch.equal(first, fz.functional_call(module, params, x, rng=fold_in(KEY, 0)))
    a, b = (fz.functional_call(module, params, x, rng=k, training=False) for k in (KEY, OTHER))
    assert torch.equal(a, b) and not torch.equal(a, first)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_repeat_too(name):
    module, params, x = made(MODULES[name])

    def loss(p, key):
        return fz.functional_call(module, p, x, rng=key).square().sum()

    a, b, c = (fz.grad_fn(loss)(params, k)[0] for k in (KEY, KEY, OTHER))
    assert all(torch.equal(a[k], b[k]) for k in a) and not all(torch.equal(a[k], c[k]) for k in a)


def test_the_draws_are_those_of_a_seeded_generator():
    module, params, x = made(MODULES["dropout"])
    got = fz.functional_call(module, params, x, rng=KEY)
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(KEY))
        assert torch.equal(fz.functional_call(module, params, x), got)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_repeats_the_masks(use_reentrant):
    module, params, x = made(lambda: Checkpointed(use_reentrant))
    plain, _, _ = made(lambda: Checkpointed(None))

    def backward(module):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        inputs = x.clone().requires_grad_()
        with scope():  # reentrant checkpointing refuses torch.autograd.grad, which fz.grad_fn uses
            out = fz.functional_call(module, leaves, inputs, rng=KEY)
            before = torch.get_rng_state()
            out.square().sum().backward()
            assert torch.equal(torch.get_rng_state(), before)
        return out, inputs.grad, leaves

    (out, at_x, leaves), (want, want_at_x, want_leaves) = backward(module), backward(plain)
    assert torch.equal(out, want) and torch.equal(at_x, want_at_x)
    assert all(torch.equal(leaves[k].grad, want_leaves[k].grad) for k in params)


def test_recomputation_after_other_draws():
    module, params, x = made(lambda: Checkpointed(False))
    plain, _, _ = made(lambda: Checkpointed(None))

    def loss(p, module):
        first = fz.functional_call(module, p, x, rng=KEY).square().sum()
        return first + fz.functional_call(module, p, 2 * x, rng=OTHER).square().sum()

    got, want = (fz.grad_fn(loss)(params, m)[0] for m in (module, plain))
    assert all(torch.allclose(got[k], want[k], rtol=1e-5, atol=1e-6) for k in want)


def test_an_error_leaves_the_generator_as_it_was():
    class Fails(nn.Module):
        def forward(self, x):
            torch.rand(3)
            raise KeyError("stop")

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="stop"):
        fz.functional_call(Fails(), {}, torch.ones(1), rng=KEY)
    assert torch.equal(torch.get_rng_state(), before)
    module, _, x = made(MODULES["dropout"])
    with pytest.raises(ValueError, match="params do not fit"):
        fz.functional_call(module, {}, x, rng=KEY)
    assert torch.equal(torch.get_rng_state(), before)


class Outer(nn.Module):
    """Draws, calls another module in between, and draws again."""

    def __init__(self, inner, params, rng):
        super().__init__()
        self.inner, self.params, self.rng = [inner], params, rng

    def forward(self, x):
        first = torch.rand(4)
        middle = fz.functional_call(self.inner[0], self.params, x, rng=self.rng)
        return first, middle, torch.rand(4)


def test_nested_calls():
    inner, params, x = made(MODULES["dropout"])
    own = fz.functional_call(inner, params, x, rng=OTHER)
    first, middle, last = fz.functional_call(Outer(inner, params, OTHER), {}, x, rng=KEY)
    assert torch.equal(middle, own)
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(KEY))
        assert torch.equal(torch.rand(4), first) and torch.equal(torch.rand(4), last), "the outer stream goes on"
    shared = fz.functional_call(Outer(inner, params, None), {}, x, rng=KEY)
    with torch.random.fork_rng():
        torch.manual_seed(seed_of(KEY))
        assert all(torch.equal(a, b) for a, b in zip(shared, Outer(inner, params, None)(x), strict=True))


def test_a_key_ends_with_its_call():
    module, params, x = made(MODULES["dropout"])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        want = [fz.functional_call(module, params, x) for _ in range(2)]
        torch.manual_seed(5)
        first = fz.functional_call(module, params, x)
        with scope():  # within one gradient, too
            fz.functional_call(module, params, x, rng=KEY)
            assert torch.equal(fz.functional_call(module, params, x), want[1])
        assert torch.equal(first, want[0])


def test_with_buffers():
    module, params, x = made(lambda: nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(5)))
    buffers = fz.split_module(module)[1]
    (a, new_a), (b, new_b) = (fz.functional_call(module, params, x, rng=KEY, buffers=buffers) for _ in range(2))
    assert torch.equal(a, b) and all(torch.equal(new_a[k], new_b[k]) for k in buffers)
    assert not torch.equal(new_a["1.running_mean"], buffers["1.running_mean"])


def test_in_a_step():
    module, params, x = made(lambda: Checkpointed(False))
    plain, _, _ = made(lambda: Checkpointed(None))

    def loss_of(module):
        return lambda p, batch, key: fz.functional_call(module, p, batch, rng=fold_in(key, 3)).square().mean()

    states = []
    for m in (module, plain, module):
        state = fz.init_state(params, fz.sgd(0.1), key=4)
        step = fz.make_step(loss_of(m), fz.sgd(0.1), accumulate=3)
        for _ in range(2):
            state, _ = step(state, x)
        states.append(state.params)
    assert all(torch.equal(states[0][k], states[2][k]) for k in params)
    assert all(torch.allclose(states[0][k], states[1][k], rtol=1e-6) for k in params)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    module, params, x = made(MODULES["encoder"])
    module, x = module.cuda(), x.cuda()
    params = {k: v.cuda() for k, v in params.items()}
    before = torch.cuda.get_rng_state()
    a, b, c = (fz.functional_call(module, params, x, rng=k) for k in (KEY, KEY, OTHER))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("rng, message", [(torch.ones(2), r"key: expected int64 \[2\]"), ("a", "key: expected a seed")])
def test_what_is_no_key(rng, message):
    module, params, x = made(MODULES["dropout"])
    with pytest.raises((TypeError, ValueError), match=message):
        fz.functional_call(module, params, x, rng=rng)
