"""`funzero plan`: what a step takes in a layout, whether it fits, and the cheapest layout that does."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from funzero.cli.decoder import PRESETS, Decoder, Sizes
from funzero.core.mesh import abstract_mesh
from funzero.executor.init import abstract_state
from funzero.integrations.module import functional_call, split_module
from funzero.planning import show
from funzero.planning.limits import Limit, Limits, read_limits
from funzero.planning.plan import MemoryPlan, plan
from funzero.planning.propose import FIELDS, Choice, Model, propose
from funzero.planning.trace import Timeline
from funzero.transforms import precision
from funzero.transforms.optim.adam import adamw

POLICIES = ("float32", "bf16_mixed", "bf16_master", "bf16_pure", "fp16_mixed")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_to(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "plan",
        help="what a training step takes in a layout, and what fits",
        description="Works out, without running anything, what a training step takes: memory of each kind, and bytes sent, "
        "read and written. Says whether that fits, and proposes the cheapest layout that does. Sizes: 80GB, 512MiB, ...",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--preset", choices=sorted(PRESETS), default="125m", help="a built-in transformer (default 125m)")
    what.add_argument("--model", metavar="MODULE:FUNCTION", help="gives (loss_fn, meta params, batch of a rank[, tx])")
    for field in dataclasses.fields(Sizes):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=_count, metavar="N", help="in place of the preset's")
    parser.add_argument("--rows", type=_count, default=1, metavar="N", help="rows of a rank's batch (default 1)")
    for axis in ("replicate", "dp", "ep"):
        parser.add_argument(f"--{axis}", type=_count, metavar="N", help=f"ranks along the axis {axis}")
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage (default 3)")
    for field in FIELDS:
        parser.add_argument(f"--{field.replace('_', '-')}", choices=("host", "disk"), help="where they live")
    parser.add_argument("--precision", choices=POLICIES, default="float32", help="policy (default float32)")
    parser.add_argument("--accumulate", type=_count, default=1, metavar="N", help="micro-batches (default 1)")
    parser.add_argument("--remat", metavar="GLOB", help="modules to recompute (of a preset: layers.*)")
    parser.add_argument("--gather-budget", type=_size, metavar="SIZE")
    parser.add_argument("--device-memory", type=_size, metavar="SIZE", help="of a rank; default: what is found here")
    parser.add_argument("--host-memory", type=_size, metavar="SIZE", help="of a host; default: what is found here")
    parser.add_argument(
        "--ranks-per-host", type=_count, default=1, metavar="N", help="they share its memory (default 1)"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="of leaves on disk: its free space is a limit")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write a stacked bar chart, an HTML page")
    parser.add_argument("--no-proposal", action="store_true", help="do not look for a layout that fits")


def run(args: argparse.Namespace) -> int:
    """Prints it all; 0 if the layout fits, else 1."""
    gc.disable()  # a short run whose objects nearly all stay: looking through them takes a fifth of its time
    model, rules = _model(args)
    limits = _limits(args)
    memory = {f: getattr(args, f) for f in FIELDS if getattr(args, f)}
    remat = {args.remat: "nothing"} if args.remat else None
    choice = Choice(args.stage, args.accumulate, remat, memory, args.gather_budget)
    state = abstract_state(model.shapes, model.tx, specs=model.specs(choice), precision=model.precision)
    options: Any = {"tx": model.tx, "precision": model.precision, "gather_budget": args.gather_budget}
    made = plan(model.loss_fn, state, model.batch, accumulate=args.accumulate, remat=remat, **options)
    print(made)
    print(f"limits: {_told(limits)}")
    lacks = made.shortfalls(limits, args.ranks_per_host)
    print("it fits" if not lacks else "it does not fit: " + "; ".join(lacks))
    if args.chart:
        made.chart(args.chart, limits)
        print(f"{args.chart}: the chart")
    if lacks and not args.no_proposal:
        _propose(args, model, limits, remat or rules, None if remat else made.timeline)
    return 1 if lacks else 0


def _propose(
    args: argparse.Namespace,
    model: Model,
    limits: Limits,
    remat: Mapping[str, Any] | None,
    known: Timeline | None,
) -> None:
    options: Any = {"remat": remat, "ranks_per_host": args.ranks_per_host, "known": known}
    found = propose(model, limits, accumulate=args.accumulate, **options)
    if found.fits:
        print(f"proposal: {found.choice}; {_needs(found.plan)}; {len(found.reasons)} cheaper layouts do not fit")
        return
    print(f"no layout fits; least takes {found.choice}: {_needs(found.plan)}")


def _needs(made: MemoryPlan) -> str:
    return ", ".join(
        f"{m} {show.size(n)}" for m, n in (("device", made.device), ("host", made.host), ("disk", made.disk))
    )


def _told(limits: Limits) -> str:
    rows = (("host", limits.host), ("device", limits.device), ("disk", limits.disk))
    told = [f"{n} {show.size(x.available)} of {show.size(x.total)} ({x.source})" for n, x in rows if x is not None]
    return ", ".join(told) + ("" if limits.device else "; no device: leaves live in host memory")


def _limits(args: argparse.Namespace) -> Limits:
    found = read_limits(folder=args.folder, device=args.device_memory)
    if args.host_memory is None:
        return found
    given = Limit("given", args.host_memory, args.host_memory)
    return dataclasses.replace(found, host=given, total=given)


def _model(args: argparse.Namespace) -> tuple[Model, dict[str, str] | None]:
    """What is to be trained, and rules to recompute it by."""
    axes = {n: getattr(args, n) for n in ("replicate", "dp", "ep") if getattr(args, n)}
    mesh, policy = abstract_mesh(**(axes or {"dp": 1})), getattr(precision, args.precision)
    if args.model:
        loss_fn, shapes, batch, *rest = _call(args.model)
        return Model(loss_fn, shapes, rest[0] if rest else adamw(1e-4), mesh, batch, policy), None
    names = [f.name for f in dataclasses.fields(Sizes)]
    sizes = dataclasses.replace(PRESETS[args.preset], **{n: getattr(args, n) for n in names if getattr(args, n)})
    if sizes.width % sizes.heads or sizes.heads % sizes.kv_heads:
        raise ValueError(
            f"plan: --width {sizes.width} must be a multiple of --heads {sizes.heads}, and that of --kv-heads "
            f"{sizes.kv_heads}; choose others"
        )
    with torch.device("meta"):
        decoder = Decoder(sizes)
        batch = tuple(torch.empty(args.rows, sizes.context, dtype=torch.int64) for _ in range(2))

    def loss(params: Any, rows: Any) -> Any:
        return functional_call(decoder, params, *rows)

    return Model(loss, split_module(decoder)[0], adamw(1e-4), mesh, batch, policy), {"layers.*": "nothing"}


def _call(name: str) -> Any:
    """What `module:function` returns."""
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"plan: --model {name}: {error}; give an importable MODULE:FUNCTION") from error
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        raise ValueError(f"plan: --model {name} must return (loss_fn, params, batch) or (loss_fn, params, batch, tx)")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] not in UNITS or not float(found[1]):
        raise argparse.ArgumentTypeError(f"expected bytes such as 80GB or 512MiB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2]])
