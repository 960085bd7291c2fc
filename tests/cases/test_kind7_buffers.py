"""Buffers: new state from a step, averaged over ranks by weight."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import funzero as fz
from tests.cases.training import assert_close, flat, mesh_of, same_bits
from tests.ranks import pool

DP = (("dp", -1),)
FEATURES = 3


class Net(nn.Module):
    """BatchNorm (mean, var, int64 count), a table that the state dict leaves out, a mask with -inf, bools."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, dtype=torch.float64)
        self.out = nn.Linear(FEATURES, 1, dtype=torch.float64)
        table = (torch.arange(64, dtype=torch.float64) + 1).reciprocal()
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("table32", table.float(), persistent=False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x)) * self.table[0]


CONSTANT = ("table", "table32", "mask", "flags")


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def rows(rank: int, t: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * t + rank)
    return torch.randn(count, FEATURES, dtype=torch.float64, generator=generator) * (1 + rank) + rank


def lengths(world: int) -> list[int]:
    """Rows a rank: they differ, and 7 in 11 has no exact share."""
    return [4, 7, 6, 5][:world]


def make(mesh: fz.Mesh, stage: int, **options: Any) -> tuple[fz.TrainState, fz.Step]:
    """State and step on a module that lives on meta, so that nothing of it can be used by mistake."""
    params, buffers = fz.split_module(net())
    with torch.device("meta"):
        module = Net()
    tx = fz.adam(0.1)
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, buffers=buffers)

    def loss_fn(p: Any, batch: Any, buffers: Any) -> fz.Loss:
        y, new = fz.functional_call(module, p, batch, buffers=buffers, training=True)
        return fz.Loss((y**2).sum(), weight=len(batch), buffers=new)

    return fz.init_state(params, tx, specs=specs, buffers=buffers), fz.make_step(loss_fn, tx, specs=specs, **options)


def batch_norm(stats: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The statistics of one process's BatchNorm after it saw x."""
    module = nn.BatchNorm1d(FEATURES, dtype=torch.float64)
    module.load_state_dict(copy.deepcopy(stats), strict=False)
    module(x)
    return dict(module.named_buffers())


def expected_stats(world: int, steps: int, k: int, idle: int | None = None) -> dict[str, torch.Tensor]:
    """Each step: every rank's own BatchNorm from the common statistics on, then the mean weighted by rows."""
    stats = dict(nn.BatchNorm1d(FEATURES, dtype=torch.float64).named_buffers())
    for t in range(steps):
        active = [r for r in range(world) if r != idle]
        news, counts = [], [lengths(world)[r] * k for r in active]
        for r, count in zip(active, counts, strict=True):
            new = stats
            for x in rows(r, t, count).chunk(k):
                new = batch_norm(new, x)
            news.append(new)
        total = sum(counts)
        mean = {
            n: sum(new[n] * c for new, c in zip(news, counts, strict=True)) / total
            for n in ("running_mean", "running_var")
        }
        stats = mean | {"num_batches_tracked": torch.stack([n["num_batches_tracked"] for n in news]).max()}
    return stats


def train(rank: int, world: int, idle: int | None) -> list[tuple[str, dict[str, torch.Tensor], list[str]]]:
    """Three steps; what changed in the states that went in, which donate=False forbids."""
    mesh, out = mesh_of(DP), []
    for stage, k in itertools.product((0, 1, 2, 3), (1, 2)):
        donate, changed = (stage + k) % 2 == 0, []
        state, step = make(mesh, stage, accumulate=k, donate=donate)
        for t in range(3):
            before = {p: x.clone() for p, x in flat(state).items()}
            old = state
            batch = fz.data.EMPTY if rank == idle else rows(rank, t, lengths(world)[rank] * k)
            state, _ = step(state, batch)
            if not donate:
                changed += [path for path, x in flat(old).items() if not same_bits(x, before[path])]
        out.append((f"stage {stage}, accumulate={k}, donate={donate}", dict(state.buffers), changed))
    return out


@functools.cache
def trained(world: int, idle: int | None) -> list[list[tuple[str, dict[str, torch.Tensor], list[str]]]]:
    """By rank; run once for the tests that look at it."""
    return pool(world).run(train, idle)


@pytest.mark.parametrize("world, idle", [(1, None), (2, None), (3, None), (2, 1)])
def test_br35_running_statistics_are_the_weighted_mean_over_ranks(world, idle):
    results = trained(world, idle)
    start = fz.split_module(net())[1]
    for rank, found in enumerate(results):
        for i, (where, buffers, changed) in enumerate(found):
            where = f"{where}, rank {rank} of {world}, idle {idle}"
            assert not changed, f"{where}: the input state changed at {changed}"
            k = 2 if "accumulate=2" in where else 1
            for name, x in expected_stats(world, 3, k, idle).items():
                assert_close(buffers[f"norm.{name}"], x, f"{where}, {name}")
            count = buffers["norm.num_batches_tracked"]
            assert count.dtype == torch.int64 and count.item() == 3 * k, f"{where}: {count}"
            assert buffers.keys() == start.keys(), where
            for name in buffers:
                assert same_bits(buffers[name], results[0][i][1][name]), f"{where}, {name}: not as on rank 0"


@pytest.mark.parametrize("world, idle", [(1, None), (2, None), (3, None), (2, 1)])
def test_br35_buffers_that_nobody_writes_keep_their_bits(world, idle):
    """c 4/11 + c 7/11 is not c in float64, and 0 * inf is NaN."""
    start = fz.split_module(net())[1]
    for rank, found in enumerate(trained(world, idle)):
        for where, buffers, _ in found:
            for name in CONSTANT:
                x = buffers[name]
                assert x.dtype == start[name].dtype, f"{where}, rank {rank} of {world}, {name}: {x.dtype}"
                assert torch.equal(x, start[name]), f"{where}, rank {rank} of {world}, {name}: {x[:4]}"


def skip(rank: int, world: int) -> list[tuple[str, bool, list[str], list[str]]]:
    """One good step, then one that must be skipped: a NaN on one rank only, or no data on any."""
    mesh, out = mesh_of(DP), []
    for stage, reason, donate in itertools.product((0, 1, 2, 3), ("nan", "empty"), (True, False)):
        state, step = make(mesh, stage, donate=donate)
        state, _ = step(state, rows(rank, 0, 4))
        before = {p: x.clone() for p, x in flat(state).items()}
        batch = fz.data.EMPTY
        if reason == "nan":
            batch = rows(rank, 1, 4) * (torch.nan if rank == world - 1 else 1.0)
        state, metrics = step(state, batch)
        changed = sorted(p for p, x in flat(state).items() if not torch.equal(x, before[p]))
        state, _ = step(state, rows(rank, 2, 4))
        bad = [n for n, x in state.buffers.items() if n.startswith("norm") and not torch.isfinite(x).all()]
        out.append((f"stage {stage}, {reason}, donate={donate}", metrics.skipped.item(), changed, bad))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_br35_a_skipped_step_keeps_the_old_buffers(world):
    for rank, found in enumerate(pool(world).run(skip)):
        for where, skipped, changed, bad in found:
            where = f"{where}, rank {rank} of {world}"
            assert skipped, where
            assert changed == ["skips"], f"{where}: changed {changed}"
            assert not bad, f"{where}: not finite after the next step: {bad}"


def window(rank: int, world: int) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """The same in two calls: buffers are chained in the window, and the state's stay until the update."""
    mesh, out = mesh_of(DP), []
    for stage in (0, 3):
        state, step = make(mesh, stage)
        x = rows(rank, 0, lengths(world)[rank] * 2)
        for part in x.chunk(2):
            state = step.accumulate(state, part)
            assert state.buffers["norm.num_batches_tracked"].item() == 0
        state, _ = step.update(state)
        out.append((f"stage {stage}", dict(state.buffers)))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_br35_buffers_in_a_window(world):
    for rank, found in enumerate(pool(world).run(window)):
        for where, buffers in found:
            for name, x in expected_stats(world, 1, 2).items():
                assert_close(buffers[f"norm.{name}"], x, f"{where}, rank {rank} of {world}, {name}")
