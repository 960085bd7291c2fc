"""Stand-ins: whatever a loss does with a param gives the gradient of plain tensors, or a refusal that names the leaf."""

import pytest
import torch

import funzero as fz
from funzero.executor import placement, shards
from tests.executor.idioms import REFUSED, expressions, modules
from tests.ranks import once, pool


def through_stand_ins(params, loss, budget):
    """Gradients by stage 3 with every cut leaf lazy; the ranks have equal data, so the mean is each one's own."""
    tx = fz.sgd(1.0)
    mesh = fz.make_mesh(dp=-1)
    specs = fz.zero_specs(params, tx, mesh, stage=3)
    state = fz.init_state(params, tx, specs=specs)
    step = fz.make_step(lambda p, b: loss(p), tx, specs=specs, gather_budget=budget, donate=False)
    results = []
    for _ in range(2):  # the first call records the lists, the second goes by them
        held = step.accumulate(state, {})
        grads = fz.gather(held.accum.grads, specs.accum)
        results.append({k: g / mesh.world for k, g in grads.items()})
    return results


def run_idioms(rank, world, budget):
    bad, names = [], []
    before, placement.BUNDLE_BYTES = placement.BUNDLE_BYTES, 0
    try:
        for name, params, loss in [*modules(), *expressions()]:
            torch.manual_seed(1)
            plain, _ = fz.grad_fn(lambda p, loss=loss: loss(p))(params)
            for i, found in enumerate(through_stand_ins(params, loss, budget)):
                for k, g in found.items():
                    want = torch.zeros_like(g) if plain[k] is None else plain[k]
                    if not torch.allclose(g, want, rtol=1e-12, atol=1e-13):
                        bad.append((name, i, k, float((g - want).abs().max())))
            names.append(name)
    finally:
        placement.BUNDLE_BYTES = before
    return bad, names


@pytest.mark.parametrize("budget", [None, 200])
def test_idioms_through_stand_ins(budget):
    for bad, names in pool(2).run(run_idioms, budget, timeout=110):
        assert len(names) >= 28
        assert not bad


def run_refused(rank, world, name):
    placement.BUNDLE_BYTES = 0
    params = {"w": torch.ones(8, 4), "b": torch.ones(4)}
    x = torch.ones(6, 8)
    specs = fz.zero_specs(params, fz.sgd(1.0), fz.make_mesh(dp=-1), stage=3)
    state = fz.init_state(params, fz.sgd(1.0), specs=specs)
    step = fz.make_step(lambda p, b: REFUSED[name][0](p, x), fz.sgd(1.0), specs=specs)
    try:
        step(state, {})
    except Exception as error:
        return str(error), [x.sum().item() for x in fz.tree.leaves(state.params)]
    return "no error", []


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    for outcome in once(run_refused, 2, name):
        assert outcome.ok, outcome.error
        message, values = outcome.value
        assert REFUSED[name][1] in message
        assert values == [2.0, 16.0], "a refusal changes nothing"


class Outer(torch.nn.Module):
    """A model with a part that its user compiled."""

    def __init__(self, backend):
        super().__init__()
        inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)).double()
        self.first = torch.nn.Linear(8, 8).double()
        self.inner = torch.compile(inner, backend=backend) if backend else inner

    def forward(self, x):
        return self.inner(self.first(x)).square().sum()


def run_compiled(rank, world, backend, budget):
    before, placement.BUNDLE_BYTES = placement.BUNDLE_BYTES, 0
    try:
        torch.manual_seed(0)
        plain, model = Outer(None), Outer(backend)
        params = {k: v + 0.01 for k, v in fz.split_module(model)[0].items()}
        x = torch.randn(3, 8, dtype=torch.float64)
        own = {k.replace("_orig_mod.", ""): v for k, v in params.items()}
        want, _ = fz.grad_fn(lambda p: fz.functional_call(plain, p, x))(own)
        found = through_stand_ins(params, lambda p: fz.functional_call(model, p, x), budget)
        return [max(float((g[k] - want[k.replace("_orig_mod.", "")]).abs().max()) for k in g) for g in found]
    finally:
        placement.BUNDLE_BYTES = before


@pytest.mark.parametrize("budget", [None, 600])
def test_a_compiled_submodule_gets_its_leaves_when_it_is_called(budget):
    for errors in pool(2).run(run_compiled, "aot_eager", budget):
        assert max(errors) < 1e-12


def run_cast(rank, world):
    """A float32 leaf used in bf16 only: what the loss sees, and in what dtype it was gathered."""
    before, placement.BUNDLE_BYTES = placement.BUNDLE_BYTES, 0
    post, shards.post_gather = shards.post_gather, lambda x, layout: gathered.add(layout.dtype) or post(x, layout)
    seen, gathered = {}, set()

    def loss_fn(p, b):
        low = p["w"].bfloat16()
        seen.update(kind=type(low).__name__, dtype=low.dtype, same=p["w"].float() is p["w"])
        return (b.bfloat16() @ low).float().square().sum()

    try:
        params = {"w": torch.randn(64, 32, generator=torch.Generator().manual_seed(0))}
        plain, _ = fz.grad_fn(lambda p: loss_fn(p, torch.ones(4, 64)))(params)
        specs = fz.zero_specs(params, fz.sgd(1.0), fz.make_mesh(dp=-1), stage=3)
        state = fz.init_state(params, fz.sgd(1.0), specs=specs)
        step = fz.make_step(loss_fn, fz.sgd(1.0), specs=specs, gather_budget=6000)
        new, _ = step(state, torch.ones(4, 64))
        seen["gathered"] = gathered.copy()
        whole = fz.gather(new.params, specs.params)["w"]
        return seen, float((params["w"] - plain["w"] - whole).abs().max() / plain["w"].abs().max())
    finally:
        placement.BUNDLE_BYTES, shards.post_gather = before, post


def test_a_cast_stand_in_is_one_and_travels_cast():
    for seen, error in pool(2).run(run_cast):
        assert seen == {"kind": "StandIn", "dtype": torch.bfloat16, "same": True, "gathered": {torch.bfloat16}}
        assert error < 1e-6
