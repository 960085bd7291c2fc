"""What the checkpoint tests share: a small model with every kind of leaf, in any layout."""

import torch

import funzero as fz
from tests.cases.common import whole

SIZES = {"a": (10,), "b": (5, 3), "c": (), "d": (0, 4), "frozen": (6, 2)}


def params(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, dtype=torch.float64, generator=g) for n, s in SIZES.items()}


def loss_fn(p, b):
    """A mean over rows, so that it does not matter which rank has them."""
    rows = (b["x"] @ p["b"]).square().sum(1) * p["c"]
    total = rows.sum() + len(b["x"]) * (p["a"].square().sum() + p["d"].sum() + p["frozen"].sum())
    return fz.Loss(total * 0.1, weight=len(b["x"]), aux={"rows": fz.Sum(float(len(b["x"]))), "one": 1.0})


TRAINS = {n: n != "frozen" for n in SIZES}


def make(stage, *, mesh=None, tx=None, rules=None, seed=0):
    """(state, step, abstract state) at a stage."""
    tx = tx or fz.adamw(0.1, weight_decay=0.1)
    mesh = mesh or fz.make_mesh(dp=-1)
    specs = fz.zero_specs(params(), tx, mesh, stage=stage, trainable=TRAINS, rules=rules)
    scale = fz.loss_scale.dynamic(initial_power=4, window=3)
    state = fz.init_state(params(seed), tx, key=3 + seed, specs=specs, loss_scale=scale)
    step = fz.make_step(loss_fn, tx, specs=specs, max_norm=1.0, donate=False)
    return state, step, fz.abstract_state(params(), tx, specs=specs, loss_scale=scale)


def batch(mesh, t=0):
    x = torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
    return fz.data.local({"x": x}, mesh)


def everything(state):
    """All there is of a state between windows, gathered, by path."""
    scale = {f"loss_scale/{n}": x for n, x in zip(*fz.tree.flatten_with_paths(state.loss_scale)[:2], strict=True)}
    rest = {"key": state.key, "skips": state.skips} | scale
    return whole(state) | {n: x.clone() for n, x in rest.items()}
