"""Kind 4: arithmetic of optimizers, schedules, groups and memory layouts."""

import pytest
import torch

import funzero as fz
from tests.cases.common import (
    SOME_WORLDS,
    STAGES,
    WORLDS,
    close,
    difference,
    launch,
    linear,
    one_for_all,
    params_of,
    rows,
    whole,
    window,
)
from tests.ranks import pool


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


# BR15: decay 0 and 0.5, coupled and decoupled, fused and not.
BR15 = {
    "adam": lambda: fz.adam(0.1, eps=0.0),
    "adamw": lambda: fz.adamw(0.1, eps=0.0, weight_decay=0.5),
    "coupled": lambda: fz.chain(fz.add_decayed_weights(0.5), fz.scale_by_adam(eps=0.0), fz.scale_by_learning_rate(0.1)),
    "composed": lambda: fz.chain(fz.scale_by_adam(eps=0.0), fz.identity(), fz.scale(-0.1)),
}


def look(state, tx, params, mesh):
    """Everything that reads a state and should not change it."""
    specs = state.specs
    fz.tree.show(state), fz.tree.show(specs), str(state), repr(specs), fz.tree.paths(state)
    fz.tree.map(lambda x: x.float().sum(), state.params)
    fz.eval_shape(state.params), fz.eval_shape(params), fz.abstract_state(params, tx, specs=specs)
    tx.init(params), fz.global_norm(state.params)
    other = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=(0, 3)[specs.opt_state.local_bytes % 2])
    return fz.gather(state.opt_state, specs.opt_state), fz.reshard(fz.reshard(state, other), specs)


def br15_run(mesh, stage, name, when):
    params, tx = {"w": torch.zeros(5, dtype=torch.float64)}, BR15[name]()
    state, step = launch(params, tx, linear, mesh, stage)
    first = fz.gather(state.opt_state, state.specs.opt_state)
    seen = [torch.tensor(len(fz.tree.leaves(first)))]
    for _ in range(2):
        if "between" in when:
            _, again = look(state, tx, params, mesh)
            state = again if "resharded" in when else state
        state = step.accumulate(state, rows(w=ones(5)))
        if "inside" in when:
            _, again = look(state, tx, params, mesh)
            state = again if "resharded" in when else state
        state, _ = step.update(state)
        seen.append(whole(state))
        if "empty step" in when:
            state, nothing = step(state, fz.data.EMPTY)
            assert nothing.skipped
    return seen


def br15_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for name in BR15 if stage in (0, 3) else ("adam", "coupled"):
            for when in ("plain", "between, inside", "between, inside, resharded", "empty step"):
                found[f"{stage} {name} {when}"] = br15_run(mesh, stage, name, when)
    return found


@pytest.mark.parametrize("world", SOME_WORLDS)
def test_br15_looking_at_the_state_does_not_change_training(world):
    cells = one_for_all(pool(world).run(br15_cells))
    for cell, (leaves, first, *later) in cells.items():
        stage, name, _ = cell.split(" ", 2)
        assert leaves >= 4, f"{cell}: the optimizer state is empty before the first step"
        w = first["params/w"]
        assert close(w, torch.full_like(w, -0.1)), f"{cell}: {w}, right -0.1, after a dummy step -0.0744137"
        plain = cells[f"{stage} {name} plain"]
        assert not difference([first, *later], plain[1:]), f"{cell}: {difference([first, *later], plain[1:])}"


# BR16: W decays; bias, scale, the frozen table and the leaf without gradient do not.
LONG = {(0, "composed"), (3, "tree")}  # the runs of 100 steps
MASK = {"W": True, "bias": False, "norm": {"scale": False}, "table": True, "unused": True}


def br16_params():
    draw = torch.Generator().manual_seed(3)
    sizes = {"W": (3, 4), "bias": (4,), "table": (5, 4), "unused": (2, 3)}
    made = {n: torch.randn(s, dtype=torch.float64, generator=draw) for n, s in sizes.items()}
    return made | {"norm": {"scale": torch.rand(4, dtype=torch.float64, generator=draw)}}


def br16_loss(params, batch):
    h = (batch["x"] + params["table"].sum()) @ params["W"] + params["bias"]
    return (h * params["norm"]["scale"]).sum() * 0.0


def matrices(params):
    return fz.tree.map(lambda x: x.dim() >= 2, params)


def br16_tx(kind, decay):
    if kind == "composed":
        parts = fz.scale_by_adam(), fz.add_decayed_weights(decay, MASK), fz.identity(), fz.scale_by_learning_rate(0.1)
        return fz.chain(*parts)
    if kind == "masked":
        decayed = fz.masked(fz.add_decayed_weights(decay), MASK)
        return fz.chain(fz.scale_by_adam(), decayed, fz.scale_by_learning_rate(0.1))
    if kind == "partition":
        labels = fz.tree.map(lambda flag: "decay" if flag else "none", MASK)
        return fz.partition({"decay": fz.adamw(0.1, weight_decay=decay), "none": fz.adam(0.1)}, labels)
    return fz.adamw(0.1, weight_decay=decay, mask=matrices if kind == "function" else MASK)


def br16_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for kind in ("tree", "function", "composed", "masked", "partition"):
            tx, seen = br16_tx(kind, 0.5), []
            specs = {"trainable": {"table": False}}
            state, step = launch(br16_params(), tx, br16_loss, mesh, stage, **specs)
            state, metrics = step(state, {"x": ones(2, 3)})
            seen.append(whole(state))
            state, step = launch(br16_params(), br16_tx(kind, 0.1), br16_loss, mesh, stage, **specs)
            for _ in range(100 if (stage, kind) in LONG else 2):
                state, metrics = step(state, {"x": ones(2, 3)})
            found[f"stage {stage} mask as {kind}"] = [*seen, whole(state), metrics]
    return found


@pytest.mark.parametrize("world", SOME_WORLDS)
def test_br16_decay_reaches_the_masked_leaves_only(world):
    before = br16_params()
    for cell, (one, many, metrics) in one_for_all(pool(world).run(br16_cells)).items():
        assert metrics.grad_norm == 0.0 and not metrics.skipped, cell
        shrunk = 0.99 ** int(metrics.step)
        assert close(one["params/W"], 0.95 * before["W"]), f"{cell}: W is {one['params/W'] / before['W']} of itself"
        assert close(many["params/W"], shrunk * before["W"], 1e-11), f"{cell}: {many['params/W'] / before['W']}"
        still = {"bias": before["bias"], "norm/scale": before["norm"]["scale"], "table": before["table"]}
        for name, value in {**still, "unused": before["unused"]}.items():
            for state in (one, many):
                assert torch.equal(state[f"params/{name}"], value), f"{cell}: {name} changed"
        counts = {n.rsplit("/", 1)[1]: x.item() for n, x in many.items() if "/count/" in n}
        steps = int(metrics.step)
        right = {"W": steps, "bias": steps, "scale": steps, "unused": 0}
        assert counts == right, f"{cell}: {counts}; no gradient is not a zero gradient, and frozen has no state"


def br16_partly(params, batch):
    """Leaf `a` is used by the rows that say so; `b` by all, with gradient zero."""
    loss = params["b"].sum() * 0.0
    return loss + params["a"].sum() * 0.0 if bool(batch["use"].any()) else loss


def br16_partly_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for kind, tx in {"fused": fz.adamw(0.1, weight_decay=0.5), "composed": br16_plain()}.items():
            state, step = launch({"a": ones(3), "b": ones(5)}, tx, br16_partly, mesh, stage)
            for used_by in (world - 1, -1):  # by the last micro-batch alone, by none
                micros = [{"use": torch.tensor([i == used_by])} for i in range(world)]
                state, _ = window(step, state, micros, mesh)
            found[f"stage {stage} {kind}"] = params_of(state)
    return found


def br16_plain():
    return fz.chain(fz.scale_by_adam(), fz.identity(), fz.add_decayed_weights(0.5), fz.scale_by_learning_rate(0.1))


@pytest.mark.parametrize("world", WORLDS)
def test_br16_a_leaf_used_on_one_rank_decays_on_all_and_an_unused_one_on_none(world):
    for cell, params in one_for_all(pool(world).run(br16_partly_cells)).items():
        assert close(params["a"], 0.95 * ones(3)), f"{cell}: {params['a']}, right 0.95 (used once in two windows)"
        assert close(params["b"], 0.95**2 * ones(5)), f"{cell}: {params['b']}"


def test_br16_a_mask_that_does_not_fit_is_refused():
    short = {n: v for n, v in MASK.items() if n != "bias"}
    tx = fz.adamw(0.1, mask=short)
    with pytest.raises(ValueError, match=r"mask: .*no entry for \['bias'\]"):
        fz.init_state(br16_params(), tx)
    with pytest.raises(TypeError, match="mask: W must be True or False"):
        fz.init_state(br16_params(), fz.adamw(0.1, mask=MASK | {"W": 1}))


# BR17: label A has rate 0.1, B 0.01 and no leaf, C 0.001.
RATES = {"A": 0.1, "B": 0.01, "C": 0.001}
DECAYS = {"A": 0.5, "B": 0.3, "C": 0.1}


def br17_tx(kind, labels):
    def half(rate):
        return lambda t: rate * 0.5 + 0.0 * t

    if kind == "schedule in each":
        return fz.partition({k: fz.sgd(half(rate)) for k, rate in RATES.items()}, labels)
    if kind == "decay":
        parts = {k: (fz.add_decayed_weights(DECAYS[k]), fz.scale_by_learning_rate(half(RATES[k]))) for k in RATES}
        return fz.partition({k: fz.chain(*p) for k, p in parts.items()}, labels)
    if kind == "adam":
        return fz.partition({k: fz.adam(half(rate), eps=0.0) for k, rate in RATES.items()}, labels)
    groups = fz.partition({k: fz.sgd(rate) for k, rate in reversed(RATES.items())}, labels)
    return fz.chain(groups, fz.scale_by_schedule(fz.schedules.constant(0.5)))


def br17_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for kind in ("schedule in each", "schedule after", "decay", "adam"):
            for labels in ({"a": "A", "c": "C"}, lambda p: {n: n.upper() for n in p}):
                params = {"a": ones(3), "c": ones(2, 3)}
                state, step = launch(params, br17_tx(kind, labels), linear, mesh, stage)
                g = 0.0 if kind == "decay" else 1.0
                state, _ = step(state, rows(a=torch.full_like(ones(3), g), c=torch.full_like(ones(2, 3), g)))
                found[f"stage {stage} {kind} {'function' if callable(labels) else 'tree'}"] = whole(state)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br17_each_label_keeps_its_rate_and_decay_beside_an_empty_one(world):
    for cell, state in one_for_all(pool(world).run(br17_cells)).items():
        moved = {n: 1 - state[f"params/{n}"] for n in "ac"}
        right = {"a": 0.05 * 0.5, "c": 0.0005 * 0.1} if "decay" in cell else {"a": 0.05, "c": 0.0005}
        for name, value in right.items():
            off = (moved[name] - value).abs().max()
            assert off < 1e-15, f"{cell}: {name} moved {moved[name]}, right {value}; C with B's rate 0.005"
        assert any(n.startswith("opt_state") and "/B/" in n for n in state), f"{cell}: {list(state)}"


# BR18: every way of giving schedule(t) = t.
def t_of(count):
    return count * 1.0


WAYS = {
    "sgd": lambda: fz.sgd(t_of),
    "sgd with momentum 0": lambda: fz.sgd(t_of, momentum=0.0),
    "scale_by_learning_rate": lambda: fz.scale_by_learning_rate(t_of),
    "scale_by_schedule": lambda: fz.chain(fz.scale_by_schedule(t_of), fz.scale(-1.0)),
    "scale": lambda: fz.chain(fz.scale(-1.0), fz.scale(t_of)),
    "linear": lambda: fz.sgd(fz.schedules.linear(0.0, 8.0, 8)),
    "join": lambda: fz.sgd(fz.schedules.join([t_of, lambda t: t + 1], [1])),
    "warmup": lambda: fz.sgd(fz.schedules.warmup_cosine(4.0, warmup=4, total=9)),
    "partition": lambda: fz.partition({"x": fz.sgd(t_of)}, {"w": "x"}),
    "masked": lambda: fz.masked(fz.sgd(t_of), {"w": True}),
    "adam": lambda: fz.adam(t_of, eps=0.0),
    "composed adam": lambda: fz.chain(fz.scale_by_adam(eps=0.0), fz.identity(), fz.scale_by_learning_rate(t_of)),
    "decay": lambda: fz.chain(fz.add_decayed_weights(lambda t: 0.0 * t), fz.scale_by_learning_rate(t_of)),
}


@pytest.mark.parametrize("way", WAYS)
def test_br18_every_way_of_giving_a_schedule_begins_at_0(way):
    tx, params = WAYS[way](), {"w": ones(2)}
    state, moved = tx.init(params), []
    for _ in range(3):
        updates, state = tx.update({"w": ones(2)}, state, params)
        moved.append(updates["w"])
    for update, right in zip(moved, (0.0, -1.0, -2.0), strict=True):
        assert close(update + 3, right + 3 + 0 * update), f"updates {moved}, right 0, -1, -2; from 1: -1, -2, -3"
    counts = [x for path, x in zip(fz.tree.paths(state), fz.tree.leaves(state), strict=True) if "count" in path]
    assert counts and all(x == 3 for x in counts), counts


def br18_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for way in WAYS if stage in (0, 3) else ("sgd", "adam", "partition"):
            state, step = launch(
                {"w": torch.zeros(5, dtype=torch.float64)}, WAYS[way](), linear, mesh, stage, step={"accumulate": 4}
            )
            seen = []
            for _ in range(2):  # 8 micro-batches on each rank, 4 to a window
                state, _ = step(state, {"w": ones(4, 5)})
                seen.append(whole(state))
            for _ in range(4):
                state = step.accumulate(state, {"w": ones(4, 5)})
            state, metrics = step.update(state)
            found[f"stage {stage} {way}"] = [*seen, whole(state), metrics]
    return found


@pytest.mark.parametrize("world", SOME_WORLDS)
def test_br18_the_schedule_counts_updates_not_micro_batches_or_ranks(world):
    for cell, (first, second, third, metrics) in one_for_all(pool(world).run(br18_cells)).items():
        w = [state["params/w"] for state in (first, second, third)]
        assert not w[0].any(), f"{cell}: first update {w[0]}, right 0"
        assert close(w[1], -ones(5)), f"{cell}: second update {w[1]}, right -1"
        assert close(w[2], -3 * ones(5)), f"{cell}: third update {w[2] - w[1]}, right -2"
        for state, right in ((second, 2), (third, 3)):
            counts = {n: x.item() for n, x in state.items() if "count" in n}
            assert counts and set(counts.values()) == {right}, f"{cell}: {counts}, right {right}, wrong 8, 4 or 16"
        assert metrics.step == 3, cell


def test_br18_a_join_hands_over_at_its_boundary():
    joined = fz.schedules.join([lambda t: 10.0 + t, lambda t: 100.0 + t, lambda t: 1000.0 + t], [3, 5])
    right = [10.0, 11.0, 12.0, 100.0, 101.0, 1000.0, 1001.0]
    assert [float(joined(t)) for t in range(7)] == right
    assert [float(joined(torch.tensor(t, dtype=torch.int32))) for t in range(7)] == right
