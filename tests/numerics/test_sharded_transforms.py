"""Every transform on cut leaves equals itself in one process: ZeRO stages 1 to 3, uneven leaves, one leaf that rests.

The loss is linear in the params and its numbers are small dyadic fractions, so that the gradients have the same bits on any
number of ranks; what is left to differ is the arithmetic of the transform itself. To add one, add a line to `TRANSFORMS`.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import funzero as fz
from funzero.transforms import block
from funzero.transforms.base import Transform
from funzero.transforms.optim.adafactor import adafactor
from funzero.transforms.optim.adam_blockwise import adamw_4bit, adamw_8bit, scale_by_adam_8bit
from funzero.transforms.optim.lamb import lamb
from funzero.transforms.optim.lars import lars
from funzero.transforms.optim.muon import muon
from tests.cases.training import flat, mesh_of
from tests.ranks import once, pool

SHAPES = {
    "big": (300, 70),
    "empty": (0, 4),
    "matrix": (5, 3),
    "one": (1,),
    "rests": (9, 2),  # unused in odd steps
    "scalar": (),
    "twin_a": (6, 4),
    "twin_b": (6, 4),
    "vector": (7,),
}
STEPS, ROWS, STAGES = 4, 6, (1, 2, 3)


def matrices(params: Any) -> Any:
    return {k: p.dim() == 2 for k, p in params.items()}


def after(transform: Transform) -> Transform:
    """A direction as an optimizer."""
    return fz.chain(transform, fz.scale(-0.1))


# Name -> factory, and whether a cut changes the order of no sum, so that the bits are equal too.
TRANSFORMS: dict[str, tuple[Callable[[], Transform], bool]] = {
    "adamw": (lambda: fz.adamw(0.1, weight_decay=0.1), True),
    "sgd": (lambda: fz.sgd(0.1, momentum=0.9, nesterov=True), True),
    "clip_by_block_rms": (lambda: after(block.clip_by_block_rms(0.1)), False),
    "trust_ratio": (lambda: after(block.scale_by_trust_ratio(min_norm=0.01)), False),
    "param_block_rms": (lambda: after(block.scale_by_param_block_rms()), False),
    "centralize": (lambda: after(block.centralize()), True),
    "centralize_alone": (block.centralize, True),
    "clip_alone": (lambda: block.clip_by_block_rms(0.1), False),
    "lamb": (lambda: lamb(0.01, weight_decay=0.1, mask=matrices), False),
    "lars": (lambda: lars(1.0, weight_decay=0.1, trust_ratio_mask=matrices), False),
    "adafactor": (lambda: adafactor(0.1, 2, momentum=0.9, dtype_momentum=torch.float64, weight_decay_rate=0.01), False),
    "adafactor_plain": (lambda: adafactor(0.1, factored=False, multiply_by_parameter_scale=False), False),
    "muon": (lambda: muon(0.02, weight_decay=0.1, adam_learning_rate=0.01), True),
    "muon_adaptive": (lambda: muon(fz.schedules.linear(0.1, 0.01, 4), adaptive=True, consistent_rms=0.2), True),
    "adamw_8bit": (lambda: adamw_8bit(0.01, weight_decay=0.1), True),
    "adamw_4bit": (lambda: adamw_4bit(0.01, weight_decay=0.1), True),
    "adamw_8bit_of_16": (lambda: adamw_8bit(0.01, block_size=16), True),
    "two_block_sizes": (
        lambda: fz.partition({"a": adamw_8bit(0.01, block_size=64), "b": adamw_4bit(0.01, block_size=8)}, by_dims),
        True,
    ),
    "8bit_then_trust": (lambda: fz.chain(scale_by_adam_8bit(), block.scale_by_trust_ratio(), fz.scale(-0.1)), False),
}


def by_dims(params: Any) -> Any:
    return {k: "a" if p.dim() == 2 else "b" for k, p in params.items()}


def params_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in SHAPES.items()}


@functools.cache
def fraction_of(name: str, t: int) -> torch.Tensor:
    """Gradients of step t, [ROWS, *shape]: multiples of 1/16, spread over three orders of magnitude."""
    generator = torch.Generator().manual_seed(1000 * t + list(SHAPES).index(name))
    size = (ROWS, *SHAPES[name])
    return torch.randint(-64, 65, size, generator=generator).double() * 2.0 ** -torch.randint(
        4, 13, size, generator=generator
    )


def loss_fn(params: Any, batch: Any) -> fz.Loss:
    names = [k for k in params if k != "rests" or batch["t"] % 2 == 0]
    total = sum((params[k] * fraction_of(k, batch["t"])[batch["row"]].sum(0)).sum() for k in names)
    return fz.Loss(total, weight=len(batch["row"]))


def train(tx: Transform, mesh: Any, stage: int) -> dict[str, torch.Tensor]:
    """Params and optimizer state after the run, whole."""
    specs = fz.zero_specs(fz.eval_shape(params_of()), tx, mesh, stage=stage)
    state, step = fz.init_state(params_of(), tx, specs=specs), fz.make_step(loss_fn, tx, specs=specs)
    for t in range(STEPS):
        local = fz.data.local({"row": torch.arange(ROWS)}, mesh)
        state, _ = step(state, {**local, "t": t})
    whole = {"params": fz.gather(state.params, specs.params), "opt": fz.gather(state.opt_state, specs.opt_state)}
    return flat(whole)


@functools.cache
def alone(name: str) -> dict[str, torch.Tensor]:
    """The run in one process, with as many threads as a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(TRANSFORMS[name][0](), fz.make_mesh(dp=1), 0)
    finally:
        torch.set_num_threads(threads)


def on_ranks(rank: int, world: int, name: str) -> dict[int, dict[str, torch.Tensor]]:
    mesh = mesh_of((("dp", world),))
    return {stage: train(TRANSFORMS[name][0](), mesh, stage) for stage in STAGES}


def difference(name: str, found: dict[str, torch.Tensor]) -> str:
    """What is wrong with a run on ranks, or nothing."""
    want, exact = alone(name), TRANSFORMS[name][1]
    if found.keys() != want.keys():
        return f"other leaves: {sorted(found.keys() ^ want.keys())}"
    for path, x in want.items():
        y = found[path]
        if y.shape != x.shape or y.dtype != x.dtype:
            return f"{path}: {y.dtype}{tuple(y.shape)}, right {x.dtype}{tuple(x.shape)}"
        if not x.dtype.is_floating_point or exact:
            if not torch.equal(x, y):
                return f"{path}: other bits, off by {(x.double() - y.double()).abs().max()}"
        elif x.numel() and not (x - y).abs().max() <= 1e-12 * max(1.0, float(x.abs().max())):
            return f"{path}: off by {(x - y).abs().max()}"
    return ""


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_cut_transform_is_the_whole_one(name, world):
    for rank, found in enumerate(pool(world).run(on_ranks, name)):
        for stage, whole in found.items():
            assert not difference(name, whole), f"{name}, stage {stage}, rank {rank} of {world}: " + difference(
                name, whole
            )


def test_the_leaf_that_rests_keeps_its_param_and_state():
    """So that the table above tells a leaf without a gradient from one with a zero gradient."""
    one, two = (train(fz.adamw(0.1), fz.make_mesh(dp=1), 0) for _ in range(2))
    assert one["opt/scale_by_adam/count/rests"] == 2 and one["opt/scale_by_adam/count/big"] == STEPS
    assert all(torch.equal(one[k], two[k]) for k in one)


# What a part declares it needs, put wrong: name in the table -> (module whose parts are spoilt, what they declare).
FAULTS = {
    "lamb": (block, "element"),
    "adafactor_plain": (block, "element"),
    "centralize": (block, "element"),
    "adafactor": (sys.modules[adafactor.__module__], "element"),
    "muon": (sys.modules[muon.__module__], "element"),
}


def spoilt(rank: int, world: int) -> dict[str, dict[str, torch.Tensor] | str]:
    """Stage 3 with the parts of a module declared wrong; the text of an error stands for a run that raised."""
    found: dict[str, Any] = {}
    for name, (module, needs) in FAULTS.items():
        wrong = functools.partial(spoil, module.leafwise, needs)
        with mock.patch.object(module, "leafwise", wrong):
            try:
                found[name] = train(TRANSFORMS[name][0](), fz.make_mesh(dp=world), 3)
            except (ValueError, RuntimeError) as error:
                found[name] = str(error)
    return found


def spoil(leafwise: Any, declared: str, *args: Any, **kwargs: Any) -> Transform:
    return dataclasses.replace(leafwise(*args, **kwargs), needs=declared)


def test_a_wrong_needs_is_seen():
    for outcome in once(spoilt, 2):
        assert outcome.ok, outcome
        for name, found in outcome.value.items():
            assert isinstance(found, str) or difference(name, found), f"{name}: the table did not see the fault"
        assert "expected a matrix" in outcome.value["muon"], outcome.value["muon"]
