"""Looking at checkpoints without training: their leaves, whether every byte is right, where two differ."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from funzero.checkpoint import disk, files
from funzero.checkpoint.manifest import MANIFEST, File, Manifest, Piece, read_manifest
from funzero.checkpoint.restore import Source
from funzero.core import tree as tree_lib
from funzero.core.errors import CheckpointError


def leaves(path: str | Path) -> files.LazyTensors:
    """The whole leaves of a checkpoint by path, in host memory, each read and checked when it is asked for.

    Raises CheckpointError for what is damaged, FileNotFoundError.
    """
    manifest, folder = read_manifest(path), Path(path)

    def read(name: str) -> torch.Tensor:
        with Source(folder, manifest) as source:
            return source.whole(name)

    return files.LazyTensors(manifest.shapes(), read)


def damage(path: str | Path) -> list[str]:
    """Reads every byte of a checkpoint: one line for each thing that is wrong, with file, leaf and range."""
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    lines = [f"{folder / n}: not part of the checkpoint" for n in sorted(os.listdir(folder)) if not _known(n, manifest)]
    for name, file in manifest.files.items():
        pieces = [(p, n) for n, leaf in manifest.leaves.items() for p in leaf.pieces if p.file == name]
        lines += _gaps(folder / name, file, pieces, manifest)
        try:
            reader = disk.Reader(folder / name, file)
        except (CheckpointError, OSError) as error:
            lines.append(str(error))
            continue
        try:
            lines += [text for piece, leaf in pieces for text in _damage_in(reader, piece, leaf, manifest)]
        finally:
            reader.close()
    return lines


def _known(name: str, manifest: Manifest) -> bool:
    return name == MANIFEST or name in manifest.files


def _gaps(path: Path, file: File, pieces: list[tuple[Piece, str]], manifest: Manifest) -> Iterator[str]:
    """Bytes of a file that belong to no leaf, or to two."""
    at = file.start
    spans = sorted((p.at, p.at + p.count * manifest.leaves[n].torch_dtype.itemsize) for p, n in pieces)
    for begin, end in [*spans, (file.bytes, file.bytes)]:
        if begin != at:
            yield f"{path}: bytes {min(at, begin)} to {max(at, begin)} belong to {'no leaf' if begin > at else 'two'}"
        at = end


def _damage_in(reader: disk.Reader, piece: Piece, leaf: str, manifest: Manifest) -> Iterator[str]:
    size = piece.count * manifest.leaves[leaf].torch_dtype.itemsize
    buffer = memoryview(bytearray(disk.BLOCK))
    for begin in range(0, size, disk.BLOCK):
        try:
            reader.read(leaf, piece, size, begin, buffer[: min(disk.BLOCK, size - begin)])()
        except (CheckpointError, OSError) as error:
            yield str(error)


def differences(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """(path, how they differ) for each leaf that is not bit for bit the same in both."""
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            yield name, f"only in the {'second' if name in b else 'first'}"
            continue
        x, y = a[name], b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            yield name, f"{tree_lib.describe(x)} and {tree_lib.describe(y)}"
        elif not files.same_bits(x, y):
            yield name, _distance(x, y)


def _distance(x: torch.Tensor, y: torch.Tensor) -> str:
    wide = torch.complex128 if x.is_complex() else torch.float64
    apart = (x.to(wide) - y.to(wide)).abs()
    count = int((apart != 0).sum())
    largest = float(apart.nan_to_num(nan=math.inf).max())
    return f"{count} of {x.numel()} elements, by up to {largest:.3g}"
