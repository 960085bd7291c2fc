"""Models in groups of ranks of their own: as one process, whatever the order, and what happens when a side is gone."""

import os
from typing import Any

import pytest
import torch

import funzero as fz
from tests.autograd.twins import F64, example, two_groups
from tests.ranks import once, pool

STEPS = 3


def train(rank: int, world: int, backwards: bool) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whole params of this rank's model; `backwards`: the language model takes the micro-batches in the other order."""
    ex = example("07_two_groups")

    def decoder_step(state: Any, step: Any, texts: Any, there: Any, here: Any) -> Any:
        for i, (text, target) in reversed(list(enumerate(texts))):
            seen = fz.transfer(None, there, here, handle=i)
            _, pull = fz.vjp(ex.loss, state.params, seen, text, target, specs=state.specs)
            grads, seen_bar, *_ = pull(1.0, last=True)
            fz.transfer(seen_bar, here, there, handle=i)
            state = fz.accumulate_into(state, grads, weight=ex.ROWS)
        return step.update(state)

    usual = ex.decoder_step
    ex.decoder_step = decoder_step if backwards else usual
    try:
        state, is_encoder, _ = ex.train(world, steps=STEPS, dtype=F64)
    finally:
        ex.decoder_step = usual
    return is_encoder, fz.gather(state.params, state.specs.params)


@pytest.mark.parametrize(
    ("world", "backwards"), [pytest.param(2, False, marks=pytest.mark.slow), (4, False), (4, True)]
)
def test_two_groups_equal_one_process(world, backwards):
    want, start = two_groups(STEPS), two_groups(0)
    assert (want[0]["layers.0.weight"] - start[0]["layers.0.weight"]).abs().max() > 1e-3, "the encoder must move"
    for rank, (is_encoder, found) in enumerate(pool(world).run(train, backwards)):
        right = want[0 if is_encoder else 1]
        assert is_encoder == (rank < world // 2) and found.keys() == right.keys()
        for name, x in found.items():
            gap = (x - right[name]).abs().max().item()
            assert gap <= 1e-10, f"rank {rank} of {world}: {name} differs by {gap}"


def test_the_steps_read_like_plain_torch():
    source = example("07_two_groups").__file__
    with open(source) as file:
        bodies = file.read().split("\ndef ")
    for name in ("encoder_step", "decoder_step"):
        (body,) = (b for b in bodies if b.startswith(name))
        assert len(body.strip().splitlines()) <= 15, name


def test_no_cotangent_is_no_gradient():
    params = {"w": torch.ones(3)}
    state = fz.init_state(params, fz.sgd(1.0))
    for specs in (None, state.specs):
        _, pull = fz.vjp(lambda p, x: {"y": p["w"] * x, "z": p["w"]}, state.params, torch.ones(3), specs=specs)
        grads, x_bar = pull({"y": None, "z": None})
        assert grads == {"w": None} and x_bar is None
    after, metrics = fz.make_step(None, fz.sgd(1.0)).update(fz.accumulate_into(state, grads))
    assert torch.equal(after.params["w"], params["w"]) and metrics.grad_norm == 0


def dies(rank: int, world: int) -> str:
    """The language model's rank goes between forward and pull."""
    shape = torch.empty(4, device="meta")
    here, there = (fz.Specs.bind(fz.make_mesh(ranks=(r,), dp=1), fz.Spec(), shape) for r in (0, 1))
    if rank == 1:
        fz.transfer(None, here, there, handle=7)
        os._exit(3)
    params = {"w": torch.ones(4)}
    state = fz.init_state(params, fz.sgd(1.0), specs=fz.zero_specs(params, fz.sgd(1.0), here.mesh, stage=0))
    seen, pull = fz.vjp(lambda p: p["w"] * 2, state.params, specs=state.specs)
    fz.transfer(seen, here, there, handle=7)
    try:
        pull(fz.transfer(None, there, here, handle=7))
    except fz.MeshError as error:
        return str(error)
    return "nothing"


def test_a_side_that_dies_between_forward_and_pull_is_named():
    first, second = once(dies, 2)
    assert second.exitcode == 3
    assert "rank 1 of the job is gone or stalled" in first.value
