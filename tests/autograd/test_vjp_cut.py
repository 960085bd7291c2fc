"""vjp of params that are cut, kept elsewhere or in low precision, against one process with the whole batch."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import funzero as fz
from tests.cases.common import border
from tests.cases.training import mesh_of
from tests.ranks import pool

DP = (("dp", -1),)
KINDS = ("device", "host", "disk")


class Net(nn.Module):
    """Layers of several sizes, one of them used twice, one in no use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.a(x))
        return {"h": h, "y": self.b(torch.tanh(self.b(h)))}


def data(rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """Params, inputs, and a cotangent of the outputs; all float64."""
    made = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64)  # noqa: E731
    params = {n: draw(*p.shape) for n, p in Net().double().named_parameters()}
    return params, draw(rows, 6), {"h": draw(rows, 7), "y": draw(rows, 7)}


def reference(rows: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Gradients of the whole batch in one process, by torch."""
    params, x, c = data(rows)
    leaves, net = {n: p.requires_grad_() for n, p in params.items()}, Net().double()
    x.requires_grad_()
    out = torch.func.functional_call(net, leaves, (x,))
    found = torch.autograd.grad(list(out.values()), [*leaves.values(), x], [c["h"], c["y"]], allow_unused=True)
    return dict(zip(leaves, found, strict=False)), found[-1]


def cells(world: int) -> list[tuple[int, str, int | None, bool]]:
    """Stage, memory of the params, gather budget, replay."""
    if world == 1:
        return [(0, kind, None, replay) for kind in KINDS for replay in (False, True)]
    here = [(stage, "device", None, replay) for stage in range(4) for replay in (False, True)]
    away = [(stage, kind, budget, False) for stage in (0, 3) for kind in KINDS[1:] for budget in (None, 600)]
    return [*here, *away, (3, "device", 600, False), (3, "disk", 600, True)]


def pulls(rank: int, world: int, small: int) -> list[dict[str, Any]]:
    """In each cell two forwards in flight on parts of this rank's rows, pulled in the other order."""
    rows, out, mesh, net = 6 * world, [], mesh_of(DP), Net().double()
    params, x, c = data(rows)
    tx = fz.adam(0.1)
    with border(small, small, small):
        for stage, kind, budget, replay in cells(world):
            specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
            specs = fz.with_memory(specs, {"params/**": kind})
            state = fz.init_state(params, tx, specs=specs)
            flying = []
            for i in range(2):
                mine = slice(6 * rank + 3 * i, 6 * rank + 3 * i + 3)
                options = {"specs": specs if i else specs.params, "gather_budget": budget, "replay": replay}
                _, pull = fz.vjp(lambda p, x: fz.functional_call(net, p, x), state.params, x[mine], **options)
                flying.append((pull, mine))
            total, x_bars = None, []
            for pull, mine in reversed(flying):
                for last in (False, True):
                    grads, x_bar = pull({n: t[mine] for n, t in c.items()}, last=last)
                total = grads if total is None else fz.tree.map(torch.add, total, grads)
                x_bars.append(x_bar)
            shapes = {n: (tuple(g.shape), tuple(state.params[n].shape)) for n, g in total.items() if g is not None}
            names = {x.path.removeprefix("params/"): x for x in specs.params.layouts}
            whole = {n: fz.gather(g, fz.Specs(mesh, *_one(names[n]))) for n, g in total.items() if g is not None}
            out.append({"grads": whole, "x": torch.cat(x_bars[::-1]), "shapes": shapes, "idle": total["idle.weight"]})
    return out


def _one(layout: Any) -> tuple[Any, tuple[Any, ...]]:
    moved = layout.with_spec(memory="device", folder=None)
    return fz.tree.structure(torch.empty(0)), (moved,)


@pytest.mark.parametrize(
    ("world", "small"), [(1, 0), (2, 0), (2, 1 << 16), pytest.param(3, 200, marks=pytest.mark.slow)]
)
def test_pulls_equal_one_process(world, small):
    want, x_bar = reference(6 * world)
    for rank, found in enumerate(pool(world).run(pulls, small)):
        for cell, got in zip(cells(world), found, strict=True):
            where = f"{cell} rank {rank} of {world}"
            assert got["idle"] is None and set(got["grads"]) == {n for n, g in want.items() if g is not None}, where
            for name, g in got["grads"].items():
                assert torch.allclose(g, want[name], rtol=1e-12, atol=1e-12), f"{where} {name}"
                assert got["shapes"][name][0] == got["shapes"][name][1], f"{where} {name}: {got['shapes'][name]}"
            assert torch.allclose(got["x"], x_bar[6 * rank : 6 * rank + 6], rtol=1e-12, atol=1e-12), where


def in_low_precision(rank: int, world: int) -> list[dict[str, Any]]:
    """bf16 compute over float32 params: gradients in float32, cotangents of inputs in the inputs' dtype."""
    params, x, c = (fz.tree.map(lambda t: t.float(), tree) for tree in data(4 * world))
    mesh, net, out, tx = mesh_of(DP), Net(), [], fz.sgd(0.1)
    for stage, small in itertools.product((0, 2, 3), (0, 1 << 16)):
        policy = fz.precision.bf16_mixed
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, precision=policy)
        state, mine = fz.init_state(params, tx, specs=specs, precision=policy), slice(4 * rank, 4 * rank + 4)
        with border(small, small, small):
            y, pull = fz.vjp(
                lambda p, x: fz.functional_call(net, p, x), state.params, x[mine], specs=specs, precision=policy
            )
            grads, x_bar = pull({n: t[mine].to(y[n].dtype) for n, t in c.items()})
        dtypes = {y["y"].dtype, x_bar.dtype, *(g.dtype for g in grads.values() if g is not None)}
        after = fz.make_step(None, tx, precision=policy).update(fz.accumulate_into(state, grads, precision=policy))[0]
        names = {x.path.removeprefix("params/"): x for x in specs.params.layouts}
        whole = {n: fz.gather(g, fz.Specs(mesh, *_one(names[n]))) for n, g in grads.items() if g is not None}
        out.append({"grads": whole, "dtypes": dtypes, "after": fz.gather(after.params, specs.params)})
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_pulls_in_low_precision(world):
    (want, _), params = reference(4 * world), data(1)[0]
    for found in pool(world).run(in_low_precision):
        for got in found:
            assert got["dtypes"] == {torch.bfloat16, torch.float32}
            for n, g in got["grads"].items():
                assert (g - want[n]).abs().max() < 0.02 * want[n].abs().max(), n
                assert torch.allclose(got["after"][n], params[n].float() - 0.1 * g, atol=1e-6), n


def on_a_grid(rank: int, world: int) -> list[dict[str, Any]]:
    """Other axes than one: copies outside (HSDP), and a leaf that is cut as experts are."""
    params, x, c = data(4 * world)
    out, net = [], Net().double()
    for axes, more in (((("replicate", 2), ("dp", 1)), {"replicate": "replicate"}), ((("dp", 1), ("ep", 2)), {})):
        mesh = mesh_of(axes)
        for stage, small in itertools.product((0, 1, 3), (0, 1 << 16)):
            specs = fz.zero_specs(fz.eval_shape(params), fz.sgd(0.1), mesh, stage=stage, **more)
            state, mine = fz.init_state(params, fz.sgd(0.1), specs=specs), slice(4 * rank, 4 * rank + 4)
            with border(small, small, small):
                _, pull = fz.vjp(lambda p, x: fz.functional_call(net, p, x), state.params, x[mine], specs=specs)
                grads, _ = pull({n: t[mine] for n, t in c.items()})
            names = {x.path.removeprefix("params/"): x for x in specs.params.layouts}
            out.append({n: fz.gather(g, fz.Specs(mesh, *_one(names[n]))) for n, g in grads.items() if g is not None})
    return out


def test_pulls_on_grids():
    want, _ = reference(8)
    for found in pool(2).run(on_a_grid):
        for got in found:
            assert all(torch.allclose(g, want[n], rtol=1e-12, atol=1e-12) for n, g in got.items()) and len(got) == 4


def alike(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
    """batch=(): all ranks have the same inputs, and nothing is summed."""
    params, x, c = data(4)
    mesh, net, out = mesh_of(DP), Net().double(), []
    for stage, small in itertools.product((0, 3), (0, 1 << 16)):
        specs = fz.zero_specs(fz.eval_shape(params), fz.sgd(0.1), mesh, stage=stage)
        state = fz.init_state(params, fz.sgd(0.1), specs=specs)
        with border(small, small, small):
            _, pull = fz.vjp(lambda p, x: fz.functional_call(net, p, x), state.params, x, specs=specs.params, batch=())
            grads, x_bar = pull(c)
        used = {n: g for n, g in grads.items() if g is not None}
        names = {x.path.removeprefix("params/"): x for x in specs.params.layouts}
        out.append({n: fz.gather(g, fz.Specs(mesh, *_one(names[n]))) for n, g in used.items()} | {"x": x_bar})
    return out


def test_inputs_that_are_alike_are_not_summed():
    want, x_bar = reference(4)
    for found in pool(2).run(alike):
        for got in found:
            assert torch.allclose(got.pop("x"), x_bar, rtol=1e-12)
            assert all(torch.allclose(g, want[n], rtol=1e-12, atol=1e-12) for n, g in got.items())


def other_leaves(rank: int, world: int) -> list[Any]:
    """Each rank uses a leaf of its own, of which the other has no gradient."""
    params, mesh, out = {n: torch.full((10,), 2.0) for n in "abc"}, mesh_of(DP), []
    for stage, small in itertools.product((0, 2, 3), (0, 1 << 16)):
        specs = fz.zero_specs(fz.eval_shape(params), fz.sgd(0.1), mesh, stage=stage)
        state = fz.init_state(params, fz.sgd(0.1), specs=specs)
        with border(small, small, small):
            y, pull = fz.vjp(lambda p: p["ab"[rank]] * (rank + 1), state.params, specs=specs)
            (grads,) = pull(torch.ones_like(y))
        out.append({n: None if g is None else g.tolist() for n, g in grads.items()})
    return out


def test_ranks_that_use_other_params():
    for rank, found in enumerate(pool(2).run(other_leaves)):
        for i, got in enumerate(found):
            count = 5 if i >= 4 else 10
            assert got == {"a": [1.0] * count, "b": [2.0] * count, "c": None}, f"rank {rank}, {i}"


def mistakes(rank: int, world: int) -> list[str]:
    """What one rank does wrong is raised on both, and the mesh lives on."""
    params, mesh, said = {"w": torch.ones(4, 3)}, mesh_of(DP), []
    specs = fz.zero_specs(fz.eval_shape(params), fz.sgd(0.1), mesh, stage=3)
    state = fz.init_state(params, fz.sgd(0.1), specs=specs)
    donated = fz.init_state(params, fz.sgd(0.1), specs=specs)
    fz.make_step(lambda p, b: p["w"].sum() * b, fz.sgd(0.1))(donated, torch.ones(()))
    _, pull = fz.vjp(lambda p, x: p["w"] @ x, state.params, torch.ones(3), specs=specs)
    for attempt in (
        lambda: pull(torch.ones(4 + rank)),
        lambda: pull({"a": torch.ones(4)} if rank else torch.ones(4)),
        lambda: fz.vjp(lambda p: p["w"], {"v": state.params["w"]}, specs=specs),
        lambda: fz.vjp(lambda p: p["w"], {"w": torch.ones(4, 3)}, specs=specs),
        lambda: fz.vjp(lambda p: p["w"], state.params, specs=specs) if rank else pull(torch.ones(4)),
        lambda: fz.vjp(lambda p: p["w"], {"w": 1.0} if rank else state.params, specs=specs),
        lambda: fz.vjp(lambda p: p["w"], state.params, specs=specs, gather_budget=0 if rank else None),
        lambda: fz.vjp(lambda p: p["w"], donated.params if rank else state.params, specs=specs),
        lambda: fz.vjp(lambda p, x: p["w"] * x, state.params, torch.ones((), requires_grad=bool(rank)), specs=specs),
    ):
        try:
            attempt()
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
    assert torch.equal(
        pull(torch.ones(4) if rank else None)[0]["w"], fz.shard({"w": torch.ones(4, 3)}, specs.params)["w"]
    )
    assert torch.equal(pull(torch.ones(4))[1], torch.full((3,), 4.0))
    return said


def test_mistakes_are_raised_on_all_ranks():
    for said in pool(2).run(mistakes):
        assert "rank 1" in said[0] and "expected float32[4], got float32[5]" in said[0]
        assert "rank 1" in said[1] and "missing [''], unexpected ['a']" in said[1]
        assert "differ at ['v', 'w']" in said[2] and "params/w: the layout says" in said[3]
        assert "different functions" in said[4] and "rank 1" in said[5]
        assert "gather_budget is positive" in said[6] and "donated" in said[7] and "requires grad; detach it" in said[8]


def second_order(rank: int, world: int) -> list[tuple[list[float], float]]:
    """A gradient penalty by vjp within vjp, and within a step: w x^2, (df/dx)^2 summed over two rows."""
    params, mesh, out = {"w": torch.full((4,), 1.5, dtype=torch.float64)}, mesh_of(DP), []
    x, tx = torch.full((2, 4), 2.0, dtype=torch.float64), fz.sgd(1.0)

    def penalty(p: Any, x: torch.Tensor) -> torch.Tensor:
        _, pull = fz.vjp(lambda p, x: p["w"] * x**2, p, x)
        return pull(torch.ones_like(x))[1].square().sum()

    for stage, small, budget in itertools.product(range(4), (0, 1 << 16), (None, 8)):
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state = fz.init_state(params, tx, specs=specs)
        with border(small, small, small):
            (grads,) = fz.vjp(lambda p: penalty(p, x), state.params, specs=specs, gather_budget=budget)[1](1.0)
            step = fz.make_step(penalty, tx, reduction="sum", gather_budget=budget)
            after, _ = step(state, x)
        out.append((grads["w"].tolist(), fz.gather(after.params, specs.params)["w"].tolist()))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_second_order_through_cut_leaves(world):
    for found in pool(world).run(second_order):
        for grads, after in found:
            assert set(grads) == {96.0 * world} and set(after) == {1.5 - 96.0 * world}


def updated_between(rank: int, world: int) -> list[float]:
    """An update of the state between a forward and its pull: the pull is of the params that the forward saw."""
    mesh, out, tx = mesh_of(DP), [], fz.sgd(1.0)
    for stage, small, replay in itertools.product(range(4), (0, 1 << 16), (False, True)):
        specs = fz.zero_specs({"w": torch.ones(10)}, tx, mesh, stage=stage)
        state = fz.init_state({"w": torch.full((10,), 3.0)}, tx, specs=specs)
        with border(small, small, small):
            _, pull = fz.vjp(lambda p: p["w"] ** 2, state.params, specs=specs, replay=replay)
            step = fz.make_step(lambda p, b: (p["w"] * b).sum(), tx)
            state, _ = step(state, torch.ones(1))
            (grads,) = pull(torch.ones(10))
        out += [x for g in (grads, state.params) for x in set(g["w"].tolist())]
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_between_forward_and_pull(world):
    for found in pool(world).run(updated_between):
        assert found == [6.0 * world, 2.0] * 16


def returned_on_one_rank(rank: int, world: int) -> list[list[float]]:
    """A cut param that one rank returns as it is, and the other computes with, under a budget that keeps nothing."""
    params, mesh, out = {"a": torch.full((8,), 2.0), "b": torch.full((8,), 3.0)}, mesh_of(DP), []
    for replay in (False, True):
        specs = fz.zero_specs(fz.eval_shape(params), fz.sgd(0.1), mesh, stage=3)
        state = fz.init_state(params, fz.sgd(0.1), specs=specs)
        with border(0, 0, 0):
            y, pull = fz.vjp(
                lambda p: p["a"] if rank == 0 else p["b"] * p["a"],
                state.params,
                specs=specs,
                gather_budget=40,
                replay=replay,
            )
            (grads,) = pull(torch.ones(8))
        out.append([float(y[0]), float(grads["a"][0]), float(grads["b"][0])])
    return out


def test_a_param_that_one_rank_returns():
    first, second = pool(2).run(returned_on_one_rank)
    assert first == [[2.0, 4.0, 2.0]] * 2 and second == [[6.0, 4.0, 2.0]] * 2


def read_again(rank: int, world: int) -> list[str]:
    """Params on disk that were updated, and would have to be read again: said on all ranks, and the mesh lives on."""
    mesh, said, tx = mesh_of(DP), [], fz.sgd(1.0)
    for options in ({"replay": True}, {"gather_budget": 40}, {}):
        specs = fz.zero_specs({"w": torch.ones(10), "v": torch.ones(10)}, tx, mesh, stage=3)
        specs = fz.with_memory(specs, {"params/**": "disk"})
        state = fz.init_state({"w": torch.ones(10), "v": torch.ones(10)}, tx, specs=specs)
        with border(0, 0, 0):
            _, pull = fz.vjp(lambda p: p["w"] * p["v"], state.params, specs=specs, **options)
            state, _ = fz.make_step(lambda p, b: (p["w"] * b).sum(), tx)(state, torch.ones(1))
            try:
                said.append(str(pull(torch.ones(10))[0]["w"].sum() > 0))
            except fz.DonatedError as error:
                said.append(str(error))
    mesh.gather_host(torch.ones(1))
    return said


def test_params_on_disk_that_were_updated_between():
    for said in pool(2).run(read_again):
        assert "has been updated" in said[0] and "has been updated" in said[1] and said[2] == "tensor(True)"


def test_a_write_to_a_param_is_found():
    specs = fz.zero_specs({"w": torch.ones(4)}, fz.sgd(0.1), fz.make_mesh(dp=1), stage=0)
    state, write = fz.init_state({"w": torch.ones(4)}, fz.sgd(0.1), specs=specs), []

    def fn(p: Any) -> torch.Tensor:
        with torch.no_grad():
            for value in write:
                p["w"].add_(value)
        return p["w"] * 2

    write.append(1.0)
    for replay in (False, True):  # what has not run before writes to a copy
        with pytest.raises(RuntimeError, match="in place"):
            fz.vjp(fn, state.params, specs=specs, replay=replay)
        assert state.params["w"].tolist() == [1.0] * 4
    write.clear()
    fz.vjp(fn, state.params, specs=specs)
    write.append(1.0)
    with pytest.raises(RuntimeError, match="in place"):
        fz.vjp(fn, state.params, specs=specs, replay=True)
    with pytest.raises(fz.SpentStateError):
        state.params["w"].sum()


class Token:
    """Something that a graph holds."""


class Holding(torch.autograd.Function):
    """The identity, with a graph that holds a token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: Token) -> torch.Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize("last", [False, True])
def test_a_dropped_pull_lets_go_of_its_graph(last):
    specs = fz.zero_specs({"w": torch.ones(4)}, fz.sgd(0.1), fz.make_mesh(dp=1), stage=0)
    state = fz.init_state({"w": torch.ones(4)}, fz.sgd(0.1), specs=fz.with_memory(specs, {"params/**": "host"}))
    with border(0):
        tokens = [Token()]
        held = weakref.ref(tokens[0])
        gc.collect()
        gc.disable()
        try:
            _, pull = fz.vjp(lambda p: Holding.apply(p["w"], tokens.pop()), state.params, specs=state.specs)
            pull(torch.ones(4))
            assert held() is not None
            if last:
                pull(torch.ones(4), last=True)
            else:
                del pull
            assert held() is None
        finally:
            gc.enable()
