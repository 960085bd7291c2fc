"""A rank that raises, is killed, or stalls: all ranks end, and the message names the rank and the first cause."""

import os
import signal
import time

import pytest
import torch

import funzero as fz
from tests.ranks import once


def make(stage, loss_fn, timeout_s=60):
    params = {"w": torch.ones(256, 256), "b": torch.ones(256)}
    tx = fz.sgd(0.1)
    specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1, timeout_s=timeout_s), stage=stage)
    return fz.init_state(params, tx, specs=specs), fz.make_step(loss_fn, tx, specs=specs), specs


def run_raise(rank, world, stage):
    calls = []

    def loss_fn(p, b):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise KeyError("no such word")
        return (p["w"].sum() + p["b"].sum()) * 0.0

    state, step, _ = make(stage, loss_fn)
    state, _ = step(state, {})
    start = time.monotonic()
    try:
        step(state, {})
    except Exception as error:
        readable = float(state.params["b"].sum())
        try:
            step(state, {})
        except Exception as second:
            return type(error).__name__, str(error), time.monotonic() - start, readable, str(second)
    return "no error", "", 0.0, 0.0, ""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_raises(stage):
    for outcome in once(run_raise, 3, stage):
        assert outcome.ok, outcome.error
        kind, message, seconds, readable, second = outcome.value
        assert kind == ("KeyError" if outcome.rank == 1 else "MeshError")
        assert "no such word" in message
        assert outcome.rank == 1 or "rank 1: KeyError" in message
        assert seconds < 30
        assert readable > 0, "local leaves stay readable"
        assert "the mesh is dead" in second


def run_gone(rank, world, how):
    def loss_fn(p, b):
        if rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        return (p["w"].sum() + p["b"].sum()) * 0.0

    state, step, _ = make(3, loss_fn, timeout_s=20 if how == "stall" else 60)
    start = time.monotonic()
    try:
        step(state, {})
    except Exception as error:
        if rank == 1:
            return "late", 0.0
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("how", ["kill", "stall"])
def test_one_rank_is_gone(how):
    outcomes = once(run_gone, 3, how, timeout=90)
    for outcome in outcomes:
        if outcome.rank == 1:
            continue
        assert outcome.ok, outcome.error
        message, seconds = outcome.value
        assert "rank 1: died or stalled" in message
        assert seconds < 45


def run_anew(rank, world):
    """After a failure the same step, evaluation and pulls go on, on a mesh that was made anew and equals the dead one."""
    params, tx, bad, found = {"w": torch.ones(5)}, fz.sgd(0.1), [rank == 1], []

    def loss_fn(p, b):
        if bad.pop() if bad else False:
            raise ValueError("once")
        return (p["w"] * b).sum()

    step, evaluate = fz.make_step(loss_fn, tx, max_norm=1.0), fz.make_eval(loss_fn)
    for _ in range(2):
        specs = fz.zero_specs(fz.eval_shape(params), tx, fz.make_mesh(dp=-1), stage=3)
        state = fz.init_state(params, tx, specs=specs)
        try:
            _, pull = fz.vjp(lambda p: p["w"] * 2, state.params, specs=specs)
            (grads,) = pull(torch.ones(5))
            norm = fz.global_norm(grads, specs.grads)
            acc = fz.reduce(fz.accumulate((), grads), specs)
            loss = evaluate(state, torch.ones(1)).loss
            state, metrics = step(state, torch.ones(1))
            found.append([float(x) for x in (norm, acc.weight, loss, metrics.grad_norm)])
        except (ValueError, fz.MeshError) as error:
            found.append(type(error).__name__)
    return found


def test_a_mesh_that_was_made_anew():
    first, second = once(run_anew, 2)
    assert first.value[0] == "MeshError" and second.value[0] == "ValueError"
    for outcome in (first, second):
        assert outcome.value[1] == pytest.approx([80**0.5, 2.0, 5.0, 5**0.5])
