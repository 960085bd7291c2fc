"""The manifest of a checkpoint: every leaf with its shape, dtype and the places of its bytes; see docs/checkpoint-format.md.

[Note: a manifest is not trusted] It may be damaged or made by somebody else. Its first line holds a checksum of all that
follows; then its types, and what it says of files, ranges and shapes, are checked before any other file is opened.
"""

import errno
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch

from funzero.core.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
BLOCK = 1 << 20  # bytes that one checksum covers; a part of a leaf is read in whole blocks

_FIRST_LINE = re.compile(rb'\{"crc32":"([0-9a-f]{8})",\n')
_FILE_NAME = re.compile(r"[0-9]{5,}\.safetensors")
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
}
"""What safetensors calls torch's dtypes."""
_DTYPES = {str(d).removeprefix("torch."): d for d in (*DTYPES.values(), torch.complex128)}

Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 63)]
Span = tuple[Count, Count]


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")


class Piece(_Model):
    """A part of a leaf in one file.

    Attributes:
        file: its name. at: offset of the first byte in it.
        box: for each dim of the global leaf the range of which this is a part. range: of elements, in row-major order of
            the box. crc32: 8 hexadecimal digits for each `BLOCK` bytes.
    """

    file: str
    at: Count
    box: tuple[Span, ...]
    range: Span
    crc32: str

    @property
    def count(self) -> int:
        """Elements."""
        return self.range[1] - self.range[0]


class Leaf(_Model):
    """A global leaf. `dtype`: torch's name of it. `layout`: how it was cut, for people."""

    dtype: str
    shape: tuple[Count, ...]
    layout: str
    pieces: tuple[Piece, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return _DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class File(_Model):
    """A file of bytes. `start`: where the data begin. `crc32`: of what comes before, 8 hexadecimal digits."""

    bytes: Count
    start: Count
    crc32: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{8}$")]


class Manifest(_Model):
    """A checkpoint, without its values.

    Attributes:
        funzero: version that wrote it. mesh: the ranks that did, for people. step: applied updates. saved: when, in
            seconds since 1970.
        leaves: by path. nodes: {path: kind} of the containers. left_out: paths of frozen params that were not saved.
        extra: the user's JSON. metrics: numbers by which a manager may judge.
    """

    format: int
    funzero: str
    mesh: str
    step: Count
    saved: float
    leaves: dict[str, Leaf]
    nodes: dict[str, str]
    left_out: tuple[str, ...]
    files: dict[str, File]
    extra: pydantic.JsonValue = None
    metrics: dict[str, float] = {}

    def shapes(self) -> dict[str, torch.Tensor]:
        """{path: meta tensor of the global shape}."""
        return {n: torch.empty(x.shape, dtype=x.torch_dtype, device="meta") for n, x in self.leaves.items()}


class Part(_Model):
    """What one rank wrote: the same, before the first rank puts them together."""

    pieces: dict[str, tuple[Piece, ...]]
    files: dict[str, File]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def encode(model: Manifest | Part) -> bytes:
    """JSON under a first line with its checksum; the two together are JSON."""
    body = b'"manifest":' + model.model_dump_json().encode() + b"}\n"
    return b'{"crc32":"%08x",\n' % zlib.crc32(body) + body


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a checkpoint; reads no other file, and needs no device.

    Raises FileNotFoundError if there is no checkpoint, CheckpointError if its manifest is damaged or contradicts itself.

    >>> import tempfile, funzero as fz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fz.save(f"{folder}/first", fz.init_state({"w": torch.zeros(2, 3)}, fz.sgd(0.1)))
    ...     read_manifest(f"{folder}/first").leaves["params/w"].shape
    (2, 3)
    """
    path = Path(folder) / MANIFEST
    with os.fdopen(opened(path), "rb") as file:
        body = _body(path, file.read())
    if isinstance(body, dict) and body.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {body.get('format')!r}, this version of funzero reads {FORMAT}")
    found = _parsed(Manifest, path, body)
    for name in found.files:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{path}: {name!r} is not the name of a file of a checkpoint")
    for name, leaf in found.leaves.items():
        _check_leaf(path, name, leaf, found.files)
    return found


def opened(path: Path) -> int:
    """A handle for reading an ordinary file, which a checkpoint may be made of.

    Raises CheckpointError for a link, a pipe or the like, FileNotFoundError, OSError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: a link, not a file of the checkpoint") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path}: not an ordinary file")
    return handle


def read_part(path: Path) -> Part:
    """What a rank says it wrote."""
    return _parsed(Part, path, _body(path, path.read_bytes()))


def _body(path: Path, raw: bytes) -> Any:
    first = _FIRST_LINE.match(raw)
    if not first or zlib.crc32(raw[first.end() :]) != int(first[1], 16):
        raise CheckpointError(f"{path}: damaged, its checksum does not hold")
    try:
        return json.loads(raw)["manifest"]
    except (ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest: {error}") from error


def _parsed(kind: type[Any], path: Path, body: Any) -> Any:
    try:
        return kind.model_validate_json(json.dumps(body))
    except (pydantic.ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT}: {error}") from error


def _check_leaf(path: Path, name: str, leaf: Leaf, files: Mapping[str, File]) -> None:
    def need(holds: bool, what: str) -> None:
        if not holds:
            raise CheckpointError(f"{path}: {name}: {what}")

    need(leaf.dtype in _DTYPES, f"unknown dtype {leaf.dtype!r}")
    size = leaf.torch_dtype.itemsize
    need(math.prod(max(1, n) for n in leaf.shape) * size < 1 << 63, f"shape {list(leaf.shape)} overflows")
    for piece in leaf.pieces:
        lo, hi = piece.range
        need(len(piece.box) == len(leaf.shape), f"box {piece.box} does not fit the shape {list(leaf.shape)}")
        need(all(a < b <= n for (a, b), n in zip(piece.box, leaf.shape, strict=True)), f"box {piece.box} is outside")
        need(lo < hi <= _volume(piece.box), f"range {piece.range} is outside of its box")
        need(piece.file in files, f"{piece.file!r} is not among the files")
        file, end = files[piece.file], piece.at + piece.count * size
        need(file.start <= piece.at and end <= file.bytes, f"bytes {piece.at} to {end} are outside of {piece.file}")
        digits = 8 * math.ceil(piece.count * size / BLOCK)
        need(bool(re.fullmatch("[0-9a-f]*", piece.crc32)) and len(piece.crc32) == digits, "checksums are malformed")
    need(_tiles(leaf), "its pieces do not make up the leaf, each element once")


def _volume(box: Iterable[Span]) -> int:
    return math.prod(b - a for a, b in box)


def _tiles(leaf: Leaf) -> bool:
    """True if the boxes are a grid over the leaf, and the ranges within each follow one another."""
    if leaf.numel == 0:
        return not leaf.pieces
    by_box: dict[tuple[Span, ...], list[Span]] = {}
    for piece in leaf.pieces:
        by_box.setdefault(piece.box, []).append(piece.range)
    for box, ranges in by_box.items():
        if not _follow(ranges, _volume(box)):
            return False
    dims = [sorted({box[d] for box in by_box}) for d in range(len(leaf.shape))]
    grid = all(_follow(spans, size) for spans, size in zip(dims, leaf.shape, strict=True))
    return grid and len(by_box) == math.prod(len(spans) for spans in dims)


def _follow(spans: Iterable[Span], end: int) -> bool:
    at = 0
    for lo, hi in sorted(spans):
        if lo != at:
            return False
        at = hi
    return at == end
