import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import funzero as fz
from funzero.cli import main as command_line
from funzero.cli import run_folder
from funzero.cli.corpus import heldout_rows, load_corpus
from funzero.cli.demo_worker import load_example
from tests.ranks import pool

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0  # on a machine that does much else; alone, no run here takes 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"m{i}.py").write_text(f"def add_{i}(x):\n    return x + {i}\n\n\n" * 5)
    return folder


@contextlib.contextmanager
def demo(out: Path, *options: str) -> Iterator[subprocess.Popen]:
    """A running demo; what is left of it at the end of the block is killed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (out.parent / f"{out.name}.txt").open("w") as text:
        command = [sys.executable, "-m", "funzero", "demo", "--device", "cpu", "--out", str(out), *options]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=text, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                for pid in rank_pids(out):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()


def finished(out: Path, *options: str) -> tuple[int, str]:
    with demo(out, *options) as process:
        return process.wait(LIMIT_S), said(out)


def said(out: Path) -> str:
    return (out.parent / f"{out.name}.txt").read_text()


def rank_pids(out: Path) -> list[int]:
    return [json.loads(path.read_text()) for path in (out / run_folder.RANKS).glob("[0-9]*")]


def records(out: Path) -> list[dict]:
    path = out / run_folder.METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, "the demo ended first"
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.005)


def from_checkpoint(out: Path, steps: int) -> tuple[torch.nn.Module, fz.TrainState]:
    example = load_example()
    model = example.GPT()
    return model, example.setup(fz.make_mesh(), model, run_folder.checkpoints(out), steps=steps, stage=0)[2]


def trained(rank, world, root, folder, steps, width, stop_at=None):
    """The whole params after the example's training, which stops, saves and goes on at `stop_at`."""
    example, text, mesh = load_example(), load_corpus(root).train, fz.make_mesh()
    torch.manual_seed(0)
    model = example.GPT(width)
    checkpoints = run_folder.checkpoints(folder)
    for end in (stop_at, steps) if stop_at else (steps,):
        _, step, state = example.setup(mesh, model, checkpoints, steps=steps)
        for state, metrics in example.train(mesh, step, state, text, steps=steps):  # noqa: B020
            if checkpoints.after_step(state, last=int(metrics.step) == end) or int(metrics.step) == end:
                break
    return fz.gather(state.params, state.specs.params)


def test_a_stopped_and_resumed_training_gives_the_same_bits(corpus, tmp_path):
    straight = pool(2).run(trained, corpus, tmp_path / "a", 12, 32)[0]
    resumed = pool(2).run(trained, corpus, tmp_path / "b", 12, 32, 6)[0]
    assert run_folder.checkpoints(tmp_path / "b").steps() == [6, 12]
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_short_run_leaves_all_that_it_promises(corpus, tmp_path):
    out = tmp_path / "run"
    code, text = finished(out, "--steps", "12", "--corpus", str(corpus))
    assert code == 0, text
    own = next(r["heldout_bits"] for r in records(out) if "heldout_bits" in r)
    assert [r["step"] for r in records(out) if "loss" in r] == list(range(1, 13))
    assert (out / run_folder.CURVE).read_bytes().startswith(b"\x89PNG")
    assert run_folder.checkpoints(out).steps() == [12]
    config = json.loads((out / run_folder.CONFIG).read_text())
    assert (config["steps"], config["seed"], config["ranks"], config["stage"]) == (12, 0, 2, 3)
    assert "byte trigram" in text and "this GPT" in text and f"{own:.3f} bits per byte" in text
    assert (out / run_folder.LOG).read_text() == ""

    model, state = from_checkpoint(out, 12)
    tokens, labels = heldout_rows(load_corpus(corpus).heldout, load_example().CONTEXT)
    logits = fz.call(lambda params: fz.functional_call(model, params, tokens), state)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / math.log(2)
    assert own == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_interrupt_saves_and_resume_gives_the_same_bits(corpus, tmp_path):
    out, steps = tmp_path / "run", 40
    with demo(out, "--steps", str(steps), "--corpus", str(corpus)) as process:
        wait_for(lambda: len(records(out)) >= 3, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130, said(out)
    stopped_at = run_folder.checkpoints(out).latest()
    assert 3 <= stopped_at < steps
    assert f"step-{stopped_at:08d}" in said(out) and "--resume" in said(out)

    code, text = finished(out, "--resume")
    assert code == 0, text
    assert [r["step"] for r in records(out) if "loss" in r] == list(range(1, steps + 1))
    straight = pool(2).run(trained, corpus, tmp_path / "straight", steps, 128)[0]
    resumed = from_checkpoint(out, steps)[1].params
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_second_interrupt_quits_at_once(corpus, tmp_path):
    out = tmp_path / "run"
    with demo(out, "--steps", "100000", "--corpus", str(corpus)) as process:
        wait_for(lambda: records(out), process)
        pids = rank_pids(out)
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # ranks that no longer listen
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(15.0) == 130
    limit = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < limit, "a rank lives on"
        time.sleep(0.05)  # the kernel and the first process of the machine take a moment


@pytest.mark.slow
def test_ranks_save_and_stop_when_the_launcher_is_gone(corpus, tmp_path):
    out = tmp_path / "run"
    with demo(out, "--steps", "100000", "--corpus", str(corpus)) as process:
        wait_for(lambda: records(out), process)
        process.kill()
        process.wait()
        limit = time.monotonic() + LIMIT_S
        while not run_folder.checkpoints(out).steps():
            assert time.monotonic() < limit, "nothing was saved"
            time.sleep(0.05)


def refused(capsys, *options: str) -> str:
    try:
        code = command_line.main(["demo", *options])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stage", "7"], "argument --stage: invalid choice: 7 (choose from 0, 1, 2, 3)"),
        (["--ranks", "0"], "argument --ranks: expected a whole number of at least 1, got '0'"),
        (["--ranks", "3"], "--ranks: the 8 rows of a step do not divide over 3 ranks; choose from [1, 2, 4, 8]"),
        (["--steps", "many"], "argument --steps: expected a whole number of at least 1, got 'many'"),
        (["--setps", "3"], "unrecognized arguments: --setps 3"),
        (["--resume"], "--resume: there is no checkpoint in"),
        (["--corpus", "nowhere"], "found no folder at 'nowhere'"),
    ],
)
def test_mistakes_are_named(options, message, tmp_path, capsys):
    assert message in refused(capsys, *options, "--out", str(tmp_path / "run"))


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setitem(command_line.NEEDED, "demo", ("rich", "no_such_package"))
    assert "needs no_such_package; run `pip install funzero[cli]`" in refused(capsys)


def complete(out: Path, step: int) -> None:
    """A folder that looks like a checkpoint."""
    path = run_folder.checkpoints(out).path(step)
    path.mkdir()
    (path / "manifest.json").write_text("{}")


def test_resume_refuses_another_run(corpus, tmp_path, capsys):
    complete(tmp_path, 3)
    there = {"steps": 5, "seed": 1, "ranks": 2, "stage": 3, "device": "cpu", "model": {"width": 64}}
    run_folder.write_json(tmp_path / run_folder.CONFIG, {**there, "data": {"root": str(corpus), "sha256": "0"}})
    text = refused(capsys, "--resume", "--steps", "7", "--stage", "1", "--ranks", "1", "--out", str(tmp_path))
    assert "holds another run" in text and "steps: 5 there, 7 now" in text and "model: {'width': 64} there" in text
    assert "data:" in text and "seed:" not in text and "stage:" not in text and "ranks:" not in text


def test_one_run_at_a_time_in_a_folder(tmp_path, capsys):
    with run_folder.locked(tmp_path):
        assert "another demo is running there" in refused(capsys, "--out", str(tmp_path))


def test_a_fresh_run_removes_only_what_a_run_left(tmp_path):
    for step in (500, 1000, 1500):
        complete(tmp_path, step)
    for name in ("notes.txt", run_folder.BASELINES, run_folder.METRICS, run_folder.CONFIG):
        (tmp_path / name).write_text("{}")
    run_folder.start_afresh(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", run_folder.BASELINES, run_folder.RANKS}


def test_metrics_after_the_checkpoint_are_forgotten(tmp_path):
    lines = [
        '{"step": 1, "loss": 2.0}',
        '{"step": 2, "loss": 1.0}',
        '{"step": 1, "heldout_bits": 3.0}',
        '{"step": 3, "lo',
    ]
    (tmp_path / run_folder.METRICS).write_text("\n".join(lines))
    run_folder.forget_after(tmp_path, 1)
    assert (tmp_path / run_folder.METRICS).read_text() == lines[0] + "\n"
