"""The demo's launcher: starts the ranks, looks after them, and tells how they did."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import os
import platform
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from rich.console import Console

import funzero as fz
from funzero.cli import INTERRUPTED, run_folder
from funzero.cli.baselines import baselines
from funzero.cli.corpus import Corpus, load_corpus
from funzero.cli.demo_worker import ESTIMATE_FROM, load_example
from funzero.cli.report import clock, loss_curve, verdict_table

DEFAULTS = {"ranks": 2, "stage": 3, "steps": 2400, "device": "auto", "seed": 0}
LOG_LINES = 60
QUIT_S = 5.0
SHOW_CURSOR = "\x1b[?25h"


def run(args: argparse.Namespace) -> int:
    """Trains, scores and reports as the parsed command line says; returns the exit code."""
    out = Path(args.out)
    if args.resume and run_folder.checkpoints(out).latest() is None:
        raise ValueError(f"--resume: there is no checkpoint in {out}; start without --resume, or name a run by --out")
    with run_folder.locked(out):
        return _run(out, args)


def _run(out: Path, args: argparse.Namespace) -> int:
    there, example = run_folder.read_json(out / run_folder.CONFIG), load_example()
    asked = {**DEFAULTS, **({name: there[name] for name in DEFAULTS} if args.resume else {})}
    asked |= {name: value for name in DEFAULTS if (value := getattr(args, name)) is not None}
    stdlib = sysconfig.get_paths()["stdlib"]
    root = args.corpus or (there["data"]["root"] if args.resume else stdlib)
    corpus = load_corpus(root)
    ranks, kind = _placed(asked["ranks"], asked["device"], example.ROWS)
    config = {**_config(example, corpus, root), **asked}
    if args.resume:
        run_folder.check_same_run(out, there, config)
        run_folder.clean_up(out)
    elif there:
        print(f"Replacing the earlier run in {out}")
        run_folder.start_afresh(out)
    else:
        run_folder.clean_up(out)
    start = (run_folder.checkpoints(out).latest() or 0) if args.resume else 0
    run_folder.forget_after(out, start)
    run_folder.write_json(out / run_folder.CONFIG, config)
    source = f"Python {platform.python_version()}'s own standard library" if root == stdlib else str(root)
    print(
        f"Training a byte-level GPT ({_count(example, config):,} parameters) on the source of {source} "
        f"({len(corpus.train) / 1e6:.1f} MB): {config['steps']} steps{f' ({start} are done)' if start else ''}, "
        f"{ranks} {'ranks' if ranks > 1 else 'rank'} at ZeRO stage {config['stage']}, on the {kind}",
        flush=True,
    )
    return _launch(out, config, corpus, ranks)


def _config(example: ModuleType, corpus: Corpus, root: str) -> dict[str, Any]:
    """What a run is made of, but for the options."""
    digest = hashlib.sha256(corpus.train.tobytes() + b"|" + corpus.heldout.tobytes()).hexdigest()
    sizes = {"train_bytes": len(corpus.train), "heldout_bytes": len(corpus.heldout)}
    return {
        "model": {name: p.default for name, p in inspect.signature(example.GPT).parameters.items()},
        "data": {"root": str(Path(root).resolve()), "sha256": digest, **sizes},
        "versions": {"funzero": fz.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _count(example: ModuleType, config: dict[str, Any]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in example.GPT(**config["model"]).parameters())


def _placed(ranks: int, device: str, rows: int) -> tuple[int, str]:
    """The number of ranks to start, and what they run on."""
    fitting = [n for n in range(1, rows + 1) if rows % n == 0]
    if ranks not in fitting:
        raise ValueError(f"--ranks: the {rows} rows of a step do not divide over {ranks} ranks; choose from {fitting}")
    gpus = torch.accelerator.device_count() if device != "cpu" and torch.accelerator.is_available() else 0
    if device == "gpu" and not gpus:
        raise ValueError("--device gpu: torch finds no GPU here; without the option the demo runs on the CPU")
    if not gpus:
        return ranks, "CPU"
    return max(n for n in fitting if n <= min(ranks, gpus)), "GPU"


def _launch(out: Path, config: dict[str, Any], corpus: Corpus, ranks: int) -> int:
    with (out / run_folder.LOG).open("w") as log, _asked_to_stop() as asked:
        process = _start(out, config["device"], ranks, log)
        levels = _in_background(_baselines, out, config["data"]["sha256"], corpus, process)
        quits = _look_after(process, ranks, out / run_folder.RANKS, asked)
    result = run_folder.read_json(out / run_folder.RESULT)
    if result:
        return _report(out, config, result, levels)
    if process.returncode and not quits:
        lines = (out / run_folder.LOG).read_text().splitlines()
        print("\n".join(lines[-LOG_LINES:]), file=sys.stderr)
        print(f"funzero: a rank failed; all that the ranks said is in {out / run_folder.LOG}", file=sys.stderr)
        return 1
    _say_how_to_go_on(out, quits)
    return INTERRUPTED


def _start(out: Path, device: str, ranks: int, log: Any) -> subprocess.Popen[bytes]:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    worker = ("funzero.cli.demo_worker", "--out", str(out), "--launcher", str(os.getpid()))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **os.environ}
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    # In a session of its own: the terminal's Ctrl-C would reach torchrun, which gives its ranks 30 s and then kills.
    command = [sys.executable, "-m", *launcher, "-m", *worker]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that every SIGINT and SIGTERM of this process is appended to, in place of ending it."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _look_after(process: subprocess.Popen[bytes], ranks: int, folder: Path, asked: list[int]) -> bool:
    """Waits for torchrun and its ranks. Asked once it passes that on to them, asked twice it kills them: then it returns True."""
    told: set[int] = set()
    while process.poll() is None:
        pids = {run_folder.read_json(path) for path in folder.glob("[0-9]*")} if asked else set()
        if len(asked) > 1 or (asked and not pids):  # no rank has begun: there is nothing to save
            _kill(process, pids, all_known=len(pids) == ranks)
            return True
        for pid in pids - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        told |= pids
        time.sleep(0.05)
    return False


def _kill(process: subprocess.Popen[bytes], pids: set[int], all_known: bool) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not all_known:  # ranks that are just starting are known to torchrun only, which ends them on SIGTERM
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(QUIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if sys.stdout.isatty():
        print(SHOW_CURSOR)  # the bar of a killed rank hid it


def _say_how_to_go_on(out: Path, quits: bool) -> None:
    found = run_folder.checkpoints(out)
    if (step := found.latest()) is None:
        print("Stopped before there was anything to save")
        return
    python = Path(sys.executable)
    shown = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else "python"
    where = "" if out == Path("runs/demo") else f" --out {out}"
    did = "Quit at once; the last checkpoint is" if quits else "Stopped; saved"
    print(f"{did} {found.path(step)}. To go on from it: {shown} -m funzero demo --resume{where}")


def _in_background(fn: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls a function in a thread that takes only what the ranks leave, and that the end of the process ends."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            if sys.platform == "linux":  # elsewhere priority is that of the whole process
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _baselines(out: Path, digest: str, corpus: Corpus, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Bits of the baselines; the time estimate comes first, since on a small machine both would share the cores."""
    metrics, before = out / run_folder.METRICS, _lines(out / run_folder.METRICS)
    while process.poll() is None and _lines(metrics) < before + ESTIMATE_FROM:
        time.sleep(0.2)
    path = out / run_folder.BASELINES
    known = run_folder.read_json(path)
    if known.get("data") != digest:
        known = {"data": digest, "bits": baselines(corpus.train, corpus.heldout)}
        run_folder.write_json(path, known)
    return known["bits"]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _report(out: Path, config: dict[str, Any], result: dict[str, Any], levels: Future[dict[str, float]]) -> int:
    console = Console()
    if not levels.done():
        print("Waiting for the baselines", flush=True)
    bits, steps = levels.result(), config["steps"]
    title = f"Byte-level GPT on Python's standard library, {steps} steps"
    loss_curve(out / run_folder.METRICS, out / run_folder.CURVE, title, bits)
    print(
        f"{result['heldout_bits']:.3f} bits per byte on {result['heldout_bytes']:,} held-out bytes; trained "
        f"{result['trained_steps']} steps in {clock(result['train_s'])}, scored in {clock(result['score_s'])}"
    )
    console.print(verdict_table(result["heldout_bits"], bits, name="this GPT"))
    print(f"What it writes:\n\n{result['sample'].rstrip()}\n")
    found = run_folder.checkpoints(out)
    saved = (found.path(step).name for step in found.steps())
    print(f"In {out}: {', '.join([run_folder.CONFIG, run_folder.METRICS, run_folder.CURVE, *saved])}")
    return 0
