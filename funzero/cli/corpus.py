"""A byte corpus that needs no download: the source of the running Python's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SEPARATOR = 0
"""The byte written after every file; Python source cannot contain it, so it always means "end of file"."""

IGNORE = -100
"""Label of padding positions; the default `ignore_index` of `torch.nn.functional.cross_entropy`."""

SKIPPED_FOLDERS = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"]
)
HELDOUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes; a file is wholly in one of the two.

    `train`, `heldout`: uint8 [n bytes], each file followed by one `SEPARATOR` byte.
    `train_files`, `heldout_files`: number of files in each.
    """

    train: np.ndarray
    heldout: np.ndarray
    train_files: int
    heldout_files: int


def is_heldout(relative_path: str) -> bool:
    """Whether the file at this relative posix path is held out: about 1 in 20, the same on every machine."""
    return int(hashlib.sha256(relative_path.encode("utf-8")).hexdigest(), 16) % HELDOUT_ONE_IN == 0


def load_corpus(root: str | Path | None = None) -> Corpus:
    """Read every .py file below `root` (default: this Python's standard library), in order of relative path."""
    base = Path(root) if root is not None else Path(sysconfig.get_paths()["stdlib"])
    if not base.is_dir():
        raise FileNotFoundError(
            f"load_corpus: expected a folder of .py files, found no folder at {str(base)!r}; "
            "pass root= a folder with Python sources"
        )
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for relative, path in sorted(_sources(base)):
        parts[is_heldout(relative)].append(path.read_bytes())
    for held, name in ((False, "training"), (True, "held-out")):
        if not parts[held]:
            raise ValueError(
                f"load_corpus: expected at least one {name} file below {str(base)!r}, found none among "
                f"{len(parts[not held])} .py files; pass root= a folder with more Python sources"
            )
    return Corpus(_join(parts[False]), _join(parts[True]), len(parts[False]), len(parts[True]))


def sample_rows(train: np.ndarray, rows: int, length: int, seed: int, step: int) -> torch.Tensor:
    """Random windows of the training bytes, a pure function of its arguments.

    train: uint8 [n], n > length. Returns int64 [rows, length + 1]: inputs are `[:, :-1]`, labels `[:, 1:]`.
    """
    if len(train) <= length:
        raise ValueError(
            f"sample_rows: expected more than length={length} training bytes, found {len(train)}; "
            "use a shorter length or a larger corpus"
        )
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, step))))
    starts = random.integers(0, len(train) - length, size=rows)
    windows = train[starts[:, None] + np.arange(length + 1)]
    return torch.from_numpy(windows.astype(np.int64))


def heldout_rows(heldout: np.ndarray, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows in which every held-out byte is a label exactly once.

    heldout: uint8 [n]. Returns tokens and labels, both int64 [ceil(n / length), length]. The token at a position
    is the byte before its label; the very first is `SEPARATOR`. Labels past the end are `IGNORE`.
    """
    if len(heldout) == 0 or length < 1:
        raise ValueError(
            f"heldout_rows: expected at least one byte and length >= 1, found {len(heldout)} bytes and "
            f"length={length}; pass a corpus with held-out files and a positive length"
        )
    count = -(-len(heldout) // length)
    labels = np.full(count * length, IGNORE, dtype=np.int64)
    labels[: len(heldout)] = heldout
    tokens = np.full(count * length, SEPARATOR, dtype=np.int64)
    tokens[1 : len(heldout)] = heldout[:-1]
    return torch.from_numpy(tokens.reshape(count, length)), torch.from_numpy(labels.reshape(count, length))


def _sources(base: Path) -> Iterator[tuple[str, Path]]:
    folders = [base]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                if path.name not in SKIPPED_FOLDERS and not path.is_symlink():
                    folders.append(path)
            elif path.suffix == ".py":
                yield path.relative_to(base).as_posix(), path


def _join(files: list[bytes]) -> np.ndarray:
    separator = bytes([SEPARATOR])
    return np.frombuffer(b"".join(text + separator for text in files), dtype=np.uint8)
