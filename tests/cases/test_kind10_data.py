"""Ranks with different amounts of data."""

from typing import Any

import pytest
import torch

import funzero as fz
from tests.cases.training import assert_close, flat, mesh_of
from tests.ranks import pool

DP = (("dp", -1),)
STAGES = (0, 1, 2, 3)


def ones(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def linear(params: Any, batch: torch.Tensor) -> fz.Loss:
    """The gradient of each example is its value."""
    return fz.Loss((params["w"] * batch).sum(), weight=len(batch), aux={"largest": batch.max(), "n": fz.Sum(1.0)})


def start(mesh: fz.Mesh, stage: int, tx: fz.Transform, w: float = 0.0, n: int = 1) -> fz.TrainState:
    params = {"w": torch.full((n,), w, dtype=torch.float64)}
    return fz.init_state(params, tx, specs=fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage))


def whole_w(state: fz.TrainState) -> torch.Tensor:
    return fz.gather(state.params, state.specs.params)["w"]


def epoch(rank: int, world: int, policy: str, batches: list[list[torch.Tensor]]) -> list[dict[str, Any]]:
    mesh, tx, out = mesh_of(DP), fz.sgd(0.1), []
    for stage in STAGES:
        state, step = start(mesh, stage, tx), fz.make_step(linear, tx)
        grads, weights = [], []
        source = (x for x in batches[rank])  # a generator: it can be asked only once for each batch
        for batch in fz.data.each_rank(source, mesh, policy=policy):
            state, metrics = step(state, batch)
            grads.append(metrics.grad_norm.item())
            weights.append(metrics.weight.item())
        out.append({"w": whole_w(state), "grads": grads, "weights": weights, "step": state.step.item()})
    return out


UNEVEN = [[ones(1), ones(1), ones(4)], [ones(1), ones(1)]]


def test_br49_weighted_goes_on_until_all_are_done():
    for rank, found in enumerate(pool(2).run(epoch, "weighted", UNEVEN)):
        for stage, result in zip(STAGES, found, strict=True):
            where = f"stage {stage}, rank {rank}: {result}"
            assert result["grads"] == [1.0, 1.0, 4.0], f"{where} (a missing rank counted as zero example: 2.0)"
            assert result["weights"] == [2.0, 2.0, 1.0], where
            assert result["step"] == 3, where
            assert_close(result["w"], ones(-0.6), where)


def test_br49_shortest_stops_with_the_first():
    for rank, found in enumerate(pool(2).run(epoch, "shortest", UNEVEN)):
        for stage, result in zip(STAGES, found, strict=True):
            where = f"stage {stage}, rank {rank}: {result}"
            assert result["grads"] == [1.0, 1.0] and result["step"] == 2, where
            assert torch.equal(result["w"], ones(-0.2)), where


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_br49_neighbours(world):
    """The end comes on another rank, on several, before the first batch, and with batches of different lengths."""
    last = [[ones(2, 4)]] * (world - 1) + [[ones(1), ones(7, 8, 9)]]
    none_on_0 = [[]] + [[ones(1, 3), ones(5)]] * (world - 1) if world > 1 else [[ones(1, 3), ones(5)]]
    for batches in (last, none_on_0):
        steps = max(len(b) for b in batches)
        joined = [torch.cat([b[t] for b in batches if t < len(b)]) for t in range(steps)]
        right = [x.mean().item() for x in joined]
        for rank, found in enumerate(pool(world).run(epoch, "weighted", batches)):
            for stage, result in zip(STAGES, found, strict=True):
                where = f"stage {stage}, rank {rank} of {world}: {result}"
                assert result["weights"] == [len(x) for x in joined], where
                assert_close(ones(*result["grads"]), ones(*right), where)
                assert_close(result["w"], ones(-0.1 * sum(right)), where)


def no_step(rank: int, world: int, policy: str, empty: list[int]) -> tuple[str, float]:
    """The error of an epoch without a step, and a step after it: the mesh lives on."""
    mesh, tx = mesh_of(DP), fz.sgd(0.1)
    batches = [] if rank in empty else [ones(1)]
    try:
        list(fz.data.each_rank(iter(batches), mesh, policy=policy))
        text = "no error"
    except ValueError as error:
        text = str(error)
    state, _ = fz.make_step(linear, tx)(start(mesh, 3, tx), ones(1))
    return text, whole_w(state).item()


@pytest.mark.parametrize("policy, empty", [("shortest", [1]), ("shortest", [0, 1]), ("weighted", [0, 1])])
def test_br49_zero_steps_is_an_error_on_all_ranks(policy, empty):
    found = pool(2).run(no_step, policy, empty)
    for rank, (text, w) in enumerate(found):
        assert "no step in this epoch" in text and str(empty) in text and policy in text, f"rank {rank}: {text}"
        assert w == -0.1, f"rank {rank}: the mesh must live on"


def test_br49_an_unknown_policy_is_an_error():
    with pytest.raises(ValueError, match=r"policy is 'weighted' or 'shortest', got 'longest'"):
        next(fz.data.each_rank([1], fz.abstract_mesh(dp=1), policy="longest"))


def broken_source(rank: int, world: int) -> str:
    """Rank 1's data fail at the second batch."""
    mesh = mesh_of(DP)

    def source() -> Any:
        yield ones(1)
        if rank == 1:
            raise OSError("shard 7 is gone")
        yield ones(1)

    try:
        return f"{len(list(fz.data.each_rank(source(), mesh)))} batches"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_br49_an_iterator_that_fails_on_one_rank_is_an_error_on_all():
    """Else the others wait for a rank that will never answer."""
    for rank, text in enumerate(pool(2).run(broken_source, timeout=8)):
        assert "shard 7 is gone" in text, f"rank {rank}: {text}"


def uneven_rows(rank: int, world: int) -> list[dict[str, Any]]:
    """Rank r has 2 (r + 1) rows."""
    mesh, out = mesh_of(DP), []
    for stage in STAGES:
        for k in (1, 2):
            tx = fz.adam(0.1)
            state, step = start(mesh, stage, tx, 1.0, 5), fz.make_step(square, tx, accumulate=k, max_norm=1.0)
            seen = []
            for t in range(3):
                state, metrics = step(state, rows_of(rank, t, 2 * (rank + 1)))
                seen.append([metrics.loss.item(), metrics.grad_norm.item(), metrics.weight.item()])
                aux = flat(metrics.aux)
            out.append({"where": f"stage {stage}, accumulate={k}", "w": whole_w(state), "seen": seen, "aux": aux})
    return out


def square(params: Any, batch: torch.Tensor) -> fz.Loss:
    errors = params["w"] * batch.unsqueeze(1) - 1
    return fz.Loss((errors**2).sum(), weight=len(batch), aux={"mean": batch.mean(), "n": fz.Sum(batch.sum() * 0 + 1)})


def rows_of(rank: int, t: int, count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64) * 0.3 + rank * 0.1 + t * 0.05


def one_process(batches: list[torch.Tensor]) -> tuple[torch.Tensor, list[list[float]]]:
    """Adam 0.1 with the gradient clipped to norm 1, on joined batches."""
    w = torch.ones(5, dtype=torch.float64, requires_grad=True)
    optimizer, seen = torch.optim.Adam([w], lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        loss = square({"w": w}, batch).total / len(batch)
        loss.backward()
        seen.append([loss.item(), w.grad.norm().item(), float(len(batch))])
        w.grad *= min(1.0, 1.0 / seen[-1][1])
        optimizer.step()
    return w.detach(), seen


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_different_batch_lengths(world):
    joined = [torch.cat([rows_of(r, t, 2 * (r + 1)) for r in range(world)]) for t in range(3)]
    w, seen = one_process(joined)
    for rank, found in enumerate(pool(world).run(uneven_rows)):
        for result in found:
            where = f"{result['where']}, rank {rank} of {world}"
            assert_close(result["w"], w, where)
            assert_close(
                torch.tensor(result["seen"], dtype=torch.float64), torch.tensor(seen, dtype=torch.float64), where
            )
            assert result["aux"]["n"].item() == world * int(result["where"][-1]), where
            assert_close(result["aux"]["mean"], joined[-1].mean(), where)


def uneven_calls(rank: int, world: int, calls: list[int]) -> list[dict[str, Any]]:
    mesh, out = mesh_of(DP), []
    for stage in STAGES:
        for k in (1, 2):
            tx = fz.adam(0.1)
            state, step = start(mesh, stage, tx, 1.0, 5), fz.make_step(square, tx, accumulate=k, max_norm=1.0)
            seen = []
            for t in range(2):
                for call in range(calls[rank]):
                    state = step.accumulate(state, rows_of(rank + 10 * call, t, 2))
                state, metrics = step.update(state)
                seen.append([metrics.loss.item(), metrics.grad_norm.item(), metrics.weight.item()])
            out.append({"where": f"stage {stage}, accumulate={k}", "w": whole_w(state), "seen": seen})
    return out


@pytest.mark.parametrize("calls", [[2, 0], [1, 3], [3, 1], [1, 0, 2], [2, 2, 5]], ids=str)
def test_ranks_with_different_numbers_of_accumulate_calls(calls):
    world = len(calls)
    joined = [torch.cat([rows_of(r + 10 * c, t, 2) for r in range(world) for c in range(calls[r])]) for t in range(2)]
    w, seen = one_process(joined)
    for rank, found in enumerate(pool(world).run(uneven_calls, calls)):
        for result in found:
            where = f"{result['where']}, calls {calls}, rank {rank}"
            assert_close(
                torch.tensor(result["seen"], dtype=torch.float64), torch.tensor(seen, dtype=torch.float64), where
            )
            assert_close(result["w"], w, where)


def all_empty(rank: int, world: int) -> list[tuple[int, dict[str, Any]]]:
    mesh, out = mesh_of(DP), []
    for stage in STAGES:
        tx = fz.adam(0.1)
        state, step = start(mesh, stage, tx, 1.0, 5), fz.make_step(square, tx)
        before = {p: x.clone() for p, x in flat({"p": state.params, "o": state.opt_state}).items()}
        state, metrics = step(state, fz.data.EMPTY)
        after = flat({"p": state.params, "o": state.opt_state})
        same = all(torch.equal(x, after[p]) for p, x in before.items())
        out.append((stage, {"same": same, "skipped": metrics.skipped.item(), "step": state.step.item()}))
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_a_window_without_any_data_is_a_skipped_step(world):
    for rank, found in enumerate(pool(world).run(all_empty)):
        for stage, result in found:
            assert result == {"same": True, "skipped": True, "step": 0}, f"stage {stage}, rank {rank} of {world}"
