"""Leaves on host and disk: the cells of BR05, BR12, BR45 and BR46 that offload adds, and deepspeed.md 3.7 to 3.10, 3.13."""

import gc
import itertools
import os

import pytest
import torch

import funzero as fz
from funzero.executor.disk import DiskLeaf
from funzero.executor.stores import HOST
from tests.cases.common import STAGES, border, difference, linear, params_of, rows, same, whole, window
from tests.cases.test_kind9_memory import count_and_bytes, settled
from tests.ranks import pool

MEMORIES = ("device", "host", "disk")
LARGE = 20_011  # elements of a leaf that goes to the disk by itself


def launch(params, tx, loss_fn, mesh, stage, memory, folder, *, what="**", step=(), init=(), **specs):
    """As `common.launch`, with the leaves that the glob `what` matches in a memory."""
    made = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, **specs)
    if memory != "device":
        made = fz.with_memory(made, {what: memory}, folder=folder)
    state = fz.init_state(params, tx, specs=made, **dict(init))
    return state, fz.make_step(loss_fn, tx, specs=made, **dict(step))


def br05(rank, world, folder, lazy):
    with border(0 if lazy else 64 * 1024):  # so that leaves of a few elements take the way of large ones
        return br05_cells(folder)


def br05_cells(folder):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage, memory, n in itertools.product(STAGES, MEMORIES, (1, 5)):
        params, options = {"w": torch.zeros(n)}, {"reduction": "sum"}
        state, step = launch(params, fz.sgd(1.0), linear, mesh, stage, memory, folder, step=options)
        for _ in range(2):
            micros = [rows(w=torch.full((n,), float(g))) for g in (1, 2, 3, 4)]
            state, _ = window(step, state, micros, mesh)
            found.setdefault((stage, memory, n), []).append(params_of(state)["w"])
    return found


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_br05_every_call_of_a_window_counts_wherever_the_sums_are(world, lazy, tmp_path):
    for found in pool(world).run(br05, tmp_path, lazy):
        assert len(found) == 24
        for cell, (first, second) in found.items():
            assert (first == -10).all() and (second == -20).all(), f"{cell}: {first}, {second}; the last only: -4"


def br12(rank, world, folder):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage, memory, (n, at, who) in itertools.product(STAGES, MEMORIES, ((4, 3, 1), (1, 0, 0))):
        scaling = {"loss_scale": fz.loss_scale.dynamic(initial_power=1, window=1000)}
        params = {"w": torch.ones(n)}
        state, step = launch(params, fz.adam(0.1), linear, mesh, stage, memory, folder, init=scaling)
        g = torch.ones(n)
        if rank == who:
            g[at] = float("inf")
        before = whole(state)
        state, bad = step(state, rows(w=g))
        after, scale = whole(state), (float(state.loss_scale.scale), int(state.loss_scale.finite))
        state, good = step(state, rows(w=torch.ones(n)))
        moved = not same(params_of(state)["w"], before["params/w"])
        found[stage, memory, n] = (difference(after, before), bool(bad.skipped), scale, bool(good.skipped), moved)
    return found


def test_br12_one_ranks_overflow_skips_on_all_wherever_the_state_is(tmp_path):
    for found in pool(2).run(br12, tmp_path):
        assert len(found) == 24
        for cell, told in found.items():
            assert told == ([], True, (1.0, 0), False, True), cell


def net(params, batch):
    x = torch.tanh(batch @ params["w"]) * params["tied"] + params["tied"]
    return fz.Loss((x @ params["v"]).square().sum() + params["large"].mean(), batch.shape[0])


def br45(rank, world, memory, folder):
    mesh = fz.make_mesh(dp=-1)
    g = torch.Generator().manual_seed(0)
    shapes = {"w": (6, 8), "tied": (8,), "v": (8, 3), "large": (LARGE,), "unused": (5,)}
    params = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    options = {"accumulate": 2, "max_norm": 1.0}
    state, step = launch(params, fz.adamw(1e-3), net, mesh, world and 3, memory, folder, step=options)
    counted = []
    for i in range(50):
        state, metrics = step(state, torch.ones(4, 6))
        if i in (9, 49):
            del metrics
            gc.collect()
            counted.append((settled(count_and_bytes), len(os.listdir("/proc/self/fd"))))
    on_disk = leaves_on_disk()
    del state, step
    gc.collect()
    return counted, on_disk, leaves_on_disk()


def leaves_on_disk():
    return sum(issubclass(type(x), DiskLeaf) for x in gc.get_objects())


@pytest.mark.parametrize("memory", ["host", "disk"])
@pytest.mark.parametrize("world", [1, 2])
def test_br45_nothing_grows_and_nothing_stays(world, memory, tmp_path):
    for (early, late), on_disk, left in pool(world).run(br45, memory, tmp_path):
        assert early == late
        assert left == 0 and on_disk == (15 if memory == "disk" else 0), "five params and two moments of each"
    assert list(tmp_path.iterdir()) == [], "the files go with the last leaf"


SIZES = (0, 1, 7, 1023, 1025)
DTYPES = (torch.bfloat16, torch.float32, torch.int64)


def br46(rank, world, stage, memory, folder):
    """Params after three steps of Adam, and what was read back before: leaves of every size in every dtype."""
    mesh, g = fz.make_mesh(dp=-1), torch.Generator().manual_seed(1)
    made = {f"{d}-{n}".replace("torch.", ""): (d, n) for d in DTYPES for n in SIZES}
    made["bytes"] = (torch.bfloat16, (1 << 19) + 1)  # 1 MiB + 2 bytes
    params = {n: torch.randint(-99, 99, (size,), generator=g).to(d) for n, (d, size) in made.items()}

    def loss_fn(p, batch):
        return fz.Loss(sum((x.float() * batch[:, :1].mean()).square().sum() for x in p.values()), batch.shape[0])

    state, step = launch(params, fz.adam(0.5), loss_fn, mesh, stage, memory, folder)
    at_first = params_of(state)
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 2))
    return difference(at_first, params), whole(state)


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 1), (2, 3)])
def test_br46_odd_sizes_and_dtypes_make_the_round_and_train(world, stage, tmp_path):
    right = None
    for memory in MEMORIES:
        for lost, after in pool(world).run(br46, stage, memory, tmp_path):
            assert lost == []
            right = right or after
            assert difference(after, right) == [], memory


def ds37(rank, world, memory, folder):
    mesh = fz.make_mesh(dp=-1)
    params = {"a": torch.zeros(5), "b": torch.zeros(LARGE)}
    found = []
    for stage in STAGES:
        state, step = launch(params, fz.sgd(1.0), linear, mesh, stage, memory, folder, what="accum/**")
        state, first = step(state, rows(a=torch.ones(5), b=torch.ones(LARGE)))
        state, second = step(state, rows(a=torch.ones(5)))
        found.append((params_of(state), first.grad_norm, second.grad_norm))
    return found


@pytest.mark.parametrize("memory", MEMORIES)
def test_deepspeed_3_7_a_leaf_that_is_not_used_now_keeps_no_gradient_of_before(memory, tmp_path):
    for found in pool(2).run(ds37, memory, tmp_path):
        for after, first, second in found:
            assert (after["a"] == -2).all() and (after["b"] == -1).all()
            assert float(first) == pytest.approx((5 + LARGE) ** 0.5) and float(second) == pytest.approx(5**0.5)


def ds38(rank, world, folder):
    with border(0):
        return ds38_sums(folder)


def ds38_sums(folder):
    mesh, found = fz.make_mesh(dp=-1), {}
    for memory in ("host", "disk"):
        params, options = {"w": torch.zeros(10), "odd": torch.zeros(3)}, {"reduction": "sum"}
        made = fz.zero_specs(params, fz.sgd(1.0), mesh, stage=2)
        made = fz.with_memory(made, {"accum/**": memory}, folder=folder)
        state = fz.init_state(params, fz.sgd(1.0), specs=made)
        step = fz.make_step(linear, fz.sgd(1.0), specs=made, **options)
        before = HOST.bytes_moved
        for k in (1, 2, 3):
            micro = rows(w=k * torch.arange(10.0), odd=k * torch.arange(3.0))
            state = step.accumulate(state, micro)
        sums = {n: x + 0 for n, x in state.accum.grads.items()}
        cut = {n: x.bounds(x.index) for n, x in zip(sums, made.accum.layouts, strict=True)}
        moved = HOST.bytes_moved - before
        if memory == "disk":
            store = next(x.slot.store for x in state.accum.grads.values() if x.numel())
            moved = store.bytes_read + store.bytes_written
        found[memory] = sums, cut, moved
    return found


def test_deepspeed_3_8_a_rank_adds_up_its_own_range_and_moves_no_more(tmp_path):
    for found in pool(2).run(ds38, tmp_path):
        for memory, (sums, cut, moved) in found.items():
            own = 0
            for name, n in (("w", 10), ("odd", 3)):
                lo, hi = cut[name]
                assert torch.equal(sums[name], 2 * 6 * torch.arange(float(n))[lo:hi]), (memory, name)
                own += (hi - lo) * 4
            # Three micro-batches are written, and two sums read back.
            assert own <= moved - (own if memory == "disk" else 0) <= 6 * own, (memory, moved, own)


@pytest.mark.parametrize("memory", ["host", "disk"])
def test_deepspeed_3_9_params_are_the_master_rounded_once(memory, tmp_path):
    policy, mesh = fz.precision.bf16_master, fz.make_mesh()
    params = {"w": torch.randn(LARGE, generator=torch.Generator().manual_seed(0)), "b": torch.randn(3)}
    how = {"precision": policy}
    state, step = launch(
        params, fz.adam(0.01), lambda p, b: (p["w"].float() ** 2).sum() * b.sum() + (p["b"].float() ** 3).sum(),
        mesh, 0, memory, tmp_path, what="opt_state/**", step=how, init=how, **how,
    )  # fmt: skip
    for _ in range(3):
        state, _ = step(state, torch.ones(1))
        master = {n: x + 0 for n, x in state.opt_state["master"].items()}
        for name, p in state.params.items():
            assert p.dtype == torch.bfloat16 and same(p, master[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("memory", MEMORIES)
def test_deepspeed_3_10_float32_has_no_second_copy_and_an_old_state_is_not_written_to(memory, tmp_path):
    mesh, params = fz.make_mesh(), {"w": torch.randn(LARGE), "b": torch.randn(3)}
    how = {"step": {"donate": False}}
    state, step = launch(params, fz.adam(0.1), linear, mesh, 0, memory, tmp_path, **how)
    assert sorted(state.opt_state["scale_by_adam"]) == ["count", "hyperparams", "mu", "nu"], "no master beside params"
    before = whole(state)
    fz.save(tmp_path / "old", state)
    batch = rows(w=torch.ones(LARGE), b=torch.ones(3))
    new, _ = step(state, batch)
    assert not difference(whole(state), before), "the old state has changed"
    again, _ = step(state, batch)
    assert not difference(whole(again), whole(new))
    back = fz.restore(tmp_path / "old", fz.abstract_state(params, fz.adam(0.1), specs=state.specs))
    assert not difference(whole(back), before)
    moved = {n: x - before[f"params/{n}"] for n, x in params_of(new).items()}
    assert all(bool((x != 0).all()) for x in moved.values())


def read_once(rank, world, stage, folder, budget):
    with border(0):
        return bytes_read(stage, folder, budget)


def bytes_read(stage, folder, budget):
    mesh = fz.make_mesh(dp=-1)
    params = {"p": torch.eye(32) / 2, "q": torch.eye(32) / 4}

    def loss_fn(p, batch):
        return fz.Loss((batch @ p["p"] @ p["q"] @ p["p"]).sum(), batch.shape[0])

    state, step = launch(params, fz.sgd(0.0), loss_fn, mesh, stage, "disk", folder, what="params/**",
                         step={"gather_budget": budget, "accumulate": 2})  # fmt: skip
    store, seen = state.params["p"].slot.store, []
    for _ in range(2):
        before = store.bytes_read
        state, metrics = step(state, torch.ones(4, 32))
        seen.append((store.bytes_read - before, float(metrics.loss)))
    local = sum(x.local_bytes for x in state.specs.params.layouts)
    mine = sum(x.local_bytes for x in state.specs.grads.layouts)
    return seen, local, mine


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 1), (2, 3)])
def test_deepspeed_3_13_a_leaf_that_is_used_twice_is_read_once(world, stage, tmp_path):
    """The list is p, q, p and back, twice a window; the update reads once more what is updated here."""
    for seen, local, mine in pool(world).run(read_once, stage, tmp_path, None):
        regather = mine if world == 2 and stage == 1 else 0
        assert seen == [(local + mine + regather, 2.0)] * 2
    tight = 32 * 32 * 4  # one leaf at a time: more reading, the same numbers
    for seen, _, _ in pool(world).run(read_once, stage, tmp_path, tight):
        assert [x[1] for x in seen] == [2.0] * 2


@pytest.mark.parametrize("names", ["abcd", "bacd", "bdac"])
def test_norm_and_update_read_each_gradient_once_each(names, tmp_path):
    sizes = {"a": 10, "b": LARGE, "c": 20, "d": LARGE + 1}  # small and large ones in any order
    params = {f"{i}{n}": torch.zeros(sizes[n]) for i, n in enumerate(names)}
    how = {"step": {"max_norm": 1.0}}
    state, step = launch(params, fz.sgd(1.0), linear, fz.make_mesh(), 0, "disk", tmp_path, what="accum/**", **how)
    state = step.accumulate(state, rows(**{n: torch.ones_like(p) for n, p in params.items()}))
    store = next(iter(state.accum.grads.values())).slot.store
    before, nbytes = store.bytes_read, 4 * sum(sizes.values())
    step.update(state)
    assert store.bytes_read - before == 2 * nbytes
