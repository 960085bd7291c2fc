"""The folder of a demo run: its config, its metrics, its checkpoints, and what it ended with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import funzero as fz

CONFIG, METRICS, RESULT, CURVE, LOG, BASELINES = (
    "config.json", "metrics.jsonl", "result.json", "loss.png", "stderr.log", "baselines.json",
)  # fmt: skip
RANKS = ".ranks"
SAVE_EVERY, KEEP = 500, 2  # steps, checkpoints
FIXED = ("model", "seed", "steps", "data")
"""The parts of a config that a resumed run must share; ranks, stage and device may change."""


def read_json(path: Path) -> Any:
    """What a JSON file holds; an empty dict if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file such that its name always holds all of one version."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(draft, path)


def checkpoints(out: Path) -> fz.CheckpointManager:
    """The checkpoints of a run."""
    return fz.CheckpointManager(out, keep=KEEP, every_steps=SAVE_EVERY)


def check_same_run(out: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError if a run with the config `now` cannot go on with that of the config `there`."""
    differ = [f"  {key}: {there.get(key)} there, {now[key]} now" for key in FIXED if there.get(key) != now[key]]
    if differ:
        raise ValueError(
            f"--resume: {out} holds another run:\n" + "\n".join(differ) + "\nask for the same, start afresh without "
            "--resume, or give another folder with --out"
        )


def start_afresh(out: Path) -> None:
    """Removes what an earlier run left in the folder, and nothing else; baselines stay."""
    for name in (CONFIG, METRICS, CURVE):
        (out / name).unlink(missing_ok=True)
    found = checkpoints(out)
    for step in found.steps():
        found.delete(step)
    clean_up(out)


def clean_up(out: Path) -> None:
    """Removes the last result and the list of ranks."""
    shutil.rmtree(out / RANKS, ignore_errors=True)
    (out / RANKS).mkdir()
    (out / RESULT).unlink(missing_ok=True)


def forget_after(out: Path, step: int) -> None:
    """Drops the metrics of steps after `step`, and the scores: a resumed run writes them again."""
    path = out / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    kept = [line for line in whole if (record := json.loads(line))["step"] <= step and "loss" in record]
    path.write_text("".join(f"{line}\n" for line in kept))


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the folder for one run; raises ValueError if another has it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--out: {out} is, or is below, a file; give a folder") from None
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out}: another demo is running there; give another folder with --out") from None
        yield
