"""Kind 1: accumulation and the normalisation of the loss."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import funzero as fz
from tests.cases.common import (
    STAGES,
    WORLDS,
    close,
    deal,
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

# BR01: micro-batches of tokens; A has one token 4, B three tokens 0, M none.
TOKENS = {"A": ([4.0, 0.0, 0.0], [1, 0, 0]), "B": ([0.0, 0.0, 0.0], [1, 1, 1]), "M": ([9.0, 9.0, 9.0], [0, 0, 0])}
WINDOWS = ("AB", "BA", "AMB", "MAB", "AMBM", "BMMA")


def token_loss(params, batch):
    mask = batch["mask"]
    per_token = (params["w"].reshape(-1, 1, 1) - batch["t"]).square() / 2
    return fz.Loss((per_token * mask).sum(), weight=mask.sum())


def tokens(order):
    made = [(torch.tensor([TOKENS[x][0]], dtype=torch.float64), torch.tensor([TOKENS[x][1]])) for x in order]
    return [{"t": t, "mask": mask} for t, mask in made]


def br01_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for shape, orders in (((), WINDOWS), ((5,), ("BA", "AMBM"))):
            params = {"w": torch.zeros(shape, dtype=torch.float64)}
            for order in orders:
                state, step = launch(params, fz.sgd(0.1), token_loss, mesh, stage)
                state, metrics = window(step, state, tokens(order), mesh)
                found[f"{stage} {list(shape)} {order} by calls"] = (params_of(state)["w"], metrics)
                if len(order) % world == 0:
                    k = len(order) // world
                    joined = fz.tree.map(lambda *xs: torch.cat(xs), *tokens(order))
                    state, step = launch(params, fz.sgd(0.1), token_loss, mesh, stage, step={"accumulate": k})
                    state, metrics = step(state, fz.data.local(joined, mesh, k))
                    found[f"{stage} {list(shape)} {order} split"] = (params_of(state)["w"], metrics)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br01_the_mean_is_over_tokens_not_over_micro_batches(world):
    for cell, (w, metrics) in one_for_all(pool(world).run(br01_cells)).items():
        assert torch.equal(w, torch.full_like(w, 0.1)), f"{cell}: {w}, right 0.1, mean of means gives 0.2"
        assert metrics.weight == 4, cell
        assert metrics.loss == 2.0 * w.numel(), f"{cell}: loss {metrics.loss}"
        assert torch.equal(metrics.grad_norm, torch.tensor(float(w.numel()), dtype=torch.float64).sqrt()), cell
        assert not metrics.skipped and metrics.step == 1, cell


def br01_masked_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        params = {"w": torch.zeros(5, dtype=torch.float64)}
        state, step = launch(params, fz.adamw(0.1, weight_decay=0.5), token_loss, mesh, stage)
        before = whole(state)
        state, nothing = window(step, state, tokens("MMM"), mesh)
        after = whole(state)
        state, metrics = window(step, state, tokens("AMB"), mesh)
        found[stage] = (before, after, nothing, metrics)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br01_a_window_without_tokens_is_a_step_that_says_it_did_nothing(world):
    for stage, (before, after, nothing, metrics) in one_for_all(pool(world).run(br01_masked_cells)).items():
        assert not difference(after, before), f"stage {stage}: {difference(after, before)} changed"
        assert nothing.skipped and nothing.weight == 0 and nothing.step == 0 and nothing.skipped_in_a_row == 1, stage
        assert not metrics.skipped and metrics.step == 1 and metrics.skipped_in_a_row == 0, stage
        assert metrics.loss == 10.0 and torch.isfinite(metrics.grad_norm), stage


def test_br01_the_pure_pieces_give_the_same_answer():
    for order in WINDOWS:
        params, acc = {"w": torch.zeros((), dtype=torch.float64)}, ()
        for micro in tokens(order):
            grads, loss = fz.grad_fn(token_loss)(params, micro)
            acc = fz.accumulate(acc, grads, loss=loss)
        assert fz.finalize(acc)["w"].item() == -1.0, order
        state = fz.apply_update(fz.sgd(0.1), fz.init_state(params, fz.sgd(0.1)), fz.finalize(acc))
        assert state.params["w"].item() == 0.1, order


def sentence_loss(params, batch):
    logits = torch.tanh(batch["x"] @ params["w"]) @ params["head"] + params["bias"]
    total, count = fz.losses.cross_entropy(logits, batch["labels"])
    return fz.Loss(total, weight=count)


def sentences():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, 5, dtype=torch.float64, generator=draw)
    labels = torch.randint(0, 7, (8, 6), generator=draw)
    lengths = torch.tensor([6, 1, 3, 0, 5, 2, 1, 4])
    labels[torch.arange(6) >= lengths[:, None]] = -100
    sizes = {"w": (5, 4), "head": (4, 7), "bias": (7,)}
    params = {n: torch.randn(s, dtype=torch.float64, generator=draw) for n, s in sizes.items()}
    return params, {"x": x, "labels": labels}


def br01_sentence_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    params, batch = sentences()
    for stage in STAGES:
        for k in (1, 2, 8 // world):
            state, step = launch(params, fz.sgd(1.0), sentence_loss, mesh, stage, step={"accumulate": k})
            state, metrics = step(state, fz.data.local(batch, mesh, k))
            found[f"stage {stage} k={k}"] = (params_of(state), metrics)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br01_sentences_of_unequal_length_equal_the_whole_batch_at_once(world):
    params, batch = sentences()
    leaves = {n: x.clone().requires_grad_() for n, x in params.items()}
    logits = torch.tanh(batch["x"] @ leaves["w"]) @ leaves["head"] + leaves["bias"]
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for cell, (after, metrics) in one_for_all(pool(world).run(br01_sentence_cells)).items():
        assert close(metrics.loss, loss.detach()), cell
        for name, grad in grads.items():
            assert (params[name] - after[name] - grad).abs().max() < 1e-12 * params[name].abs().max(), f"{cell} {name}"


def mean_loss(params, batch):
    return (params["w"] * batch["g"].mean(0)).sum() + 1


def weighted_loss(params, batch):
    return fz.Loss((params["w"] * batch["g"]).sum() + len(batch["g"]), weight=len(batch["g"]))


def sum_loss(params, batch):
    return weighted_loss(params, batch).total


def br03_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    batch = {"g": torch.full((8, 3), 0.75, dtype=torch.float64)}
    for stage in STAGES:
        for loss_fn, reduction in ((mean_loss, "mean"), (weighted_loss, "mean"), (sum_loss, "sum")):
            for k in [k for k in (1, 2, 4, 8) if k * world <= 8]:
                params = {"w": torch.full((3,), 2.0, dtype=torch.float64)}
                options = {"accumulate": k, "reduction": reduction}
                state, step = launch(params, fz.sgd(1.0), loss_fn, mesh, stage, step=options)
                losses, norms, seen = [], [], []
                for _ in range(2):
                    state, metrics = step(state, fz.data.local(batch, mesh, k))
                    losses.append(metrics.loss), norms.append(metrics.grad_norm), seen.append(params_of(state)["w"])
                found[f"stage {stage} {loss_fn.__name__} k={k}"] = (losses, norms, seen)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br03_gradient_and_loss_do_not_depend_on_the_number_of_micro_batches(world):
    for cell, (losses, norms, seen) in one_for_all(pool(world).run(br03_cells)).items():
        g, loss = (6.0, 44.0) if "sum_loss" in cell else (0.75, 5.5)
        norm = torch.tensor(3 * g**2, dtype=torch.float64).sqrt()
        assert losses[0] == loss, f"{cell}: loss {losses[0]}"
        assert torch.equal(norms[0], norm) and torch.equal(norms[1], norm), f"{cell}: norms {norms}, right {norm}"
        assert torch.equal(seen[0], torch.full_like(seen[0], 2 - g)), f"{cell}: {seen[0]}, right {2 - g}"
        assert torch.equal(seen[1], torch.full_like(seen[1], 2 - 2 * g)), f"{cell}: second window {seen[1]}"


def br03_order_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for order in ((8.0, 0.0), (0.0, 8.0)):
            params = {"w": torch.zeros(3, dtype=torch.float64)}
            state, step = launch(params, fz.sgd(1.0), mean_loss, mesh, stage, step={"accumulate": 2})
            for g in order:
                state = step.accumulate(state, {"g": torch.full((2, 3), g, dtype=torch.float64)})
            state, _ = step.update(state)
            found[f"stage {stage} {order}"] = params_of(state)["w"]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br03_two_calls_in_a_window_divide_once(world):
    for cell, w in one_for_all(pool(world).run(br03_order_cells)).items():
        assert torch.equal(w, torch.full_like(w, -4.0)), f"{cell}: {w}, right -4, divided after each call -2"


def br05_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    deals = {"in turn": deal([1.0, 2.0, 3.0, 4.0], mesh), "rank 0 all": [1.0, 2.0, 3.0, 4.0] if rank == 0 else []}
    deals["last rank most"] = [2.0, 3.0, 4.0] if rank == world - 1 else [1.0] if rank == 0 else []
    if world == 1:
        deals = {"in turn": [1.0, 2.0, 3.0, 4.0], "backwards": [4.0, 3.0, 2.0, 1.0]}
    kinds = ((torch.float64, (), True), (torch.float32, (5, 3), True), (torch.float64, (1,), False))
    for stage, (dtype, shape, donate) in itertools.product(STAGES, kinds):
        for dealt, mine in deals.items():
            params = {"w": torch.zeros(shape, dtype=dtype)}
            options = {"reduction": "sum", "donate": donate}
            state, step = launch(params, fz.sgd(1.0), linear, mesh, stage, step=options)
            seen = []
            for _ in range(2):
                for g in mine:
                    state = step.accumulate(state, rows(w=torch.full(shape, g, dtype=dtype)))
                state, metrics = step.update(state)
                seen += [params_of(state)["w"], metrics.grad_norm]
            found[f"stage {stage} {dtype} {list(shape)} {dealt} donate={donate}"] = seen
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br05_four_gradient_calls_before_one_update_all_count(world):
    for cell, (first, norm, second, norm2) in one_for_all(pool(world).run(br05_cells)).items():
        right = 10.0 * first.numel() ** 0.5
        assert torch.equal(first, torch.full_like(first, -10.0)), f"{cell}: {-first}, right 10, last call only 4"
        assert torch.equal(second, torch.full_like(first, -20.0)), f"{cell}: second round {first - second}, right 10"
        assert close(norm, right) and torch.equal(norm, norm2), f"{cell}: norms {norm}, {norm2}"


def br06_loss(params, batch):
    """Leaf b is used in the last micro-batch only, leaf c never."""
    total = (params["a"] * batch["a"]).sum()
    return total + params["b"].sum() if bool(batch["last"].any()) else total


def br06_micros(order, dtype):
    large, ones = [256.0], [1.0] * 64
    values = large + ones if order == "large first" else ones[:32] + large + ones[32:]
    return [{"a": torch.full((1, 1), v, dtype=dtype), "last": torch.tensor([i == 64])} for i, v in enumerate(values)]


def br06_run(mesh, stage, order, dtype, **specs):
    params = {n: torch.zeros(6, dtype=dtype) for n in "abc"} | {"c": torch.ones(6, dtype=dtype)}
    tx = fz.sgd(1.0, momentum=0.5)
    options = {"reduction": "sum", "precision": fz.precision.bf16_mixed if dtype == torch.float32 else None}
    state, step = launch(params, tx, br06_loss, mesh, stage, step=options, **specs)
    state, metrics = window(step, state, br06_micros(order, dtype), mesh)
    return whole(state), metrics


def br06_cells(rank, world):
    found = {}
    meshes = {"dp": (fz.make_mesh(dp=-1), None)}
    if world > 1:
        meshes[f"replicate 2 x {world // 2}"] = (fz.make_mesh(replicate=2, dp=-1), "replicate")
    for name, (mesh, replicate) in meshes.items():
        for stage in STAGES:
            for order, dtype in (("large first", torch.float32), ("large inside", torch.bfloat16)):
                cell = f"{name} stage {stage} {order} {dtype}"
                found[cell] = br06_run(mesh, stage, order, dtype, replicate=replicate)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br06_many_small_bf16_gradients_do_not_stop_the_sum(world):
    for cell, (state, metrics) in one_for_all(pool(world).run(br06_cells)).items():
        a, b, c = (state[f"params/{n}"] for n in "abc")
        assert torch.equal(-a, torch.full_like(a, 320.0)), f"{cell}: a {-a}, right 320, summed in bf16 256"
        assert torch.equal(-b, torch.full_like(b, 1.0)), f"{cell}: b {-b}"
        assert torch.equal(c, torch.ones_like(c)), f"{cell}: c took no part, {c}"
        assert not state["opt_state/trace/trace/c"].any(), f"{cell}: c's moment changed"
        assert metrics.grad_norm == torch.tensor(6 * (320.0**2 + 1.0), dtype=torch.float64).sqrt(), cell
        dtypes = {n: x.dtype for n, x in state.items() if n.startswith("params/") or "/trace/trace/" in n}
        assert set(dtypes.values()) == {a.dtype}, f"{cell}: {dtypes}"


def br06_split_cells(rank, world):
    """65 micro-batches in one call, the accumulation in the step itself."""
    found, mesh = {}, fz.make_mesh(dp=-1)
    for stage in STAGES:
        params = {n: torch.zeros(6) for n in "abc"}
        options = {"reduction": "sum", "precision": fz.precision.bf16_mixed, "accumulate": 65}
        state, step = launch(params, fz.sgd(1.0), br06_loss, mesh, stage, step=options)
        joined = fz.tree.map(lambda *xs: torch.cat(xs), *br06_micros("large first", torch.float32))
        state, _ = step(state, joined if rank == 0 else fz.data.EMPTY)
        found[f"stage {stage}"] = params_of(state)
    return found


@pytest.mark.parametrize("world", (1, 2))
def test_br06_one_call_of_many_micro_batches(world):
    for cell, params in one_for_all(pool(world).run(br06_split_cells)).items():
        expected = {"a": torch.full((6,), -320.0), "b": torch.full((6,), -1.0), "c": torch.zeros(6)}
        assert not difference(params, expected), f"{cell}: {params}"


def test_br06_the_pure_pieces_sum_bf16_gradients_in_float32():
    acc = ()
    for micro in br06_micros("large first", torch.bfloat16):
        grads, loss = fz.grad_fn(br06_loss)({n: torch.zeros(1, dtype=torch.bfloat16) for n in "abc"}, micro)
        acc = fz.accumulate(acc, grads, loss=loss)
    total = fz.finalize(acc, reduction="sum")
    assert total["a"].dtype == torch.float32 and total["a"].item() == 320.0 and total["b"].item() == 1.0
    assert total["c"] is None


def br06_dtype_cells(rank, world):
    """bf16 params: their gradients are summed in float32, and what the optimizer keeps has the dtype of its spec."""
    mesh, found = fz.make_mesh(dp=-1), {}
    makers = {"adamw": fz.adamw(1.0), "composed": fz.chain(fz.scale_by_adam(), fz.scale(-1.0)), "sgd": fz.sgd(1.0, 0.5)}
    for stage in STAGES:
        for name, tx in makers.items():
            params = {"w": torch.zeros(6, dtype=torch.bfloat16), "s": torch.zeros((), dtype=torch.bfloat16)}
            state, step = launch(params, tx, linear, mesh, stage)
            before = whole(state)
            for _ in range(2):
                state, _ = step(state, rows(w=torch.ones(6).bfloat16(), s=torch.ones(()).bfloat16()))
            found[f"stage {stage} {name}"] = [before, whole(state)]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br06_a_step_keeps_the_dtypes_of_bf16_params_and_their_moments(world):
    for cell, (before, after) in one_for_all(pool(world).run(br06_dtype_cells)).items():
        changed = {n: x.dtype for n, x in after.items() if x.dtype != before[n].dtype}
        assert not changed, f"{cell}: {changed}"
        assert after["params/w"].tolist() == [-2.5 if "sgd" in cell else -2.0] * 6, f"{cell}: {after['params/w']}"
