"""Loaders of other libraries behind `Stateful`: small twins of them everywhere, the real ones where installed."""

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import funzero as fz
from tests.ranks import pool


class StatefulDataLoader:
    """torchdata's: a new iterator goes on at the loaded state, or begins an epoch; its sampler keeps a generator."""

    def __init__(self, items: int):
        self._items, self._at, self._loaded = items, 0, None

    def __iter__(self) -> Iterator[Any]:
        self._at, self._loaded = self._loaded or 0, None
        self._at %= self._items
        while self._at < self._items:
            self._at += 1
            yield {"x": torch.tensor([self._at - 1])}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "generator": torch.tensor([self._at, 255], dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["generator"].dtype == torch.uint8 and state["generator"].tolist() == [state["at"], 255]
        self._loaded = state["at"]


class DatasetIterator:
    """grain's: numpy batches, `get_state` and `set_state`."""

    def __init__(self, items: int):
        self._items, self._at = items, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._at == self._items:
            raise StopIteration
        self._at += 1
        rows = np.array([self._at - 1])
        rows.flags.writeable = False  # as arrays from grain's shared memory may be
        return {"x": rows}

    def get_state(self) -> Any:
        return json.dumps({"next_index": self._at}).encode()

    def set_state(self, state: Any) -> None:
        self._at = json.loads(state.decode())["next_index"]


class MapDataset:
    def __init__(self, items: int):
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return DatasetIterator(self._items)


@pytest.fixture
def twins(monkeypatch):
    use_twins(monkeypatch.setitem)


def use_twins(setitem: Any = dict.__setitem__) -> None:
    other = type("Other", (), {})
    modules = {
        "torchdata": {},
        "torchdata.stateful_dataloader": {"StatefulDataLoader": StatefulDataLoader},
        "grain": {
            "MapDataset": MapDataset,
            "IterDataset": other,
            "DatasetIterator": DatasetIterator,
            "DataLoader": other,
        },
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        setitem(sys.modules, name, module)


def torchdata_twin(items: int, mesh: Any = None) -> Any:
    return fz.data.from_torchdata(StatefulDataLoader(items), mesh)


def grain_twin(items: int, mesh: Any = None) -> Any:
    return fz.data.from_grain(MapDataset(items), mesh)


def values(batches: Any) -> list[Any]:
    return [batch["x"].tolist() for batch in batches]


@pytest.mark.parametrize("make", [torchdata_twin, grain_twin])
def test_a_resume_at_any_step(make, twins):
    for stop in range(5):
        data = make(4)
        assert isinstance(data, fz.data.Stateful)
        first = values(next(data) for _ in range(stop))
        state = json.loads(json.dumps(data.state_dict()))
        again = make(4)
        next(again)
        again.load_state_dict(state)
        rest = [] if stop == 4 else values(again)
        assert first + rest == [[0], [1], [2], [3]], f"stop after {stop}"


@pytest.mark.parametrize("make", [torchdata_twin, grain_twin])
def test_the_next_for_begins_the_next_epoch(make, twins):
    data = make(2)
    assert [values(data), values(data)] == [[[0], [1]]] * 2


def test_arrays_become_tensors(twins):
    batch = next(grain_twin(2))
    assert isinstance(batch["x"], torch.Tensor)


def on_rank(rank: int, world: int) -> dict[str, Any]:
    """Rank r takes r + 1 batches; the state of all ranks, and what comes after it."""
    use_twins()
    try:
        mesh = fz.make_mesh(dp=-1)
        data = grain_twin(9, mesh)
        for _ in range(rank + 1):
            next(data)
        state = data.state_dict()
        again = grain_twin(9, mesh)
        again.load_state_dict(state)
        return {"state": state, "next": next(again)["x"].item()}
    finally:
        for name in ("torchdata", "torchdata.stateful_dataloader", "grain"):
            del sys.modules[name]


def test_every_rank_holds_the_positions_of_all(twins):
    results = pool(2).run(on_rank)
    assert results[0]["state"] == results[1]["state"]
    assert [r["next"] for r in results] == [1, 2]
    with pytest.raises(ValueError, match=r"positions of 2 ranks in grain, here are 1; .* fz.data.ArrayLoader"):
        grain_twin(9).load_state_dict(results[0]["state"])
    with pytest.raises(ValueError, match="expected one of torchdata, got one of grain"):
        torchdata_twin(9).load_state_dict(results[0]["state"])


def test_another_kind_of_loader_is_refused(twins):
    with pytest.raises(TypeError, match="expected a StatefulDataLoader, got list"):
        fz.data.from_torchdata([1])
    with pytest.raises(TypeError, match=r"expected one of .*'MapDataset'.*, got list"):
        fz.data.from_grain([1])


@pytest.mark.parametrize("name", ["torchdata", "grain"])
def test_a_missing_library_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install {name}, or funzero\[data\]"):
        getattr(fz.data, f"from_{name}")([1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_the_real_torchdata(workers):
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return fz.data.from_torchdata(module.StatefulDataLoader(range(10), 3, shuffle=True, num_workers=workers))

    data = make()
    first = next(data).tolist()
    state = json.loads(json.dumps(data.state_dict()))
    rest = [batch.tolist() for batch in data]
    again = make()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert sorted(sum(rest, first)) == list(range(10))
    assert sorted(torch.cat(list(again)).tolist()) == list(range(10)), "the next epoch is whole"


@pytest.mark.parametrize("kind", ["map", "iter", "loader"])
def test_the_real_grain(kind):
    grain = pytest.importorskip("grain")

    def make() -> Any:
        dataset = grain.MapDataset.range(10).seed(3).shuffle().batch(3)
        sampler = grain.samplers.IndexSampler(10, shuffle=True, seed=1, num_epochs=1)
        source = grain.sources.RangeDataSource(0, 10, 1)
        loader = grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(3)])
        return fz.data.from_grain({"map": dataset, "iter": dataset.to_iter_dataset(), "loader": loader}[kind])

    data = make()
    first = next(data).tolist()
    state = json.loads(json.dumps(data.state_dict()))
    rest = [batch.tolist() for batch in data]
    again = make()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert sorted(sum(rest, first)) == list(range(10))
