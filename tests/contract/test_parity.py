"""Every layout trains like the pure composition in one process: 20 steps, with every kind of leaf at once."""

import dataclasses

import pytest
import torch

import funzero as fz
from funzero.executor import placement
from tests.ranks import pool

STEPS, MICRO, VOCAB, WIDTH = 20, 8, 11, 12


class Net(torch.nn.Module):
    """Tied head, a frozen matrix, an unused leaf, and leaves that no number of ranks divides."""

    def __init__(self, dtype):
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def leaf(*shape):
            return torch.nn.Parameter(0.5 * torch.randn(shape, generator=g, dtype=torch.float64).to(dtype))

        self.tok = torch.nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.tok.weight = leaf(VOCAB, WIDTH)
        self.mix, self.bias, self.gain = leaf(WIDTH, WIDTH), leaf(WIDTH), leaf()
        self.odd, self.back = leaf(WIDTH, 7), leaf(7, WIDTH)
        self.frozen, self.unused = leaf(WIDTH, WIDTH), leaf(5)
        self.frozen.requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
        self.head.weight = self.tok.weight

    def forward(self, tokens):
        x = torch.tanh(self.tok(tokens) @ self.mix + self.bias) * self.gain
        return self.head(x + torch.tanh(x @ self.odd) @ self.back + x @ self.frozen)


def global_batch(step):
    """8 micro-batches of one row each, with between 1 and 6 tokens that count."""
    g = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (MICRO, 6), generator=g)
    labels = torch.randint(0, VOCAB, (MICRO, 6), generator=g)
    for row in range(MICRO):
        labels[row, 1 + (row * 5 + step) % 6 :] = -100
    return {"tokens": tokens, "labels": labels}


def optimizer(name):
    return fz.sgd(0.01) if name == "sgd" else fz.adamw(fz.schedules.linear(0.02, 0.0, 40), weight_decay=0.1)


def setting(dtype):
    model = Net(dtype)
    params, _ = fz.split_module(model)

    def loss_fn(p, b):
        total, count = fz.losses.cross_entropy(fz.functional_call(model, p, b["tokens"]), b["labels"])
        return fz.Loss(total, weight=count)

    return params, loss_fn, fz.trainable(model)


def reference(name, dtype, max_norm):
    """The pure pieces, composed by hand."""
    params, loss_fn, mask = setting(dtype)
    state = fz.init_state(params, optimizer(name), trainable=mask)
    grads_of = fz.grad_fn(loss_fn, trainable=mask)
    norms, losses = [], []
    for t in range(STEPS):
        acc = ()
        for micro in range(MICRO):
            grads, loss = grads_of(state.params, {k: v[micro : micro + 1] for k, v in global_batch(t).items()})
            trained = {k: g for k, g in grads.items() if mask[k]}
            acc = fz.accumulate(acc, trained, loss=loss)
        grads, norm = fz.clip_by_global_norm(fz.finalize(acc), max_norm)
        losses.append(float(acc.loss / acc.weight))
        norms.append(float(norm))
        trained = {k: p for k, p in state.params.items() if mask[k]}
        updated = fz.apply_update(optimizer(name), dataclasses.replace(state, params=trained), grads)
        state = dataclasses.replace(updated, params=state.params | updated.params)
    return losses, norms, state.params


def run_layout(rank, world, name, dtype, max_norm, stage, lazy_from=64):
    before, placement.BUNDLE_BYTES = placement.BUNDLE_BYTES, lazy_from
    try:
        params, loss_fn, mask = setting(dtype)
        tx, mesh = optimizer(name), fz.make_mesh(dp=-1)
        specs = fz.zero_specs(params, tx, mesh, stage=stage, trainable=mask)
        state = fz.init_state(params, tx, specs=specs)
        each = MICRO // world
        step = fz.make_step(loss_fn, tx, specs=specs, accumulate=each, max_norm=max_norm, gather_budget=2000)
        norms, losses = [], []
        for t in range(STEPS):
            state, metrics = step(state, fz.data.local(global_batch(t), mesh, accumulate=each))
            norms.append(float(metrics.grad_norm))
            losses.append(float(metrics.loss))
        return losses, norms, fz.gather(state.params, specs.params)
    finally:
        placement.BUNDLE_BYTES = before


def worst(a, b):
    """Largest error relative to the largest value of a leaf, or of the losses and norms."""
    errors = [max(abs(x - y) / abs(y) for x, y in zip(a[i], b[i], strict=True)) for i in (0, 1)]
    errors += [float((a[2][k] - b[2][k]).abs().max() / b[2][k].abs().max()) for k in b[2]]
    return max(errors)


CELLS = [("sgd", torch.float64, 1e-10), ("adamw", torch.float64, 1e-10), ("sgd", torch.float32, 1e-6)]


@pytest.mark.parametrize("max_norm", [0.05, 1e6], ids=["clip active", "clip inactive"])
@pytest.mark.parametrize(("name", "dtype", "tolerance"), CELLS, ids=lambda x: str(x).removeprefix("torch."))
def test_every_layout_trains_like_one_process(name, dtype, tolerance, max_norm):
    wanted = reference(name, dtype, max_norm)
    initial = setting(dtype)[0]
    for world in (1, 2, 4):
        by_stage = {}
        for stage in range(4):
            ranks = pool(world).run(run_layout, name, dtype, max_norm, stage)
            for got in ranks:
                cell = f"{name} {dtype} clip {max_norm}: {world} ranks, stage {stage}"
                assert worst(got, wanted) < tolerance, cell
                assert torch.equal(got[2]["frozen"], initial["frozen"]), cell
                assert torch.equal(got[2]["unused"], initial["unused"]), cell
            by_stage[stage] = ranks[0]
        for a, b in ((0, 1), (2, 3)):  # the same order of sums, so the same bits
            assert by_stage[a][:2] == by_stage[b][:2], f"{world} ranks: stages {a} and {b}"
            assert all(torch.equal(by_stage[a][2][k], by_stage[b][2][k]) for k in initial), (
                f"{world} ranks: stages {a}, {b}"
            )


def run_with_a_wrong_factor(rank, world, name, max_norm):
    from funzero.core import collectives

    right = collectives._by_position
    collectives._by_position = lambda rows, order: right(rows, order) * world
    try:
        return run_layout(rank, world, name, torch.float64, max_norm, 2)
    finally:
        collectives._by_position = right


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_factor_of_the_world_size_is_felt(name):
    wanted = reference(name, torch.float64, 0.05)
    got = pool(2).run(run_with_a_wrong_factor, name, 0.05)[0]
    assert worst(got, wanted) > 0.1, "grad_norm must show it, though AdamW's params do not"
