"""The worked examples equal their one-process torch twins, in float64 to 1e-10, at stages 0 and 3."""

import itertools
from typing import Any

import pytest
import torch

import funzero as fz
from tests.autograd.twins import F64, TWINS, example
from tests.cases.common import border
from tests.cases.training import mesh_of
from tests.ranks import pool

STEPS = 4
STATES = {"02_gan": 2, "03_actor_critic": 3}  # that train() gives first; else one


def train(rank: int, world: int, name: str) -> list[list[dict[str, torch.Tensor]]]:
    """Whole params of each state, at each stage, with leaves that come on use and ones that come at once."""
    found, mesh = [], mesh_of((("dp", -1),))
    for stage, small in itertools.product((0, 3), (0, 1 << 16)):
        with border(small, small, small):
            states: Any = example(name).train(mesh, steps=STEPS, stage=stage, dtype=F64)[: STATES.get(name, 1)]
            found.append([fz.gather(s.params, s.specs.params) for s in states])
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", TWINS)
def test_examples_equal_their_torch_twins(name, world):
    want, start = TWINS[name](STEPS), TWINS[name](0)
    assert all((a[n] - b[n]).abs().max() > 1e-4 for a, b in zip(want, start, strict=True) for n in a if "weight" in n)
    for rank, found in enumerate(pool(world).run(train, name)):
        assert len(found) == 4
        for states in found:
            assert len(states) == len(want)
            for state, right in zip(states, want, strict=True):
                assert state.keys() == right.keys()
                for n, x in state.items():
                    gap = (x - right[n]).abs().max().item()
                    assert gap <= 1e-10, f"{name}, rank {rank} of {world}, {n}: differs by {gap}"
