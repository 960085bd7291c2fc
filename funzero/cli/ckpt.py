"""`funzero ckpt`: looks at checkpoints, checks them, compares them, and turns those of others into ours and back."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from funzero.checkpoint import files, inspect
from funzero.checkpoint.dcp import export_dcp, import_dcp
from funzero.checkpoint.hf import export_hf, import_hf
from funzero.checkpoint.manager import CheckpointManager
from funzero.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from funzero.checkpoint.save import save
from funzero.compat.deepspeed.checkpoint import read_checkpoint, to_state
from funzero.core import tree as tree_lib
from funzero.core.errors import CheckpointError
from funzero.executor.init import abstract_state, init_state
from funzero.transforms.basic import identity
from funzero.transforms.chain import partition
from funzero.transforms.optim.adam import adamw


def add_to(commands: Any) -> None:
    """Adds the command and its own commands to a parser."""
    parser = commands.add_parser("ckpt", help="look at checkpoints, check, compare and convert them")
    own = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, *places: str) -> argparse.ArgumentParser:
        made = own.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for place in places:
            made.add_argument(place, type=Path)
        return made

    action("ls", "list the checkpoints in a folder", "folder")
    show = action("show", "print the tree of a checkpoint with shapes, bytes and layout", "path")
    show.add_argument("--extra", action="store_true", help="print what the user stored beside the state, as JSON")
    action("verify", "read every byte; name the damaged file, leaf and range", "path")
    action("diff", "compare two checkpoints leaf by leaf", "first", "second")
    convert = action("convert", "make a checkpoint from one of another library", "source", "path")
    convert.add_argument("--source-format", choices=sorted(IMPORTS), required=True, help="what wrote the source")
    export = action("export", "write the params (or what --select names) for another library", "path", "target")
    export.add_argument("--format", choices=sorted(EXPORTS), required=True)
    export.add_argument("--select", default="params/**", metavar="GLOB", help="leaves to write (default params/**)")
    prune = action("prune", "remove checkpoints that need not stay", "folder")
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="the last N stay")
    prune.add_argument("--keep-every", type=int, metavar="K", help="those whose step K divides stay too")
    prune.add_argument("--best", nargs=2, metavar=("METRIC", "MIN|MAX"), help="the best one by a metric stays too")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def run(args: argparse.Namespace) -> int:
    """Runs one of the actions; returns the exit code."""
    code: int = ACTIONS[args.action](args) or 0
    return code


def _ls(args: argparse.Namespace) -> None:
    rows = []
    for folder in sorted(p.parent for p in args.folder.glob(f"[!.]*/{MANIFEST}")):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            rows.append((folder.name, "damaged", "", "", "", str(error)))
            continue
        when = datetime.datetime.fromtimestamp(manifest.saved).strftime("%Y-%m-%d %H:%M")
        metrics = " ".join(f"{k}={v:.4g}" for k, v in manifest.metrics.items())
        rows.append((folder.name, f"step {manifest.step}", _size(_bytes(manifest)), manifest.mesh, when, metrics))
    left = [(x.name, "left over by a save that was cut short") for x in sorted(args.folder.glob(".*.tmp*"))]
    print(tree_lib.table(rows) if rows else f"{args.folder} holds no complete checkpoint")
    if left:
        print(tree_lib.table(left))


def _show(args: argparse.Namespace) -> None:
    manifest = read_manifest(args.path)
    if args.extra:
        print(json.dumps(manifest.extra, indent=1))
        return
    rows = [
        (name, tree_lib.dtype_and_shape(x.torch_dtype, x.shape), _size(x.numel * x.torch_dtype.itemsize), x.layout)
        for name, x in manifest.leaves.items()
    ]
    print(tree_lib.table(sorted(rows)))
    left_out = f", {len(manifest.left_out)} frozen leaves left out" if manifest.left_out else ""
    print(
        f"step {manifest.step}, {len(manifest.leaves)} leaves, {_size(_bytes(manifest))} in {len(manifest.files)} files, "
        f"written on {manifest.mesh} by funzero {manifest.funzero}{left_out}"
    )


def _bytes(manifest: Manifest) -> int:
    return sum(x.numel * x.torch_dtype.itemsize for x in manifest.leaves.values())


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if unit != "B" else f"{count} B"


def _verify(args: argparse.Namespace) -> int:
    found = inspect.damage(args.path)
    print("\n".join(found) if found else f"{args.path}: every byte is as it was written")
    return 1 if found else 0


def _diff(args: argparse.Namespace) -> int:
    found = list(inspect.differences(inspect.leaves(args.first), inspect.leaves(args.second)))
    print(tree_lib.table(found) if found else "the same leaves, bit for bit")
    return 1 if found else 0


def _from_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """A checkpoint of params alone; `restore(select="params/**")` puts them into a state."""
    params = {name: (lambda key, name=name: tensors[name]) for name in tensors}
    save(path, init_state(params, identity(), donate=True))


def _from_deepspeed(source: Path, path: Path) -> None:
    """A checkpoint with params, Adam's moments, counts and hyper-parameters.

    It is of the state of `fz.adamw`; with several param groups, of `fz.partition` with parts "0", "1", ...
    """
    found = read_checkpoint(source)
    trained = {name: name in found.groups for name in found.params}
    labels = {name: str(found.groups.get(name, 0)) for name in found.params}
    parts = {label: adamw(1e-3) for label in labels.values()}
    tx = partition(parts, labels) if len(parts) > 1 else adamw(1e-3)
    save(path, to_state(found, abstract_state(found.params, tx, trainable=trained, buffers=found.buffers or ())))


IMPORTS = {
    "dcp": lambda source, path: _from_weights(import_dcp(source), path),
    "deepspeed": _from_deepspeed,
    "hf": lambda source, path: _from_weights(import_hf(source), path),
}
EXPORTS = {"dcp": export_dcp, "hf": export_hf}


def _convert(args: argparse.Namespace) -> None:
    IMPORTS[args.source_format](args.source, args.path)
    print(f"{args.path}: {len(read_manifest(args.path).leaves)} leaves")


def _export(args: argparse.Namespace) -> None:
    tensors = inspect.leaves(args.path)
    hits = tree_lib.match_globs([args.select], list(tensors), "export: --select")
    chosen = [n for n, hit in zip(tensors, hits, strict=True) if hit]
    names = {_torch_name(n) if args.select == "params/**" else n: n for n in chosen}
    lazy = files.LazyTensors({a: tensors.shapes[b] for a, b in names.items()}, lambda a: tensors[names[a]])
    EXPORTS[args.format](args.target, lazy)
    print(f"{args.target}: {len(names)} leaves")


def _torch_name(path: str) -> str:
    """What torch calls a param: its path below params, unescaped."""
    return path.removeprefix("params/").replace("%2F", "/").replace("%25", "%")


def _prune(args: argparse.Namespace) -> None:
    best = (args.best[0], args.best[1].lower()) if args.best else None
    manager = CheckpointManager(args.folder, keep=args.keep, keep_every=args.keep_every, best=best)
    gone = manager.prune(dry_run=args.dry_run)
    print(
        "\n".join(f"{'would remove' if args.dry_run else 'removed'} {manager.path(s)}" for s in gone)
        or "nothing to remove"
    )


ACTIONS = {
    "convert": _convert,
    "diff": _diff,
    "export": _export,
    "ls": _ls,
    "prune": _prune,
    "show": _show,
    "verify": _verify,
}
