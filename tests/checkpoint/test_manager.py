"""The manager: which checkpoints stay, when one is made, what a signal does, what ranks agree on."""

import os
import signal
import threading
import time

import pytest
import torch

import funzero as fz
from funzero.checkpoint import disk
from tests.cases.common import difference
from tests.checkpoint.common import batch, everything, make
from tests.ranks import pool


def state_at(step, value=1.0):
    state = fz.init_state({"w": torch.full((3,), value)}, fz.sgd(0.1))
    return fz.tree.map_with_path(lambda p, x: torch.tensor(step, dtype=torch.int32) if p == "step" else x, state)


@pytest.mark.parametrize("background", (False, True))
def test_the_last_the_round_and_the_best_stay(tmp_path, background):
    manager = fz.CheckpointManager(tmp_path, keep=2, keep_every=4, best=("loss", "min"), background=background)
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0, 6: 1.0, 7: 9.0}
    for step, loss in losses.items():
        manager.save(state_at(step), metrics={"loss": loss})
    manager.wait()
    assert manager.steps() == [4, 6, 7] and manager.latest() == 7 and manager.best_step() == 6
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000006", "step-00000007"]
    manager.save(state_at(8))  # without the metric
    manager.wait()
    assert manager.steps() == [4, 6, 7, 8] and manager.best_step() == 6
    largest = fz.CheckpointManager(tmp_path, best=("loss", "max"))
    assert largest.best_step() == 7 and fz.CheckpointManager(tmp_path).best_step() is None


def test_the_same_step_again(tmp_path):
    manager = fz.CheckpointManager(tmp_path, background=False)
    manager.save(state_at(1, 1.0), extra={"n": 1})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        manager.save(state_at(1, 2.0))
    manager.save(state_at(1, 3.0), overwrite=True, extra={"n": 3})
    assert manager.restore(state_at(0)).params["w"].tolist() == [3.0] * 3 and manager.extra() == {"n": 3}


def test_nothing_there(tmp_path):
    manager = fz.CheckpointManager(tmp_path / "none")
    assert manager.latest() is None and manager.steps() == []
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        manager.restore(state_at(0))
    manager.wait()


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        fz.CheckpointManager(tmp_path, keep=0)
    with pytest.raises(ValueError, match="best is"):
        fz.CheckpointManager(tmp_path, best=("loss", "least"))


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path):
    for name in ("step-1", "step-00000001.old", "notes"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step-00000009").mkdir()  # no manifest: not complete
    manager = fz.CheckpointManager(tmp_path, keep=1)
    for step in (1, 2):
        manager.save(state_at(step))
    manager.wait()
    assert manager.steps() == [2] and manager.latest() == 2
    assert {"step-1", "step-00000001.old", "notes", "step-00000009"} < set(os.listdir(tmp_path))


def test_a_restore_of_options_and_steps(tmp_path):
    manager = fz.CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(state_at(step, float(step)))
    assert manager.restore(state_at(0), step=1).params["w"].tolist() == [1.0] * 3
    state, report = manager.restore(state_at(0), strict=False)
    assert int(state.step) == 2 and report.lines() == []


def test_the_snapshot_is_made_before_save_returns_and_memory_is_bounded(tmp_path, monkeypatch):
    gate, running, real = threading.Event(), [], disk.write_file

    def held(path, items):
        running.append(path)
        gate.wait(20)
        return real(path, items)

    monkeypatch.setattr(disk, "write_file", held)
    manager, state = fz.CheckpointManager(tmp_path), state_at(1)
    manager.save(state)
    state.params["w"].fill_(7.0)
    second = threading.Thread(target=lambda: manager.save(state_at(2)))
    second.start()
    time.sleep(0.2)
    assert len(running) == 1 and second.is_alive(), "a second save waits for the first"
    gate.set()
    second.join()
    assert manager.restore(state_at(0), step=1).params["w"].tolist() == [1.0] * 3


def policy_run(rank, world, root):
    """Saves every second step, and at once when a signal reaches one rank."""
    state, step, like = make(3)
    manager = fz.CheckpointManager(root, every_steps=2)
    calls, seen = [], []
    handler = signal.getsignal(signal.SIGTERM)
    with manager.on_signal():
        for t in range(5):
            state, metrics = step(state, batch(state.specs.mesh, t))
            if t == 4 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            stop = manager.after_step(
                state, metrics={"loss": float(metrics.loss)}, extra=lambda: calls.append(1) or {"t": 1}
            )
            seen.append(stop)
            if stop:
                break
    restored = signal.getsignal(signal.SIGTERM) is handler
    return (
        seen,
        manager.steps(),
        len(calls),
        restored,
        everything(state),
        everything(manager.restore(like)),
        manager.extra(),
    )


@pytest.mark.parametrize("world", (1, 2))
def test_after_a_step_it_saves_when_it_is_time_and_when_a_signal_came(tmp_path, world):
    for seen, steps, calls, restored, state, loaded, extra in pool(world).run(policy_run, str(tmp_path)):
        assert seen == [False] * 4 + [True] and steps == [2, 4, 5], "SIGTERM on one rank stops all, with a save"
        assert calls == 3 and restored and extra == {"t": 1}
        assert not difference(loaded, state)


def test_time_decides_on_the_first_rank(tmp_path):
    manager = fz.CheckpointManager(tmp_path, every_s=0.2, background=False)
    assert not manager.after_step(state_at(1)) and manager.steps() == []
    time.sleep(0.25)
    manager.after_step(state_at(2))
    manager.after_step(state_at(3))
    assert manager.steps() == [2]


def test_a_second_interrupt_is_an_interrupt(tmp_path):
    manager = fz.CheckpointManager(tmp_path)
    with pytest.raises(KeyboardInterrupt), manager.on_signal():
        os.kill(os.getpid(), signal.SIGINT)
        assert manager.after_step(state_at(1)), "the first one asks for a save"
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert manager.steps() == [1]


def run_end(path):
    """A script that ends without waiting."""
    fz.CheckpointManager(path).save(state_at(1))


def test_a_script_that_ends_waits_for_its_save(tmp_path):
    import subprocess
    import sys

    code = f"from tests.checkpoint.test_manager import run_end; run_end({str(tmp_path / 'run')!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert fz.CheckpointManager(tmp_path / "run").steps() == [1]


def test_a_run_that_goes_back_goes_on_from_there(tmp_path):
    """The checkpoint that was made last is the latest, and stays, though others have higher steps."""
    manager = fz.CheckpointManager(tmp_path, keep=3, background=False)
    for step in (8, 9, 10):
        manager.save(state_at(step))
    manager.save(state_at(9, 5.0), overwrite=True)
    assert manager.latest() == 9 and manager.restore(state_at(0)).params["w"][0] == 5.0
    manager.save(state_at(5))
    assert manager.latest() == 5 and manager.steps() == [5, 9, 10]


def test_a_nan_is_not_the_best(tmp_path):
    manager = fz.CheckpointManager(tmp_path, keep=1, best=("loss", "min"), background=False)
    for step, loss in enumerate((float("nan"), 0.1, 5.0, 6.0)):
        manager.save(state_at(step), metrics={"loss": loss})
    assert manager.steps() == [1, 3] and manager.best_step() == 1


def test_a_damaged_one_does_not_stop_the_others(tmp_path):
    manager = fz.CheckpointManager(tmp_path, keep=2, best=("loss", "min"), background=False)
    manager.save(state_at(1), metrics={"loss": 1.0})
    (manager.path(1) / "manifest.json").write_text("{}")
    for step in (2, 3, 4):
        manager.save(state_at(step), metrics={"loss": float(step)})
    assert manager.steps() == [2, 3, 4] and manager.best_step() == 2


def test_what_cannot_be_removed_is_no_failed_save(tmp_path, monkeypatch):
    manager = fz.CheckpointManager(tmp_path, keep=1, background=False)
    manager.save(state_at(1))
    real = os.rename
    refuse = lambda a, b: real(a, b) if "step-00000001" not in str(a) else os.unlink("/nothing/there")  # noqa: E731
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="is complete, but older ones could not be removed"):
        manager.save(state_at(2))
    assert manager.latest() == 2


def test_a_signal_saves_even_if_the_last_save_failed(tmp_path, monkeypatch):
    manager = fz.CheckpointManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_file", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        manager.save(state_at(1))
        manager._job._thread.join()
    with manager.on_signal(signal.SIGTERM), pytest.raises(OSError, match="No space left"):
        os.kill(os.getpid(), signal.SIGTERM)
        manager.after_step(state_at(2))
    assert manager.steps() == [2]
    with manager.on_signal(signal.SIGTERM):
        assert not manager.after_step(state_at(3)), "the signal of the first block is over"


def test_a_step_that_does_not_move_is_saved_once(tmp_path):
    manager = fz.CheckpointManager(tmp_path, every_steps=2, background=False)
    made = []
    for _ in range(3):  # skipped steps
        manager.after_step(state_at(2), extra=lambda: made.append(1))
    assert len(made) == 1 and manager.steps() == [2]


def test_the_order_survives_a_copy_that_changes_the_times_of_files(tmp_path):
    manager = fz.CheckpointManager(tmp_path, background=False)
    for step in (1, 2, 3):
        manager.save(state_at(step))
    for age, step in enumerate((3, 1, 2)):
        os.utime(manager.path(step) / "manifest.json", (age, age))
    assert manager.latest() == 3
    (manager.path(3) / "manifest.json").write_text("{}")
    with pytest.raises(fz.CheckpointError, match=r"step-00000003.*damaged"):
        manager.restore(state_at(0))
