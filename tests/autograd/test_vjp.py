"""vjp of whole params, in one process, against torch.autograd and torch.func."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funzero as fz

W, X = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0])


class Checkpointed(nn.Module):
    """Two layers, of which the first is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.first, x, use_reentrant=False))


class Plain(Checkpointed):
    """The same without that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.first(x))


def params_of(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Other values than the module's own."""
    made = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=made, dtype=p.dtype) for n, p in module.named_parameters()}


def by_torch(fn: Any, params: dict[str, torch.Tensor], x: torch.Tensor, cotangent: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of params and x by torch alone."""
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(fn(leaves, x), [*leaves.values(), x], cotangent))


@pytest.mark.parametrize("replay", [False, True])
def test_a_module_that_recomputes(replay):
    module = Checkpointed()
    own = [p.clone() for p in module.parameters()]
    params, x, cotangent = params_of(module, 1), torch.randn(5, 4), torch.randn(5, 3)
    y, pull = fz.vjp(lambda p, x: fz.functional_call(module, p, x), params, x, replay=replay)
    assert not y.requires_grad and all(a is b for a, b in zip(module.parameters(), module.parameters(), strict=True))
    want = by_torch(lambda p, x: torch.func.functional_call(Plain(), p, (x,)), params, x, cotangent)
    for _ in range(2):
        grads, x_bar = pull(cotangent)
        assert list(grads) == list(params)
        assert all(torch.equal(a, b) for a, b in zip([*grads.values(), x_bar], want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), own, strict=True))
    assert not any(isinstance(x, torch.Tensor) and x.requires_grad for x in params.values())


def test_forwards_in_flight_with_their_own_params():
    """Two trees in one module that recomputes, pulled in the other order: each finds its own."""
    module, x, cotangent = Checkpointed(), torch.randn(5, 4), torch.randn(5, 3)
    trees = [params_of(module, seed) for seed in (1, 2)]
    pulls = [fz.vjp(lambda p, x: fz.functional_call(module, p, x), p, x)[1] for p in trees]
    for params, pull in reversed(list(zip(trees, pulls, strict=True))):
        want = by_torch(lambda p, x: torch.func.functional_call(Plain(), p, (x,)), params, x, cotangent)
        grads, x_bar = pull(cotangent, last=True)
        assert all(torch.equal(a, b) for a, b in zip([*grads.values(), x_bar], want, strict=True))


def test_a_pull_that_leaves_the_gradient_it_was_made_in():
    module, x, cotangent = Checkpointed(), torch.randn(5, 4), torch.randn(5, 3)
    params, pulls = params_of(module, 1), []

    def loss(p: Any) -> torch.Tensor:
        y, pull = fz.vjp(lambda p, x: fz.functional_call(module, p, x), params, x)
        pulls.append(pull)
        return p * y.sum()

    fz.grad_fn(loss)(torch.tensor(1.0))
    want = by_torch(lambda p, x: torch.func.functional_call(Plain(), p, (x,)), params, x, cotangent)
    grads, x_bar = pulls[0](cotangent)
    assert all(torch.equal(a, b) for a, b in zip([*grads.values(), x_bar], want, strict=True))


def test_two_trees_within_remat_are_refused_as_without():
    module, x, params = Checkpointed(), torch.randn(5, 4), params_of(Checkpointed(), 1)

    def call(p: Any) -> torch.Tensor:
        return fz.functional_call(module, p, x).sum()

    def loss(p: Any) -> torch.Tensor:
        slope = fz.remat(lambda p: fz.vjp(lambda p: p["b.bias"].square().sum(), p)[1](1.0)[0]["b.bias"].sum())
        return call(p) + call(fz.tree.map(lambda w: 2 * w, p)) + slope(p)

    with pytest.raises(RuntimeError, match="two trees of params in one graph"):
        fz.grad_fn(loss)(params)


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        fz.vjp(torch.matmul, W, X)
    with torch.no_grad():
        assert fz.vjp(torch.matmul, W, X)[1](torch.ones(2))[0].tolist() == [[1.0, -1.0], [1.0, -1.0]]


def test_trees_integers_and_what_is_not_reached():
    params = {"used": W, "idle": torch.ones(3), "count": torch.tensor(2)}
    inputs = {"x": X, "at": torch.tensor([0, 1]), "name": "a", "idle": torch.ones(2)}

    def fn(p: Any, i: Any) -> Any:
        return {"y": p["used"] @ i["x"], "at": i["at"], "both": (p["used"].sum(), i["name"])}

    out, pull = fz.vjp(fn, params, inputs)
    assert out["at"].tolist() == [0, 1] and out["both"][1] == "a"
    grads, inputs_bar = pull({"y": torch.tensor([1.0, -2.0]), "at": None, "both": (1.0, None)})
    assert grads["used"].tolist() == [[2.0, 0.0], [-1.0, 3.0]] and grads["idle"] is None and grads["count"] is None
    assert inputs_bar["x"].tolist() == [-5.0, -6.0] and inputs_bar["idle"] is None and inputs_bar["name"] is None
    assert pull({"y": None, "at": None, "both": (None, None)})[0]["used"] is None


def test_what_does_not_fit_is_refused_by_path():
    _, pull = fz.vjp(lambda w, x: {"y": w @ x, "n": (torch.tensor(1), w.bfloat16()), "none": None}, W, X)
    good = {"y": torch.ones(2), "n": (None, None)}
    for change, match in (
        ({"y": torch.ones(3)}, r"cotangent/y: expected float32\[2\], got float32\[3\]"),
        ({"y": torch.ones(2, dtype=torch.float64)}, "cotangent/y: expected float32"),
        ({"n": (torch.tensor(1), None)}, "cotangent/n/0: .* has no gradient; give None"),
        ({"n": (None, torch.ones(2, 2))}, "cotangent/n/1: expected bfloat16"),
        ({"n": (None,)}, r"missing \['n/1'\]"),
        ({"z": None}, r"unexpected \['z'\]"),
    ):
        with pytest.raises(ValueError, match=match):
            pull(good | change)
    with pytest.raises(ValueError, match="of no use without specs"):
        fz.vjp(lambda w: w, W, batch=())
    assert torch.equal(pull(good | {"none": None})[0], pull(good)[0])
    assert pull(good)[0].tolist() == [[1.0, -1.0], [1.0, -1.0]]


def test_the_last_pull_is_the_last():
    _, pull = fz.vjp(torch.matmul, W, X)
    pull(torch.ones(2), last=True)
    with pytest.raises(RuntimeError, match="last=True"):
        pull(torch.ones(2))


def test_a_replay_draws_the_same():
    x = torch.ones(1000)
    y, pull = fz.vjp(lambda w, x: nn.functional.dropout(w * x), torch.tensor(2.0), x, replay=True)
    before = torch.get_rng_state()
    for _ in range(2):
        w_bar, _ = pull(torch.ones(1000))
        assert w_bar == y.sum() / 2
    assert torch.equal(torch.get_rng_state(), before)


def test_second_order_and_further():
    """Of w^3 x: by vjp within vjp, and by grad_fn around it."""
    w, x = torch.tensor(1.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)

    def slope(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fz.vjp(lambda w, x: w**3 * x, w, x)[1](1.0)[0]  # 3 w^2 x

    _, pull = fz.vjp(slope, w, x)
    assert [g.item() for g in pull(1.0)] == [6 * 1.5 * 2, 3 * 1.5**2]
    grads, _ = fz.grad_fn(lambda w: fz.vjp(slope, w, x)[1](1.0)[0] ** 2)(w)  # (6 w x)^2
    assert grads.item() == 72 * 1.5 * 4
    cotangent = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    w_bar, _ = fz.vjp(lambda w, x: w * x, w, x)[1](cotangent)
    assert torch.autograd.grad(w_bar, cotangent)[0] == x
    with pytest.raises(ValueError, match="replay"):
        fz.grad_fn(lambda w: fz.vjp(lambda w: w**2, w, replay=True)[0])(w)


def test_an_input_that_depends_on_the_params():
    """Partial derivatives: what goes through the input is the input's."""
    grads, loss = fz.grad_fn(lambda w: fz.vjp(lambda a, b: a**2 * b, w, 3 * w)[1](1.0)[0])(torch.tensor(2.0))
    assert loss.total == 2 * 2 * 6 and grads == 12 * 2  # d(2 w * 3 w)/dw


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, when jvp is first used
def test_per_example_gradients_and_jvp():
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    params, x, c = params_of(module, 3), torch.randn(6, 4), torch.randn(6, 3)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return fz.functional_call(module, p, x)

    grads, x_bar = torch.func.vmap(lambda x, c: fz.vjp(fn, params, x)[1](c))(x, c)
    for i in range(6):
        alone, x_i = fz.vjp(fn, params, x[i])[1](c[i])
        assert all(torch.allclose(grads[n][i], alone[n], atol=1e-6) for n in params)
        assert torch.allclose(x_bar[i], x_i, atol=1e-6)
    tangents = params_of(module, 4)
    _, moved = torch.func.jvp(lambda p: fn(p, x), (params,), (tangents,))
    grads, _ = fz.vjp(fn, params, x)[1](c)
    inner = sum((grads[n] * tangents[n]).sum() for n in params)
    assert torch.allclose((moved * c).sum(), inner, rtol=1e-4)
