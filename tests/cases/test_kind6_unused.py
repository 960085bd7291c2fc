"""Leaves that some rank, or every rank, does not use."""

import itertools
from typing import Any

import pytest
import torch

import funzero as fz
from funzero.core import comm
from tests.cases.training import OPTIMIZERS, assert_close, flat, mesh_of
from tests.ranks import pool

DP = (("dp", -1),)
LARGE = 10_001  # float64: more than 64 KiB, so it travels alone


def make_params() -> dict[str, torch.Tensor]:
    shapes = {"expert0": (3,), "expert1": (3,), "big": (LARGE,), "branch": (2, 2), "shared": (), "unused": (5,)}
    return {name: torch.linspace(0.5, 1.5, 1 + i, dtype=torch.float64).mean().expand(shape).clone() + 0.1 * i
            for i, (name, shape) in enumerate(shapes.items())}  # fmt: skip


def rows_loss(params: Any, rows: list[tuple[int, float]]) -> torch.Tensor:
    """A sum over rows (kind, x): kind 0 and 1 take an expert, 2 the branch, 3 the large leaf."""
    uses = {0: ("expert0",), 1: ("expert1",), 2: ("branch",), 3: ("big",)}
    total = torch.zeros((), dtype=torch.float64)
    for kind, x in rows:
        for name in (*uses[kind], "shared"):
            total = total + ((params[name] * x - 1) ** 2).sum()
    return total


def loss_fn(params: Any, batch: Any) -> fz.Loss:
    """Which leaves are used is decided in Python, from the rank's own batch."""
    rows = list(zip(batch["kind"].tolist(), batch["x"].tolist(), strict=True))
    return fz.Loss(rows_loss(params, rows), weight=len(rows))


def kinds_of(case: str, rank: int, world: int, t: int) -> list[int]:
    """The kinds of this rank's two rows."""
    if case == "experts":
        return [rank % 2, rank % 2]
    if case == "branch on rank 0":
        return [2, 2] if rank == 0 else [1, 1]
    if case == "branch on the last rank, late":  # only in the second micro-batch
        return [0, 2] if rank == world - 1 else [0, 0]
    if case == "large leaf on one rank":
        return [3, 1] if rank == 1 % world else [0, 1]
    return [0, 0] if t != 1 else [1, 1]  # "comes and goes": expert0 is not used in step 1, expert1 only there


CASES = ["experts", "branch on rank 0", "branch on the last rank, late", "large leaf on one rank", "comes and goes"]


def rows_of(case: str, rank: int, world: int, t: int) -> list[tuple[int, float]]:
    return [(kind, 0.5 + 0.25 * rank + 0.125 * i + 0.1 * t) for i, kind in enumerate(kinds_of(case, rank, world, t))]


def cells(world: int) -> list[tuple[str, int, str, int]]:
    ways = [("adamw", 1), ("composed_adam", 2)] if world == 2 else [("adamw", 2)]
    return [(case, stage, *way) for case, stage, way in itertools.product(CASES, (0, 1, 2, 3), ways)]


class Posted:
    """Records the collectives of this rank: what, how many elements in all, which dtype."""

    names = ("all_to_all", "send_recv", "all_reduce_sum", "all_gather_equal")

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.own = {name: getattr(comm, name) for name in self.names}

    def __enter__(self) -> "Posted":
        for name, fn in self.own.items():
            setattr(comm, name, lambda *args, name=name, fn=fn: (self.note(name, args), fn(*args))[1])
        return self

    def __exit__(self, *error: object) -> None:
        for name, fn in self.own.items():
            setattr(comm, name, fn)

    def note(self, name: str, args: Any) -> None:
        if name == "send_recv":  # every rank gets what it lacks: its size differs, its place in the list does not
            self.calls.append((name, 0, ""))
        else:
            x = args[0] if name == "all_reduce_sum" else args[1]
            self.calls.append((name, x.numel(), str(x.dtype)))


def train(rank: int, world: int) -> list[dict[str, Any]]:
    mesh, out = mesh_of(DP), []
    for case, stage, name, k in cells(world):
        params, tx = make_params(), OPTIMIZERS[name][0]()
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state = fz.init_state(params, tx, specs=specs)
        step, norms = fz.make_step(loss_fn, tx, specs=specs, accumulate=k), []
        with Posted() as posted:
            for t in range(3):
                rows = rows_of(case, rank, world, t)
                kind, x = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows], dtype=torch.float64)
                state, metrics = step(state, {"kind": kind, "x": x})
                norms.append(metrics.grad_norm.item())
        params, opt = fz.gather(state.params, specs.params), fz.gather(state.opt_state, specs.opt_state)
        out.append({"params": flat(params), "opt": flat(opt), "norms": norms, "posted": posted.calls})
    return out


def reference(case: str, name: str, world: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float]]:
    """One process over the joined batch; torch.optim leaves alone what has no gradient."""
    leaves = {n: x.requires_grad_() for n, x in make_params().items()}
    optimizer, norms = OPTIMIZERS[name][1](list(leaves.values())), []
    for t in range(3):
        optimizer.zero_grad()
        rows = [row for rank in range(world) for row in rows_of(case, rank, world, t)]
        (rows_loss(leaves, rows) / len(rows)).backward()
        norms.append(torch.cat([x.grad.view(-1) for x in leaves.values() if x.grad is not None]).norm().item())
        optimizer.step()
    moments = {n: optimizer.state[x]["exp_avg"] for n, x in leaves.items() if x in optimizer.state}
    counts = {n: int(optimizer.state[x]["step"]) if x in optimizer.state else 0 for n, x in leaves.items()}
    return {n: x.detach() for n, x in leaves.items()}, {"moments": moments, "counts": counts}, norms


@pytest.mark.parametrize("world", [2, 3])
def test_br28_leaves_used_on_some_ranks_only(world):
    results = pool(world).run(train, timeout=60)
    for i, (case, stage, name, k) in enumerate(cells(world)):
        params, kept, norms = reference(case, name, world)
        for rank in range(world):
            found, where = results[rank][i], f"{case}, stage {stage}, {name}, accumulate={k}, rank {rank} of {world}"
            for path, x in params.items():
                assert_close(found["params"][path], x, f"{where}, {path}")
                assert torch.equal(found["params"][path], results[0][i]["params"][path]), f"{where}, {path}: ranks"
                assert found["opt"][f"scale_by_adam/count/{path}"].item() == kept["counts"][path], f"{where}, {path}"
                if path in kept["moments"]:
                    assert_close(found["opt"][f"scale_by_adam/mu/{path}"], kept["moments"][path], f"{where}, mu {path}")
            as_tensor = (torch.tensor(x, dtype=torch.float64) for x in (found["norms"], norms))
            assert_close(*as_tensor, f"{where}, norms")
            assert found["posted"] == results[0][i]["posted"], f"{where}: other collectives than rank 0"


@pytest.mark.parametrize("world", [1, 2])
def test_br28_a_leaf_used_on_no_rank_stays_as_it_is(world):
    """Zero gradient and no gradient are different: no decay, no moment, no count."""
    start = make_params()["unused"]
    for rank, found in enumerate(pool(world).run(train, timeout=60)):
        for (case, stage, name, k), result in zip(cells(world), found, strict=True):
            where = f"{case}, stage {stage}, {name}, accumulate={k}, rank {rank} of {world}"
            assert torch.equal(result["params"]["unused"], start), where
            for part in ("mu", "nu"):
                moment = result["opt"][f"scale_by_adam/{part}/unused"]
                assert torch.equal(moment, torch.zeros(5, dtype=torch.float64)), f"{where}, {part}"
            assert result["opt"]["scale_by_adam/count/unused"].item() == 0, where


def pause(rank: int, world: int) -> list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """A leaf with a history, unused in one step: its bits before and after that step."""
    mesh, out = mesh_of(DP), []
    for stage, name, zero in itertools.product((0, 1, 2, 3), ("adamw", "composed_adam", "momentum"), (False, True)):
        tx, params = OPTIMIZERS[name][0](), {"a": torch.ones(7), "b": torch.full((3, 3), 2.0)}
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)

        def loss(p: Any, batch: Any, zero: bool = zero) -> torch.Tensor:
            total = (p["a"] * batch["x"]).sum()
            if batch["use"]:
                return total + (p["b"] ** 2).sum()
            return total + 0 * p["b"].sum() if zero else total

        step, state = fz.make_step(loss, tx, donate=False), fz.init_state(params, tx, specs=specs)
        state, _ = step(state, {"x": torch.ones(1), "use": True})
        before = {p: x.clone() for p, x in flat({"p": state.params, "o": state.opt_state}).items()}
        state, _ = step(state, {"x": torch.ones(1), "use": False})
        after = flat({"p": state.params, "o": state.opt_state})
        out.append((f"stage {stage}, {name}, {'zero' if zero else 'no'} gradient", before, after))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_br28_zero_gradient_is_not_no_gradient(world):
    for rank, found in enumerate(pool(world).run(pause)):
        for where, before, after in found:
            changed = {p for p, x in before.items() if p.split("/")[-1] == "b" and not torch.equal(x, after[p])}
            where = f"{where}, rank {rank} of {world}: changed {changed}"
            if "no gradient" in where:
                assert not changed, where
            elif before["p/b"].numel():
                assert "p/b" in changed, where  # its momentum moves it
