"""Shapes, identity and meshes under sharding."""

import itertools

import pytest
import torch
from torch import nn

import funzero as fz
from tests.cases.training import OPTIMIZERS, Cell, assert_cell, assert_close, flat, mesh_of, run_cells
from tests.ranks import pool

DP = (("dp", -1),)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64).reshape(shape) / max(n, 1) + 0.5).to(dtype)


def orders(dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """Dicts are walked in the order of their keys, so the keys make the order."""
    before, zero, after = leaf(8, dtype=dtype), leaf(0, 8, dtype=dtype), leaf(24, dtype=dtype)
    return {
        "between": {"a": before, "b": zero, "c": after},
        "first": {"a": zero, "b": before, "c": after},
        "last": {"a": before, "b": after, "c": zero},
        "two": {"a": zero.clone(), "b": before, "c": zero, "d": after},
    }


@pytest.mark.parametrize("world", [2, 4])
def test_br23_zero_sized_leaves(world):
    ways = itertools.cycle([("adam", 1), ("composed_adam", 2), ("adam", 2), ("momentum", 1), ("composed_adam", 1)])
    cells = [
        Cell(f"zero {place}, {tx}, accumulate={k}", params, stage, tx, accumulate=k)
        for (place, params), stage in itertools.product(orders(torch.float64).items(), (0, 1, 2, 3))
        for tx, k in itertools.islice(ways, 2)
    ]
    for cell, *results in zip(cells, *pool(world).run(run_cells, cells), strict=True):
        assert_cell(cell, results)
        for found in results:
            for name, x in cell.params.items():
                mu = found.opt_state[("trace/trace/" if cell.tx == "momentum" else "scale_by_adam/mu/") + name]
                assert (mu.shape, mu.dtype) == (x.shape, x.dtype), f"{cell.name}: moment of {name}"
                if cell.tx != "momentum":
                    assert found.opt_state[f"scale_by_adam/count/{name}"].item() == 3, f"{cell.name}: count of {name}"


def keep_zero(rank: int, world: int, dtype: torch.dtype) -> dict[str, object]:
    """A zero-sized leaf through shard, gather, the accumulated gradient, an update and every reshard."""
    mesh, out = mesh_of(DP), {}
    for (place, params), stage in itertools.product(orders(dtype).items(), (0, 1, 2, 3)):
        tx = fz.adam(0.1)
        all_specs = [fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=s) for s in range(4)]
        specs = all_specs[stage]
        state = fz.init_state(params, tx, specs=specs)
        step = fz.make_step(lambda p, b: sum((x.float() ** 2).sum() for x in p.values()) * b["s"], tx)
        state = step.accumulate(state, {"s": torch.tensor(1.0)})
        grads = fz.reduce(state.accum, specs).grads
        seen = {"gather(shard)": fz.gather(fz.shard(params, specs.params), specs.params)}
        seen["gradient"] = fz.gather(grads, specs.grads)
        state, _ = step.update(state)
        for to, other in enumerate(all_specs):
            state = fz.reshard(state, other)
            seen[f"params at {to}"] = fz.gather(state.params, other.params)
            seen[f"mu at {to}"] = fz.gather(state.opt_state["scale_by_adam"]["mu"], mu_specs(other))
        out |= {f"{place}, stage {stage}, {what}": (params, tree) for what, tree in seen.items()}
    return out


def mu_specs(specs: fz.StateSpecs) -> fz.Specs:
    """The specs of Adam's first moments alone."""
    tree, shapes = specs.opt_state.tree["scale_by_adam"]["mu"], specs.opt_state.abstract()["scale_by_adam"]["mu"]
    return fz.Specs.bind(specs.mesh, tree, shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_br23_shape_and_dtype_stay_everywhere(world, dtype):
    for rank, found in enumerate(pool(world).run(keep_zero, dtype)):
        for where, (params, tree) in found.items():
            for name, x in params.items():
                y = tree[name]
                assert y.shape == x.shape, f"rank {rank}, {where}, {name}: {tuple(y.shape)}"
                wide = torch.float32 if "gradient" in where else dtype
                assert y.dtype == wide, f"rank {rank}, {where}, {name}: {y.dtype}"


def test_br23_nothing_but_zero_sized_leaves():
    cells = [Cell("only zero", {"a": leaf(0, 8), "b": leaf(0)}, stage, accumulate=2) for stage in (0, 1, 2, 3)]
    for cell, *results in zip(cells, *pool(2).run(run_cells, cells), strict=True):
        assert_cell(cell, results)
        assert results[0].norms == [0.0] * 3


ODD = {"s": leaf(), "one": leaf(1), "three": leaf(3), "m": leaf(5, 3), "ten": leaf(10), "cube": leaf(7, 2, 2)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_br24_uneven_tiny_and_0_dimensional_leaves(world):
    variants = [("adam", 1, None), ("composed_adam", 2, 1.0)]
    cells = [
        Cell(f"odd, {tx}, accumulate={k}, max_norm={c}", ODD, stage, tx, k, c)
        for stage in (0, 1, 2, 3)
        for tx, k, c in variants
    ]
    for cell, *results in zip(cells, *pool(world).run(run_cells, cells), strict=True):
        assert_cell(cell, results)
        for rank, found in enumerate(results):
            for name, x in cell.params.items():
                where = f"{cell.name}, stage {cell.stage}, rank {rank} of {world}, {name}"
                assert found.recorded[f"params/{name}"] == tuple(x.shape), where
                if cell.stage < 3 or world == 1:
                    assert found.local[name] == tuple(x.shape), where
        if cell.stage == 3 and world > 1:
            for name, x in cell.params.items():
                assert sum(r.local[name][0] for r in results) == x.numel(), f"{cell.name}: pieces of {name}"
            assert results[-1].local["s"] == (0,) and results[0].local["s"] == (1,)


def test_br24_both_axes_of_a_mesh():
    axes = {"dp": 2, "ep": 2}
    ways = [None, ("dp", "ep"), ("ep", "dp"), "dp", "ep"]
    tree = {"w": leaf(5, 6)} | ODD
    cells = [
        Cell(f"axis={way}", tree, stage, axes=axes, axis=way, accumulate=k)
        for way, stage, k in itertools.product(ways, (1, 2, 3), (1, 2))
    ]
    for cell, *results in zip(cells, *pool(4).run(run_cells, cells), strict=True):
        assert_cell(cell, results)
        assert [r.recorded["params/w"] for r in results] == [(5, 6)] * 4
        if cell.stage == 3 and not isinstance(cell.axis, str):
            # 30 chunks of one element: 8 a rank, the last has 6
            pieces = [(8,), (8,), (8,), (6,)]
            assert [r.local["w"] for r in results] == pieces, cell.name


def scalar_step(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    mesh, out = mesh_of(DP), {}
    for stage, dtype in itertools.product((0, 1, 2, 3), (torch.float64, torch.float32, torch.bfloat16)):
        params, tx = {"s": torch.tensor(2.0, dtype=dtype)}, fz.sgd(0.1)
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state = fz.init_state(params, tx, specs=specs)
        loaded = fz.shard({"s": torch.tensor(2.0, dtype=dtype)}, specs.params)
        state, metrics = fz.make_step(lambda p, b: p["s"] * b, tx)(state, torch.tensor(1.0, dtype=dtype))
        after = fz.gather(state.params, specs.params)["s"]
        out[f"stage {stage}, {dtype}"] = [fz.gather(loaded, specs.params)["s"], after, metrics.grad_norm]
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_br24_scalar(world):
    for rank, found in enumerate(pool(world).run(scalar_step)):
        for where, (loaded, after, norm) in found.items():
            assert torch.equal(loaded, torch.tensor(2.0, dtype=loaded.dtype)), f"{where}, rank {rank}"
            assert torch.equal(after, torch.tensor(1.9, dtype=after.dtype)), f"{where}, rank {rank}: {after.item()}"
            assert norm.item() == 1.0, f"{where}, rank {rank}"


class Tied(nn.Module):
    """One weight under two names; the output is w*2 + w*3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.second.weight = self.first.weight
        self.seen_same = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen_same.append(self.first.weight is self.second.weight)
        return self.first(2 * x) + self.second(3 * x)


def tied_cells() -> list[tuple[int, str, float | None, int, int]]:
    variants = [("sgd", None, 1, 1), ("sgd", 2.5, 1, 1), ("adam", None, 3, 1), ("composed_adam", None, 3, 2)]
    return [(stage, *variant) for stage in (0, 1, 2, 3) for variant in variants]


def train_tied(rank: int, world: int) -> list[dict[str, object]]:
    mesh, out = mesh_of(DP), []
    for stage, name, max_norm, steps, k in tied_cells():
        with torch.device("meta"):
            module = Tied()
        params = {n: torch.ones(1, 1, dtype=torch.float64) for n in fz.split_module(module)[0]}
        tx = OPTIMIZERS[name][0]()
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state = fz.init_state(params, tx, specs=specs)

        def loss_fn(p, batch, module=module):
            return fz.Loss(fz.functional_call(module, p, batch).sum(), weight=len(batch))

        step, norms = fz.make_step(loss_fn, tx, accumulate=k, max_norm=max_norm), []
        for _ in range(steps):
            state, metrics = step(state, torch.ones(2, 1, dtype=torch.float64))
            norms.append(metrics.grad_norm.item())
        own = [module.first.weight.device.type, module.first.weight is module.second.weight]
        params, opt = flat(fz.gather(state.params, specs.params)), flat(fz.gather(state.opt_state, specs.opt_state))
        out.append({"params": params, "opt": opt, "norms": norms, "same": module.seen_same, "own": own})
    return out


def adam_on_one_weight(steps: int) -> torch.Tensor:
    w = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (w * 2 + w * 3).sum().backward()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_br25_tied_weights_of_a_module(world):
    for rank, found in enumerate(pool(world).run(train_tied)):
        for (stage, name, max_norm, steps, k), result in zip(tied_cells(), found, strict=True):
            where = f"stage {stage}, {name}, max_norm={max_norm}, accumulate={k}, rank {rank} of {world}"
            assert list(result["params"]) == ["first.weight"], f"{where}: stored once"
            assert result["same"] and all(result["same"]), f"{where}: the module saw two tensors"
            assert result["own"] == ["meta", True], f"{where}: the module was not put back"
            assert result["norms"] == [5.0] * steps, f"{where}: {result['norms']} (two copies: 7.07 or 3.6056)"
            w = result["params"]["first.weight"]
            if name == "sgd":
                right = 0.5 if max_norm is None else 0.75
                assert w.item() == right, f"{where}: {w.item()} (two copies: 0.8 or 0.7, updated twice: 0.0)"
            else:
                moments = [p for p in result["opt"] if "/mu/" in p]
                assert moments == ["scale_by_adam/mu/first.weight"], f"{where}: one moment leaf"
                assert_close(w, adam_on_one_weight(steps), where)


def test_br25_the_same_tensor_twice_is_refused():
    w, tx = torch.ones(2, 3), fz.adam(0.1)
    cases = {
        "same object": {"a": w, "b": w},
        "same memory": {"a": w, "b": w.detach()},
        "in a list": {"a": w, "b": [torch.ones(1), w]},
        "transposed": {"a": w, "b": w.t()},
        "a part": {"a": w, "b": w[1:]},
        "three": {"a": torch.ones(1), "b": w, "c": torch.ones(4), "d": w},
    }
    for name, params in cases.items():
        with pytest.raises(
            ValueError, match=r"params/.*(same tensor|shares memory).*params/.*fz\.tie\(params"
        ) as error:
            fz.init_state(params, tx)
        assert "params/b" in str(error.value), f"{name}: {error.value}"


def test_br25_equal_values_and_neighbours_in_one_storage_are_no_ties():
    buffer = torch.arange(12.0)
    params = {"a": buffer[:6], "b": buffer[6:].view(2, 3), "c": torch.ones(2), "d": torch.ones(2)}
    state = fz.init_state(params, fz.sgd(0.1))
    state, _ = fz.make_step(lambda p, b: (p["a"] * b).sum() + p["b"].sum() * 0, fz.sgd(0.1))(state, torch.ones(1))
    assert torch.equal(state.params["a"], torch.arange(6.0) - 0.1)
    assert torch.equal(state.params["b"], torch.arange(6.0, 12.0).view(2, 3))
    assert torch.equal(buffer, torch.arange(12.0)), "init_state must copy"
