"""Kind 4, BR20: leaves and gradients that are not contiguous."""

import pytest
import torch

import funzero as fz
from tests.cases.common import STAGES, WORLDS, difference, launch, one_for_all, whole, window
from tests.ranks import pool


class Given(torch.autograd.Function):
    """A loss whose gradient is the tensor object it was given, with its strides and on its memory."""

    @staticmethod
    def forward(ctx, w, grad):
        ctx.grad = grad
        return (w * grad).sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.grad, None


def given_loss(params, batch):
    return sum(Given.apply(params[name], g.squeeze(0)) for name, g in batch.items())


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaves(dtype=torch.float64):
    """Views as params, and the bases they look at."""
    bases = [draw(4, 3, dtype=dtype), draw(6, 10, seed=1, dtype=dtype), draw(2, 3, 4, 5, seed=2, dtype=dtype)]
    views = {
        "transposed": bases[0].t(),
        "columns": bases[1][1:5, ::2],
        "channels_last": bases[2].to(memory_format=torch.channels_last),
        "expanded": bases[1][:1, 0].expand(7),
        "large": draw(90, 100, seed=3, dtype=dtype).t(),
    }
    return views, bases


def gradients(seed, dtype=torch.float64):
    """Non-contiguous gradients of these leaves, one micro-batch, and the bases they look at."""
    wide, image = draw(1, 3, 8, seed=seed, dtype=dtype), draw(1, 2, 4, 5, 3, seed=seed + 1, dtype=dtype)
    square, column = draw(1, 100, 180, seed=seed + 2, dtype=dtype), draw(1, 4, 5, seed=seed + 3, dtype=dtype)
    views = {
        "transposed": wide[:, :, ::2],
        "columns": column[:, :, :1].expand(1, 4, 5),
        "channels_last": image.permute(0, 1, 4, 2, 3),
        "expanded": column[:, 0, :1].expand(1, 7),
        "large": square[:, :, ::2],
    }
    return views, [wide, image, square, column]


def dense(tree):
    return fz.tree.map(lambda x: x.clone(memory_format=torch.contiguous_format), tree)


OPTIMIZERS = {
    "adamw": lambda: fz.adamw(0.1, weight_decay=0.1),
    "composed": lambda: fz.chain(fz.scale_by_adam(), fz.identity(), fz.scale_by_learning_rate(0.1)),
    "momentum": lambda: fz.sgd(0.1, momentum=0.9),
}


def br20_run(mesh, stage, tx, contiguous, donate):
    """Two windows; the state after, and how many bases were written to."""
    params, bases = leaves()
    dealt = [gradients(10 * i) for i in range(2 * mesh.world)]
    bases = bases + [base for _, more in dealt for base in more]
    before = [base.clone() for base in bases]
    micros = [dense(g) if contiguous else g for g, _ in dealt]
    params = dense(params) if contiguous else params
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
    state = fz.init_state(params, tx, specs=specs, donate=donate)
    step = fz.make_step(given_loss, tx, specs=specs, max_norm=5.0)
    for half in (micros[: mesh.world], micros[mesh.world :]):
        state, metrics = window(step, state, half, mesh)
    written = sum(not torch.equal(a, b) for a, b in zip(bases, before, strict=True))
    return [whole(state), metrics, torch.tensor(written)]


def br20_cells(rank, world):
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for name, make in OPTIMIZERS.items():
            if name == "momentum" and stage in (1, 2):
                continue
            donate = name == "adamw"
            pair = [br20_run(mesh, stage, make(), contiguous, donate) for contiguous in (False, True)]
            found[f"stage {stage} {name} donate={donate}"] = pair
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br20_views_train_like_their_contiguous_copies(world):
    for cell, (views, copies) in one_for_all(pool(world).run(br20_cells)).items():
        assert not difference(views[:2], copies[:2]), f"{cell}: {difference(views[:2], copies[:2])} differ"
        assert views[2] == 0, f"{cell}: {views[2]} bases were written to"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_br20_transforms_by_hand_keep_the_logical_order(name):
    tx, (params, _), (grads, _) = OPTIMIZERS[name](), leaves(), gradients(5)
    grads = {n: g.squeeze(0) for n, g in grads.items()}
    updates, state = tx.update(grads, tx.init(params), params)
    expected = tx.update(dense(grads), tx.init(dense(params)), dense(params))
    assert not difference([updates, state], list(expected))
    clipped = [fz.clip_by_global_norm(g, 1.0) for g in (grads, dense(grads))]
    assert not difference(list(clipped[0]), list(clipped[1]))


def br20_round_trip(rank, world):
    """Shard, gather and reshard of views at every stage: what comes back, and whether the bases kept their values."""
    mesh, found = fz.make_mesh(dp=-1), {}
    for dtype in (torch.float64, torch.bfloat16):
        params, bases = leaves(dtype)
        before = [base.clone() for base in bases]
        tables = [fz.zero_specs(fz.eval_shape(params), fz.sgd(0.1), mesh, stage=stage) for stage in STAGES]
        for stage, specs in zip(STAGES, tables, strict=True):
            local = fz.shard(params, specs.params)
            back = fz.gather(local, specs.params)
            state = fz.init_state(params, fz.sgd(0.1), specs=specs)
            moved = [fz.gather(fz.reshard(state, other).params, other.params) for other in tables]
            found[f"stage {stage} {dtype}"] = [fz.tree.map(torch.clone, back), fz.tree.map(torch.clone, moved)]
            for x in fz.tree.leaves([local, back]):
                x.fill_(7)  # they are copies, so no base may see this
        assert all(torch.equal(a, b) for a, b in zip(bases, before, strict=True)), "a base was written to"
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br20_shard_gather_and_reshard_keep_the_logical_order(world):
    for cell, (back, moved) in one_for_all(pool(world).run(br20_round_trip)).items():
        params, _ = leaves(torch.bfloat16 if "16" in cell else torch.float64)
        for tree in (back, *moved):
            assert not difference(tree, params), f"{cell}: {difference(tree, params)}"


def test_br20_flatten_and_unflatten_give_back_the_same_views():
    params, _ = leaves()
    found, treedef = fz.tree.flatten(params)
    again = fz.tree.unflatten(treedef, found)
    assert all(again[n] is x for n, x in params.items())


def br20_reuse(rank, world):
    """A batch whose memory is used again after each call; gradients that alias it must have been taken by then."""
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for calls in ("accumulate", "step"):
            tx = fz.sgd(1.0)
            options = {"reduction": "sum"}
            state, step = launch(
                {"a": torch.zeros(3, 4), "b": torch.zeros(6)}, tx, given_loss, mesh, stage, step=options
            )
            batch = {"a": torch.zeros(1, 3, 4), "b": torch.zeros(1, 6)}
            for value in (1.0, 2.0):
                for x in batch.values():
                    x.fill_(value)
                if calls == "accumulate":
                    state = step.accumulate(state, batch)
                else:
                    state, _ = step(state, batch)
                    kept = torch.tensor(all(bool((x == value).all()) for x in batch.values()))
            if calls == "accumulate":
                batch["a"].fill_(100.0), batch["b"].fill_(100.0)
                state, _ = step.update(state)
                kept = torch.tensor(all(bool((x == 100.0).all()) for x in batch.values()))
            found[f"stage {stage} {calls}"] = [whole(state), kept]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br20_gradients_that_alias_the_batch_are_neither_kept_nor_written_to(world):
    for cell, (state, kept) in one_for_all(pool(world).run(br20_reuse)).items():
        for name in "ab":
            w = state[f"params/{name}"]
            assert torch.equal(w, torch.full_like(w, -3.0 * world)), f"{cell}: {name} {w}, right {-3 * world}"
        assert kept, f"{cell}: the batch was written to"


def weighted_given_loss(params, batch):
    return fz.Loss(given_loss(params, batch), weight=2)


def br20_scaled(rank, world):
    """Gradients that are the batch's own memory, divided by a weight, clipped, or both."""
    mesh, found = fz.make_mesh(dp=-1), {}
    for stage in STAGES:
        for loss_fn, max_norm in ((given_loss, 6.5), (weighted_given_loss, None), (weighted_given_loss, 3.25)):
            params = {"s": torch.zeros(4), "r": torch.zeros(1)}
            options = {"max_norm": max_norm}
            state, step = launch(params, fz.sgd(1.0), loss_fn, mesh, stage, step=options)
            batch = {"s": torch.tensor([[3.0, 0, 0, 4]]), "r": torch.tensor([[12.0]])}
            before = fz.tree.map(torch.clone, batch)
            state, _ = step(state, batch)
            kept = torch.tensor(not difference(batch, before))
            found[f"stage {stage} {loss_fn.__name__} {max_norm}"] = [whole(state), kept]
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_br20_dividing_and_clipping_do_not_write_to_the_batch(world):
    for cell, (state, kept) in one_for_all(pool(world).run(br20_scaled)).items():
        assert kept, f"{cell}: the batch was written to"
        right = 4.0 if "3.25" in cell else 2.0  # divided by 2, clipped by 2, or both
        assert state["params/r"].tolist() == [-12.0 / right], f"{cell}: {state['params/r']}"
        assert state["params/s"].tolist() == [-3.0 / right, 0, 0, -4.0 / right], f"{cell}: {state['params/s']}"
