"""BR41: cotangents that are no scalars, several models and losses; BR05 and deepspeed.md 3.6 with gradients by hand."""

import itertools
from typing import Any

import pytest
import torch

import funzero as fz
from tests.cases.common import STAGES, border, params_of, same, whole
from tests.cases.training import mesh_of
from tests.ranks import pool

DP = (("dp", -1),)
MEMORIES = ("device", "host", "disk")
F64 = torch.float64


def state_of(
    params: dict[str, torch.Tensor], tx: Any, stage: int, memory: str = "device", **init: Any
) -> fz.TrainState:
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh_of(DP), stage=stage)
    if memory != "device":
        specs = fz.with_memory(specs, {"**": memory})
    return fz.init_state(params, tx, specs=specs, **init)


def total(grads: Any, state: fz.TrainState) -> dict[str, torch.Tensor]:
    """Whole gradients, of a pull's cut ones."""
    layouts = {x.path.removeprefix("params/"): x.with_spec(memory="device") for x in state.specs.params.layouts}
    leaf = fz.tree.structure(torch.empty(0))
    return {n: fz.gather(g, fz.Specs(state.specs.mesh, leaf, (layouts[n],))) for n, g in grads.items()}


def several(rank: int, world: int, small: int) -> list[dict[str, Any]]:
    """(a) a matrix and a vector cotangent; (b) two models, the cotangent handed over; (c) two cotangents in turn. Rows of
    the input are dealt out over the ranks, or alike on all with batch=()."""
    out = []
    with border(small, small, small):
        for stage, remat, scale, alike in itertools.product(STAGES, (False, True), (1.0, 1024.0), (False, True)):
            wrap = fz.remat if remat else lambda fn: fn
            more: dict[str, Any] = {"batch": ()} if alike else {}
            share = slice(None) if alike else slice(rank, None, world)
            w = state_of({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)}, fz.sgd(1.0), stage)
            x = torch.tensor([[1.0, -1.0]] * 2, dtype=F64)[share]
            y, pull = fz.vjp(wrap(lambda p, x: x @ p["w"].T), w.params, x, specs=w.specs, **more)
            c = torch.tensor([1.0, -2.0], dtype=F64).expand(y.shape)
            dw, x_bar = pull(c)
            parts = [pull(torch.stack([a, b], 1))[0] for a, b in ((c[:, 0], 0 * c[:, 1]), (0 * c[:, 0], c[:, 1]))]
            a = state_of({"a": torch.tensor(3.0, dtype=F64)}, fz.sgd(1.0), stage)
            b = state_of({"b": torch.tensor(0.5, dtype=F64)}, fz.sgd(1.0), stage)
            x = torch.tensor([1.0, 2.0], dtype=F64)[share]
            h, pull_a = fz.vjp(wrap(lambda p, x: p["a"] * x), a.params, x, specs=a.specs, **more)
            _, pull_b = fz.vjp(wrap(lambda p, h: (p["b"] * h**2).sum()), b.params, h, specs=b.specs, **more)
            db, h_bar = pull_b(torch.tensor(scale, dtype=F64))
            da, _ = pull_a(h_bar)
            out.append(
                {"dw": total(dw, w)["w"], "x": x_bar, "parts": [total(p, w)["w"] for p in parts]}
                | {"h": h_bar / scale, "da": total(da, a)["a"] / scale, "db": total(db, b)["b"] / scale, "alike": alike}
            )
    return out


@pytest.mark.parametrize(("world", "small"), [(1, 0), (2, 0), (2, 1 << 16)])
def test_br41_cotangents_models_and_pulls(world, small):
    dw = torch.tensor([[1.0, -1.0], [-2.0, 2.0]], dtype=F64)
    for rank, found in enumerate(pool(world).run(several, small)):
        assert len(found) == 32
        for got in found:
            share = slice(None) if got["alike"] else slice(rank, None, world)
            assert torch.equal(got["dw"], 2 * dw) and torch.equal(sum(got["parts"]), got["dw"]), got
            first = torch.tensor([[1.0, -1.0], [0.0, 0.0]], dtype=F64)
            assert torch.equal(got["parts"][0], 2 * first), got
            assert torch.equal(got["x"], torch.tensor([[-5.0, -6.0]] * 2, dtype=F64)[share]), got
            assert torch.equal(got["h"], torch.tensor([3.0, 6.0], dtype=F64)[share]), got
            assert got["da"] == 15 and got["db"] == 45, got


def gan(rank: int, world: int) -> list[tuple[bool, bool]]:
    """(d) G is updated by D's judgement; D stays as it is, bit for bit."""
    out, tx = [], fz.adam(0.1)
    for stage in STAGES:
        g, d = (state_of({"w": torch.linspace(1, 2, 5, dtype=F64)}, tx, stage) for _ in range(2))
        before, step = (whole(g), whole(d)), fz.make_step(None, tx)
        fake, pull_g = fz.vjp(lambda p, z: p["w"] * z, g.params, torch.ones(3, 5, dtype=F64), specs=g.specs)
        judged, pull_d = fz.vjp(lambda p, x: torch.tanh(x @ p["w"]), d.params, fake, specs=d.specs)
        _, fake_bar = pull_d(torch.ones_like(judged))
        (grads, _) = pull_g(fake_bar)
        g, metrics = step.update(fz.accumulate_into(g, grads, 3 * world))
        assert not metrics.skipped and float(metrics.weight) == 3 * world
        out.append((same(whole(g)["params/w"], before[0]["params/w"]), _equal(whole(d), before[1])))
    return out


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same(a[n], b[n]) for n in a)


@pytest.mark.parametrize("world", [1, 2])
def test_br41_one_model_is_updated_by_another_s_judgement(world):
    for found in pool(world).run(gan):
        assert found == [(False, True)] * 4


def by_hand(rank: int, world: int, folder: Any, small: int) -> dict[Any, Any]:
    """BR05 with pulls in place of a loss: gradients 1, 2, 3, 4 dealt out, forwards of new requests between them."""
    found: dict[Any, Any] = {}
    with border(small, small, small):
        for stage, memory, n in itertools.product(STAGES, MEMORIES, (5,) if small else (1, 300)):
            state = state_of({"w": torch.zeros(n), "idle": torch.ones(3)}, fz.sgd(1.0), stage, memory)
            step = fz.make_step(None, fz.sgd(1.0), reduction="sum")
            for _ in range(2):
                flying = None
                for i in range(4 // world):
                    g = float(1 + i * world + rank)
                    _, pull = fz.vjp(lambda p: p["w"] * 1.0, state.params, specs=state.specs)
                    if flying is not None:
                        state = fz.accumulate_into(state, flying[0](flying[1])[0])
                    flying = pull, torch.full((n,), g)
                state = fz.accumulate_into(state, flying[0](flying[1])[0])
                old = state
                state, _ = step.update(state)
                assert isinstance(old.accum, fz.Accumulator)
                found.setdefault((stage, memory, n), []).append((params_of(state)["w"], params_of(state)["idle"]))
    return found


@pytest.mark.parametrize(("world", "small"), [(1, 0), (2, 0), (2, 1 << 16)])
def test_br05_gradients_by_hand_stay_until_the_update(world, small, tmp_path):
    for found in pool(world).run(by_hand, tmp_path, small):
        assert len(found) == (12 if small else 24)
        for cell, ((first, _), (second, idle)) in found.items():
            assert (first == -10).all() and (second == -20).all() and (idle == 1).all(), f"{cell}: {first}, {second}"


def kept_states(rank: int, world: int, folder: Any) -> list[Any]:
    """States before and after a window's gradients: each can be updated alone, wherever leaves live."""
    found = []
    for stage, memory in itertools.product(STAGES, MEMORIES):
        params, tx = {"a": torch.zeros(6), "b": torch.zeros(6)}, fz.sgd(1.0)
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh_of(DP), stage=stage)
        specs = fz.with_memory(specs, {"**": memory}, folder=folder) if memory != "device" else specs
        s0 = fz.init_state(params, tx, specs=specs)
        one = fz.shard({"a": torch.ones(6), "b": torch.ones(6)}, fz.with_memory(specs, {"**": "device"}).params)
        s1 = fz.accumulate_into(s0, one)
        s2 = fz.accumulate_into(s1, {"a": one["a"], "b": None})
        step = fz.make_step(None, tx, reduction="sum")
        after = params_of(step.update(s2)[0])
        try:
            before = params_of(step.update(s1)[0])
            start = float(s0.params["a"].sum())
        except fz.DonatedError:  # what lives on disk was written over
            assert memory == "disk"
            before, start = None, 0.0
            for stale in (s0, s1):
                with pytest.raises(fz.DonatedError):
                    fz.accumulate_into(stale, one)
                with pytest.raises(fz.DonatedError):  # a copy of what is stale is stale
                    stale.params["a"].detach().sum()
        found.append((after["a"][0].item(), after["b"][0].item(), before and before["a"][0].item(), start))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_the_state_before_stays_usable(world, tmp_path):
    for found in pool(world).run(kept_states, tmp_path):
        for cell, got in zip(itertools.product(STAGES, MEMORIES), found, strict=True):
            assert got == (-2.0, -1.0, None if cell[1] == "disk" else -1.0, 0.0), f"{cell}: {got}"


def shared_buffers(rank: int, world: int) -> list[float]:
    """Running statistics are averaged by what the ranks saw, whatever is added by hand."""
    out, tx = [], fz.sgd(1.0)

    def loss(p: Any, b: Any, buffers: Any) -> fz.Loss:
        return fz.Loss((p["w"] * b).sum(), weight=1, buffers={"m": torch.full((1,), 10.0 * (1 + rank))})

    for weight in (0, 1, 98):
        specs = fz.zero_specs({"w": torch.ones(2)}, tx, mesh_of(DP), stage=0, buffers={"m": torch.zeros(1)})
        state = fz.init_state({"w": torch.ones(2)}, tx, specs=specs, buffers={"m": torch.zeros(1)})
        step = fz.make_step(loss, tx)
        state = step.accumulate(state, torch.ones(1))
        if weight:
            state = fz.accumulate_into(state, {"w": torch.ones(2)}, weight)
        state, metrics = step.update(state)
        assert float(metrics.weight) == 2 + weight
        out.append(float(state.buffers["m"]))
    return out


def test_weights_by_hand_leave_the_buffers_alone():
    assert pool(2).run(shared_buffers) == [[15.0] * 3] * 2


def scaled(rank: int, world: int) -> list[list[float]]:
    """With a loss scale sums are scaled: gradients by hand are not, and join those of a loss."""
    out, tx = [], fz.sgd(1.0)
    for stage, scale, small in itertools.product(STAGES, (0, 10), (0, 1 << 16)):
        policy, params = fz.precision.fp16_mixed, {"w": torch.zeros(10)}
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh_of(DP), stage=stage, precision=policy)
        dynamic = fz.loss_scale.dynamic(scale)
        state = fz.init_state(params, tx, specs=specs, precision=policy, loss_scale=dynamic)
        step = fz.make_step(lambda p, b: (p["w"] * b).float().sum(), tx, precision=policy, reduction="sum")
        with border(small, small, small):
            _, pull = fz.vjp(lambda p: p["w"] * 2, state.params, specs=specs, precision=policy)
            (grads,) = pull(torch.ones(10, dtype=torch.float16))
            state = fz.accumulate_into(state, grads, precision=policy)
            state = step.accumulate(state, torch.full((1,), 4.0))
            state = fz.accumulate_into(state, grads, precision=policy)
            state, metrics = step.update(state)
        out.append([float(metrics.loss_scale), *set(params_of(state)["w"].tolist())])
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_by_hand_and_a_loss_scale(world):
    for found in pool(world).run(scaled):
        assert found == [[2.0**s, -8.0 * world] for _ in STAGES for s in (0, 10) for _ in (0, 1)]
