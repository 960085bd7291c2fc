"""Loaders: order, layout over ranks, and a position that fits any number of ranks."""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import funzero as fz
from funzero.data import EMPTY, ArrayLoader, TokenLoader
from funzero.data.loader import epoch_order
from tests.ranks import pool


def mesh_of(ranks: int, rank: int) -> fz.Mesh:
    """Rank `rank` of `ranks`, without processes."""
    return dataclasses.replace(fz.abstract_mesh(dp=ranks), rank=rank)


def on_ranks(ranks: int, items: int, batch: int, **options: Any) -> list[ArrayLoader]:
    """The loader of each rank; item i holds i."""
    return [ArrayLoader(torch.arange(items), batch, mesh=mesh_of(ranks, r), **options) for r in range(ranks)]


def steps(loaders: list[ArrayLoader], count: int | None = None) -> list[list[list[int]]]:
    """For each step what each rank got; all ranks must take the same number of steps."""
    rows = [[[] if b is EMPTY else b.tolist() for b in itertools.islice(loader, count)] for loader in loaders]
    assert len({len(r) for r in rows}) == 1, f"the ranks took {[len(r) for r in rows]} steps"
    return [list(step) for step in zip(*rows, strict=True)]


def seen(taken: list[list[list[int]]]) -> list[int]:
    return [item for step in taken for rank in step for item in rank]


def saved(loaders: list[ArrayLoader]) -> dict[str, Any]:
    """The state after a trip through JSON; all ranks must have the same."""
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert len(set(states)) == 1, states
    return json.loads(states[0])


def resumed(state: dict[str, Any] | None, *args: Any, **options: Any) -> list[ArrayLoader]:
    """Loaders that go on at `state`, if there is one."""
    loaders = on_ranks(*args, **options)
    for loader in loaders if state else []:
        loader.load_state_dict(state)
    return loaders


@pytest.mark.parametrize("ranks, accumulate", [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1)])
def test_batches_are_what_local_cuts(ranks, accumulate):
    tree = {"x": torch.randn(24, 2), "y": np.arange(24, dtype=np.int16), "scale": 0.5, "w": torch.tensor(2.0)}
    order = epoch_order(24, 5, 0)
    for rank in range(ranks):
        mesh = mesh_of(ranks, rank)
        loader = ArrayLoader(tree, 12, mesh=mesh, seed=5, accumulate=accumulate, epochs=1)
        for found, rows in zip(loader, order.split(12), strict=True):
            whole = {**tree, "x": tree["x"][rows], "y": torch.from_numpy(tree["y"])[rows]}
            right = fz.data.local(whole, mesh, accumulate)
            assert found.keys() == right.keys() and found["scale"] == 0.5
            assert all(torch.equal(found[k], right[k]) for k in ("x", "y", "w")), f"rank {rank} of {ranks}"
            assert found["y"].dtype == torch.int16


def test_ranks_that_differ_along_other_axes_get_the_same_rows():
    mesh = fz.abstract_mesh(dp=2, tp=2)
    rows = [
        next(ArrayLoader(torch.arange(8), 4, mesh=dataclasses.replace(mesh, rank=r), seed=1)).tolist() for r in range(4)
    ]
    assert rows[0] == rows[1] != rows[2] == rows[3]


def test_the_order_is_a_function_of_seed_and_epoch():
    def epochs(seed: int) -> list[list[int]]:
        return [step[0] for step in steps(on_ranks(1, 50, 50, seed=seed, epochs=3))]

    first = epochs(0)
    assert first == epochs(0), "the same seed, another order"
    assert all(sorted(e) == list(range(50)) for e in first)
    assert len({tuple(e) for e in first + epochs(1)}) == 6, "two epochs or two seeds share an order"
    assert first[2] == epoch_order(50, 0, 2).tolist()


def test_without_shuffle_the_order_is_that_of_the_array():
    assert seen(steps(on_ranks(1, 5, 2, shuffle=False, epochs=2))) == [0, 1, 2, 3, 4] * 2


def test_no_generator_is_read_or_moved():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = seen(steps(on_ranks(2, 20, 4, epochs=1)))
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()
    torch.manual_seed(2)
    assert first == seen(steps(on_ranks(2, 20, 4, epochs=1)))


@pytest.mark.parametrize("before", [(1, 4, 1), (2, 4, 1), (2, 8, 2), (3, 6, 1)])
@pytest.mark.parametrize("after", [(1, 1, 1), (2, 6, 1), (3, 9, 1), (4, 8, 2), (8, 8, 1)])
def test_a_resume_at_any_step_sees_the_rest_once(before, after):
    """Two epochs, a stop after every step, any number of ranks, batch and accumulate after it."""
    items, (ranks, batch, accumulate) = 26, before
    options = {"seed": 3, "accumulate": accumulate, "epochs": 2}
    total = len(steps(on_ranks(ranks, items, batch, **options)))
    for stop in range(total + 1):
        loaders = on_ranks(ranks, items, batch, **options)
        first = seen(steps(loaders, stop))
        ranks_after, batch_after, accumulate_after = after
        again = resumed(saved(loaders), ranks_after, items, batch_after, seed=3, accumulate=accumulate_after, epochs=2)
        both = first + seen(steps(again))
        where = f"stop after {stop} of {total} steps"
        assert sorted(both[:items]) == list(range(items)), where
        assert sorted(both[items:]) == list(range(items)), where


@given(st.data())
def test_any_chain_of_resumes_sees_each_item_once_an_epoch(data):
    def whole(low: int, high: int, name: str) -> int:
        return data.draw(st.integers(low, high), label=name)

    items, epochs, shuffle = whole(1, 40, "items"), whole(1, 3, "epochs"), data.draw(st.booleans(), label="shuffle")
    state, found = None, []
    for _ in range(whole(1, 4, "runs")):
        ranks, accumulate = whole(1, 5, "ranks"), whole(1, 3, "accumulate")
        rest = items - (state["position"] if state else 0)
        assume(items % accumulate == 0 and rest % accumulate == 0)
        batch = ranks * accumulate * whole(1, 3, "rows in a micro-batch")
        options = {"seed": 7, "shuffle": shuffle, "accumulate": accumulate, "epochs": epochs}
        loaders = resumed(state, ranks, items, batch, **options)
        found += steps(loaders, whole(0, 10, "steps"))
        state = saved(loaders)
        assert state["epoch"] * items + state["position"] == len(seen(found))
    found += steps(resumed(state, 1, items, items, seed=7, shuffle=shuffle, epochs=epochs))
    order = seen(found)
    assert len(order) == items * epochs
    for epoch in range(epochs):
        assert sorted(order[epoch * items : (epoch + 1) * items]) == list(range(items)), f"epoch {epoch}"


@pytest.mark.parametrize("rest", range(0, 12, 2))
def test_the_uneven_end_of_an_epoch(rest):
    """One step more, whose rows differ by at most one a micro-batch and split into `accumulate` on every rank."""
    taken = steps(on_ranks(3, 24 + rest, 12, accumulate=2, epochs=1))
    assert len(taken) == 2 + (rest > 0)
    for step in taken:
        lengths = [len(rank) for rank in step]
        assert all(n % 2 == 0 for n in lengths) and max(lengths) - min(lengths) <= 2, lengths
    assert sorted(seen(taken)) == list(range(24 + rest))


def test_a_rank_without_rows_gets_empty():
    loaders = on_ranks(4, 5, 4, shuffle=False, epochs=1)
    assert [next(loader).tolist() for loader in loaders] == [[0], [1], [2], [3]]
    last = [next(loader) for loader in loaders]
    assert [b is EMPTY for b in last] == [True, True, True, False] and last[3].tolist() == [4]


def test_drop_last_leaves_out_what_makes_no_full_batch():
    taken = steps(on_ranks(2, 11, 4, drop_last=True, seed=1, epochs=2))
    assert [len(rank) for step in taken for rank in step] == [2] * 8
    loaders = on_ranks(2, 11, 4, drop_last=True, seed=1)
    steps(loaders, 2)
    assert saved(loaders)["position"] == 8
    again = resumed(saved(loaders), 2, 11, 2, drop_last=True, seed=1, epochs=1)
    assert len(steps(again)) == 1, "a smaller batch takes two of the three that the larger one would leave out"


def test_a_read_that_fails_may_be_tried_again():
    class Flaky(np.ndarray):
        fail = True

        def __getitem__(self, index):
            if Flaky.fail:
                raise OSError("the disk is gone")
            return np.asarray(self)[index]

    loader = ArrayLoader(np.arange(6).view(Flaky), 2, shuffle=False)
    with pytest.raises(OSError, match="gone"):
        next(loader)
    Flaky.fail = False
    assert next(loader).tolist() == [0, 1]


def test_only_the_rows_of_the_rank_are_read():
    read: list[int] = []

    class Counting(np.ndarray):
        def __getitem__(self, index):
            read.extend(index.tolist())
            return np.asarray(self)[index]

    loader = ArrayLoader(np.arange(12).view(Counting), 6, mesh=mesh_of(3, 1), shuffle=False, epochs=1)
    assert [b.tolist() for b in loader] == [[2, 3], [8, 9]]
    assert read == [2, 3, 8, 9]


def test_a_loader_is_stateful_and_ends():
    loader = ArrayLoader(torch.arange(4), 2, epochs=1)
    assert isinstance(loader, fz.data.Stateful) and isinstance(TokenLoader(torch.arange(9), 2, 1), fz.data.Stateful)
    assert len(list(loader)) == 2 and list(loader) == []
    longer = resumed(saved([loader]), 1, 4, 2, epochs=2)
    assert len(steps(longer)) == 2


@pytest.mark.parametrize(
    "change, text",
    [
        ({"items": 9}, "items=8 in the state, 9 here"),
        ({"seed": 1}, "seed=0 in the state, 1 here"),
        ({"shuffle": False}, "shuffle=True in the state, False here"),
        ({"seed": 1, "items": 9}, "items=8 in the state, 9 here; seed=0 in the state, 1 here"),
    ],
)
def test_a_state_of_other_data_is_refused(change, text):
    state = saved(on_ranks(1, 8, 4))
    options = {"items": 8, **change}
    with pytest.raises(ValueError, match=text):
        resumed(state, 1, options.pop("items"), 4, **options)


def test_a_state_that_does_not_fit_changes_nothing():
    (loader,) = on_ranks(1, 12, 6, accumulate=2)
    next(loader)
    right = saved([loader])
    for wrong, text in [
        ({**right, "position": 13}, r"position within 0\.\.12, got epoch=0, position=13"),
        ({**right, "epoch": -1}, "epoch=-1"),
        ({**right, "position": 3}, "9 items to the end of the epoch do not split into accumulate=2"),
        ({"step": 4}, r"\['epoch', 'position', 'items', 'seed', 'shuffle'\] are not in it, only \['step'\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            loader.load_state_dict(wrong)
        assert saved([loader]) == right


@pytest.mark.parametrize(
    "tree, options, text",
    [
        (torch.arange(8), {"batch": 6, "mesh": mesh_of(4, 0)}, "batch=6 is not a positive multiple .* 4 x 1"),
        (torch.arange(8), {"batch": 0}, "batch=0 is not a positive multiple"),
        (torch.arange(7), {"batch": 2, "accumulate": 2}, "7 items .* accumulate=2 .* drop_last=True"),
        (torch.arange(3), {"batch": 4, "drop_last": True}, "3 items make no batch of 4"),
        (torch.arange(0), {"batch": 4}, "0 items make no batch"),
        (torch.arange(8), {"batch": 2, "epochs": 0}, "epochs must be at least 1"),
        ({"x": torch.arange(3), "y": np.arange(4)}, {"batch": 1}, r"share dim 0, got the lengths {'x': 3, 'y': 4}"),
        ({"x": 1.0}, {"batch": 1}, r"got the lengths {}"),
    ],
)
def test_sizes_that_do_not_fit(tree, options, text):
    with pytest.raises(ValueError, match=text):
        ArrayLoader(tree, **options)


@pytest.mark.parametrize("kind", ["tensor", "array", "memmap"])
def test_token_windows(kind, tmp_path):
    """Every token but the first is a label once; the last ones that fill no window are left out."""
    tokens = np.arange(100, 125, dtype=np.uint16)
    if kind == "tensor":
        source: Any = torch.from_numpy(tokens.astype(np.int32))
    elif kind == "memmap":
        tokens.tofile(tmp_path / "tokens")
        source = np.memmap(tmp_path / "tokens", dtype=np.uint16, mode="r")
    else:
        source = tokens
    batches = [b for r in (0, 1) for b in TokenLoader(source, 4, 4, mesh=mesh_of(2, r), epochs=1)]
    for batch in batches:
        assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
        assert batch["tokens"].is_contiguous() and batch["labels"].is_contiguous()
        assert torch.equal(batch["tokens"] + 1, batch["labels"])
    assert sorted(x for b in batches for x in b["labels"].flatten().tolist()) == list(range(101, 125))


def test_token_loader_resumes_on_other_ranks():
    tokens = torch.arange(41)

    def make(ranks: int, batch: int) -> list[TokenLoader]:
        return [TokenLoader(tokens, 4, batch, mesh=mesh_of(ranks, r), seed=2, epochs=1) for r in range(ranks)]

    def labels(loaders: list[TokenLoader], count: int | None = None) -> list[int]:
        batches = [b for loader in loaders for b in itertools.islice(loader, count) if b is not EMPTY]
        return [x for b in batches for x in b["labels"].flatten().tolist()]

    before, after = make(2, 4), make(3, 3)
    first = labels(before, 1)
    for loader in after:
        loader.load_state_dict(saved(before))
    assert sorted(first + labels(after)) == list(range(1, 41))
    with pytest.raises(ValueError, match="length=4 in the state, 5 here"):
        TokenLoader(tokens, 5, 1).load_state_dict(saved(before))


@pytest.mark.parametrize(
    "tokens, length, error, text",
    [
        (torch.zeros(3, 3, dtype=torch.int64), 1, TypeError, r"1-D .* got torch.Size\(\[3, 3\]\)"),
        ([1, 2, 3], 1, TypeError, "1-D tensor or numpy array, got <class 'list'>"),
        (torch.zeros(9), 1, TypeError, "integers, got torch.float32"),
        (np.zeros(9), 1, TypeError, "integers, got float64"),
        (torch.arange(4), 4, ValueError, "length=4 needs 5 tokens, got 4"),
        (torch.arange(4), 0, ValueError, "length=0"),
    ],
)
def test_tokens_that_do_not_fit(tokens, length, error, text):
    with pytest.raises(error, match=text):
        TokenLoader(tokens, length, 1)


def train(rank: int, world: int, state: dict[str, Any] | None, count: int | None) -> tuple[Any, list[float]]:
    """Two epochs of 13 items in batches of 6, from `state` and for `count` steps: the data state, and the norms."""
    mesh, tx = fz.make_mesh(dp=-1), fz.sgd(0.1)
    params = {"w": torch.zeros(4, dtype=torch.float64)}
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=3)
    step = fz.make_step(lambda p, x: fz.Loss((p["w"] * x).sum(), weight=len(x)), tx)
    weights = fz.init_state(params, tx, specs=specs)
    tree = torch.arange(52, dtype=torch.float64).view(13, 4) ** 2
    loader = ArrayLoader(tree, 6, mesh=mesh, seed=1, epochs=2)
    if state:
        loader.load_state_dict(state)
    norms = []
    for batch in itertools.islice(loader, count):
        weights, metrics = step(weights, batch)
        norms.append(metrics.grad_norm.item())
    return loader.state_dict(), norms


def test_a_training_goes_on_on_other_ranks():
    """The end of an epoch is one item, so that all ranks but one get EMPTY; after a stop 3 ranks take the same batches."""
    (_, right), *_ = pool(1).run(train, None, None)
    assert len(right) == 6
    for _, norms in pool(2).run(train, None, None):
        assert norms == pytest.approx(right, rel=1e-12)
    (state, _), *_ = pool(2).run(train, None, 1)
    for _, norms in pool(3).run(train, state, None):
        assert norms == pytest.approx(right[1:], rel=1e-12)
