"""AdamW with moments of 8 bits runs as one kernel, and is what its transforms are."""

import pytest
import torch

import funzero as fz
from funzero.executor.plan import Plan
from funzero.executor.selection import Selection
from funzero.transforms.storage import rounder, stored, update_stored, whole_index

SHAPES = {"a": (300, 7), "b": (1000,), "c": (5,), "d": (), "e": (0, 3)}
STEPS = 4
POLICIES = {"float32": fz.precision.float32, "master": fz.precision.bf16_master, "pure": fz.precision.bf16_pure}


def tx_of(block):
    rate = fz.schedules.warmup_cosine(0.02, warmup=2, total=10)
    return fz.adamw_8bit(
        rate, weight_decay=0.1, mask=lambda p: {n: x.dim() == 2 for n, x in p.items()}, block_size=block
    )


def kernel_of(specs, tx, policy):
    plan = Plan(specs, policy)
    return Selection(plan, plan.resolved(tx), tuple(range(len(plan.trained)))).kernel


def some(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g) * scale for n, s in SHAPES.items()}


def loss_fn(p, batch):
    return sum((p[n].float() * batch[n]).sum() for n in p)


def codes_apart(a, b):
    return (a.int() - b.int()).abs()


@pytest.mark.parametrize("block", [256, 64, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_update_is_that_of_the_transforms(policy, block):
    """From the state of a few steps, so that moments are what they are in a run."""
    tx, policy = tx_of(block), POLICIES[policy]
    specs = fz.zero_specs(fz.eval_shape(some(0)), tx, fz.make_mesh(), stage=0, precision=policy)
    assert kernel_of(specs, tx, policy) is not None
    state = fz.init_state(some(0), tx, specs=specs, precision=policy, key=5)
    step = fz.make_step(loss_fn, tx, specs=specs, precision=policy, donate=False)
    for i in range(STEPS):
        grads = some(10 + i, 1 + i)
        before, (state, _) = state, step(state, {n: x[None] for n, x in grads.items()})
        index = whole_index(some(0))
        kept = {n: g.to(before.params[n].dtype) for n, g in grads.items()}
        params, right = update_stored(
            tx, policy, kept, before.opt_state, before.params, rounder(policy, before.key, before.step, index)
        )
        for n, x in params.items():
            last = 2.0**-7 if x.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(state.params[n], x, rtol=last, atol=last * 0.2)
        mine, want = state.opt_state["scale_by_adam_8bit"], right["scale_by_adam_8bit"]
        for m in ("mu", "nu"):
            for n in SHAPES:
                torch.testing.assert_close(mine[f"{m}_scale"][n], want[f"{m}_scale"][n], rtol=1e-6, atol=0)
                apart = codes_apart(mine[m][n], want[m][n])
                assert not apart.numel() or (int(apart.max()) <= 1 and float(apart.float().mean()) < 0.01)
        assert all(torch.equal(a, b) for a, b in zip(*map(fz.tree.leaves, (mine["count"], want["count"])), strict=True))


def test_float64_and_4_bits_keep_to_the_transforms():
    wide = {n: x.double() for n, x in some(0).items()}
    for tx, params in ((fz.adamw_8bit(0.1), wide), (fz.adamw_4bit(0.1), some(0))):
        specs = fz.zero_specs(fz.eval_shape(params), tx, fz.make_mesh(), stage=0)
        assert kernel_of(specs, tx, fz.precision.float32) is None


def test_the_stored_state_is_that_of_the_policy():
    """The kernel is chosen by what the state is, so the state must not depend on it."""
    state = stored(tx_of(64), fz.precision.bf16_pure).init(some(0))
    assert {x.dtype for x in fz.tree.leaves(state["scale_by_adam_8bit"]["mu"])} == {torch.uint8}
