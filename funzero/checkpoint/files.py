"""What the formats share: folders that appear whole or not at all, safetensors files, and mappings that read late."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import safetensors.torch
import torch

from funzero.checkpoint import disk, manifest


@final
class LazyTensors(Mapping[str, torch.Tensor]):
    """A mapping of names to tensors, each of which is read when it is asked for and not kept.

    Args:
        shapes: {name: meta tensor}, which names there are and what they will be; also an attribute.
        read: name -> tensor. left_out: names of what the source holds beside tensors; also an attribute.

    >>> zeros = LazyTensors({"w": torch.empty(2, device="meta")}, lambda name: torch.zeros(2))
    >>> list(zeros), zeros["w"]
    (['w'], tensor([0., 0.]))
    """

    def __init__(
        self, shapes: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], left_out: tuple[str, ...] = ()
    ):
        self.shapes, self.left_out, self._read = dict(shapes), left_out, read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{name: meta tensor}; reads a mapping that is no `LazyTensors` once."""
    if isinstance(tensors, LazyTensors):
        return tensors.shapes
    shapes = {}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        shapes[name] = meta(x.shape, x.dtype)
    return shapes


def meta(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both have the same dtype, shape and bits, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (x.detach().cpu().reshape(-1).contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(first, second)


@contextlib.contextmanager
def new_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write files into, which becomes `path` when the block has ended and all is on disk.

    After an error in the block nothing is left of it. What `overwrite` replaces stays until then.

    Raises FileExistsError, before anything is written, for a `path` that exists and is not to be overwritten.
    """
    path = Path(path)
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(f"{path} exists; give another name or overwrite=True")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f".{path.name}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()  # not mkdtemp, whose folders only their owner can read
    try:
        yield folder
        for file in (*folder.iterdir(), folder):
            disk.sync(file)
        _rename(folder, path)
        disk.sync(path.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _rename(folder: Path, path: Path) -> None:
    if not os.path.lexists(path):
        os.rename(folder, path)
        return
    disk.swap(folder, path)
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink()


def inside(folder: Path, name: str, *, also: tuple[Path, ...] = ()) -> Path:
    """The file of that name in a folder.

    Raises ValueError for a name that leads out of the folder, itself or as a link (into `also` it may), and
    FileNotFoundError.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{folder}: {name!r} must be the name of a file in this folder, without a path")
    file = folder / name
    real = Path(os.path.realpath(file))  # resolve() has errors of its own for a ring of links
    if not any(real.is_relative_to(os.path.realpath(root)) for root in (folder, *also)):
        raise ValueError(f"{file} is a link out of its folder, to {real}; put the file itself there")
    if not real.is_file():
        raise FileNotFoundError(f"{file} is not there")
    return file


def write_safetensors(
    file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors, which must be in host memory, contiguous and no views of one another. Raises OSError."""
    file.touch()
    mode = file.stat().st_mode  # the library makes files that only their owner can read
    try:
        safetensors.torch.save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    except safetensors.SafetensorError as found:
        raise OSError(f"{file}: {found}") from found
    file.chmod(mode)


def safetensors_shapes(file: Path) -> dict[str, torch.Tensor]:
    """{name: meta tensor} of a file, from its header. Raises OSError for a damaged file, ValueError for a dtype."""
    with _opened(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        for name, found in slices.items():
            if found.get_dtype() not in manifest.DTYPES:
                raise ValueError(
                    f"{file}: {name} has dtype {found.get_dtype()}; torch tensors have {list(manifest.DTYPES)}"
                )
        return {name: meta(x.get_shape(), manifest.DTYPES[x.get_dtype()]) for name, x in slices.items()}


def read_safetensors(file: Path, name: str) -> torch.Tensor:
    """One tensor of a file, in memory of its own. Raises OSError for a damaged file."""
    with _opened(file) as opened:
        return opened.get_tensor(name).clone()  # it comes as a view of the mapped file, which may be replaced


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            yield opened
    except safetensors.SafetensorError as found:
        raise OSError(f"{file} is damaged or no safetensors file: {found}") from found
