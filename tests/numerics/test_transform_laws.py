"""Laws that every transform keeps; other modules add their own to `TABLE` of `transform_table`."""

import pytest
import torch

import funzero as fz
from funzero.transforms.average import averaged_params, polyak_averaging
from funzero.transforms.basic import clip
from funzero.transforms.inject import inject_hyperparams
from funzero.transforms.lookahead import lookahead
from funzero.transforms.nonfinite import skip_nonfinite
from funzero.transforms.optim.adam import adam, adamw, scale_by_adam
from funzero.transforms.optim.rmsprop import rmsprop
from funzero.transforms.optim.schedule_free import schedule_free, schedule_free_eval_params, schedule_free_sgd
from tests.numerics.transform_table import SCHEDULED, TABLE

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
EVERY = pytest.mark.parametrize("name", TABLE)


def tree(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = {
        k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in (("a", (3, 4)), ("b", ()), ("c", (5,)))
    }
    return {"x": {"a": draw["a"].to(dtype)}, "b": draw["b"].to(dtype), "c": draw["c"].to(dtype)}


def run(tx, params, grads):
    """Params and state after updates with each of the gradients."""
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = fz.apply_updates(params, updates)
    return params, state


def kinds(state):
    return {p: (x.shape, x.dtype) for p, x in zip(fz.tree.paths(state), fz.tree.leaves(state), strict=True)}


def bits(state):
    return {p: x.clone() for p, x in zip(fz.tree.paths(state), fz.tree.leaves(state), strict=True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY
def test_the_state_keeps_its_structure_shapes_and_dtypes(name, dtype):
    tx, params = TABLE[name](), tree(dtype)
    after, state = run(tx, params, [tree(dtype, seed) for seed in range(1, 21)])
    assert fz.tree.structure(state) == fz.tree.structure(tx.init(params))
    assert kinds(state) == kinds(tx.init(params))
    assert kinds(after) == kinds(params)
    assert all(x.isfinite().all() for x in fz.tree.leaves(after))


@EVERY
def test_nothing_is_written_in_place(name):
    tx, params, grads = TABLE[name](), tree(), tree(seed=1)
    state = run(tx, params, [tree(seed=2)])[1]
    trees = {"params": params, "grads": grads, "state": state}
    before = bits(trees)
    tx.update(grads, state, params)
    assert all(torch.equal(x, before[p]) for p, x in bits(trees).items())


@EVERY
def test_a_batch_of_trees_under_vmap(name):
    tx = TABLE[name]()
    batch = [(tree(seed=s), [tree(seed=10 * s + i) for i in range(1, 4)]) for s in range(3)]
    stacked = fz.tree.map(lambda *xs: torch.stack(xs), *[p for p, _ in batch])
    grads = [fz.tree.map(lambda *xs: torch.stack(xs), *gs) for gs in zip(*[g for _, g in batch], strict=True)]
    found = torch.func.vmap(lambda p, *g: run(tx, p, g)[0])(stacked, *grads)
    for i, (p, g) in enumerate(batch):
        for one, right in zip(fz.tree.leaves(found), fz.tree.leaves(run(tx, p, g)[0]), strict=True):
            torch.testing.assert_close(one[i], right, rtol=1e-12, atol=1e-12)


@EVERY
def test_its_jacobian_is_that_of_finite_differences(name):
    tx, params, grads = TABLE[name](), {"w": tree()["c"]}, tree(seed=3)["c"]

    def after(g):
        return run(tx, params, [{"w": g}, {"w": 0.5 * g}, {"w": 2.0 * g}])[0]["w"]

    found, step = torch.func.jacrev(after)(grads), 1e-6
    columns = [
        (after(grads + step * e) - after(grads - step * e)) / (2 * step) for e in torch.eye(5, dtype=grads.dtype)
    ]
    torch.testing.assert_close(found, torch.stack(columns, dim=1), rtol=1e-6, atol=1e-7)


@EVERY
def test_the_loss_after_a_step_is_differentiable_in_the_initial_params(name):
    tx, start = TABLE[name](), tree()["c"]
    a = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)

    def loss(w):
        return ((a * w) ** 2).sum() + w.sin().sum()

    def outer(w):
        params, state = {"w": w}, tx.init({"w": w})
        for _ in range(2):
            (g,) = torch.autograd.grad(loss(params["w"]), params["w"], create_graph=True)
            updates, state = tx.update({"w": g}, state, params)
            params = fz.apply_updates(params, updates)
        return loss(params["w"])

    def value(w):
        return outer(w.detach().requires_grad_()).detach()

    w = start.clone().requires_grad_()
    (found,) = torch.autograd.grad(outer(w), w)
    step = 1e-6
    right = [(value(start + step * e) - value(start - step * e)) / (2 * step) for e in torch.eye(5, dtype=start.dtype)]
    torch.testing.assert_close(found, torch.stack(right), rtol=1e-5, atol=1e-6)


@EVERY
def test_a_leaf_without_update_keeps_its_state_bit_for_bit(name):
    tx, params = TABLE[name](), tree()
    params, state = run(tx, params, [tree(seed=1), tree(seed=2)])
    before = bits(state)
    for seed in (3, 4, 5):
        updates, state = tx.update({**tree(seed=seed), "c": None}, state, params)
        assert updates["c"] is None
        params = fz.apply_updates(params, updates)
    assert kinds(state) == {p: (x.shape, x.dtype) for p, x in before.items()}
    for path, leaf in bits(state).items():
        if path.endswith("/c"):
            assert torch.equal(leaf, before[path]), path


@EVERY
def test_a_leaf_that_missed_updates_moves_as_if_they_had_not_been(name):
    tx, params = TABLE[name](), tree()
    steps = [tree(seed=s) for s in range(1, 5)]
    missed = [{**g, "c": None} if i == 1 else g for i, g in enumerate(steps)]
    found = run(tx, params, missed)[0]["c"]
    right = run(tx, params, [g for i, g in enumerate(steps) if i != 1])[0]["c"]
    assert torch.equal(found, right)


@pytest.mark.parametrize("name", [n for n, make in TABLE.items() if make().needs == "element"])
def test_pieces_of_leaves_move_as_the_whole_ones(name):
    tx, params, grads = TABLE[name](), {"w": tree()["x"]["a"]}, [{"w": tree(seed=s)["x"]["a"]} for s in range(1, 5)]
    whole = run(tx, params, grads)[0]["w"].view(-1)

    def piece(t, lo, hi):
        return {"w": t["w"].reshape(-1)[lo:hi]}

    for lo, hi in ((0, 5), (5, 12), (12, 12)):
        found = run(tx, piece(params, lo, hi), [piece(g, lo, hi) for g in grads])[0]["w"]
        torch.testing.assert_close(found, whole[lo:hi], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", SCHEDULED)
def test_br18_schedules_read_count_0_first(name):
    tx, params, moved = SCHEDULED[name](lambda t: t * 1.0), {"w": torch.zeros(2, dtype=torch.float64)}, []
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": torch.ones(2, dtype=torch.float64)}, state, params)
        moved.append(updates["w"])
    torch.testing.assert_close(torch.stack(moved)[:, 0], torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64))


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "amsgrad", "rmsprop", "lion", "adan", "ema"])
def test_every_moment_takes_a_schedule(name):
    """Decays that are functions of the count; a constant one is the number."""
    from tests.numerics.cases_elementwise import FUNZERO

    key = {"rmsprop": "decay", "ema": "decay"}.get(name, "b1")
    rate = () if name == "ema" else (0.1,)
    grads = [tree(seed=s) for s in range(1, 4)]
    found, _ = run(FUNZERO[name](*rate, **{key: lambda t: 0.7}), tree(), grads)
    right, _ = run(FUNZERO[name](*rate, **{key: 0.7}), tree(), grads)
    assert all(torch.equal(x, y) for x, y in zip(fz.tree.leaves(found), fz.tree.leaves(right), strict=True))


def test_gradients_flow_to_a_hyper_parameter_given_as_a_tensor():
    rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    tx, params = adam(rate), {"w": torch.ones(3, dtype=torch.float64)}
    updates, state = tx.update({"w": torch.full((3,), 2.0, dtype=torch.float64)}, tx.init(params), params)
    torch.testing.assert_close(
        torch.autograd.grad(updates["w"].sum(), rate)[0], torch.tensor(-3.0, dtype=torch.float64)
    )
    assert "hyperparams" not in state["scale_by_learning_rate"]
    assert tx.parts[1].fused is None, "a kernel would look for the number in the state"


def test_only_plain_adam_is_offered_to_the_fused_kernel():
    assert scale_by_adam().fused and scale_by_adam(eps_root=0).fused and adamw(1e-3).parts[0].fused
    for other in (
        scale_by_adam(eps_root=1e-8),
        scale_by_adam(nesterov=True),
        scale_by_adam(eps_root=lambda t: 0.0),
        adamw(1e-3, nesterov=True).parts[0],
        adamw(1e-3, eps_root=1e-8).parts[0],
    ):
        assert other.fused is None


@pytest.mark.parametrize(
    "options",
    [{"nesterov": True}, {"eps_root": 1e-2}, {"eps_root": 1e-2, "nesterov": True}, {"b1": lambda t: 0.8 / (t + 1)}],
    ids=lambda options: " ".join(options),
)
def test_a_step_with_the_options_of_adam_is_the_plain_functions(options):
    def loss_fn(p, batch):
        return ((batch["x"] * p["w"]) ** 2).sum()

    params, tx = {"w": torch.linspace(-1, 1, 6)}, adamw(0.1, weight_decay=0.1, **options)
    batch = {"x": torch.ones(2, 6)}
    state, step = fz.init_state(params, tx), fz.make_step(loss_fn, tx)
    right, held = params, tx.init(params)
    for _ in range(3):
        state, _ = step(state, batch)
        grads, _ = fz.grad_fn(loss_fn)(right, batch)
        updates, held = tx.update(grads, held, right)
        right = fz.apply_updates(right, updates)
    torch.testing.assert_close(fz.gather(state.params, state.specs.params)["w"], right["w"], rtol=1e-6, atol=1e-6)


def test_a_partition_whose_parts_are_those_of_adam_is_not_adam():
    tx = fz.partition({"a": fz.scale_by_adam(eps=0.0), "b": fz.scale_by_learning_rate(0.5)}, {"w": "a", "v": "b"})
    state = fz.init_state({"w": torch.zeros(3), "v": torch.zeros(2)}, tx)
    step = fz.make_step(lambda p, batch: (p["w"] * batch["x"]).sum() + p["v"].sum(), tx)
    state, _ = step(state, {"x": torch.full((1, 3), 2.0)})
    assert torch.equal(state.params["w"], torch.ones(3)) and torch.equal(state.params["v"], torch.full((2,), -0.5))


def test_complex_leaves_move_as_optax_says():
    """Adam's direction of a complex gradient, by hand: g / (|g| + eps) in the first update."""
    params = {"w": torch.tensor([1.0 + 1.0j, 0.5 - 2.0j], dtype=torch.complex128)}
    g = {"w": torch.tensor([3.0 + 4.0j, -1.0j], dtype=torch.complex128)}
    for name in ("adam", "nadam", "amsgrad", "rmsprop", "lion", "adagrad", "adan", "schedule_free_sgd"):
        after, state = run(TABLE[name](), params, [g, g])
        assert after["w"].dtype == torch.complex128 and after["w"].isfinite().all()
        assert kinds(state) == kinds(TABLE[name]().init(params)), name
    updates, _ = adam(1.0, eps=0.0).update(g, adam(1.0, eps=0.0).init(params), params)
    torch.testing.assert_close(updates["w"], -g["w"] / g["w"].abs())


# skip_nonfinite


def test_an_update_that_is_not_finite_leaves_the_inner_state_bit_for_bit():
    tx, params = skip_nonfinite(adam(0.1), max_consecutive=2), tree()
    params, state = run(tx, params, [tree(seed=1)])
    held = bits(state["inner"])
    for bad, count in ((float("nan"), 1), (float("inf"), 2)):
        spoilt = tree(seed=2)
        spoilt["x"]["a"][1, 2] = bad
        updates, state = tx.update(spoilt, state, params)
        assert all(torch.equal(u, torch.zeros_like(u)) for u in fz.tree.leaves(updates))
        assert all(torch.equal(x, held[p]) for p, x in bits(state["inner"]).items())
        assert (state["notfinite_count"], state["total_notfinite"], state["last_finite"]) == (count, count, False)
    updates, after = tx.update(spoilt, state, params)
    assert not updates["x"]["a"][1, 2].isfinite(), "the third in a row goes through"
    assert after["notfinite_count"] == 3
    updates, state = tx.update(tree(seed=3), state, params)
    assert (state["notfinite_count"], state["total_notfinite"], state["last_finite"]) == (0, 2, True)
    assert all(u.any() for u in fz.tree.leaves(updates))
    updates, state = tx.update(spoilt, state, params)
    assert state["notfinite_count"] == 1 and not fz.tree.leaves(updates)[0].any()


def test_what_one_rank_sees_skips_the_update_on_all():
    """Two ranks hold halves of a leaf; only the second half is spoilt."""
    tx, halves = skip_nonfinite(adam(0.1), max_consecutive=5), [torch.ones(3), torch.tensor([1.0, float("nan")])]
    bad = [int((~h.isfinite()).sum()) for h in halves]
    for half in halves:

        def call(part, updates, state, params):
            if part.needs != "norm":
                return part.update(updates, state, params)
            return part.update(updates, state, params, reduce=lambda path, x: x * 0 + sum(bad))

        params = {"w": torch.zeros_like(half)}
        updates, state = tx.update({"w": half}, tx.init(params), params, call=call)
        assert not state["last_finite"] and torch.equal(updates["w"], params["w"])


# lookahead


def test_lookahead_jumps_to_the_slow_params():
    tx, params = lookahead(fz.sgd(1.0), sync_period=2, slow_step_size=0.5), {"w": torch.tensor(1.0)}
    after, state = run(tx, params, [{"w": torch.tensor(1.0)}] * 2)
    assert (after["w"], state["slow"]["w"]) == (0.0, 0.0), "from 1 by two steps of 1 to -1, and half of the way back"


def test_a_reset_keeps_hyper_parameters_that_were_set():
    tx, params = lookahead(adam(0.1), 1, 0.5, reset_state=True), {"w": torch.ones(2)}
    state = tx.init(params)
    state["fast"]["scale_by_learning_rate"]["hyperparams"]["learning_rate"] = torch.tensor(0.5)
    _, state = tx.update({"w": torch.ones(2)}, state, params)
    assert state["fast"]["scale_by_learning_rate"]["hyperparams"]["learning_rate"] == 0.5
    assert not state["fast"]["scale_by_adam"]["mu"]["w"].any() and state["fast"]["scale_by_adam"]["count"]["w"] == 0


def test_a_period_of_no_update_is_refused():
    with pytest.raises(ValueError, match="sync_period must be at least 1, got 0"):
        lookahead(fz.sgd(0.1), 0, 0.5)


# averages


def test_the_average_is_found_inside_a_chain_and_starts_at_the_params():
    params = {"averaged": torch.tensor(2.0), "idle": torch.tensor(3.0, dtype=torch.bfloat16)}
    tx = fz.chain(fz.sgd(1.0), polyak_averaging(0.5))
    state = tx.init(params)
    assert averaged_params(state) == params
    given = {"averaged": torch.tensor(1.0), "idle": None}
    for _ in range(2):
        updates, state = tx.update(given, state, params)
        params = fz.apply_updates(params, updates)
    found = averaged_params(state)
    torch.testing.assert_close(found["averaged"], torch.tensor((0.5 * 1.0 + 1.0 * 0.0) / 1.5))
    assert found["idle"] == 3.0 and found["idle"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"averaged_params: expected one place in the state .* found 0"):
        averaged_params(adam(0.1).init(params))


# schedule-free


def test_evaluation_params_are_found_inside_a_chain():
    params = {"z": torch.tensor([1.0, 2.0])}
    tx = fz.chain(clip(1.0), schedule_free_sgd(0.5))
    params, state = run(tx, params, [{"z": torch.ones(2)}])
    torch.testing.assert_close(schedule_free_eval_params(state, params)["z"], torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match="b1 must be above 0"):
        schedule_free(fz.sgd(0.1), 0.1, b1=0.0)


def test_the_base_of_schedule_free_reads_count_0_first():
    """The weights read the schedule from 1, as in Optax; the steps of z read it from 0."""
    params, ones = {"w": torch.zeros(2, dtype=torch.float64)}, {"w": torch.ones(2, dtype=torch.float64)}
    tx = schedule_free(fz.sgd(lambda t: t * 1.0), lambda t: t * 1.0)
    state, places = tx.init(params), []
    for _ in range(3):
        updates, state = tx.update(ones, state, params)
        params = fz.apply_updates(params, updates)
        places.append(float(state["z"]["w"][0]))
    assert places == [0.0, -1.0, -3.0] and state["max_lr"] == 3.0


# inject_hyperparams


def test_injected_numbers_are_leaves_that_can_be_set():
    def factory(rate, power, name="x", double=False):
        assert isinstance(rate, torch.Tensor) and isinstance(name, str) and isinstance(double, bool)
        return fz.scale(-rate * (2.0 if double else 1.0) ** power)

    tx = inject_hyperparams(factory, static_args="power")(0.25, power=2, double=True)
    params = {"w": torch.ones(2, dtype=torch.float64)}
    state = tx.init(params)
    assert kinds(state) == {"hyperparams/rate": (torch.Size([]), torch.float64)}
    updates, state = tx.update(params, state, params)
    torch.testing.assert_close(updates["w"], -params["w"])
    state["hyperparams"]["rate"] = torch.tensor(0.5, dtype=torch.float64)
    updates, state = tx.update(params, state, params)
    torch.testing.assert_close(updates["w"], -2 * params["w"])
    with pytest.raises(ValueError, match=r"has no arguments \['powder'\]"):
        inject_hyperparams(factory, static_args=["powder"])


def test_what_the_injected_transform_needs_is_kept():
    inner = fz.Transform(lambda p: {}, lambda u, s, p=None: (u, s), needs="leaf", quantum=8)
    tx = inject_hyperparams(lambda rate: inner)(rate=0.1)
    assert (tx.needs, tx.quantum, tx.parts) == ("leaf", 8, (inner,))
    for wrapped in (lookahead(inner, 2, 0.5), skip_nonfinite(inner, 2), schedule_free(inner, 0.1)):
        assert wrapped.quantum == 8 and wrapped.parts[-1] is inner
    assert lookahead(inner, 2, 0.5, reset_state=True).needs == "leaf"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: lookahead(tx, 2, 0.5),
        lambda tx: lookahead(tx, 2, 0.5, reset_state=True),
        lambda tx: skip_nonfinite(tx, 3),
        lambda tx: schedule_free(tx, 0.1),
        lambda tx: inject_hyperparams(lambda b1: fz.chain(fz.scale_by_adam(b1), tx))(b1=0.8),
    ],
)
def test_masks_inside_wrappers_are_resolved_on_global_shapes(wrap):
    """A mask by shape, which a piece of a leaf would get wrong."""
    tx = wrap(fz.chain(fz.add_decayed_weights(0.5, lambda p: fz.tree.map(lambda x: x.dim() > 1, p)), rmsprop(0.1)))
    params, grads = {"w": torch.ones(4, 2), "v": torch.ones(3)}, {"w": torch.zeros(4, 2), "v": torch.zeros(3)}
    right = run(tx, params, [grads] * 2)[0]
    fixed = tx.resolve(fz.eval_shape(params))
    flat = fz.tree.map(lambda x: x.reshape(-1), params)
    found = run(fixed, flat, [fz.tree.map(lambda x: x.reshape(-1), grads)] * 2)[0]
    assert all(torch.equal(found[k].view_as(x), x) for k, x in right.items())
    assert not torch.equal(right["w"], params["w"]) and torch.equal(right["v"], params["v"])
