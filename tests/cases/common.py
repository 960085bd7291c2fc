"""What the cases share: a loss with given gradients, a window dealt out over the ranks, and whole states to compare."""

import contextlib
from typing import Any

import pytest
import torch

import funzero as fz
from funzero.executor import placement, portions, pull, stream

STAGES = (0, 1, 2, 3)
WORLDS = SOME_WORLDS = (1, 2, pytest.param(4, marks=pytest.mark.slow))


@contextlib.contextmanager
def border(bundle_bytes, part_bytes=stream.PART_BYTES, portion_bytes=portions.PORTION_BYTES):
    """Within the block other leaves are large, and come in other parts and portions; ranks of a pool outlive a test."""
    before = placement.BUNDLE_BYTES, stream.PART_BYTES, portions.PORTION_BYTES
    placement.BUNDLE_BYTES, stream.PART_BYTES, portions.PORTION_BYTES = bundle_bytes, part_bytes, portion_bytes
    try:
        pull.Way.made.cache_clear()
        yield
    finally:
        pull.Way.made.cache_clear()
        placement.BUNDLE_BYTES, stream.PART_BYTES, portions.PORTION_BYTES = before


def linear(params, batch):
    """A loss whose gradient is the batch: it names each leaf's gradient, with the rows of the batch in front."""
    return sum((params[name] * rows).sum() for name, rows in batch.items())


def rows(**grads: Any) -> dict[str, torch.Tensor]:
    """A micro-batch of one row for `linear`, from one gradient for each leaf."""
    return {name: torch.as_tensor(g).unsqueeze(0) for name, g in grads.items()}


def launch(params, tx, loss_fn, mesh, stage, *, step=(), **specs):
    """A state and a step at a ZeRO stage; `step`: options of make_step, `specs`: options of zero_specs."""
    made = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, **specs)
    return fz.init_state(params, tx, specs=made), fz.make_step(loss_fn, tx, specs=made, **dict(step))


def deal(micros, mesh):
    """This rank's micro-batches: number i of the window runs on rank i % world."""
    return micros[mesh.index(mesh.batch) :: mesh.size(mesh.batch)]


def window(step, state, micros, mesh):
    """One update from the micro-batches of all ranks, given one call each to the rank whose turn it is."""
    for micro in deal(micros, mesh):
        state = step.accumulate(state, micro)
    return step.update(state)


def whole(state) -> dict[str, torch.Tensor]:
    """Params, opt_state and step by path, gathered, as copies that later steps do not touch."""
    found = {"step": state.step.clone()}
    for field in ("params", "opt_state"):
        tree = fz.gather(getattr(state, field), getattr(state.specs, field))
        names, leaves = fz.tree.paths(tree), fz.tree.leaves(tree)
        found |= {f"{field}/{name}": leaf for name, leaf in zip(names, leaves, strict=True)}
    return found


def params_of(state):
    """The params, gathered."""
    return fz.gather(state.params, state.specs.params)


def difference(found, expected) -> list[str]:
    """The paths at which two trees or dicts of tensors are not bit for bit equal (NaN is itself); empty if they are."""
    names = [n.replace("%2F", "/") for n in fz.tree.paths(expected)]
    if fz.tree.paths(found) != fz.tree.paths(expected):
        return sorted(set(fz.tree.paths(found)) ^ set(fz.tree.paths(expected)))
    pairs = zip(names, fz.tree.leaves(found), fz.tree.leaves(expected), strict=True)
    return [n for n, a, b in pairs if not same(a, b)]


def same(a, b) -> bool:
    """Equal in dtype, shape and bits, where NaN is equal to itself."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def close(found, expected, relative=1e-12) -> bool:
    """Equal up to `relative`, in shape and dtype exactly."""
    expected = torch.as_tensor(expected, dtype=found.dtype)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=relative, atol=0.0)


def one_for_all(results):
    """What every rank returned, once it is checked that all returned the same bits."""
    for rank, result in enumerate(results):
        assert not difference(result, results[0]), (
            f"rank {rank} differs from rank 0 at {difference(result, results[0])}"
        )
    return results[0]
