"""Other libraries' loaders as `Stateful` iterators. Their positions belong to ranks, so they resume on as many ranks only."""

import base64
import importlib
import json
from collections.abc import Iterator
from typing import Any, Self, final

import torch

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh, local_mesh
from funzero.data.batches import to_device
from funzero.data.loader import Stateful


def from_torchdata(loader: Any, mesh: Mesh | None = None) -> Stateful:
    """A `StatefulDataLoader` of torchdata as an iterator of batches on the mesh's device.

    At the end of the data the iteration stops, and the next `for` begins the next epoch. What the ranks read is up to the
    sampler, as is the order. `state_dict` is a collective call and holds every rank's position, so that one rank may save it.

    Args:
        loader: this rank's; tensors and numpy arrays in its batches become tensors on the device of `mesh`.
        mesh: default: this process alone.

    Raises:
        ImportError: torchdata is not installed.
        TypeError: `loader` is something else.
        ValueError: a loaded state is of another number of ranks, or of another library.
    """
    module = _need("torchdata.stateful_dataloader", "torchdata")
    if not isinstance(loader, module.StatefulDataLoader):
        raise TypeError(f"from_torchdata: expected a StatefulDataLoader, got {type(loader).__name__}")
    return _Adapter("torchdata", _Torchdata(loader), mesh)


def from_grain(dataset: Any, mesh: Mesh | None = None) -> Stateful:
    """A grain `MapDataset`, `IterDataset`, `DatasetIterator` or `DataLoader` as an iterator of batches on the mesh's device.

    At the end of the data the iteration stops, and the next `for` begins them anew; `dataset.repeat()` gives epochs of
    different order. Cut the data yourself, as by `dataset[mesh.index(mesh.batch) :: mesh.size(mesh.batch)]`. `state_dict`
    is a collective call and holds every rank's position, so that one rank may save it.

    Args:
        dataset: this rank's; tensors and numpy arrays in its batches become tensors on the device of `mesh`.
        mesh: default: this process alone.

    Raises:
        ImportError: grain is not installed.
        TypeError: `dataset` is something else.
        ValueError: a loaded state is of another number of ranks, or of another library.
    """
    grain = _need("grain", "grain")
    known = (grain.MapDataset, grain.IterDataset, grain.DatasetIterator, grain.DataLoader)
    if not isinstance(dataset, known):
        raise TypeError(f"from_grain: expected one of {[c.__name__ for c in known]}, got {type(dataset).__name__}")
    return _Adapter("grain", _Grain(dataset), mesh)


@final
class _Adapter:
    """Batches as tensors on the device, and the positions of all ranks in one state."""

    def __init__(self, source: str, wrapped: "_Torchdata | _Grain", mesh: Mesh | None):
        self._source, self._wrapped = source, wrapped
        self._mesh = local_mesh() if mesh is None else mesh

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch = self._wrapped.next()
        return tree_lib.map(lambda leaf: to_device(leaf, self._mesh.device), batch)

    def state_dict(self) -> dict[str, Any]:
        """The position of every rank after its batches so far. A collective call."""
        texts = _all_texts(json.dumps(self._wrapped.get(), default=_encode), self._mesh)
        return {"source": self._source, "ranks": [json.loads(text) for text in texts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where this rank was when `state` was taken."""
        if state.get("source") != self._source:
            raise ValueError(f"data state: expected one of {self._source}, got one of {state.get('source')}")
        if len(state["ranks"]) != self._mesh.world:
            raise ValueError(
                f"data state: it holds the positions of {len(state['ranks'])} ranks in {self._source}, here are "
                f"{self._mesh.world}; start as many, or use fz.data.ArrayLoader, whose position is one for all ranks"
            )
        self._wrapped.set(json.loads(json.dumps(state["ranks"][self._mesh.rank]), object_hook=_decode))


@final
class _Torchdata:
    def __init__(self, loader: Any):
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise

    def get(self) -> Any:
        return self._loader.state_dict()

    def set(self, state: Any) -> None:
        self._loader.load_state_dict(state)
        self._iterator = None  # only a new iterator looks at the loaded state


@final
class _Grain:
    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._iterator = iter(dataset)

    def next(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._dataset)
            raise

    def get(self) -> Any:
        return self._iterator.get_state()

    def set(self, state: Any) -> None:
        self._iterator.set_state(state)


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"from_{package} needs {package}: pip install {package}, or funzero[data]") from error


def _all_texts(text: str, mesh: Mesh) -> list[str]:
    """Every rank's text, of any length."""
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = mesh.gather_host(torch.tensor([len(raw)])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(raw)] = raw
    rows = mesh.gather_host(padded)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def _encode(value: Any) -> dict[str, Any]:
    """What states hold beside JSON: grain's DataLoader gives bytes, torch's samplers the state of a generator."""
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"__tensor__": [str(value.dtype).removeprefix("torch."), value.tolist()]}
    raise TypeError(f"data state: {type(value).__name__} does not go into JSON")


def _decode(node: dict[str, Any]) -> Any:
    if "__bytes__" in node:
        return base64.b64decode(node["__bytes__"])
    if "__tensor__" in node:
        dtype, values = node["__tensor__"]
        return torch.tensor(values, dtype=getattr(torch, dtype), device="cpu")
    return node
