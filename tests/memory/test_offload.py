"""Where leaves live changes nothing: every bit of the training is that of leaves on the device."""

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import funzero as fz
from funzero.core.errors import DonatedError
from funzero.executor.disk import DiskLeaf, DiskStore
from funzero.executor.stores import HOST
from tests.cases.common import border
from tests.ranks import pool

SHAPES = {"w": (37, 241), "b": (241,), "v": (241, 5), "tiny": (1,), "unused": (7,), "frozen": (5,)}
STEPS, BAD = 5, 2
OPTIMIZERS = {
    "adamw": lambda: fz.adamw(fz.schedules.warmup_cosine(0.05, warmup=2, total=STEPS), weight_decay=0.1),
    "momentum": lambda: fz.sgd(1e-4, momentum=0.9, nesterov=True),
    "lion": lambda: fz.lion(1e-2),
    "composed": lambda: fz.chain(fz.clip(0.5), fz.scale_by_adam(), fz.scale_by_learning_rate(0.01)),
    "sgd": lambda: fz.sgd(1e-4),
    "8bit": lambda: fz.adamw_8bit(0.01, block_size=64),
}


def params():
    g = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=g) for n, s in SHAPES.items()}


def loss_fn(p, batch):
    """w and v are tied: they are used twice."""
    h = torch.tanh(batch["x"] @ p["w"] + p["b"]) * p["tiny"] + p["frozen"].sum()
    h = h + 0.001 * ((h @ p["w"].T) @ p["w"] + h @ p["v"] @ p["v"].T)
    return fz.Loss(((h @ p["v"] - batch["y"]) ** 2).sum() * batch["scale"], batch["x"].shape[0])


def batch_at(i, mesh, accumulate):
    g = torch.Generator().manual_seed(i)
    whole = {"x": torch.randn(8, 37, generator=g), "y": torch.randn(8, 5, generator=g)}
    bad = {"scale": torch.tensor(float("inf") if i == BAD else 1.0)}
    return fz.data.local({**whole, **bad}, mesh, accumulate=accumulate)


WHAT = {"opt_state": ["opt_state/**"], "params": ["params/**"], "accum": ["accum/**"], "all": ["**"]}


def train(tx, mesh, stage, memory, folder, *, what="opt_state", precision=None, steps=STEPS, calls=False, **options):
    """(state, losses): each leaf of a part of the state where `memory` says; `calls`: a window of two calls."""
    trainable = {"frozen": False}
    specs = fz.zero_specs(fz.eval_shape(params()), tx, mesh, stage=stage, trainable=trainable, precision=precision)
    if memory != "device":
        specs = fz.with_memory(specs, dict.fromkeys(WHAT[what], memory), folder=folder)
    state = fz.init_state(params(), tx, key=3, specs=specs, precision=precision)
    step = fz.make_step(loss_fn, tx, specs=specs, precision=precision, **options)
    told = []
    for i in range(steps):
        batch = batch_at(i, mesh, options.get("accumulate", 1))
        if calls:
            state = step.accumulate(state, batch)
            state = step.accumulate(state, batch_at(i + STEPS, mesh, options.get("accumulate", 1)))
            state, metrics = step.update(state)
        else:
            state, metrics = step(state, batch)
        told.append((metrics.loss, metrics.grad_norm, metrics.skipped))
    return state, told


def whole(state):
    fields = {n: fz.gather(getattr(state, n), state.specs.fields[n]) for n in ("params", "opt_state")}
    return dict(zip(fz.tree.paths(fields), fz.tree.leaves(fields), strict=True)) | {"step": state.step.clone()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


WINDOWS = [{}, {"accumulate": 2, "max_norm": 0.5}, {"calls": True, "max_norm": 0.5}]


def run_parity(rank, world, folder, names, stages, part_bytes, whats=("opt_state",), bundle_bytes=64 * 1024):
    with border(bundle_bytes, part_bytes, part_bytes):
        check_parity(folder, names, stages, whats)


def check_parity(folder, names, stages, whats):
    mesh = fz.make_mesh(dp=-1)
    for name, stage, options in itertools.product(names, stages, WINDOWS):
        right, told = train(OPTIMIZERS[name](), mesh, stage, "device", folder, **options)
        for what, memory in itertools.product(whats, ("host", "disk")):
            state, also = train(OPTIMIZERS[name](), mesh, stage, memory, folder, what=what, **options)
            assert [bool(x[2]) for x in also] == [i == BAD for i in range(STEPS)]
            for one, other in zip(told, also, strict=True):
                assert all(torch.equal(x, y) or bool(x.isnan()) for x, y in zip(one, other, strict=True))
            assert_same(whole(state), whole(right))


@pytest.mark.parametrize("part_bytes", [1 << 23, 1 << 14], ids=["whole leaves", "parts"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_opt_state_elsewhere_is_the_same_training(name, part_bytes, tmp_path):
    run_parity(0, 1, tmp_path, [name], [0], part_bytes)


def test_opt_state_elsewhere_is_the_same_training_on_two_ranks(tmp_path):
    pool(2).run(run_parity, tmp_path, ["adamw", "composed"], [1, 2, 3], 1 << 14)


@pytest.mark.parametrize("bundle_bytes", [64 * 1024, 256], ids=["small leaves", "large leaves"])
@pytest.mark.parametrize("name", ["adamw", "composed", "sgd"])
def test_any_part_of_the_state_elsewhere_is_the_same_training(name, bundle_bytes, tmp_path):
    run_parity(0, 1, tmp_path, [name], [0], 1 << 14, ["params", "accum", "all"], bundle_bytes)


@pytest.mark.parametrize(
    "name, bundle_bytes, stage",
    [
        *((name, nbytes, stage) for name, nbytes in (("composed", 64 * 1024), ("adamw", 256)) for stage in range(4)),
        ("adamw", 64 * 1024, 3),
        *(pytest.param("adamw", 64 * 1024, stage, marks=pytest.mark.slow) for stage in range(3)),
    ],
)
def test_any_part_of_the_state_elsewhere_on_two_ranks(stage, name, bundle_bytes, tmp_path):
    pool(2).run(run_parity, tmp_path, [name], [stage], 1 << 14, ["params", "accum", "all"], bundle_bytes)


@pytest.mark.parametrize("policy", ["bf16_master", "bf16_pure"])
@pytest.mark.parametrize("memory", ["host", "disk"])
def test_low_precision_elsewhere(policy, memory, tmp_path):
    policy, mesh = getattr(fz.precision, policy), fz.make_mesh()
    runs = [train(fz.adamw(0.05), mesh, 0, m, tmp_path, precision=policy)[0] for m in ("device", memory)]
    assert_same(*map(whole, runs))


def test_leaves_are_where_the_specs_say(tmp_path):
    state, _ = train(OPTIMIZERS["adamw"](), fz.make_mesh(), 0, "disk", tmp_path, steps=1)
    for layout, leaf in zip(state.specs.opt_state.layouts, fz.tree.leaves(state.opt_state), strict=True):
        assert isinstance(leaf, DiskLeaf) == bool(layout.shape), layout.path
        assert (layout.spec.memory == "disk") == bool(layout.shape)
    store = next(x.slot.store for x in fz.tree.leaves(state.opt_state) if isinstance(x, DiskLeaf))
    moments = 2 * sum(torch.Size(s).numel() for n, s in SHAPES.items() if n != "frozen") * 4
    used = moments - 2 * SHAPES["unused"][0] * 4
    # `init_state` writes all of them; the step reads and writes those of the leaves that took part.
    assert (store.bytes_read, store.bytes_written) == (used, moments + used)
    before = HOST.bytes_moved
    train(OPTIMIZERS["adamw"](), fz.make_mesh(), 0, "host", tmp_path, steps=1)
    assert HOST.bytes_moved - before == moments + 2 * used


def test_a_skipped_step_touches_no_file(tmp_path):
    tx, mesh = OPTIMIZERS["adamw"](), fz.make_mesh()
    specs = fz.with_memory(fz.zero_specs(params(), tx, mesh, stage=0), {"opt_state/**": "disk"}, folder=tmp_path)
    state = fz.init_state(params(), tx, specs=specs)
    store = state.opt_state["scale_by_adam"]["mu"]["w"].slot.store
    before, moved = whole(state), store.bytes_written
    state, metrics = fz.make_step(loss_fn, tx, specs=specs)(state, batch_at(BAD, mesh, 1))
    assert bool(metrics.skipped) and store.bytes_written == moved
    assert_same(whole(state), before)


def test_an_old_state_raises_and_a_kept_one_stays(tmp_path):
    tx, mesh = OPTIMIZERS["adamw"](), fz.make_mesh()
    specs = fz.with_memory(fz.zero_specs(params(), tx, mesh, stage=0), {"opt_state/**": "disk"}, folder=tmp_path)
    state = fz.init_state(params(), tx, specs=specs)
    mu = state.opt_state["scale_by_adam"]["mu"]["w"]
    copy = mu.detach()
    step = fz.make_step(loss_fn, tx, specs=specs)
    new, _ = step(state, batch_at(0, mesh, 1))
    with pytest.raises(DonatedError, match="donated to step"):
        mu.sum()
    with pytest.raises(DonatedError, match=r"opt_state/scale_by_adam/mu/w: this leaf was on disk and has been updated"):
        copy.sum()
    keep = fz.make_step(loss_fn, tx, specs=specs, donate=False)
    before = whole(new)
    newer, _ = keep(new, batch_at(1, mesh, 1))
    assert_same(whole(new), before)
    again, _ = keep(new, batch_at(1, mesh, 1))
    assert_same(whole(again), whole(newer))


def test_a_leaf_on_disk_is_a_tensor_that_is_read(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    specs = fz.zero_specs({"w": x}, fz.adam(0.1), fz.make_mesh(), stage=0)
    specs = fz.with_memory(specs, {"opt_state/**": "disk"}, folder=tmp_path)
    leaf = fz.init_state({"w": x}, fz.adam(0.1), specs=specs).opt_state["scale_by_adam"]["mu"]["w"]
    assert (leaf.shape, leaf.dtype, leaf.numel(), leaf.device) == (x.shape, x.dtype, 12, x.device)
    assert torch.equal(leaf + x, x) and leaf.tolist() == [[0.0] * 4] * 3 and float(leaf[1, 2]) == 0.0
    assert torch.equal(leaf, torch.zeros(3, 4)) and leaf.numpy().sum() == 0
    assert "DiskLeaf(opt_state/scale_by_adam/mu/w" in repr(leaf)


def test_save_restore_and_reshard_across_memories(tmp_path):
    tx, mesh = OPTIMIZERS["adamw"](), fz.make_mesh()
    right = whole(train(tx, mesh, 0, "device", tmp_path)[0])
    state, _ = train(tx, mesh, 0, "disk", tmp_path)
    fz.save(tmp_path / "a", state)
    assert_same(whole(state), right)
    plain = fz.zero_specs(params(), tx, mesh, stage=0, trainable={"frozen": False})
    for memory in ("device", "host", "disk"):
        specs = fz.with_memory(plain, {"opt_state/**": memory}, folder=tmp_path)
        like = fz.abstract_state(params(), tx, specs=specs)
        assert_same(whole(fz.restore(tmp_path / "a", like)), right)
        moved = fz.reshard(state, specs)
        assert_same(whole(moved), right)
        assert isinstance(moved.opt_state["scale_by_adam"]["mu"]["w"], DiskLeaf) == (memory == "disk")


def test_files_go_with_the_last_state(tmp_path):
    state, _ = train(OPTIMIZERS["adamw"](), fz.make_mesh(), 0, "disk", tmp_path, steps=1)
    assert len(list(tmp_path.iterdir())) == 1
    store = next(x.slot.store for x in fz.tree.leaves(state.opt_state) if isinstance(x, DiskLeaf))
    size = store.file.size
    again, _ = train(OPTIMIZERS["adamw"](), fz.make_mesh(), 0, "disk", tmp_path, steps=3)
    assert store.file.size == 2 * size, "rooms are used again"
    del state, again, store
    assert list(tmp_path.iterdir()) == []


def test_a_refused_update_keeps_what_is_on_disk(tmp_path):
    tx, mesh = fz.adam(float("inf")), fz.make_mesh()
    specs = fz.with_memory(fz.zero_specs(params(), tx, mesh, stage=0), {"opt_state/**": "disk"}, folder=tmp_path)
    state = fz.init_state(params(), tx, specs=specs)
    before = whole(state)
    state, metrics = fz.make_step(loss_fn, tx, specs=specs)(state, batch_at(0, mesh, 1))
    assert bool(metrics.skipped)
    assert_same(whole(state), before)


def test_globs_and_kinds_that_are_wrong(tmp_path):
    specs = fz.zero_specs(params(), fz.adam(0.1), fz.abstract_mesh(dp=2), stage=1)
    with pytest.raises(ValueError, match=r"a memory is one of .* got 'nvme'"):
        fz.with_memory(specs, {"opt_state/**": "nvme"})
    with pytest.raises(ValueError, match="opt_stat"):
        fz.with_memory(specs, {"opt_stat/**": "host"})
    assert not any(x.spec.memory == "disk" for x in fz.with_memory(specs, {"opt_state/**": "host"}).opt_state.layouts)
    assert dataclasses.replace(specs) == specs


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_a_temporary_folder_in_memory_is_told(monkeypatch):
    from funzero.executor import stores

    monkeypatch.setattr("tempfile.tempdir", "/dev/shm")
    stores.default_folder.cache_clear()
    with pytest.warns(UserWarning, match="which is in memory"):
        folder = stores.default_folder()
    os.rmdir(folder)
    stores.default_folder.cache_clear()


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from funzero.executor.disk import DiskStore
store = DiskStore(Path(sys.argv[1]))
store.start_write(store.slot(100_000), torch.ones(25_000)).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_goes_and_a_living_one_stays(tmp_path):
    living = DiskStore(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    left = sorted(x.name for x in tmp_path.iterdir())
    assert len(left) == 2 and living.folder.name in left
    other = DiskStore(tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == sorted([living.folder.name, other.folder.name])


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    from funzero.executor import stores

    tx, made = fz.adam(0.1), {"w": torch.ones(100, 10)}
    specs = fz.with_memory(fz.zero_specs(made, tx, fz.make_mesh(), stage=0), {"**": "disk"}, folder=tmp_path / "new")
    monkeypatch.setattr(stores, "free_bytes", lambda folder: 15_999)  # params, two moments and an accumulator
    with pytest.raises(OSError, match=r"new: this rank's leaves on disk take 16000 bytes, 15999 are free; free some"):
        fz.init_state(made, tx, specs=specs)
    assert list((tmp_path / "new").iterdir()) == []
    monkeypatch.setattr(stores, "free_bytes", lambda folder: 16_000)
    fz.init_state(made, tx, specs=specs)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in the middle of the backward")


@pytest.mark.parametrize("memory", ["host", "disk"])
@pytest.mark.parametrize("donate", [True, False])
def test_a_call_that_fails_in_mid_window_spends_what_it_wrote_over_and_nothing_else(memory, donate, tmp_path):
    made = {"a": torch.ones(20_000), "b": torch.ones(20_000)}
    tx, mesh = fz.sgd(1.0), fz.make_mesh()
    specs = fz.with_memory(fz.zero_specs(made, tx, mesh, stage=0), {"accum/**": memory}, folder=tmp_path)

    def loss(p, batch):  # the gradient of b has landed when that of a fails
        first = Fails.apply(p["a"]) if batch.numel() == 2 else p["a"]
        return fz.Loss((first * 2).sum() + (p["b"] * 3).sum(), 1)

    step = fz.make_step(loss, tx, specs=specs, donate=donate)
    state = fz.init_state(made, tx, specs=specs)
    with pytest.raises(RuntimeError, match="in the middle"):
        step(state, torch.ones(2))  # of a window that is not the state's nothing is lost
    fresh = step.accumulate(state, torch.ones(1))
    with pytest.raises(RuntimeError, match="in the middle"):
        step.accumulate(fresh, torch.ones(2))
    if donate:
        with pytest.raises(fz.SpentStateError, match="spent"):
            step.update(fresh)
        return
    after, _ = step.update(fresh)
    assert (after.params["a"] == -1).all() and (after.params["b"] == -2).all()


def test_a_slot_is_not_given_away_while_bytes_of_it_are_under_way(tmp_path, monkeypatch):
    store, gate = DiskStore(tmp_path), threading.Event()
    write = store.file.write
    monkeypatch.setattr(store.file, "write", lambda data, at: gate.wait(30) and write(data, at))
    slot = store.slot(4096)
    at, under_way = slot.at, store.start_write(slot, torch.ones(1024))
    del slot
    other = store.slot(4096)
    assert other.at != at, "the late write would have gone into another leaf"
    gate.set()
    under_way.wait()
    deadline = time.monotonic() + 30
    while store.slot(4096).at != at:  # a worker lets go of what it did a moment after it is done
        assert time.monotonic() < deadline
        time.sleep(0.01)
