"""Gradients meet their reduction while the backward goes on, not when it is over."""

import pytest
import torch

import funzero as fz
from funzero.executor import placement
from funzero.executor.window import Landing
from tests.ranks import pool

LAYERS = 6


def loss_fn(p, batch, at_the_end):
    x, early = batch, (batch @ p["tied"]).sum()
    for k in range(LAYERS):
        x = torch.tanh(x @ p[f"w{k}"])
        if k == 0:
            x.register_hook(at_the_end)
    return fz.Loss((x @ p["tied"] @ p["tied"]).sum() + early, 1)


def order_of_landing(stage, budget):
    """The leaves in the order in which their gradients landed, with "end" where only the first layer was left."""
    seen, before, take = [], placement.BUNDLE_BYTES, Landing.reduced

    def told(self, k, total):
        seen.append(self.placement.plan.specs.accum.layouts[k].path.rpartition("/")[2])
        take(self, k, total)

    def watched(p, batch):
        return loss_fn(p, batch, lambda g: seen.append("end"))

    placement.BUNDLE_BYTES, Landing.reduced = 0, told
    try:
        g = torch.Generator().manual_seed(0)
        params = {n: torch.randn(8, 8, generator=g) / 8 for n in [*(f"w{k}" for k in range(LAYERS)), "tied"]}
        tx, mesh = fz.sgd(0.1), fz.make_mesh(dp=-1)
        specs = fz.zero_specs(params, tx, mesh, stage=stage)
        step = fz.make_step(watched, tx, specs=specs, gather_budget=budget)
        state = fz.init_state(params, tx, specs=specs)
        for _ in range(2):
            seen.clear()
            state, _ = step(state, torch.ones(4, 8))
    finally:
        placement.BUNDLE_BYTES, Landing.reduced = before, take
    return seen


def on_two_ranks(rank, world, stage, budget):
    return order_of_landing(stage, budget)


# A budget so small that a reduction must be over before the next is posted; without one all are posted before they land.
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_land_while_the_backward_goes_on(stage):
    for seen in pool(2).run(on_two_ranks, stage, 2 * 8 * 8 * 4):
        layers = [n for n in seen if n.startswith("w")]
        assert layers == ["w5", "w4", "w3", "w2", "w1", "w0"]
        assert seen.index("w3") < seen.index("end"), seen
        assert seen.index("tied") > seen.index("end"), "a leaf that is used early as well is complete at the end only"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_a_budget_the_order_is_that_of_the_backward_too(stage):
    for seen in pool(2).run(on_two_ranks, stage, None):
        assert [n for n in seen if n.startswith("w")] == ["w5", "w4", "w3", "w2", "w1", "w0"]


def kept_alone(rank, world):
    mesh = fz.make_mesh(dp=-1)
    specs = fz.zero_specs({"w": torch.empty(64, 512, device="meta")}, fz.sgd(1.0), mesh, stage=2)
    state = fz.init_state({"w": torch.zeros(64, 512)}, fz.sgd(1.0), specs=specs)
    step = fz.make_step(lambda p, b: (p["w"] * b).sum(), fz.sgd(1.0), specs=specs)
    found = step.accumulate(state, torch.ones(1, 64, 512)).accum.grads["w"]
    return found.nbytes, found.untyped_storage().nbytes()


def test_a_ranks_range_of_a_sum_keeps_no_more_memory_than_its_own():
    for used, kept in pool(2).run(kept_alone):
        assert used == kept == 64 * 512 * 4 // 2
