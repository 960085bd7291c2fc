"""What goes wrong beside the disk: errors of any kind on one rank, ranks that are gone, names, windows, files left open."""

import os
import threading
import time
import types

import pytest
import torch

import funzero as fz
from funzero.checkpoint import disk
from funzero.checkpoint import restore as restoring
from funzero.checkpoint import save as saving
from tests.cases.common import difference
from tests.checkpoint.common import batch, everything, make
from tests.ranks import pool


def state_of(value=1.0, **leaves):
    return fz.init_state({"w": torch.full((3,), value), **leaves}, fz.sgd(0.1))


def errors_run(rank, world, root):
    """Errors that are no OSError, on the last rank: while the snapshot is taken, written, read; in the user's functions."""
    state, step, like = make(2)
    out, manager = {}, fz.CheckpointManager(root, every_steps=1)

    def attempt(name, call):
        begin = time.monotonic()
        try:
            call()
            out[name] = "nothing raised"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - begin < 20, f"{name}: the peers were left waiting"

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    for name, module, function, call in (
        ("take", saving, "_part", lambda: manager.save(state)),
        ("take in the foreground", saving, "_part", lambda: fz.save(f"{root}/direct", state)),
        ("write", disk, "write_file", lambda: fz.save(f"{root}/direct", state)),
    ):
        real = getattr(module, function)
        if rank == world - 1:
            setattr(module, function, broken)
        try:
            attempt(name, call)
            attempt(f"{name}, wait", manager.wait)
        finally:
            setattr(module, function, real)
    fz.save(f"{root}/good", state)
    real = restoring.Source.local
    if rank == world - 1:
        restoring.Source.local = broken
    try:
        attempt("restore", lambda: fz.restore(f"{root}/good", like))
    finally:
        restoring.Source.local = real
    state, _ = step(state, batch(state.specs.mesh))
    attempt("extra", lambda: manager.after_step(state, extra=broken if rank == world - 1 else dict))
    attempt("metrics", lambda: manager.save(state, metrics={"loss": "a" if rank == world - 1 else 1.0}))
    manager.save(state)
    manager.wait()
    return out, manager.steps(), sorted(os.listdir(root))


@pytest.mark.parametrize("world", (1, 2))
def test_an_error_of_any_kind_on_one_rank_is_raised_on_all(tmp_path, world):
    for rank, (out, steps, left) in enumerate(pool(world).run(errors_run, str(tmp_path))):
        for name in ("take, wait", "take in the foreground", "write", "restore", "extra"):
            assert "RuntimeError" in out[name] and "out of memory" in out[name], f"{name}: {out[name]}"
        assert "ValueError" in out["metrics"], out["metrics"]
        assert steps == [1] and (rank or left == ["good", "step-00000001"])


def test_a_save_is_given_up_when_a_rank_is_gone(tmp_path):
    """The first rank waits for parts; it stops when the mesh is dead, and a while after the script has ended."""
    comm = types.SimpleNamespace(dead=None)
    mesh = types.SimpleNamespace(rank=0, world=2, comm=comm)
    draft = saving.Draft(tmp_path, tmp_path / "s", mesh)
    threading.Timer(0.2, lambda: setattr(comm, "dead", "rank 1: died")).start()
    with pytest.raises(OSError, match="given up"):
        saving.await_parts(draft, threading.Event())


def test_a_save_does_not_outlive_its_script_for_long(tmp_path, monkeypatch):
    mesh = types.SimpleNamespace(rank=0, world=2, comm=None)
    ended = types.SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(saving.threading, "main_thread", lambda: ended)
    monkeypatch.setattr(saving, "AFTER_THE_END_S", 0.2)
    with pytest.raises(OSError, match="given up"):
        saving.await_parts(saving.Draft(tmp_path, tmp_path / "s", mesh), threading.Event())


def running(params, b, buffers, key):
    rows = len(b["x"])
    loss = (params["w"] * b["x"]).sum()
    return fz.Loss(
        loss, weight=float(b["weight"]), buffers={"seen": buffers["seen"] + rows, "most": buffers["most"] * 2}
    )


def weightless(rank, world, root):
    """A window that is saved before anything in it has a weight; and one with an infinity in a buffer."""
    params, tx = {"w": torch.ones(3)}, fz.sgd(0.1)
    buffers = {"seen": torch.zeros(()), "most": torch.tensor(torch.inf)}
    specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=2, buffers=fz.eval_shape(buffers))
    state = fz.init_state(params, tx, specs=specs, buffers=buffers)
    step = fz.make_step(running, tx, specs=specs, donate=False)
    first, second = ({"x": torch.ones(2, 3), "weight": torch.tensor(w)} for w in (0.0, 2.0))
    opened = step.accumulate(state, first)
    fz.save(f"{root}/s", opened)
    restored = fz.restore(f"{root}/s", state)
    ends = [step.update(step.accumulate(x, second)) for x in (opened, restored)]
    return [(everything(s) | {f"b/{n}": x for n, x in s.buffers.items()}, m.skipped) for s, m in ends]


@pytest.mark.parametrize("world", (1, 2))
def test_a_window_without_weight_comes_back(tmp_path, world):
    for (straight, skipped), (restored, also) in pool(world).run(weightless, str(tmp_path)):
        assert not skipped and not also and not difference(restored, straight)


def test_a_window_that_does_not_fit_is_left_out_by_the_loose_mode(tmp_path):
    tx = fz.sgd(0.1)
    step = fz.make_step(lambda p, b: sum((x * b).sum() for x in p.values()), tx)
    fz.save(tmp_path / "s", step.accumulate(state_of(), torch.ones(1)))
    like = state_of(7.0, new=torch.full((1,), 7.0))
    state, report = fz.restore(tmp_path / "s", like, strict=False)
    assert report.missing == ("accum/grads/new", "params/new") and state.accum == ()
    assert state.params["w"].tolist() == [1.0] * 3 and state.params["new"].tolist() == [7.0]
    with pytest.raises(ValueError, match="missing: accum/grads/new"):
        fz.restore(tmp_path / "s", like)


def test_left_overs_of_other_names_are_left_alone(tmp_path):
    mine, others = tmp_path / ".model.0123abcd.tmp", tmp_path / ".model.ema.0123abcd.tmp"
    for folder in (mine, others):
        folder.mkdir()
    fz.save(tmp_path / "model", state_of())
    assert others.exists() and not mine.exists()


def test_an_exchange_in_two_steps_that_was_cut_short_is_undone(tmp_path):
    """Without renameat2 there is a moment in which the old checkpoint has another name."""
    fz.save(tmp_path / "s", state_of(5.0))
    os.rename(tmp_path / "s", tmp_path / ".s.0123abcd.tmp.old")
    with pytest.raises(FileExistsError):
        fz.save(tmp_path / "s", state_of(6.0))
    assert fz.restore(tmp_path / "s", state_of()).params["w"][0] == 5.0 and os.listdir(tmp_path) == ["s"]


def test_without_renameat2(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.ctypes, "CDLL", lambda *a, **k: object())
    for value in (1.0, 2.0):
        fz.save(tmp_path / "s", state_of(value), overwrite=True)
    assert fz.restore(tmp_path / "s", state_of()).params["w"][0] == 2.0 and os.listdir(tmp_path) == ["s"]


def test_a_link_is_not_overwritten(tmp_path):
    fz.save(tmp_path / "s", state_of())
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with pytest.raises(FileExistsError, match="is a link"):
        fz.save(tmp_path / "link", state_of(), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["link", "s"]


@pytest.mark.parametrize("name", ["a/b", "a%2Fb", "w[0:1]", "ü", "a b\n", "."])
def test_odd_names(tmp_path, name):
    state = state_of(**{name: torch.arange(3.0)})
    fz.save(tmp_path / "s", state)
    assert fz.restore(tmp_path / "s", state).params[name].tolist() == [0, 1, 2]


def test_names_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a name that is no text"):
        fz.save(tmp_path / "s", state_of(**{"a\udce9": torch.ones(1)}))
    with pytest.raises(TypeError, match="extra"):
        fz.save(tmp_path / "s", state_of(), extra="\udce9")
    assert os.listdir(tmp_path) == []


def handles():
    return len(os.listdir("/proc/self/fd"))


def test_no_file_stays_open(tmp_path, monkeypatch):
    state = state_of()
    fz.save(tmp_path / "s", state)
    fz.restore(tmp_path / "s", state)
    real, before = os.pwrite, handles()

    def full(handle, data, at):
        raise OSError(28, "No space left on device")

    for _ in range(5):
        fz.save(tmp_path / "s", state, overwrite=True)
        fz.restore(tmp_path / "s", state)
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwrite", full)
            with pytest.raises(OSError, match="No space"):
                fz.save(tmp_path / "t", state)
    import gc

    gc.collect()
    assert os.pwrite is real and handles() <= before


def many_files(rank, world, path, load):
    params = {f"w{i}": torch.full((8,), float(i)) for i in range(6)}
    specs = fz.zero_specs(params, fz.sgd(0.1), fz.make_mesh(dp=-1), stage=3)
    state = fz.init_state(params, fz.sgd(0.1), specs=specs)
    if not load:
        fz.save(path, state)
        return 0
    before, restoring.OPEN_FILES = restoring.OPEN_FILES, 1
    try:
        return difference(everything(fz.restore(path, state)), everything(state))
    finally:
        restoring.OPEN_FILES = before


def test_more_files_than_may_be_open(tmp_path):
    pool(4).run(many_files, str(tmp_path / "s"), False)
    assert pool(1).run(many_files, str(tmp_path / "s"), True) == [[]]


def held_bytes(rank, world, path, sizes, rules, stage):
    mesh = fz.make_mesh(**sizes)
    params = {"w": torch.arange(4096.0).view(1, 4096)}
    specs = fz.zero_specs(params, fz.sgd(0.1), mesh, stage=stage, rules=rules)
    state = fz.init_state(params, fz.sgd(0.1), specs=specs)
    if not os.path.exists(path):
        mesh.gather_host(torch.zeros(1))
        fz.save(path, state)
    x = fz.restore(path, state).params["w"]
    return x.nbytes, x.untyped_storage().nbytes()


def test_a_restored_part_holds_no_more_memory_than_it_has(tmp_path):
    path = str(tmp_path / "s")
    pool(4).run(held_bytes, path, {"dp": 1, "tp": 4}, {"w": fz.P(None, "tp")}, 0)
    for nbytes, held in pool(4).run(held_bytes, path, {"dp": 4}, None, 3):
        assert nbytes == held == 4096


def test_containers_without_leaves_are_compared(tmp_path):
    fz.save(tmp_path / "s", state_of(extra={}))
    with pytest.raises(ValueError, match="params/extra: expected a list, the checkpoint has a dict"):
        fz.restore(tmp_path / "s", state_of(extra=[]))
