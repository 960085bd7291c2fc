"""Optimizers without a kernel work on leaves that live elsewhere a few at a time, and give the numbers of all at once."""

import errno

import pytest
import torch

import funzero as fz
from funzero.core.direct import DirectFile
from funzero.executor import stores
from funzero.executor.composed import ComposedUpdate
from funzero.executor.plan import Plan
from funzero.executor.portions import portions
from funzero.transforms.chain import resolved
from tests.cases.common import border
from tests.numerics.test_sharded_transforms import TRANSFORMS
from tests.numerics.transform_table import TABLE
from tests.ranks import pool

SHAPES = {"a": (6, 5), "b": (9, 4), "c": (5,), "d": (), "e": (4, 3)}
BY_NAME = TABLE | {name: make for name, (make, _) in TRANSFORMS.items()}
AT_ONCE = {"lookahead_reset", "skip_nonfinite"}  # what they do to one leaf depends on the others
ON_RANKS = ["lamb", "muon", "adafactor", "partition", "two_block_sizes", "inject_hyperparams", "schedule_free_adamw"]


def params():
    g = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()}


def loss_fn(p, batch):
    """Leaf b rests in the second step."""
    used = {n: x for n, x in p.items() if not (n == "b" and batch["t"] == 1)}
    rows = batch["rows"].sum()
    return fz.Loss(sum((x * (i + rows)).sin().sum() for i, x in enumerate(used.values())), len(batch["rows"]))


def train(tx, mesh, stage, memories, precision=None, **options):
    """Params and state after three steps, whole, and what each step told."""
    specs = fz.zero_specs(fz.eval_shape(params()), tx, mesh, stage=stage, precision=precision)
    specs = fz.with_memory(specs, memories) if memories else specs
    state = fz.init_state(params(), tx, specs=specs, key=1, precision=precision)
    step, told = fz.make_step(loss_fn, tx, specs=specs, max_norm=0.5, precision=precision, **options), []
    for t in range(3):
        rows = torch.arange(1.0, 5.0, dtype=torch.float64) / (8 * (t + 1))
        state, metrics = step(state, {**fz.data.local({"rows": rows}, mesh), "t": t})
        told.append((metrics.loss, metrics.grad_norm, metrics.skipped))
    fields = {n: fz.gather(getattr(state, n), specs.fields[n]) for n in ("params", "opt_state")}
    return dict(zip(fz.tree.paths(fields), fz.tree.leaves(fields), strict=True)), told


def differences(one, other):
    (a, said), (b, also) = one, other
    wrong = [f"{x} in step {t}" for t, row in enumerate(zip(said, also, strict=True)) for x in row if not same(*row)]
    return wrong + [n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n])]


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def check(rank, world, names, stages, precision=None):
    mesh, found = fz.make_mesh(dp=-1), []
    for name in names:
        for stage in stages:
            right = train(BY_NAME[name](), mesh, stage, None, precision)
            for globs in (["**"], ["params/a", "accum/grads/c"]):
                with border(64 * 1024, portion_bytes=1):
                    got = train(BY_NAME[name](), mesh, stage, dict.fromkeys(globs, "host"), precision)
                found += [f"{name}, stage {stage}, {globs}: {x}" for x in differences(got, right)]
    return found


@pytest.mark.parametrize("name", BY_NAME)
def test_a_leaf_at_a_time_is_all_at_once(name):
    assert BY_NAME[name]().separate == (name not in AT_ONCE)
    assert not check(0, 1, [name], [0])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_leaf_at_a_time_on_two_ranks(stage):
    assert pool(2).run(check, ON_RANKS, [stage]) == [[], []]


KAHAN = fz.precision.Policy("kahan", params=torch.bfloat16, accum=torch.float32, rounding="kahan")


@pytest.mark.parametrize(
    "policy", [fz.precision.bf16_master, fz.precision.bf16_pure, KAHAN], ids=["master", "pure", "kahan"]
)
def test_in_low_precision(policy):
    assert not check(0, 1, ["scale_by_amsgrad", "rmsprop", "adam"], [0], policy)


def plan_of(tx, memory="host"):
    specs = fz.zero_specs(fz.eval_shape(params()), tx, fz.make_mesh(), stage=0)
    specs = fz.with_memory(specs, {"**": memory})
    made = fz.abstract_state(params(), tx, specs=specs)
    return Plan(made.specs, fz.precision.float32), resolved(tx, specs.params.abstract())


def test_portions_hold_each_leaf_once_with_what_is_its_own():
    plan, tx = plan_of(fz.chain(fz.scale_by_adam(), fz.scale(-0.1)))
    paths = fz.tree.paths(plan.specs.opt_state.tree)
    for nbytes, count in ((1, 5), (8 * 4 * 36 + 40, 3), (1 << 20, 1)):
        with border(64 * 1024, portion_bytes=nbytes):
            made = portions(plan, tx, range(5))
        assert [k for x in made for k in x.chosen] == list(range(5)) and len(made) == count
        for x in made:
            names = {sorted(SHAPES)[k] for k in x.chosen}
            own = {paths[i] for i in x.state}
            right = {p for p in paths if p.rsplit("/", 1)[1] in names or "hyperparams" in p}
            assert own == right


def test_a_refused_update_writes_over_nothing(monkeypatch):
    tx = fz.chain(fz.scale_by_adam(eps=0.0), fz.scale(-1.0))  # 0/0 where a gradient is 0
    specs = fz.zero_specs(fz.eval_shape(params()), tx, fz.make_mesh(), stage=0)
    specs = fz.with_memory(specs, {"**": "host"})
    state = fz.init_state(params(), tx, specs=specs)
    before = [x.clone() for x in fz.tree.leaves((state.params, state.opt_state))]
    step = fz.make_step(lambda p, b: sum(x.sum() for x in p.values()) - b * p["e"].sum(), tx, specs=specs)
    with border(64 * 1024, portion_bytes=1):
        state, metrics = step(state, torch.tensor(1.0, dtype=torch.float64))
        assert metrics.skipped and int(metrics.step) == 0
        assert all(map(torch.equal, fz.tree.leaves((state.params, state.opt_state)), before))
        state, metrics = step(state, torch.tensor(0.5, dtype=torch.float64))
    assert not metrics.skipped and not torch.equal(state.params["a"], before[0])


def test_room_for_new_values_is_asked_for(tmp_path, monkeypatch):
    """Twice that of what an optimizer without a kernel updates; frozen leaves stay where they are."""
    made = {n: torch.ones(1000, 10) for n in "abf"}
    for tx, times in ((fz.adam(0.1), 1), (fz.chain(fz.scale_by_adam(), fz.clip(1.0), fz.scale(-0.1)), 2)):
        specs = fz.zero_specs(made, tx, fz.make_mesh(), stage=0, trainable={"f": False})
        specs = fz.with_memory(specs, {"params/**": "disk", "opt_state/**": "disk"}, folder=tmp_path)
        needed = (times * 3 * 2 + 1) * 40_000
        with border(64 * 1024, portion_bytes=1):
            monkeypatch.setattr(stores, "free_bytes", lambda folder, free=needed - 1: free)
            with pytest.raises(OSError, match=f"take {needed} bytes, {needed - 1} are free"):
                fz.init_state(made, tx, specs=specs)
            monkeypatch.setattr(stores, "free_bytes", lambda folder, free=needed: free)
            fz.init_state(made, tx, specs=specs)


@pytest.mark.parametrize("donate", [True, False])
def test_a_disk_that_fills_up_in_a_portion_spends_nothing(donate, tmp_path, monkeypatch):
    tx, made = TABLE["rmsprop"](), params()
    specs = fz.with_memory(fz.zero_specs(made, tx, fz.make_mesh(), stage=0), {"**": "disk"}, folder=tmp_path)
    state = fz.init_state(made, tx, specs=specs)
    before = [x.clone() for x in fz.tree.leaves((state.params, state.opt_state))]
    step = fz.make_step(loss_fn, tx, specs=specs, donate=donate)
    batch = {"rows": torch.ones(2, dtype=torch.float64), "t": 0}
    with border(64 * 1024, portion_bytes=1):
        with monkeypatch.context() as patch:
            reserve, calls = DirectFile.reserve, []

            def full(self, begin, end):
                calls.append(begin)
                if len(calls) > 9:
                    raise OSError(errno.ENOSPC, "full")
                reserve(self, begin, end)

            patch.setattr(DirectFile, "reserve", full)
            with pytest.raises(OSError, match="full"):
                step(state, batch)
        assert all(map(torch.equal, fz.tree.leaves((state.params, state.opt_state)), before))
        state, metrics = step(state, batch)
    assert not metrics.skipped and not torch.equal(state.params["a"], before[0])


def test_a_gradient_that_is_one_number_spread_out(tmp_path):
    made, tx = {"u": torch.ones(3)}, fz.sgd(1.0)
    specs = fz.with_memory(fz.zero_specs(made, tx, fz.make_mesh(), stage=0), {"**": "disk"}, folder=tmp_path)
    state = fz.init_state(made, tx, specs=specs)
    state, _ = fz.make_step(lambda p, b: p["u"].sum() * b.sum(), tx, specs=specs)(state, torch.ones(2))
    assert (state.params["u"] + 0).tolist() == [-1.0] * 3


def test_no_more_than_two_portions_are_here_at_a_time(monkeypatch):
    here, most = [0], [0]
    start, put = ComposedUpdate._start, ComposedUpdate._put

    def starts(self, portion):
        here[0] += 1
        most[0] = max(most[0], here[0])
        return start(self, portion)

    def puts(self, *args):
        here[0] -= 1
        return put(self, *args)

    monkeypatch.setattr(ComposedUpdate, "_start", starts)
    monkeypatch.setattr(ComposedUpdate, "_put", puts)
    with border(64 * 1024, portion_bytes=1):
        train(TABLE["rmsprop"](), fz.make_mesh(), 0, {"**": "host"})
    assert most == [2] and here == [0]
