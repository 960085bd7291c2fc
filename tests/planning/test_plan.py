"""What a plan says, what fits, and what is proposed when it does not."""

import dataclasses
import time

import pytest
import torch

import funzero as fz
from funzero.cli.decoder import PRESETS, Decoder
from funzero.planning.limits import Limit, Limits
from funzero.planning.propose import Choice, Model, _choices, propose
from tests.planning.common import model_and_batch, setup

MB = 10**6


def limits(host, device=None, disk=None):
    host, device, disk = (None if n is None else Limit("given", n, n) for n in (host, device, disk))
    return Limits(host, host, device, disk, (host,))


def test_the_table_and_the_chart(tmp_path):
    specs = {"opt_state/**": "disk"}
    *_, made = setup(fz.abstract_mesh(dp=4), 3, fz.adamw(1e-3), specs, str(tmp_path), accumulate=2)
    text = str(made)
    assert "first rank of (dp=4)" in text and "all-gather" in text and "written" in text
    assert made.step.read == made.step.written == made.disk
    made.chart(tmp_path / "plan.html", limits(10**9, 10**8, 10**9))
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<rect") >= 5 and "available: given" in page


def test_volumes():
    """Stages 0 to 2 send every gradient twice in parts; stage 3 gathers params once more."""
    sent = {}
    for stage in range(4):
        *_, made = setup(fz.abstract_mesh(dp=2), stage, fz.adamw(1e-3))
        sent[stage] = made.step.sent
        half = sum(x.n * 4 for x in made.specs.params.layouts) / 2
    assert sum(sent[0].values()) == pytest.approx(2 * half, rel=1e-3)
    for stage in (1, 2, 3):
        assert sent[stage]["reduce-scatter"] == pytest.approx(half, rel=1e-3)
        assert sent[stage]["all-gather"] == pytest.approx(half, rel=1e-3)


def test_a_budget_gathers_twice():
    whole, small = (setup(fz.abstract_mesh(dp=2), 3, fz.adamw(1e-3), gather_budget=b)[-1] for b in (None, 400_000))
    assert small.step.sent["all-gather"] > 1.5 * whole.step.sent["all-gather"]
    assert small.step.device["params made whole"] <= 400_000 < whole.step.device["params made whole"]


def test_what_does_not_fit_says_what_lacks():
    *_, made = setup(fz.abstract_mesh(dp=2), 0, fz.adamw(1e-3))
    (line,) = made.shortfalls(limits(MB))
    assert line.startswith("host memory: needs") and "1 MB available (limit given" in line
    (line,) = made.shortfalls(limits(10**12, device=MB))
    assert line.startswith("device memory: needs")
    assert made.fits(limits(2 * made.together), ranks_per_host=2)
    assert not made.fits(limits(2 * made.together - 1), ranks_per_host=2)
    assert made.fits(), "a few megabytes fit here"


def test_params_and_sums_elsewhere_leave_the_device():
    model, batch = model_and_batch(8)
    params = fz.eval_shape(fz.split_module(model)[0])
    asked = Model(lambda p, b: fz.functional_call(model, p, *b), params, fz.adamw(1e-3), fz.abstract_mesh(dp=2), batch)
    specs = [asked.specs(Choice(2, 2, None, m, None)) for m in ({}, {"params": "host", "accum": "host"})]
    assert specs[1] == fz.with_memory(specs[0], {"params/**": "host", "accum/**": "host"})
    states = [fz.abstract_state(params, asked.tx, specs=x) for x in specs]
    plain, moved = (fz.plan(asked.loss_fn, x, batch, tx=asked.tx, accumulate=2) for x in states)
    assert moved.state["host"]["params"] == plain.state["device"]["params"]
    sums = moved.host - moved.state["host"]["params"]
    # Beside the sums, whole params that have been updated are on their way back.
    assert moved.specs.accum.local_bytes < sums <= moved.specs.accum.local_bytes + moved.specs.params.local_bytes
    assert moved.step.device.get("gradients", 0) < plain.step.device["gradients"]
    assert moved.step.device["params made whole"] > 0 and "params made whole" not in plain.step.device


def test_the_cheapest_that_fits_is_proposed():
    model, batch = model_and_batch(8)
    params = fz.eval_shape(fz.split_module(model)[0])
    asked = Model(lambda p, b: fz.functional_call(model, p, *b), params, fz.adamw(1e-3), fz.abstract_mesh(dp=2), batch)
    rules = {"blocks.*": "nothing"}
    easy = propose(asked, limits(10**9, 10**9), remat=rules)
    assert (easy.choice.stage, easy.choice.accumulate, easy.choice.remat, easy.reasons) == (0, 1, None, ())
    tighter = propose(asked, limits(10**9, easy.plan.device - 1), remat=rules)
    assert tighter.fits and tighter.choice.accumulate == 2 and tighter.choice.stage == 0
    tight = propose(asked, limits(10**9, 10 * MB), remat=rules)
    assert tight.fits and tight.plan.device <= 10 * MB
    assert tight.choice.remat == rules or tight.choice.memory
    assert all("device memory: needs" in x for x in tight.reasons)
    none = propose(asked, limits(10**9, MB), remat=rules)
    assert not none.fits and none.reasons
    assert none.plan.specs == asked.specs(none.choice) and none.plan.device <= tight.plan.device


def test_no_layout_is_passed_over_that_fits():
    """The bound that spares simulations is below what a layout takes, for each."""
    model, batch = model_and_batch(8)
    params, rules = fz.eval_shape(fz.split_module(model)[0]), {"blocks.*": "nothing"}
    asked = Model(lambda p, b: fz.functional_call(model, p, *b), params, fz.adam(1e-3), fz.abstract_mesh(dp=2), batch)
    found = propose(asked, limits(10**9, 8 * MB), remat=rules)
    passed = {x.split(": ", 1)[0] for x in found.reasons if "at least" in x}
    choices = [x for x in _choices(asked, 1, rules) if str(x) in passed]
    assert choices
    for c in choices[:: len(choices) // 8 or 1]:
        state = fz.abstract_state(params, asked.tx, specs=asked.specs(c))
        options = {"accumulate": c.accumulate, "remat": c.remat, "gather_budget": c.gather_budget, "tx": asked.tx}
        assert fz.plan(asked.loss_fn, state, batch, **options).device > 8 * MB, c


def test_params_elsewhere_are_tried_with_a_budget_on_one_rank_too():
    model, batch = model_and_batch(8)
    params = fz.eval_shape(fz.split_module(model)[0])
    asked = Model(lambda p, b: fz.functional_call(model, p, *b), params, fz.adamw(1e-3), fz.abstract_mesh(dp=1), batch)
    tried = [c for c in _choices(asked, 1, None) if c.gather_budget]
    assert tried and all("params" in c.memory and c.stage == 0 for c in tried)


def test_70b_on_1024_ranks_takes_seconds():
    begin = time.perf_counter()
    with torch.device("meta"):
        model = Decoder(PRESETS["70b"])
        batch = tuple(torch.empty(1, 4096, dtype=torch.int64) for _ in range(2))
    params, tx = fz.split_module(model)[0], fz.adamw(1e-4)
    policy = fz.precision.bf16_mixed
    specs = fz.zero_specs(params, tx, fz.abstract_mesh(dp=1024), stage=3, precision=policy)
    state = fz.abstract_state(params, tx, specs=specs, precision=policy)
    made = fz.plan(lambda p, b: fz.functional_call(model, p, *b), state, batch, tx=tx, precision=policy)
    took = time.perf_counter() - begin
    count = sum(p.numel() for p in params.values())
    assert 69e9 < count < 72e9
    assert sum(made.ranks["device"]) == pytest.approx(12 * count, rel=1e-5)  # counts are on every rank
    assert took < 30, f"{took:.1f} s; alone on a core it takes 6"


def test_bad_input():
    params, specs, loss_fn, batch, _ = setup(fz.abstract_mesh(dp=2), 0, fz.adamw(1e-3))
    state = fz.abstract_state(params, fz.adamw(1e-3), specs=specs)
    with pytest.raises(ValueError, match="plan: accumulate is at least 1, got 0"):
        fz.plan(loss_fn, state, batch, accumulate=0)
    with pytest.raises(ValueError, match="plan: the state has no specs; make it"):
        fz.plan(loss_fn, dataclasses.replace(state, specs=None), batch)
    with pytest.raises(ValueError, match="remat"):
        fz.plan(lambda p, b: p["ln.weight"].sum(), state, batch, remat={"blocks.*": "nothing"})
