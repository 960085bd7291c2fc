"""Checkpoints of torch.distributed.checkpoint (DCP): written by DCP itself, read without it.

A DCP folder holds `.metadata`, a pickle that says where the pieces of each tensor lie, and payload files. DCP's own
reader unpickles `.metadata` as it is, which runs whatever code somebody put there, and leaves memory as it was where no
piece covers a tensor. The reader here admits the classes in `ADMITTED` and no others, and even these only as records
without behaviour.
"""

import dataclasses
import io
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from funzero.checkpoint import files

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
ADMITTED = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Chunk", "Bytes")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}


def export_dcp(folder: str | Path, tensors: Mapping[str, torch.Tensor], *, overwrite: bool = False) -> None:
    """Writes whole tensors as a DCP checkpoint that `torch.distributed.checkpoint.load` reads, into any layout.

    For one process to call. Each leaf has a file of its own, so that one is in memory at a time.

    Args:
        folder: to make; it appears when all of it is on disk. tensors: {name: whole tensor}, read one by one.
        overwrite: replace the folder of that name; it stays until the new one is complete.

    Raises FileExistsError, OSError, and TypeError for what is no tensor.

    >>> import tempfile
    >>> where = tempfile.mkdtemp() + "/step-1"
    >>> export_dcp(where, {"params/w": torch.ones(2), "step": torch.tensor(3)})
    >>> dict(import_dcp(where))
    {'params/w': tensor([1., 1.]), 'step': tensor(3)}
    """
    from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter, save

    class Lazy(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> torch.Tensor:
            return tensors[index.fqn].detach()

    with files.new_folder(folder, overwrite=overwrite) as new:
        plan = dict(files.shapes_of(tensors))
        writer = FileSystemWriter(new, single_file_per_rank=False, sync_files=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                save(plan, storage_writer=writer, planner=Lazy(), no_dist=True)
        except CheckpointException as found:  # no Exception: it would pass by every `except Exception`
            causes = [error for error, _ in found.failures.values()]
            raise OSError(f"{folder}: DCP cannot write it: {causes}") from causes[0]


def import_dcp(folder: str | Path) -> files.LazyTensors:
    """The tensors of a DCP checkpoint, each read and put together from its pieces when it is asked for.

    The checkpoint may come from any number of ranks (DTensor, FSDP); no process group is needed. Nothing in it can run
    code, see this module's docstring. A tensor and the bytes of its largest piece are in memory at a time.

    Returns: {DCP's own flat name, such as `model.layers.0.weight`: whole tensor on the CPU}. `.shapes` has them as meta
    tensors; `.left_out` names the entries that are no tensors, which are not read.

    Raises: FileNotFoundError; ValueError for a `.metadata` that holds other classes, points out of the folder, or whose
    pieces do not make up a tensor; OSError for damaged payload, of which what torch.load notices is found on reading
    (DCP has no checksums).
    """
    folder = Path(folder)
    file = files.inside(folder, METADATA)
    metadata = _unpickled(file)
    try:
        leaves, left_out = _laid_out(metadata)
        for name, (shape, pieces) in leaves.items():
            _check(folder, name, shape, pieces)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as found:
        raise ValueError(f"{file} is not laid out as DCP does: {type(found).__name__}: {found}") from found
    shapes = {name: shape for name, (shape, _) in leaves.items()}
    return files.LazyTensors(shapes, lambda name: _read(folder, name, *leaves[name]), left_out)


class _Record:
    """What a class of DCP becomes: holds the attributes, and computes nothing."""

    __slots__ = ("state",)

    def __new__(cls, *args: Any) -> "_Record":
        made = super().__new__(cls)
        made.state = {}
        return made

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Finds the classes in `ADMITTED`, torch.Size and dtypes; everything else is an error that names it."""

    def __init__(self, file: Any):
        super().__init__(file)
        # New classes for each file: a pickle may set attributes of what it is given.
        self.kinds = {key: type(key[1], (_Record,), {"__slots__": ()}) for key in ADMITTED}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.kinds:
            return self.kinds[module, name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which DCP's metadata has no use for")


def _unpickled(file: Path) -> dict[str, Any]:
    """The attributes of the `Metadata` in a file."""
    try:
        with file.open("rb") as opened:
            found = _Unpickler(opened).load()
    except OSError:
        raise
    except Exception as error:  # a malformed pickle raises nearly anything
        raise ValueError(f"{file} is refused: {error}") from error
    if type(found).__name__ != "Metadata" or not isinstance(found, _Record) or not isinstance(found.state, dict):
        raise ValueError(f"{file} is refused: expected DCP's Metadata, got {type(found).__name__}")
    return found.state


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A block of a tensor: where it begins and how large it is, and the bytes of a file that hold it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    transforms: Any


_Leaves = dict[str, tuple[torch.Tensor, list[_Piece]]]


def _laid_out(metadata: dict[str, Any]) -> tuple[_Leaves, tuple[str, ...]]:
    """The shape and the pieces of each tensor, and the names of what is none."""
    stored = {}
    for key, info in metadata["storage_data"].items():
        stored[key.state["fqn"], key.state.get("offset") or ()] = info.state
    leaves, left_out = {}, []
    for name, entry in metadata["state_dict_metadata"].items():
        if type(entry).__name__ == "BytesStorageMetadata":
            left_out.append(name)
        else:
            leaves[name] = _shape_and_pieces(name, entry.state, stored)
    return leaves, tuple(left_out)


def _shape_and_pieces(name: str, entry: Any, stored: Mapping[Any, Any]) -> tuple[torch.Tensor, list[_Piece]]:
    dtype = entry["properties"].state[0]
    pieces = []
    for chunk in entry["chunks"]:
        start, shape = chunk.state["offsets"], chunk.state["sizes"]
        if 0 in shape:
            continue  # a rank without a share
        at = stored[name, start]
        transforms = at.get("transform_descriptors")
        pieces.append(_Piece(start, shape, at["relative_path"], at["offset"], at["length"], transforms))
    return files.meta(entry["size"], dtype), pieces


def _check(folder: Path, name: str, whole: torch.Tensor, pieces: list[_Piece]) -> None:
    where = f"{folder / METADATA}: {name}"
    for piece in pieces:
        box = zip(piece.start, piece.shape, whole.shape, strict=False)
        if not len(piece.start) == len(piece.shape) == whole.dim() or any(
            a < 0 or n < 0 or a + n > m for a, n, m in box
        ):
            raise ValueError(f"{where}: a piece {piece.shape} at {piece.start} lies outside {tuple(whole.shape)}")
        if piece.transforms:
            raise ValueError(f"{where}: is stored with {piece.transforms}; load it with torch and save it without")
        file = files.inside(folder, piece.file)
        size = file.stat().st_size
        if piece.offset < 0 or piece.length < 0 or piece.offset + piece.length > size:
            end = piece.offset + piece.length
            raise OSError(f"{file} is damaged: {name} lies at bytes {piece.offset} to {end}, the file has {size}")
        if math.prod(piece.shape) * whole.dtype.itemsize > piece.length:
            raise ValueError(f"{where}: a piece {piece.shape} of {whole.dtype} cannot lie in {piece.length} bytes")
    elements = sum(math.prod(piece.shape) for piece in pieces)
    if elements != whole.numel():
        raise ValueError(f"{where}: has {whole.numel()} elements, its pieces hold {elements}")


def _read(folder: Path, name: str, whole: torch.Tensor, pieces: list[_Piece]) -> torch.Tensor:
    made = torch.empty_like(whole, device="cpu")
    covered = torch.zeros(whole.shape if len(pieces) > 1 else (), dtype=torch.bool)
    for piece in pieces:
        block = _block(folder, name, piece)
        if block.dtype != whole.dtype or tuple(block.shape) != piece.shape:
            raise OSError(
                f"{folder / piece.file} is damaged: {name}: expected {whole.dtype}{list(piece.shape)}, "
                f"got {block.dtype}{list(block.shape)}"
            )
        if len(pieces) == 1:
            return block.contiguous()
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        made[box] = block
        covered[box] = True
    if len(pieces) > 1 and not covered.all():  # the sizes add up: what is not covered lies under two
        raise ValueError(f"{folder / METADATA}: {name}: its pieces overlap")
    return made


def _block(folder: Path, name: str, piece: _Piece) -> torch.Tensor:
    file = files.inside(folder, piece.file)
    with file.open("rb") as opened:
        opened.seek(piece.offset)
        data = io.BytesIO(opened.read(piece.length))
    try:
        block = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no error of its own
        raise OSError(f"{file} is damaged: {name} cannot be read: {error}") from error
    if type(block) not in (torch.Tensor, torch.nn.Parameter) or block.layout != torch.strided:
        raise OSError(f"{file} is damaged: {name}: expected a tensor, got {type(block).__name__}")
    return block.detach()
