"""Recomputation: the same bits of gradients, the same masks, less memory; in steps, at stage 3, twice through a module."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funzero as fz
from funzero.executor import placement
from funzero.transforms import remat
from tests.ranks import pool

POLICIES = ["nothing", "everything", "matmuls", ("mid",), "host"]


class Block(nn.Module):
    def __init__(self, width=8, rate=0.5):
        super().__init__()
        self.up, self.down, self.rate = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), rate

    def forward(self, x):
        y = fz.keep(F.gelu(self.up(x)), "mid")
        return x + F.dropout(self.down(y).tanh(), self.rate, training=self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def params_of(model, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        k: torch.randn(v.shape, generator=g, dtype=torch.float64) * 0.4 for k, v in fz.split_module(model)[0].items()
    }


def saved_bytes(fn, *inputs):
    """Bytes that autograd keeps between forward and backward, inputs left out."""
    seen, own = {}, {x.untyped_storage().data_ptr() for x in inputs}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fn(*inputs)
    return sum(seen.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_br43_y_is_the_inner_product_with_its_gradient(policy):
    """y = sum(dropout(w * x)) is linear in w, so it equals <w, dy/dw> exactly if the mask is that of the loss."""
    torch.manual_seed(0)
    w, x = torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    ordinary = lambda w: F.dropout(w * x, 0.5).sum()  # noqa: E731
    keyed = lambda w: fz.random.dropout(w * x, 0.5, fz.random.key(3)).sum()  # noqa: E731
    nested = fz.remat(lambda w: F.dropout(fz.remat(lambda v: F.dropout(v * x, 0.5), policy)(w), 0.5).sum(), policy)
    for fn in (fz.remat(ordinary, policy), fz.remat(keyed, policy), nested):
        grads, loss = fz.grad_fn(lambda p, fn=fn: fn(p["w"]))({"w": w})
        assert abs(float(loss.total - w @ grads["w"])) <= 1e-12 * float(w.abs() @ x.abs())
        assert 0.1 < (grads["w"] != 0).double().mean() < 0.9


def grads_with(policy, how, model, params, x):
    if how == "function":
        run = fz.remat(lambda p, x: fz.functional_call(model, p, x), policy)
        return fz.grad_fn(lambda p: run(p, x))(
            params,
        )[0]
    state = fz.init_state(params, fz.sgd(1.0))
    rules = None if policy is None else {"blocks.*": policy}
    step = fz.make_step(lambda p, b: fz.functional_call(model, p, b), fz.sgd(1.0), remat=rules, donate=False)
    new, _ = step(state, x)
    return {k: params[k] - v for k, v in new.params.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_has_the_same_bits_with_and_without(policy):
    model = Net().double()
    params, x = params_of(model), torch.randn(4, 8, dtype=torch.float64)
    own = dict(model.named_parameters())
    plain, found = (grads_with(p, "step", model, params, x) for p in (None, policy))
    assert all(torch.equal(plain[k], found[k]) for k in plain)
    assert all("forward" not in m.__dict__ for m in model.modules()) and dict(model.named_parameters()) == own


def test_what_is_kept_between_forward_and_backward():
    torch.manual_seed(0)
    block = Block(64, rate=0.0)
    params = [p.detach().requires_grad_() for p in block.parameters()]
    x = torch.randn(32, 64, requires_grad=True)
    names = [n for n, _ in block.named_parameters()]

    def run(policy):
        call = fz.remat(lambda x, *p: torch.func.functional_call(block, dict(zip(names, p, strict=True)), x), policy)
        return saved_bytes(call, x, *params)

    kept = {p: run(p) for p in POLICIES}
    assert kept["nothing"] == 0 and kept["everything"] > 0


@pytest.mark.parametrize("policy", ["nothing", "matmuls"])
def test_matmuls_and_named_values_are_not_computed_again(policy):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    with Count() as count:
        loss = fz.remat(lambda w: torch.tanh(torch.tanh(x @ w) @ w).sum(), policy)(w)
        torch.autograd.grad(loss, w)
    assert count.products == 2 + 3 + (2 if policy == "nothing" else 0)


def penalty(wrap):
    """The gradient of a squared gradient."""
    w = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(p):
        (g,) = torch.autograd.grad(wrap(lambda v: torch.tanh(v * v).sum())(p["w"]), p["w"], create_graph=True)
        return g.square().sum()

    return fz.grad_fn(loss)({"w": w})[0]["w"]


@pytest.mark.parametrize("policy", ["nothing", "host"])
def test_second_order_goes_through(policy, monkeypatch):
    monkeypatch.setattr(remat, "_in_host_memory", lambda x: False)
    assert torch.equal(penalty(lambda f: f), penalty(lambda f: fz.remat(f, policy)))


@pytest.mark.parametrize("outer", POLICIES)
@pytest.mark.parametrize("inner", ["nothing", "host"])
def test_policies_within_policies(outer, inner, monkeypatch):
    monkeypatch.setattr(remat, "_in_host_memory", lambda x: False)
    w = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()

    def run(wrap_outer, wrap_inner):
        inside = wrap_inner(lambda v: torch.tanh(v @ v.T).sum(0))
        return torch.autograd.grad(wrap_outer(lambda v: (inside(v * 2) * inside(v)).sum())(w), w)[0]

    plain = run(lambda f: f, lambda f: f)
    assert torch.equal(run(lambda f: fz.remat(f, outer), lambda f: fz.remat(f, inner)), plain)


def test_host_moves_what_autograd_keeps_but_no_params(monkeypatch):
    """With every value taken for one on a device: what is moved, and that hooks of others around it see the rest."""
    monkeypatch.setattr(remat, "_in_host_memory", lambda x: False)
    moved = []
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: moved.append(x) or torch.empty(x.shape, dtype=x.dtype))
    model, x = Block(8, rate=0.5), torch.randn(4, 8)
    params, _ = fz.split_module(model)
    for how in ("step", "grad_fn"):
        moved.clear()
        if how == "step":
            step = fz.make_step(
                lambda p, b: fz.remat(lambda: fz.functional_call(model, p, b), "host")().sum(), fz.sgd(0.1)
            )
            step(fz.init_state(params, fz.sgd(0.1)), x)
        else:
            fz.grad_fn(lambda p: fz.remat(lambda p: fz.functional_call(model, p, x), "host")(p).sum())(params)
        shapes = {tuple(t.shape) for t in moved}
        assert (4, 16) in shapes, "activations were meant to move"
        assert not shapes & {(16, 8), (8, 16)}, f"{how}: a weight was moved: {shapes}"

    seen = []
    w = torch.randn(3, requires_grad=True)
    named = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or ("mine", t), lambda p: p[1])
    moved.clear()
    with named:
        y = fz.remat(lambda: torch.tanh(w * 2), "host")()
    assert seen and not moved, "what hooks around it save is theirs"
    assert torch.allclose(torch.autograd.grad(y.sum(), w)[0], 2 * (1 - torch.tanh(2 * w).square()))


def test_two_trees_in_one_graph_through_remat():
    """A module called with two trees recomputes each with its own, which checkpointing within the module cannot."""
    model = Net().double().eval()
    a, b = params_of(model, 1), params_of(model, 2)
    x = torch.randn(4, 8, dtype=torch.float64)

    def both(wrap):
        call = wrap(lambda p, x: fz.functional_call(model, p, x))
        return fz.grad_fn(lambda p: call(p["a"], x) + call(p["b"], x) * 2)({"a": a, "b": b})[0]

    plain, found = both(lambda f: f), both(fz.remat)
    for tree in ("a", "b"):
        assert all(torch.equal(plain[tree][k], found[tree][k]) for k in plain[tree])


def at_stage_3(rank, world, policy, budget):
    before, placement.BUNDLE_BYTES = placement.BUNDLE_BYTES, 0
    remat._in_host_memory, real = (lambda x: False), remat._in_host_memory  # so that "host" makes copies on a CPU too
    try:
        model, out = Net().double(), []
        params, x = params_of(model), torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for rules in (None, {"blocks.*": policy, "blocks.1": "everything"}):
            specs = fz.zero_specs(params, fz.sgd(0.1), fz.make_mesh(dp=-1), stage=3)
            state = fz.init_state(params, fz.sgd(0.1), specs=specs, key=4)
            step = fz.make_step(
                lambda p, b: fz.functional_call(model, p, b), fz.sgd(0.1), specs=specs, remat=rules, accumulate=2,
                gather_budget=budget,
            )  # fmt: skip
            for _ in range(3):
                state, _ = step(state, x[rank::world])
            out.append([v.clone() for v in fz.tree.leaves(fz.gather(state.params, specs.params))])
        return out
    finally:
        placement.BUNDLE_BYTES = before
        remat._in_host_memory = real


@pytest.mark.parametrize("budget", [None, 2000])
@pytest.mark.parametrize("policy", ["nothing", "matmuls", "host"])
def test_lazy_leaves_accumulation_and_a_budget(policy, budget):
    for plain, found in pool(2).run(at_stage_3, policy, budget):
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_mistakes():
    for policy in ("all", 3, (), ("a", 1)):
        with pytest.raises(ValueError, match="remat: policy is one of"):
            fz.remat(torch.tanh, policy)
    with pytest.raises(TypeError, match="glob of module paths"):
        fz.make_step(lambda p, b: 0, fz.sgd(1.0), remat="nothing")
    model = Net()
    params, _ = fz.split_module(model)
    state = fz.init_state(params, fz.sgd(1.0))
    step = fz.make_step(lambda p, b: fz.functional_call(model, p, b), fz.sgd(1.0), remat={"layers.*": "nothing"})
    with pytest.raises(ValueError, match=r"remat: 'layers\.\*' matches no module"):
        step(state, torch.randn(2, 8))
    step = fz.make_step(lambda p, b: p["blocks.0.up.bias"].sum(), fz.sgd(1.0), remat={"blocks.*": "nothing"})
    with pytest.raises(ValueError, match=r"called no module by fz\.functional_call"):
        step(state, torch.randn(2, 8))
