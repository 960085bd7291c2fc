"""Every transform on cut leaves: params and optimizer state are those of the plain functions on whole leaves."""

import pytest
import torch

import funzero as fz
from funzero.transforms.base import leafwise
from funzero.transforms.lookahead import lookahead
from funzero.transforms.nonfinite import skip_nonfinite
from tests.cases.common import launch, linear, one_for_all, rows, whole
from tests.numerics.transform_table import TABLE
from tests.ranks import pool

SPIKE = 7.0


def spoil():
    """Makes 1/0 of a gradient of exactly 7: the step itself would skip gradients that are not finite."""
    return leafwise("spoil", lambda p: {}, lambda u, s, p=None: (fz.tree.map(lambda x: x / (x != SPIKE), u), s))


def start():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (), "c": (7,)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def gradients():
    """Of four updates; `c` takes no part in the second."""
    out = []
    for seed in range(1, 5):
        generator = torch.Generator().manual_seed(seed)
        out.append({k: torch.randn(x.shape, generator=generator, dtype=x.dtype) for k, x in start().items()})
    out[1].pop("c")
    return out


def plainly(tx, params, grads):
    """The same with whole leaves in one process."""
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update({**dict.fromkeys(params), **g}, state, params)
        params = fz.apply_updates(params, updates)
    tree = {"params": params, "opt_state": state}
    return dict(zip(fz.tree.paths(tree), fz.tree.leaves(tree), strict=True))


def train(tx, mesh, stage, grads):
    state, step = launch(start(), tx, linear, mesh, stage)
    for g in grads:
        state, _ = step(state, rows(**g))  # each rank the same: the mean is the gradient
    return {path: x for path, x in whole(state).items() if path != "step"}


def run_table(rank, world, stage):
    mesh = fz.make_mesh(dp=-1)
    return {n: train(make(), mesh, stage, gradients()) for n, make in TABLE.items()}


SLOW = [pytest.param(*cell, marks=pytest.mark.slow) for cell in ((2, 2), (3, 1), (3, 3))]


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3), (3, 2), *SLOW])
def test_pieces_are_updated_as_whole_leaves(world, stage):
    for name, found in one_for_all(pool(world).run(run_table, stage)).items():
        right = plainly(TABLE[name](), start(), gradients())
        assert found.keys() == right.keys(), name
        for path, leaf in right.items():
            torch.testing.assert_close(found[path], leaf, rtol=1e-12, atol=1e-12, msg=f"{name}: {path}")


def spoilt():
    grads = [{k: g.clone() for k, g in step.items()} for step in gradients()]
    grads[0]["a"][2, 4] = SPIKE  # the last element, on the last rank alone
    grads[2]["a"][0, 0] = SPIKE
    return grads


def run_spoilt(rank, world):
    mesh = fz.make_mesh(dp=-1)
    found = {}
    for stage in (0, 3):
        found[f"{stage}"] = train(fz.chain(spoil(), skip_nonfinite(fz.adam(0.1), 3)), mesh, stage, spoilt())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_what_one_rank_sees_skips_the_update_on_all(world):
    right = plainly(fz.chain(spoil(), skip_nonfinite(fz.adam(0.1), 3)), start(), spoilt())
    assert right["opt_state/skip_nonfinite/total_notfinite"] == 2
    for stage, found in one_for_all(pool(world).run(run_spoilt)).items():
        for path, leaf in right.items():
            torch.testing.assert_close(found[path], leaf, rtol=1e-12, atol=1e-12, msg=f"{stage}: {path}")


def run_partitioned(rank, world):
    """Leaves cut by a partition only, as experts are: no rank has a flat piece."""
    mesh = fz.make_mesh(ep=-1)
    tx = fz.chain(spoil(), skip_nonfinite(fz.adam(0.1), 3))
    params = {"w": torch.zeros(4, 3, dtype=torch.float64), "v": torch.zeros(3, dtype=torch.float64)}
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=0, rules={"w": fz.P("ep")})
    state = fz.init_state(params, tx, specs=specs)
    step = fz.make_step(linear, tx, specs=specs)
    g = torch.ones(4, 3, dtype=torch.float64)
    g[3] = SPIKE * world  # the mean over the ranks divides it
    share = g.chunk(world)[rank] if world > 1 else g
    state, _ = step(state, rows(w=share, v=torch.ones(3, dtype=torch.float64)))
    return {path: x for path, x in whole(state).items() if path != "step"}


def run_lookahead_of_whole_leaves(rank, world):
    """An inner transform that needs whole leaves, with a state that starts anew."""
    mesh = fz.make_mesh(dp=-1)
    return train(lookahead(mean_trace(), 2, 0.5, reset_state=True), mesh, 3, gradients())


def mean_trace():
    """Adds the mean of each whole leaf's trace; cut leaves would give other means."""
    inner = fz.trace(0.5)

    def update(updates, state, params=None):
        out, state = inner.update(updates, state, params)
        return fz.tree.map(lambda u: -0.1 * (u + u.mean()), out), state

    return fz.Transform(inner.init, update, name="mean_trace")


@pytest.mark.parametrize("world", [1, 2])
def test_a_reset_of_a_transform_that_needs_whole_leaves(world):
    found = one_for_all(pool(world).run(run_lookahead_of_whole_leaves))
    right = plainly(lookahead(mean_trace(), 2, 0.5, reset_state=True), start(), gradients())
    for path, leaf in right.items():
        torch.testing.assert_close(found[path], leaf, rtol=1e-12, atol=1e-12, msg=path)


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_that_holds_an_expert_alone_is_heard(world):
    found = one_for_all(pool(world).run(run_partitioned))
    assert found["opt_state/skip_nonfinite/total_notfinite"] == 1
    assert not any(found[f"params/{k}"].any() for k in "wv")
