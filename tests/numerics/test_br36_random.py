"""BR36: random numbers of a run are a function of (key, step, global micro-batch index), through a resume in new processes."""

import pytest
import torch

import funzero as fz
from tests.ranks import once, pool

N, STEPS = 64, 6


def run(rank, world, folder, axis, first, last):
    """Steps first..last; the masks that each step drew, the state's leaves, and whether torch's generator was left alone."""
    mesh = fz.make_mesh(**{axis: world} if axis == "dp" else {"dp": 1, axis: world})
    params, tx, masks = {"w": torch.linspace(0.5, 1.5, N)}, fz.adam(0.1), []

    def loss_fn(p, batch, key):
        mask = fz.random.dropout(torch.ones(N), 0.5, key)
        masks.append(mask != 0)
        return ((p["w"] * mask) * batch).sum()

    if first == 0:
        order = fz.random.permutation(fz.random.key(9), STEPS)  # the loader made before the state, then after it
    specs = fz.zero_specs(params, tx, mesh, stage=3)
    like = fz.init_state(params, tx, specs=specs, key=11)
    state = fz.restore(f"{folder}/at{first}", like=like) if first else like
    if first:
        order = fz.random.permutation(fz.random.key(9), STEPS)
    step, before = fz.make_step(loss_fn, tx, specs=specs), torch.get_rng_state()
    for t in range(first, last):
        state, _ = step(state, torch.full((1, N), 1.0 + float(order[t])))
    untouched = torch.equal(before, torch.get_rng_state())
    if last == STEPS // 2:
        fz.save(f"{folder}/at{last}", state)
    whole = fz.gather(state.params, specs.params), fz.gather(state.opt_state, specs.opt_state)
    return masks, [x.clone() for x in fz.tree.leaves(whole)], untouched


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_br36_a_resume_in_new_processes_repeats_the_run(tmp_path, axis):
    straight = pool(2).run(run, str(tmp_path), axis, 0, STEPS)
    half = pool(2).run(run, str(tmp_path), axis, 0, STEPS // 2)
    rest = [outcome.value for outcome in once(run, 2, str(tmp_path), axis, STEPS // 2, STEPS)]
    for rank in (0, 1):
        masks, leaves, untouched = straight[rank]
        again = half[rank][0] + rest[rank][0]
        assert untouched and rest[rank][2] and len(again) == len(masks) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(masks, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(leaves, rest[rank][1], strict=True))
        assert len({tuple(m.tolist()) for m in masks}) == STEPS, "a mask was drawn twice"
    same = [torch.equal(a, b) for a, b in zip(straight[0][0], straight[1][0], strict=True)]
    assert same == [axis == "tp"] * STEPS
