"""Kind 3: skipped steps and values that are not finite."""

import pytest
import torch

import funzero as fz
from tests.cases.common import SOME_WORLDS, STAGES, WORLDS, close, difference, launch, linear, one_for_all, rows, whole
from tests.ranks import pool

BAD = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def composed_adam(learning_rate, eps=1e-8):
    """Adam in a chain that no fused kernel covers."""
    return fz.chain(fz.scale_by_adam(eps=eps), fz.identity(), fz.scale_by_learning_rate(learning_rate))


OPTIMIZERS = {
    "adamw": lambda: fz.adamw(0.1, weight_decay=0.5),
    "composed": lambda: composed_adam(0.1),
    "momentum": lambda: fz.sgd(0.1, momentum=0.9),
}


def br12_run(mesh, stage, tx, good, bad, step=()):
    """A good step, a bad one, a good one: the whole state around each, metrics, and shapes of the local leaves."""
    params = {"w": torch.ones_like(good["w"][0]), "other": torch.ones(3, dtype=torch.float64)}
    options = {"max_norm": 10.0} | dict(step)
    state, step = launch(params, tx, linear, mesh, stage, step=options)
    state, _ = step(state, good)
    local = len(state.params["w"].view(-1))
    before = whole(state)
    state, skipped = step(state, bad)
    after = whole(state)
    state, metrics = step(state, good)
    return [before, after, whole(state), skipped, metrics], local


def br12_cells(rank, world):
    mesh, found, local = fz.make_mesh(dp=-1), {}, {}
    for stage in STAGES:
        for shape, at, kind in (((4,), 3, "inf"), ((4,), 0, "nan"), ((1,), 0, "inf"), ((), 0, "-inf")):
            for who in {0, world - 1}:
                ones = rows(w=torch.ones(shape, dtype=torch.float64), other=torch.ones(3, dtype=torch.float64))
                bad = fz.tree.map(torch.clone, ones)
                if rank == who:
                    bad["w"].view(-1)[at] = BAD[kind]
                name = ("adamw", "composed", "momentum")[(stage + at + who + len(shape)) % 3]
                cell = f"stage {stage} {name} {kind} in {list(shape)} at {at} from rank {who}"
                found[cell], local[cell] = br12_run(mesh, stage, OPTIMIZERS[name](), ones, bad)
    return found, local


@pytest.mark.parametrize("world", WORLDS)
def test_br12_one_bad_element_on_one_rank_is_skipped_on_all(world):
    results = pool(world).run(br12_cells)
    for cell, (before, after, end, skipped, metrics) in one_for_all([found for found, _ in results]).items():
        assert skipped.skipped and skipped.skipped_in_a_row == 1 and skipped.step == 1, f"{cell}: not skipped"
        assert not torch.isfinite(skipped.grad_norm), cell
        assert not difference(after, before), f"{cell}: {difference(after, before)} changed"
        assert not metrics.skipped and metrics.skipped_in_a_row == 0 and metrics.step == 2, cell
        assert "params/w" in difference(end, before) and "params/other" in difference(end, before), cell
        assert all(x.isfinite().all() for x in end.values() if x.is_floating_point()), cell
    if world == 2:
        sizes = [local["stage 3 composed inf in [1] at 0 from rank 0"] for _, local in results]
        assert sizes == [1, 0], "rank 1 was meant to hold nothing"


def br12_window_cells(rank, world):
    """The bad element comes in one micro-batch of several, or in the loss alone; the window after it is clean."""
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for at in range(3):
            ones = {"w": torch.ones(3, 4, dtype=torch.float64), "other": torch.ones(3, 3, dtype=torch.float64)}
            bad = fz.tree.map(torch.clone, ones)
            if rank == world - 1:
                bad["w"][at, 2] = float("inf")
            tx, options = fz.adamw(0.1), {"accumulate": 3}
            found[f"stage {stage} micro-batch {at}"], _ = br12_run(mesh, stage, tx, ones, bad, options)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br12_one_bad_micro_batch_skips_the_window_and_does_not_stay_in_it(world):
    for cell, (before, after, end, skipped, metrics) in one_for_all(pool(world).run(br12_window_cells)).items():
        assert skipped.skipped and not difference(after, before), cell
        assert not metrics.skipped and close(metrics.grad_norm, 7**0.5), f"{cell}: the old window is still there"
        assert "params/w" in difference(end, before), cell


def shifted(params, batch):
    return (params["w"] * batch["g"]).sum() + batch["shift"].sum()


def br12_loss_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for kind, value in BAD.items():
            state, step = launch({"w": torch.ones(5)}, fz.adam(0.1), shifted, mesh, stage)
            before = whole(state)
            shift = torch.full((1,), value if rank == world - 1 else 0.0)
            state, metrics = step(state, {"g": torch.ones(1, 5), "shift": shift})
            found[f"stage {stage} {kind}"] = [before, whole(state), metrics]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br12_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(world):
    results = pool(world).run(br12_loss_cells)
    for rank, cells in enumerate(results):
        for cell, (before, after, metrics) in cells.items():
            assert metrics.skipped and metrics.step == 0, f"rank {rank} {cell}"
            assert not difference(after, before), f"rank {rank} {cell}: {difference(after, before)} changed"


def counting(params, batch, buffers, key):
    loss = sum((params[name] * batch[name]).sum() for name in params)
    return fz.Loss(loss, buffers={"seen": buffers["seen"] + 1, "mean": buffers["mean"] * 0.5 + batch["w"].mean() * 0.5})


def br13_run(mesh, stage, tx, shape, k):
    params = {"w": torch.ones(shape, dtype=torch.float64)}
    buffers = {"seen": torch.zeros((), dtype=torch.int64), "mean": torch.zeros((), dtype=torch.float64)}
    options = {"buffers": fz.eval_shape(buffers)}
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, **options)
    state = fz.init_state(params, tx, specs=specs, buffers=buffers, key=7)
    step = fz.make_step(counting, tx, specs=specs, accumulate=k)
    seen = []
    for bad in (True, False, False, True, True, False):
        g = torch.ones((k, *shape), dtype=torch.float64)
        if bad and mesh.rank == 0:
            g[0] = float("inf")
        state, metrics = step(state, {"w": g})
        others = {"key": state.key.clone(), **{n: x.clone() for n, x in state.buffers.items()}}
        seen.append([whole(state), others, metrics])
    return seen


def br13_cells(rank, world):
    def schedule(t):
        return 0.1 * (t + 1)

    makers = {"fused": lambda: fz.adam(schedule, eps=0.0), "composed": lambda: composed_adam(schedule, 0.0)}
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for name, make in makers.items():
            for shape, k in (((), 1), ((1,), 2), ((5,), 1)):
                found[f"stage {stage} {name} {list(shape)} k={k}"] = br13_run(mesh, stage, make(), shape, k)
    return found


@pytest.mark.parametrize("world", SOME_WORLDS)
def test_br13_a_skipped_step_moves_neither_schedule_nor_counters(world):
    # gradients inf, 1, 1, inf, inf, 1; the rates of the three updates are 0.1, 0.2, 0.3
    right = [1.0, 0.9, 0.7, 0.7, 0.7, 0.4]
    results = pool(world).run(br13_cells)
    strip = [{c: [[s, o] for s, o, _ in seen] for c, seen in cells.items()} for cells in results]
    one_for_all(strip)
    for cells in results:
        for cell, seen in cells.items():
            for call, (state, others, metrics) in enumerate(seen):
                where = f"{cell}, call {call + 1}"
                w, skipped = state["params/w"], call in (0, 3, 4)
                assert close(w, torch.full_like(w, right[call])), f"{where}: {w}, right {right[call]} (0.8, 0.9256)"
                assert bool(metrics.skipped) == skipped, where
                assert metrics.skipped_in_a_row == (1, 0, 0, 1, 2, 0)[call], where
                assert metrics.step == state["step"] == (0, 1, 2, 2, 2, 3)[call], where
                counts = [x.item() for n, x in state.items() if "count" in n]
                assert counts == [state["step"]] * 2, f"{where}: {counts}"
                if skipped and call:
                    changed = difference([state, others], seen[call - 1][:2])
                    assert not changed, f"{where}: {changed} changed"
            assert others["seen"] == 3 * int(cell[-1]), f"{cell}: buffers of skipped steps were kept"


def test_br13_the_first_skipped_step_leaves_a_fresh_state_bit_for_bit():
    for make in OPTIMIZERS.values():
        state, step = launch({"w": torch.ones(3)}, make(), linear, fz.make_mesh(dp=-1), 3)
        before, key = whole(state), state.key.clone()
        state, metrics = step(state, rows(w=torch.tensor([1.0, float("inf"), 1.0])))
        assert metrics.skipped and not difference(whole(state), before)
        assert torch.equal(state.key, key) and state.accum == () and state.skips == 1


def br13_limit_cells(rank, world):
    """After max_skips in a row the next call raises, names a leaf, and the state stays usable."""
    mesh, texts = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        params = {"fine": torch.ones(3), "sick": torch.ones(3)}
        state, step = launch(params, fz.adam(0.1), linear, mesh, stage, step={"max_skips": 2})
        bad = torch.full((3,), float("nan") if rank == world - 1 else 1.0)
        for _ in range(2):
            state, _ = step(state, rows(fine=torch.ones(3), sick=bad))
        before = whole(state)
        try:
            step(state, rows(fine=torch.ones(3), sick=torch.ones(3)))
            texts[stage] = "nothing raised"
        except fz.SkipLimitError as error:
            texts[stage] = str(error)
        assert not difference(whole(state), before)
    return texts


@pytest.mark.parametrize("world", WORLDS)
def test_br13_too_many_skips_in_a_row_raise_on_every_rank(world):
    for texts in pool(world).run(br13_limit_cells):
        for stage, text in texts.items():
            assert "2 steps in a row were skipped (max_skips=2)" in text and "sick" in text, f"stage {stage}: {text}"
