"""Moments in 8 and 4 bits: what they weigh, that they learn, and that their blocks lie where their param's chunks do."""

import functools
from typing import Any

import pytest
import torch

import funzero as fz
from funzero.core import abstract
from funzero.transforms import blockwise
from funzero.transforms.base import Transform, leafwise
from funzero.transforms.optim.adafactor import adafactor
from funzero.transforms.optim.adam_blockwise import adamw_4bit, adamw_8bit, scale_by_adam_4bit, scale_by_adam_8bit
from funzero.transforms.optim.muon import muon
from tests.cases.training import flat, mesh_of
from tests.ranks import pool

KINDS = {8: (adamw_8bit, scale_by_adam_8bit), 4: (adamw_4bit, scale_by_adam_4bit)}


@pytest.mark.parametrize(("bits", "expected"), [(8, 2 + 8 / 256), (4, 1 + 8 / 128)])
def test_bytes_of_an_element(bits, expected):
    state = KINDS[bits][1]().init({"w": torch.zeros(1024, 256)})
    stored = sum(
        x.numel() * x.element_size() for k, x in flat(state).items() if k.split("/")[0] not in ("hyperparams",)
    )
    assert stored == expected * 1024 * 256 + 4  # and a count


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_the_nearest_values(bits):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[128:256] = 0
    for book, data in ((blockwise.signed_book(bits), x), (blockwise.positive_book(bits), x.abs())):
        codes, scales = blockwise.encode(data, book, 128)
        assert codes.dtype == torch.uint8 and int(codes.max()) < 2**bits and scales.shape == (8,)
        found, values = blockwise.decode(codes, scales, book, 128).double(), torch.from_numpy(book).double()
        whole = scales.double().repeat_interleave(128)[:1000]
        best = (data[:, None] - whole[:, None] * values).abs().min(1).values
        assert torch.allclose((found - data).abs(), best, rtol=0, atol=1e-6)
        assert not found[128:256].any()
        largest = data.abs().argmax()
        assert found[largest].float() == data[largest].float(), "the largest of a block is kept"
        again = blockwise.encode(found, book, 128)
        assert torch.equal(again[0][:128], codes[:128]) and torch.equal(again[1], scales)


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_pack_is_undone(n):
    codes = torch.arange(n, dtype=torch.uint8) * 5 % 16
    assert torch.equal(blockwise.unpack(blockwise.pack(codes), n), codes)
    assert len(blockwise.pack(codes)) == (n + 1) // 2


def regression(tx: Transform, seed: int, steps: int = 500) -> float:
    """The mean square error of a two-layer net on 4096 samples; their noise alone gives 0.09."""
    random = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=random)
    x = draw(4096, 16) * torch.logspace(-1, 0, 16)
    y = torch.sin(x @ draw(16, 1) / 1.5) + 0.3 * draw(4096, 1)
    params = {"a": draw(16, 48) / 4, "b": draw(48) / 4, "c": draw(48, 1) / 7}
    state = tx.init(params)

    def loss(p: Any, rows: Any) -> torch.Tensor:
        return ((torch.tanh(x[rows] @ p["a"] + p["b"]) @ p["c"] - y[rows]) ** 2).mean()

    for _ in range(steps):
        rows = torch.randint(0, 4096, (64,), generator=random)
        leaves = {k: p.requires_grad_() for k, p in params.items()}
        grads = dict(zip(leaves, torch.autograd.grad(loss(leaves, rows), list(leaves.values())), strict=True))
        params = {k: p.detach() for k, p in params.items()}
        updates, state = tx.update(grads, state, params)
        params = fz.apply_updates(params, updates)
    return loss(params, slice(None)).item()


@pytest.mark.parametrize("bits", [8, 4])
def test_learns_like_adamw(bits):
    rate = fz.schedules.warmup_cosine(1e-2, warmup=20, total=500)
    for seed in range(3):
        want, found = regression(fz.adamw(rate), seed), regression(KINDS[bits][0](rate), seed)
        assert want < 0.1 and abs(found - want) < 0.03 * want, f"seed {seed}: {found}, adamw {want}"


@pytest.mark.parametrize("bits", [8, 4])
def test_small_moments_beside_large_ones_do_not_explode(bits):
    """A second moment rounded to 0 makes a step of m / eps as soon as a gradient is 0."""
    g = torch.logspace(-5, 0, 512)[torch.randperm(512, generator=torch.Generator().manual_seed(0))]
    tx, w = KINDS[bits][1](), torch.zeros(512)
    state = tx.init({"w": w})
    for t in range(20):
        updates, state = tx.update({"w": g * (t % 2 == 0)}, state)
        assert updates["w"].abs().max() < 3 and updates["w"].isfinite().all(), f"step {t}"


def test_state_is_cut_at_the_params_chunks():
    for ranks in (2, 3, 5, 8, 64, 65):
        for n in (0, 1, 127, 128, 129, 21_000, 1_000_001):
            mesh, tx = fz.abstract_mesh(dp=ranks), adamw_4bit(1e-3)
            specs = fz.zero_specs({"w": torch.empty(n, device="meta")}, tx, mesh, stage=3)
            kept = {x.path.split("/")[-2]: x for x in specs.opt_state.layouts if x.path.endswith("/w")}
            w, codes, scales = specs.params.layouts[0], kept["mu"], kept["mu_scale"]
            for i in range(ranks):
                lo, hi = w.bounds(i)
                assert lo == hi or lo % 128 == 0
                if hi > lo:
                    assert codes.bounds(i) == (lo // 2, (hi + 1) // 2), (ranks, n, i)
                    assert scales.bounds(i) == (lo // 128, -(-hi // 128)), (ranks, n, i)
                else:
                    assert len(range(*codes.bounds(i))) == len(range(*scales.bounds(i))) == 0, (ranks, n, i)


def test_what_cannot_be_cut_is_refused():
    shapes, mesh = {"w": torch.empty(512, 2, device="meta")}, fz.abstract_mesh(dp=2, tp=2)
    with pytest.raises(ValueError, match=r"mu/w: .* of w, which P\('tp'\) cuts.*partition"):
        fz.zero_specs(shapes, adamw_8bit(1e-3), mesh, stage=3, rules={"w": fz.P("tp")})

    def init(params: Any) -> Any:
        return fz.tree.map(lambda p: abstract.zeros_per_block(p, 64, torch.float32), params)

    short = leafwise("short", init, lambda updates, state, params=None: (updates, state))
    with pytest.raises(ValueError, match="needs quantum=64"):
        fz.zero_specs(shapes, short, mesh, stage=1)
    with pytest.raises(ValueError, match="positive multiple of 2, got 7"):
        adamw_4bit(1e-3, block_size=7)
    with pytest.raises(TypeError, match=r"w is torch\.complex64"):
        adamw_8bit(1e-3).init({"w": torch.zeros(2, dtype=torch.complex64)})


def moved(rank: int, world: int, folder: str) -> list[str]:
    """Quantised state through a reshard and a checkpoint: which leaves changed."""
    mesh, changed = mesh_of((("dp", world),)), []
    params = {"w": torch.linspace(-1, 1, 21_001), "b": torch.ones(7)}
    for bits, (make, _) in KINDS.items():
        tx = make(1e-2)
        specs = {s: fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=s) for s in (0, 3)}
        state = fz.init_state(params, tx, specs=specs[3])
        step = fz.make_step(lambda p, batch: sum((x**2).sum() * batch.sum() for x in p.values()), tx)
        state, _ = step(state, torch.ones(1))
        want = flat(fz.gather(state.opt_state, specs[3].opt_state))
        fz.save(f"{folder}/{world}-{bits}", state)
        whole = fz.reshard(state, specs[0])
        back = fz.restore(f"{folder}/{world}-{bits}", fz.abstract_state(params, tx, specs=specs[0]))
        for found in (flat(whole.opt_state), flat(back.opt_state)):
            changed += [k for k, x in want.items() if not torch.equal(x, found[k])]
        assert any(x.any() for k, x in want.items() if k.endswith("mu/w"))
    return changed


@pytest.mark.parametrize("world", [2, 3])
def test_reshard_and_restore_keep_the_codes(world, tmp_path):
    assert pool(world).run(moved, str(tmp_path)) == [[]] * world


def partitioned(rank: int, world: int) -> dict[str, list[float]]:
    """Whole-leaf transforms on leaves that an axis cuts by dims: how far from the run on whole leaves."""
    mesh, off = mesh_of((("dp", 1), ("tp", world))), {}
    random = torch.Generator().manual_seed(0)
    params = {k: torch.randn(s, generator=random, dtype=torch.float64) for k, s in (("w", (6, 4)), ("b", (6,)))}
    grads = [{k: torch.randn(p.shape, generator=random, dtype=torch.float64) for k, p in params.items()} for _ in "123"]
    for name, tx in (("muon", muon(0.1)), ("adafactor", adafactor(0.1, 2))):
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=1, rules={"w": fz.P("tp"), "b": fz.P("tp")})
        local, alone = fz.init_state(params, tx, specs=specs), fz.init_state(params, tx)

        def loss(p: Any, batch: Any) -> torch.Tensor:
            return sum((p[k] * batch[k]).sum() for k in p)

        step, other = fz.make_step(loss, tx), fz.make_step(loss, tx)
        for g in grads:
            local, _ = step(local, {k: x[None] for k, x in fz.shard(g, specs.params).items()})
            alone, _ = other(alone, {k: x[None] for k, x in g.items()})
        found = fz.gather(local.params, specs.params)
        off[name] = [float((found[k] - alone.params[k]).abs().max()) for k in found]
    return off


def test_partitioned_leaves_are_whole_to_those_that_need_it():
    for off in pool(2).run(partitioned):
        assert all(x < 1e-12 for row in off.values() for x in row), off
