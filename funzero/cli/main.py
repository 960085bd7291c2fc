"""The command line: parses, calls, prints."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence

from funzero.cli import INTERRUPTED, ckpt, plan
from funzero.core.errors import CheckpointError

NEEDED = {"demo": ("rich", "matplotlib"), "ckpt": (), "plan": ()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's own); returns the exit code."""
    args = _parser().parse_args(argv)
    missing = [name for name in NEEDED[args.command] if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(f"the command line needs {' and '.join(missing)}; run `pip install funzero[cli]`")
    try:
        # Named at the top, its imports would fail with a traceback where the packages above are missing.
        return importlib.import_module(f"funzero.cli.{args.command}").run(args)
    except (ValueError, OSError, CheckpointError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("\nStopped")
        return INTERRUPTED


def _refuse(text: str) -> int:
    print(f"funzero: {text}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="funzero", description="Functional training over PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a byte-level GPT on Python's own standard library",
        description="Trains a byte-level GPT on the source of Python's own standard library, on several ranks, in "
        "about two minutes on 2 cores. Ctrl-C saves a checkpoint and stops; --resume goes on from there.",
    )
    # No default here: with --resume what is not given is taken from the run that goes on.
    demo.add_argument("--ranks", type=_at_least(1), metavar="N", help="processes, 1, 2, 4 or 8 (default 2)")
    demo.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage (default 3)")
    demo.add_argument("--steps", type=_at_least(1), metavar="N", help="steps of training (default 2400)")
    demo.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the run folder")
    demo.add_argument("--device", choices=("auto", "cpu", "gpu"), help="default auto: GPUs if there are any")
    demo.add_argument("--seed", type=_at_least(0), metavar="N", help="of weights, data and the sample (default 0)")
    demo.add_argument("--out", default="runs/demo", metavar="DIR", help="the run folder (default runs/demo)")
    demo.add_argument("--corpus", metavar="DIR", help=argparse.SUPPRESS)
    ckpt.add_to(commands)
    plan.add_to(commands)
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return whole
