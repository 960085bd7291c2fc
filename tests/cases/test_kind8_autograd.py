"""Autograd structure: second order through sharded leaves."""

import itertools
from typing import Any

import pytest
import torch

import funzero as fz
from tests.cases.training import assert_close, flat, mesh_of
from tests.ranks import pool

DP = (("dp", -1),)
STAGES = (0, 1, 2, 3)
SHAPES = {"alone": (), "one": (1,), "row": (4,)}


def penalty(params: Any, batch: Any) -> fz.Loss:
    """(df/dx)^2 of f = w x^2, at the rows x of the batch; w is a leaf, or row 2 of one."""
    leaf = params["w"]
    w = leaf[2] if leaf.shape == (4,) else leaf.reshape(())
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad((w * x**2).sum(), x, create_graph=True)
    return fz.Loss((slope**2).sum(), weight=len(x))


def cells() -> list[tuple[int, str, torch.dtype, int]]:
    return list(itertools.product(STAGES, SHAPES, (torch.float64, torch.float32), (1, 2)))


def train_penalty(rank: int, world: int) -> list[dict[str, Any]]:
    mesh, out = mesh_of(DP), []
    for stage, name, dtype, k in cells():
        params, tx = {"w": torch.full(SHAPES[name], 1.5, dtype=dtype)}, fz.sgd(1.0)
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        step = fz.make_step(penalty, tx, accumulate=k)
        state, metrics = step(fz.init_state(params, tx, specs=specs), {"x": torch.full((2,), 2.0, dtype=dtype)})
        after = fz.gather(state.params, specs.params)["w"]
        out.append({"w": after, "norm": metrics.grad_norm.item(), "loss": metrics.loss.item()})
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
def test_br42_gradient_penalty(world):
    for rank, found in enumerate(pool(world).run(train_penalty)):
        for (stage, name, dtype, k), result in zip(cells(), found, strict=True):
            where = f"stage {stage}, w {name}, {dtype}, accumulate={k}, rank {rank} of {world}: {result}"
            assert result["loss"] == 36.0, where
            assert result["norm"] == 48.0, where
            right = torch.full(SHAPES[name], 1.5, dtype=dtype)
            right[(2,) if name == "row" else ...] = 1.5 - 48.0
            assert torch.equal(result["w"], right), where


def maml(params: Any, batch: Any) -> fz.Loss:
    """One inner SGD step of rate 0.1 on a quadratic, and the loss after it on other data."""
    support, query = batch["x"].unbind(1)

    def quadratic(p: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(((w.reshape(-1, 1) * x - 1) ** 2).mean(1).sum() * (1 + i) for i, w in enumerate(p.values()))

    inner = torch.autograd.grad(quadratic(params, support), list(params.values()), create_graph=True)
    moved = {n: w - 0.1 * g for (n, w), g in zip(params.items(), inner, strict=True)}
    return fz.Loss(quadratic(moved, query) + sum((g**2).sum() for g in inner))


def maml_params() -> dict[str, torch.Tensor]:
    """The large leaf is over 64 KiB, so that it travels alone."""
    shapes = {"large": (3, 3001), "s": (), "w": (5,)}
    return {n: torch.linspace(0.2, 1.7, max(1, torch.Size(s).numel()), dtype=torch.float64).reshape(s)
            for n, s in shapes.items()}  # fmt: skip


def maml_batch(t: int, rows: int) -> torch.Tensor:
    return torch.linspace(0.3, 0.9, rows * 2, dtype=torch.float64).reshape(rows, 2) + 0.05 * t


def train_maml(rank: int, world: int) -> list[tuple[str, dict[str, torch.Tensor], list[float]]]:
    mesh, out = mesh_of(DP), []
    for stage, k in itertools.product(STAGES, (1, 2)):
        params, tx = maml_params(), fz.sgd(0.01)
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state, step, norms = fz.init_state(params, tx, specs=specs), fz.make_step(maml, tx, accumulate=k), []
        for t in range(2):
            state, metrics = step(state, {"x": fz.data.local(maml_batch(t, 2 * world * k), mesh, k)})
            norms.append(metrics.grad_norm.item())
        out.append((f"stage {stage}, accumulate={k}", flat(fz.gather(state.params, specs.params)), norms))
    return out


def maml_reference(micro_batches: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process: the mean over the same micro-batches, for an inner step depends on what it is taken on."""
    leaves, norms = {n: x.requires_grad_() for n, x in maml_params().items()}, []
    for t in range(2):
        parts = maml_batch(t, 2 * micro_batches).chunk(micro_batches)
        total = sum(maml(leaves, {"x": part}).total for part in parts) / micro_batches
        grads = torch.autograd.grad(total, list(leaves.values()))
        norms.append(torch.cat([g.view(-1) for g in grads]).norm().item())
        leaves = {n: (w - 0.01 * g).detach().requires_grad_()
                  for (n, w), g in zip(leaves.items(), grads, strict=True)}  # fmt: skip
    return {n: w.detach() for n, w in leaves.items()}, norms


@pytest.mark.parametrize("world", [1, 2, 3])
def test_br42_maml(world):
    right = {k: maml_reference(world * k) for k in (1, 2)}
    assert (right[1][0]["w"] - maml_params()["w"]).abs().max() > 1e-3, "the reference must move"
    for rank, found in enumerate(pool(world).run(train_maml)):
        for where, params, norms in found:
            where = f"{where}, rank {rank} of {world}"
            expected, expected_norms = right[int(where.split("=")[1][0])]
            for name, x in expected.items():
                assert_close(params[name], x, f"{where}, {name}")
            for a, b in zip(norms, expected_norms, strict=True):
                assert abs(a - b) <= 1e-12 * b, f"{where}: norm {a}, expected {b}"


def train_hessian(rank: int, world: int) -> list[tuple[int, torch.Tensor]]:
    """A penalty on the gradient with respect to the leaf itself, twice: third order, w = 1.5."""
    mesh, out = mesh_of(DP), []

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        w = params["w"]
        (g,) = torch.autograd.grad((w**4 * x).sum(), w, create_graph=True)  # 4 w^3 x
        (h,) = torch.autograd.grad(g.sum(), w, create_graph=True)  # 12 w^2 x
        return (h**2).sum()  # gradient 2 * 12 w^2 x * 24 w x = 576 w^3 x^2

    for stage in STAGES:
        params, tx = {"w": torch.full((4,), 1.5, dtype=torch.float64)}, fz.sgd(1.0)
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state, _ = fz.make_step(loss_fn, tx)(fz.init_state(params, tx, specs=specs), torch.tensor(2.0).double())
        out.append((stage, fz.gather(state.params, specs.params)["w"]))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_br42_third_order(world):
    for rank, found in enumerate(pool(world).run(train_hessian)):
        for stage, w in found:
            right = torch.full((4,), 1.5 - 576 * 1.5**3 * 4, dtype=torch.float64)
            assert torch.equal(w, right), f"stage {stage}, rank {rank} of {world}: {w}"
