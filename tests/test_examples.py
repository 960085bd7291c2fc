"""Every example is short, and runs in one process, under torchrun, and up to a Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import funzero as fz

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("[0-9]*.py"))
QUICK = {"01_train_gpt.py": ["20"]}  # others: 5 steps
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(example):
    assert len(example.read_text().splitlines()) <= 110


@pytest.mark.parametrize("launcher", [[], pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["alone", "torchrun"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, launcher, tmp_path):
    command = [sys.executable, *launcher, str(example), *QUICK.get(example.name, ["5"])]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


@pytest.mark.slow
def test_interrupted_torchrun_saves(tmp_path):
    command = [sys.executable, *TORCHRUN, str(EXAMPLES[0]), "100000"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=out, stderr=subprocess.STDOUT)
    try:
        limit = time.monotonic() + 50
        while "step 20" not in (tmp_path / "out").read_text():
            assert process.poll() is None and time.monotonic() < limit, (tmp_path / "out").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(40)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks, within 30 s; they would outlive its death
            process.wait(40)
    assert fz.CheckpointManager(tmp_path / "runs" / "gpt").latest() >= 20
