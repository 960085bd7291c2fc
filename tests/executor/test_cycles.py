"""A step leaves no reference cycles: what it used is freed when it returns, not at some later collection."""

import gc

import pytest
import torch

import funzero as fz
from funzero.executor import placement
from tests.ranks import pool


def garbage(stage, steps=3):
    """Objects that only a collection can free, after some steps."""
    model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Linear(48, 48))
    params, _ = fz.split_module(model)
    tx = fz.adamw(1e-3)
    specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=stage)
    state = fz.init_state(params, tx, specs=specs)

    def loss_fn(p, x):
        return fz.functional_call(model, p, x).square().mean()

    step = fz.make_step(loss_fn, tx, specs=specs, accumulate=2, max_norm=1.0)
    for _ in range(2):
        state, _ = step(state, torch.ones(4, 48))
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            state, _ = step(state, torch.ones(4, 48))
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(stage):
    assert garbage(stage) == 0


def on_a_rank(rank, world, stage):
    placement.BUNDLE_BYTES, before = 2048, placement.BUNDLE_BYTES
    try:
        return garbage(stage)
    finally:
        placement.BUNDLE_BYTES = before


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks(stage):
    assert pool(2).run(on_a_rank, stage) == [0, 0]
