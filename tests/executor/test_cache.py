"""The gather cache goes by its list: every use is served, the budget holds, and the plan is as good as can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funzero as fz
from funzero.core.collectives import Pending
from funzero.core.spec import Layout
from funzero.executor import shards as shards_lib
from funzero.executor.cache import CacheOptions, GatherCache, Program
from funzero.executor.forms import Forms
from funzero.executor.gather_list import plan_gathers
from funzero.executor.shards import Shards

MESH = fz.abstract_mesh(dp=2)


def make_cache(sizes, budget, gathers):
    layouts = {k: Layout(f"params/{k}", (n,), torch.uint8, fz.Spec(flat=("dp",)), MESH) for k, n in sizes.items()}
    shards = {k: torch.zeros(x.local_shape, dtype=torch.uint8) for k, x in layouts.items()}
    program, forms = Program(), Forms(layouts)
    program.gathers = gathers
    shards = Shards(shards, forms, layouts)
    return GatherCache(MESH, forms, shards, CacheOptions(budget, always_ask=False), program, lambda want: [])


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    posted = []

    def post(shard, layout):
        posted.append(layout.path)
        return Pending([], lambda: torch.zeros(layout.n, dtype=torch.uint8))

    monkeypatch.setattr(shards_lib, "post_gather", post)
    return posted


def cases():
    return st.tuples(
        st.lists(st.integers(0, 7), min_size=1, max_size=60),
        st.lists(st.integers(1, 40), min_size=8, max_size=8),
        st.one_of(st.none(), st.integers(1, 150)),
    )


@given(cases())
def test_every_use_is_served_within_the_budget(case):
    uses, numbers, budget = case
    sizes = dict(enumerate(numbers))
    cache = make_cache(sizes, budget, plan_gathers(uses, sizes, budget))
    for leaf in uses:
        for _ in range(2):  # a leaf is often asked for twice in a row
            assert cache.get(leaf).numel() == sizes[leaf]
    assert budget is None or cache.peak_bytes <= max(budget, max(sizes.values()))
    cache.finish()
    cache.clear()
    assert cache.bytes == 0


def fetches_by_force(uses, slots):
    """The fewest fetches of any strategy for leaves of equal size, by trying all."""
    held = {frozenset(): 0}
    for leaf in uses:
        later = {}
        for have, count in held.items():
            options = [(have, count)] if leaf in have else []
            if leaf not in have:
                full = len(have) == slots
                options = [((have - {v}) | {leaf}, count + 1) for v in have] if full else [(have | {leaf}, count + 1)]
            for state, total in options:
                later[frozenset(state)] = min(total, later.get(frozenset(state), total))
        held = later
    return min(held.values())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 4))
def test_the_farthest_next_use_is_optimal(uses, slots):
    plan = plan_gathers(uses, dict.fromkeys(range(5), 10), slots * 10)
    assert len(plan) == fetches_by_force(uses, slots)


def test_a_use_that_the_list_does_not_serve(no_network):
    sizes = {0: 4, 1: 4}
    cache = make_cache(sizes, None, plan_gathers([0], sizes, None))
    cache.get(0)
    with pytest.raises(RuntimeError, match=r'params/1: rank 0 uses this leaf .*leaf_use="any"'):
        cache.get(1)


def test_the_rest_of_the_list_is_joined(no_network):
    sizes = {0: 4, 1: 4, 2: 4, 3: 4}
    cache = make_cache(sizes, 8, plan_gathers([0, 1, 2, 3], sizes, 8))
    cache.get(0)
    cache.finish()
    assert no_network == ["params/0", "params/1", "params/2", "params/3"]
