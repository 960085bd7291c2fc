"""Precision policies in a step: dtypes of every leaf, layouts, what is refused, BR06, BR12 and BR13 with a scale, BR19."""

import dataclasses
import warnings

import pytest
import torch

import funzero as fz
from funzero.transforms.chain import chain
from tests.ranks import pool

POLICIES = {
    "bf16_mixed": fz.precision.bf16_mixed,
    "bf16_master": fz.precision.bf16_master,
    "bf16_pure": fz.precision.bf16_pure,
    "fp16_mixed": fz.precision.fp16_mixed,
    "kahan": dataclasses.replace(fz.precision.bf16_pure, name="kahan", rounding="kahan"),
    "autocast": fz.precision.Policy("autocast", compute=torch.bfloat16, cast="autocast"),
    "reduce_bf16": dataclasses.replace(fz.precision.bf16_mixed, name="reduce_bf16", reduce=torch.bfloat16),
}
OPTIMIZERS = {
    "adamw": lambda: fz.adamw(0.01, weight_decay=0.1),
    "composed": lambda: chain(fz.scale_by_adam(), fz.identity(), fz.scale_by_learning_rate(0.01)),
    "sgd": lambda: fz.sgd(0.05, momentum=0.9),
}
SHAPES = {"w": (37, 9), "b": (9,), "c": (1,), "s": ()}


def params_of(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=g) for k, s in SHAPES.items()}


def loss_fn(p, batch):
    y = torch.tanh(batch["x"] @ p["w"] + p["b"]) * p["c"] * p["s"]
    return fz.Loss(y.float().square().sum(), weight=len(batch["x"]))


def train(mesh, stage, name, tx_name, steps=3, accumulate=2, params=None):
    policy, tx = POLICIES[name], OPTIMIZERS[tx_name]()
    params = params_of() if params is None else params
    specs = fz.zero_specs(params, tx, mesh, stage=stage, precision=policy)
    scale = fz.loss_scale.dynamic(8) if policy.loss_scale else None
    state = fz.init_state(params, tx, specs=specs, precision=policy, key=3, loss_scale=scale)
    step = fz.make_step(loss_fn, tx, specs=specs, precision=policy, accumulate=accumulate, max_norm=1.0)
    for t in range(steps):
        x = torch.randn(8, 37, generator=torch.Generator().manual_seed(t))
        state, metrics = step(state, fz.data.local({"x": x}, mesh, accumulate))
    return state, metrics, specs


@pytest.mark.parametrize("tx", OPTIMIZERS)
@pytest.mark.parametrize("name", POLICIES)
def test_every_leaf_keeps_its_dtype(name, tx):
    policy = POLICIES[name]
    state, metrics, specs = train(fz.make_mesh(dp=-1), 0, name, tx)
    assert not metrics.skipped and torch.isfinite(metrics.grad_norm)
    for path, leaf in zip(fz.tree.paths(state.params), fz.tree.leaves(state.params), strict=True):
        assert leaf.dtype == (policy.params or torch.float32), path
    kept = dict(zip(fz.tree.paths(specs.opt_state.tree), specs.opt_state.layouts, strict=True))
    for path, leaf in zip(fz.tree.paths(state.opt_state), fz.tree.leaves(state.opt_state), strict=True):
        assert leaf.dtype == kept[path].dtype, path
        if path.split("/")[0] == "master":
            assert leaf.dtype == torch.float32
        elif path.split("/")[-1] in SHAPES and leaf.is_floating_point():
            assert leaf.dtype == (policy.moments or torch.float32), path
    assert ("master" in state.opt_state) == (policy.master is not None)
    assert ("compensation" in state.opt_state) == (policy.rounding == "kahan")


def test_a_master_is_made_from_the_params_before_they_are_rounded():
    state = fz.init_state(params_of(), fz.adamw(0.1), precision=fz.precision.bf16_master)
    for k, p in params_of().items():
        assert torch.equal(state.opt_state["master"][k], p)
        assert torch.equal(state.params[k], p.bfloat16())


def cells(rank, world):
    mesh, out = fz.make_mesh(dp=-1), {}
    for name in POLICIES:
        for i, tx in enumerate(OPTIMIZERS):
            for stage in (0, 1, 2, 3) if i == 0 else (3,):
                state, metrics, specs = train(mesh, stage, name, tx, accumulate=4 // world)
                whole = fz.gather(state.params, specs.params), fz.gather(state.opt_state, specs.opt_state)
                whole[1].pop("compensation", None)  # what is lost at a tie depends on which side the last bit fell
                out[name, tx, stage] = [x.clone() for x in fz.tree.leaves(whole)], float(metrics.grad_norm)
    return out


def test_layouts_agree():
    """Equal params and moments at every stage, on 1, 2 and 4 ranks; bits where one order of sums is used."""
    runs = {n: pool(n).run(cells, timeout=110)[0] for n in (1, 2, 4)}
    for key, (leaves, norm) in runs[1].items():
        # In each of 3 steps a gradient's last bit may fall on the other side of a bf16 step, and then that of what is made
        # from it: 6 units of bf16, each at most 2^-7 of the value.
        loose = 6 * 2**-7 if key[0] in ("bf16_pure", "kahan", "reduce_bf16") else 2e-3
        for world in (2, 4):
            found, found_norm = runs[world][key]
            assert abs(found_norm - norm) <= loose * norm, (key, world)
            for a, b in zip(leaves, found, strict=True):
                assert a.dtype == b.dtype and (a.double() - b.double()).abs().max() <= loose * a.double().abs().max(), (
                    key
                )
    for world in (2, 4):
        for (name, tx, stage), (leaves, _) in runs[world].items():
            if stage == 3 and tx == "adamw":
                same = runs[world][name, tx, 2][0]
                assert all(map(torch.equal, leaves, same)), (name, world)


def pure_by_world(rank, world):
    """Stochastic rounding alone: gradients that are exact in any order, so all layouts must agree bit for bit."""
    mesh, out = fz.make_mesh(dp=-1), []
    for stage in (0, 1, 2, 3):
        params = {"w": torch.linspace(-2, 2, 333), "m": torch.ones(20, 7)}
        tx = fz.adamw(0.01)
        specs = fz.zero_specs(params, tx, mesh, stage=stage, precision=fz.precision.bf16_pure)
        state = fz.init_state(params, tx, specs=specs, precision=fz.precision.bf16_pure, key=5)

        def loss(p, b):
            return (p["w"].float().sum() + (p["m"].float() * 0.5).sum()) * b.float().sum()

        step = fz.make_step(loss, tx, specs=specs, precision=fz.precision.bf16_pure)
        for _ in range(5):
            state, _ = step(state, torch.ones(1))
        whole = fz.gather(state.params, specs.params), fz.gather(state.opt_state, specs.opt_state)
        out.append([x.clone() for x in fz.tree.leaves(whole)])
    return out


def test_stochastic_rounding_does_not_depend_on_the_layout():
    reference = pool(1).run(pure_by_world)[0][0]
    assert len(reference[1].unique()) > 1
    for world in (1, 2, 4):
        for rank in pool(world).run(pure_by_world):
            for stage, leaves in enumerate(rank):
                assert all(torch.equal(a, b) for a, b in zip(leaves, reference, strict=True)), (world, stage)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"norm": torch.bfloat16}, "squares of gradients overflow"),
        ({"norm": torch.float32}, "squares of gradients overflow"),
        ({"compute": torch.float16}, "vanish without a loss scale"),
        ({"accum": torch.float16}, "vanish without a loss scale"),
        ({"compute": torch.int32}, "expected None or one of"),
        ({"rounding": "up"}, "rounding is one of"),
        ({"rounding": "stochastic"}, "neither params nor moments are kept in bfloat16"),
        ({"cast": "autocast"}, "compute is one of"),
        (
            {"params": torch.bfloat16, "master": torch.float32, "rounding": "kahan"},
            "a master copy loses nothing",
        ),
    ],
)
def test_policies_that_cannot_work(options, text):
    with pytest.raises(ValueError, match=text):
        fz.precision.Policy("x", **options)


def test_nearest_rounding_without_a_master_warns():
    with pytest.warns(UserWarning, match="lose every update below half a unit"):
        dataclasses.replace(fz.precision.bf16_pure, rounding="nearest")


def test_a_policy_in_one_place_only_is_named():
    tx, params = fz.adamw(0.1), params_of()
    with pytest.raises(ValueError, match="init_state: the layout is not that of precision bf16_pure"):
        fz.init_state(
            params, tx, specs=fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=0), precision=fz.precision.bf16_pure
        )
    state = fz.init_state(params, tx)
    for name in ("bf16_pure", "bf16_master"):
        with pytest.raises(ValueError, match=f"make_step: the layout is not that of precision {name}"):
            fz.make_step(loss_fn, tx, precision=POLICIES[name])(state, {"x": torch.ones(2, 37)})
    moments = fz.precision.Policy("low moments", moments=torch.bfloat16, rounding="stochastic")
    with pytest.raises(ValueError, match=r"opt_state/\S+/(mu|nu)/\S+ is bfloat16\S* there, and float32"):
        fz.make_step(loss_fn, tx, precision=moments)(state, {"x": torch.ones(2, 37)})
    with pytest.raises(ValueError, match="fp16_mixed needs a loss scale and the state has none"):
        fz.make_step(loss_fn, tx, precision=fz.precision.fp16_mixed)(state, {"x": torch.ones(2, 37)})


def test_an_optimizer_in_one_place_only_is_named():
    tx, other, params = fz.adamw(0.1), fz.sgd(0.1, momentum=0.9), params_of()
    specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=0)
    for make in (fz.init_state, fz.abstract_state):
        with pytest.raises(ValueError, match=rf"{make.__name__}: .*this optimizer: opt_state/\S+ is (not )?kept there"):
            make(params, other, specs=specs)
    state = fz.init_state(params, tx, specs=specs)
    with pytest.raises(ValueError, match=r"make_step: .*this optimizer: opt_state/"):
        fz.make_step(loss_fn, other)(state, {"x": torch.ones(2, 37)})


# BR06 --------------------------------------------------------------------------------------------------------------


def br06(rank, world, mesh_kind):
    mesh = fz.make_mesh(dp=-1) if mesh_kind == "dp" else fz.make_mesh(replicate=world, dp=1)
    out = {}
    for stage in (0, 1, 2, 3):
        params = {"a": torch.zeros(()), "b": torch.zeros(()), "c": torch.zeros(3)}
        options = {} if mesh_kind == "dp" else {"replicate": "replicate"}
        specs = fz.zero_specs(params, fz.sgd(1.0), mesh, stage=stage, precision=fz.precision.bf16_mixed, **options)
        state = fz.init_state(params, fz.sgd(1.0), specs=specs, precision=fz.precision.bf16_mixed)

        def loss(p, batch):
            total = p["a"] * batch["g"].sum()
            if float(batch["last"].sum()):
                total = total + p["b"] * batch["last"].sum()
            return total

        step = fz.make_step(
            loss, fz.sgd(1.0), specs=specs, precision=fz.precision.bf16_mixed, accumulate=66 // world, reduction="sum",
            leaf_use="any",
        )  # fmt: skip
        g = torch.tensor([256.0] + [1.0] * 64 + [0.0])
        last = torch.tensor([0.0] * 65 + [1.0])
        state, _ = step(state, fz.data.local({"g": g, "last": last}, mesh, 66 // world))
        whole = fz.gather(state.params, specs.params)
        out[stage] = [whole[k].tolist() for k in "abc"]
    return out


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mesh", ["dp", "replicate"])
def test_br06_sums_in_float32_also_with_a_leaf_used_only_in_the_last_micro_batch(world, mesh):
    for rank in pool(world).run(br06, mesh):
        for stage, found in rank.items():
            assert found == [-320.0, -1.0, [0.0, 0.0, 0.0]], stage


# BR12, BR13 with a loss scale --------------------------------------------------------------------------------------


def whole_state(state, specs):
    trees = fz.gather(state.params, specs.params), fz.gather(state.opt_state, specs.opt_state)
    return [x.clone() for x in fz.tree.leaves(trees)]


def br12(rank, world):
    mesh, out = fz.make_mesh(dp=-1), []
    for stage in (0, 1, 2, 3):
        for n, at, who in ((4, 3, 1), (1, 0, 0)):
            params, tx = {"w": torch.ones(n)}, fz.adam(0.1)
            specs = fz.zero_specs(params, tx, mesh, stage=stage)
            scaling = fz.loss_scale.dynamic(initial_power=1, window=1000)
            state = fz.init_state(params, tx, specs=specs, loss_scale=scaling)
            step = fz.make_step(lambda p, b: (p["w"] * b).sum(), tx, specs=specs)
            g = torch.ones(1, n)
            if rank == who:
                g[0, at] = float("inf")
            before = whole_state(state, specs)
            state, bad = step(state, g)
            after = whole_state(state, specs)
            scale = float(state.loss_scale.scale), int(state.loss_scale.finite)
            state, good = step(state, torch.ones(1, n))
            same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            moved = not torch.equal(whole_state(state, specs)[0], before[0])
            out.append((same, bool(bad.skipped), float(bad.loss_scale), scale, bool(good.skipped), moved))
    return out


def test_br12_one_ranks_overflow_halves_the_scale_on_all():
    for rank in pool(2).run(br12):
        assert rank == [(True, True, 2.0, (1.0, 0), False, True)] * 8


def test_br13_a_skipped_step_moves_the_scale_and_nothing_else():
    tx = fz.adam(lambda t: 0.1 * (t + 1), eps=0.0)
    state = fz.init_state({"w": torch.ones((), dtype=torch.float64)}, tx, loss_scale=fz.loss_scale.dynamic(4))
    step = fz.make_step(lambda p, b: p["w"] * b.sum(), tx)
    seen = []
    for g in (float("inf"), 1.0, 1.0):
        state, metrics = step(state, torch.full((1,), g, dtype=torch.float64))
        seen.append((float(state.params["w"]), int(state.step), bool(metrics.skipped), float(state.loss_scale.scale)))
    assert [s[1:] for s in seen] == [(0, True, 8.0), (1, False, 8.0), (2, False, 8.0)]
    assert (
        seen[0][0] == 1.0
        and seen[1][0] == pytest.approx(0.9, abs=1e-12)
        and seen[2][0] == pytest.approx(0.7, abs=1e-12)
    )


def test_gradients_are_unscaled_by_the_scale_of_their_backward_also_when_it_grows():
    """deepspeed.md 1.3: window 1, SGD 1, gradient 1: the param goes down by 1 each time, DeepSpeed by 1, 1/2, 1/2."""
    state = fz.init_state({"w": torch.zeros(())}, fz.sgd(1.0), loss_scale=fz.loss_scale.dynamic(2, window=1))
    step = fz.make_step(lambda p, b: p["w"] * b.sum(), fz.sgd(1.0))
    seen = []
    for _ in range(4):
        state, metrics = step(state, torch.ones(1))
        seen.append((float(state.params["w"]), float(metrics.loss_scale), float(metrics.grad_norm)))
    assert seen == [(-1.0, 4.0, 1.0), (-2.0, 4.0, 1.0), (-3.0, 8.0, 1.0), (-4.0, 16.0, 1.0)]


def test_a_sum_over_many_tokens_does_not_overflow_float16():
    """The cotangent is divided by the weight's power of two, and the accumulator multiplies it back."""
    policy = fz.precision.fp16_mixed
    params = {"w": torch.ones(8)}
    state = fz.init_state(params, fz.sgd(1.0), precision=policy, loss_scale=2.0**12)

    def loss(p, x):
        return fz.Loss((x @ p["w"]).float().sum(), weight=len(x))

    state, metrics = fz.make_step(loss, fz.sgd(1.0), precision=policy)(state, torch.ones(5000, 8))
    assert not metrics.skipped and state.params["w"].tolist() == [0.0] * 8


def test_weight_zero_leaves_the_scale():
    scaling = fz.loss_scale.dynamic(4, window=1)
    state = fz.init_state({"w": torch.ones(2)}, fz.sgd(1.0), loss_scale=scaling)
    step = fz.make_step(lambda p, b: fz.Loss(p["w"].sum() * 0, weight=b.sum() * 0), fz.sgd(1.0))
    for _ in range(3):
        state, metrics = step(state, torch.ones(1))
    assert metrics.skipped and float(state.loss_scale.scale) == 16.0 and int(state.loss_scale.finite) == 0


def test_at_the_minimum_a_step_is_skipped_or_raises_at_the_next_call():
    bad = torch.full((1,), float("inf"))
    for on_minimum in ("skip", "raise"):
        scaling = fz.loss_scale.dynamic(0, on_minimum=on_minimum)
        state = fz.init_state({"w": torch.ones(2)}, fz.sgd(1.0), loss_scale=scaling)
        step = fz.make_step(lambda p, b: p["w"].sum() * b.sum(), fz.sgd(1.0))
        state, metrics = step(state, bad)
        assert metrics.skipped and float(state.loss_scale.scale) == 1.0 and state.loss_scale.exhausted
        if on_minimum == "raise":
            with pytest.raises(fz.LossScaleError, match=r"smallest loss scale, 1\.0; the first bad gradient"):
                step(state, bad)
        else:
            assert step(state, bad)[1].skipped


# BR19 --------------------------------------------------------------------------------------------------------------


def rounded(policy, updates, steps, decay=0.0):
    """A bf16 weight of 1.0 after `steps` of SGD with this gradient and decay."""
    tx = chain(fz.add_decayed_weights(decay), fz.scale_by_learning_rate(1.0))
    state = fz.init_state({"w": torch.ones(64)}, tx, precision=policy, key=1)
    step = fz.make_step(lambda p, b: (p["w"].float() * b).sum(), tx, precision=policy)
    for _ in range(steps):
        state, _ = step(state, torch.full((1,), updates))
    return state.params["w"].float()


def with_rounding(rounding):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dataclasses.replace(fz.precision.bf16_pure, rounding=rounding, accum=None, compute=None)


def test_br19_nearest_stands_still_as_it_warned():
    policy = with_rounding("nearest")
    assert rounded(policy, 0.001, 100).unique().tolist() == [1.0]
    assert rounded(policy, 0.0, 1000, decay=1e-4).unique().tolist() == [1.0]


@pytest.mark.parametrize("policy", [fz.precision.bf16_master, with_rounding("kahan")], ids=["master", "kahan"])
def test_br19_master_and_kahan_follow(policy):
    assert set(rounded(policy, 0.001, 100).unique().tolist()) <= {0.8984375, 0.90234375}
    assert (rounded(policy, 0.0, 1000, decay=1e-4) - 0.9048).abs().max() <= 2**-8


def test_br19_stochastic_follows_on_average():
    policy = with_rounding("stochastic")
    assert (rounded(policy, 0.001, 100).mean() - 0.9).abs() < 0.005
    assert (rounded(policy, 0.0, 1000, decay=1e-4).mean() - 0.9048).abs() < 0.005


def test_br19_one_update_of_many_elements():
    tx, policy = fz.sgd(1.0), with_rounding("stochastic")

    def one(key):
        state = fz.init_state({"w": torch.ones(10_000)}, tx, precision=policy, key=key)
        step = fz.make_step(lambda p, b: (p["w"].float() * b.float()).sum(), tx, precision=policy)
        return step(state, torch.full((1,), 0.001))[0].params["w"].float()

    w = one(0)
    assert w.unique().tolist() == [0.99609375, 1.0] and abs(float(w.mean()) - 0.999) < 1e-4
    assert torch.equal(w, one(0)) and not torch.equal(w, one(1))
