"""One rank of the demo: trains, saves, scores, writes a sample, and leaves it all in the run folder."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch
from rich.console import Console

import funzero as fz
from funzero.cli import run_folder
from funzero.cli.corpus import heldout_rows, load_corpus
from funzero.cli.report import Progress, clock
from funzero.core import comm

ESTIMATE_FROM, SETTLING = 20, 5  # steps; the first ones of a process are slower
RATE_OVER = 50  # steps
SCORED_ROWS = 256  # of a rank at a time
SAMPLE_BYTES, TEMPERATURE, PROMPT = 400, 0.7, b"def "


def load_example() -> ModuleType:
    """examples/01_train_gpt.py: the installed one, or that of the source tree."""
    name = "01_train_gpt"
    if importlib.util.find_spec("funzero_examples") is not None:
        return importlib.import_module(f"funzero_examples.{name}")
    path = Path(fz.__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class Run:
    """What the parts of a rank share: folder, its config, its checkpoints, mesh, the launcher's pid, a console."""

    out: Path
    config: dict[str, Any]
    checkpoints: fz.CheckpointManager
    mesh: fz.Mesh
    launcher: int
    console: Console

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.mesh.rank == 0

    def look_after_launcher(self) -> None:
        """Asks for a stop if the launcher is gone."""
        try:
            os.kill(self.launcher, 0)
        except (ProcessLookupError, PermissionError):  # no such process, or the number is someone else's now
            self.checkpoints.request_stop()


def main() -> None:
    """Runs this rank of the run that a folder describes, from its last checkpoint if it has one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--launcher", type=int, required=True, help="pid; the ranks save and stop when it is gone")
    args = parser.parse_args()
    config, mesh = run_folder.read_json(args.out / run_folder.CONFIG), fz.make_mesh(dp=-1)
    console = Console(quiet=mesh.rank != 0)
    run = Run(args.out, config, run_folder.checkpoints(args.out), mesh, args.launcher, console)
    with run.checkpoints.on_signal():
        # The launcher sends signals to the processes named here, so the handlers must stand before.
        run_folder.write_json(args.out / run_folder.RANKS / str(mesh.rank), os.getpid())
        _run(run, load_example())
    comm.finalize()


def _run(run: Run, example: ModuleType) -> None:
    config, mesh = run.config, run.mesh
    corpus = load_corpus(config["data"]["root"])
    torch.manual_seed(config["seed"])
    model = example.GPT(**config["model"])
    given = {"steps": config["steps"], "seed": config["seed"]}
    loss_fn, step, state = example.setup(mesh, model, run.checkpoints, stage=config["stage"], **given)
    start, began = int(state.step), time.perf_counter()
    state, stopped = train(run, state, example.train(mesh, step, state, corpus.train, **given))
    if stopped:
        return
    trained = time.perf_counter()
    run.console.print(f"Scoring all {len(corpus.heldout):,} bytes of the {corpus.heldout_files} held-out files")
    bits = score(run, fz.make_eval(loss_fn), state, corpus.heldout, example.CONTEXT)
    if bits is None:
        return
    scored = time.perf_counter()
    text = fz.call(write_sample, state, run, model, example.CONTEXT)
    if run.first:
        with (run.out / run_folder.METRICS).open("a") as file:
            file.write(json.dumps({"step": config["steps"], "heldout_bits": bits}) + "\n")
        seconds = {"train_s": trained - began, "score_s": scored - trained}
        counts = {"heldout_bytes": len(corpus.heldout), "trained_steps": config["steps"] - start}
        result = {"heldout_bits": bits, **counts, **seconds, "sample": text}
        run_folder.write_json(run.out / run_folder.RESULT, result)


def train(
    run: Run, state: fz.TrainState, updates: Iterable[tuple[fz.TrainState, fz.Metrics]]
) -> tuple[fz.TrainState, bool]:
    """Goes through the updates, logs and saves; (last state, whether it was stopped before the end of the run)."""
    steps, start = run.config["steps"], int(state.step)
    with contextlib.ExitStack() as stack:
        show = _nothing
        if run.first and start < steps:
            bar = stack.enter_context(Progress(steps, run.console, start))
            show = _Log(bar, stack.enter_context((run.out / run_folder.METRICS).open("a", buffering=1)))
        for state, metrics in updates:
            at = int(metrics.step)
            show(at, metrics)
            run.look_after_launcher()
            if run.checkpoints.after_step(state, metrics={"loss": float(metrics.loss)}, last=at == steps):
                run.console.print(f"Stopping after step {at}, which is saved")
                return state, True
    return state, False


def _nothing(at: int, metrics: fz.Metrics) -> None:
    """What ranks other than the first show."""


class _Log:
    """Shows and writes what a step reports; after the first steps says how long the rest will take."""

    def __init__(self, bar: Progress, file: IO[str]) -> None:
        self._bar, self._file = bar, file
        self._ends = collections.deque([time.perf_counter()], maxlen=RATE_OVER + 1)
        self._seen = 0

    def __call__(self, at: int, metrics: fz.Metrics) -> None:
        self._ends.append(time.perf_counter())
        self._seen += 1
        rate = float(metrics.weight) * (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])
        shown = {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm), "tokens_per_s": round(rate, 1)}
        self._file.write(json.dumps({"step": at, **shown}) + "\n")
        self._bar.update(at, **shown)
        if self._seen == ESTIMATE_FROM and at < self._bar.steps:
            each = (self._ends[-1] - self._ends[SETTLING]) / (ESTIMATE_FROM - SETTLING)
            self._bar.console.print(
                f"By the first {ESTIMATE_FROM} steps, training takes {clock(each * (self._bar.steps - at))} more; "
                "Ctrl-C saves and stops"
            )


def score(
    run: Run,
    evaluate: Callable[[fz.TrainState, Any], fz.Metrics],
    state: fz.TrainState,
    heldout: np.ndarray,
    context: int,
) -> float | None:
    """Bits per held-out byte, every byte scored once, by all ranks together; None if stopped. heldout: uint8 [n]."""
    tokens, labels = heldout_rows(heldout, context)
    pieces = list(zip(tokens.split(SCORED_ROWS), labels.split(SCORED_ROWS), strict=True))
    nats = count = 0.0
    for first in range(0, len(pieces), run.mesh.world):
        run.look_after_launcher()
        if run.checkpoints.stop_requested(run.mesh):
            return None
        batch: Any = fz.data.EMPTY
        if (mine := first + run.mesh.rank) < len(pieces):
            batch = dict(zip(("tokens", "labels"), (x.to(run.mesh.device) for x in pieces[mine]), strict=True))
        metrics = evaluate(state, batch)
        nats += float(metrics.loss) * float(metrics.weight)
        count += float(metrics.weight)
    assert count == len(heldout), f"scored {count} of {len(heldout)} bytes"
    return nats / count / float(np.log(2))


def write_sample(params: Any, run: Run, model: torch.nn.Module, context: int) -> str:
    """What the model writes after `PROMPT`: the same text for the same params, on the first rank; params: whole."""
    if not run.first:
        return ""
    random = torch.Generator().manual_seed(run.config["seed"])
    written = list(PROMPT)
    for _ in range(SAMPLE_BYTES):
        tokens = torch.tensor([written[-context:]], device=run.mesh.device)
        logits = fz.functional_call(model, params, tokens)[0, -1].double().cpu()
        written.append(int(torch.multinomial((logits / TEMPERATURE).softmax(0), 1, generator=random)))
    text = bytes(written).decode("utf-8", errors="replace")
    # A control character could do anything to a terminal.
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


if __name__ == "__main__":
    main()
