"""The arguments that docs/optimizers.md names give the numbers of `torch.optim`: 10 steps, float64, to 1e-12."""

import contextlib

import pytest
import torch

import funzero as fz
from tests.numerics.torch_optim_table import PAGE, ROWS, page
from tests.numerics.trajectories import SEEDS, problem

TWINS = [row for row in ROWS if row.twin]


@contextlib.contextmanager
def wide_scalars():
    """torch keeps scalars of an optimizer's state, such as the product in NAdam, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def distance(row, seed):
    """The largest difference of any element after any step."""
    arrays, grads = problem(seed)
    params = {k: torch.tensor(v) for k, v in arrays.items()}
    theirs = {k: v.clone().requires_grad_() for k, v in params.items()}
    tx, optimizer, apart = row.tx(), row.optimizer(list(theirs.values())), 0.0
    state = tx.init(params)
    for step in grads:
        given = {k: torch.tensor(g) for k, g in step.items()}
        updates, state = tx.update(given, state, params)
        params = fz.apply_updates(params, updates)
        for k, leaf in theirs.items():
            leaf.grad = given[k].clone()
        with wide_scalars():
            optimizer.step()
        apart = max(apart, *(float((params[k] - theirs[k].detach()).abs().max()) for k in params))
    return apart


@pytest.mark.parametrize("row", TWINS, ids=lambda row: f"{row.funzero} {row.twin}")
def test_equals_torch_or_differs_as_the_table_says(row):
    apart = [distance(row, seed) for seed in SEEDS]
    assert min(apart) > 1e-9 if row.differs else max(apart) <= 1e-12, apart


@pytest.mark.parametrize("row", [row for row in ROWS if not row.twin], ids=lambda row: row.funzero)
def test_torch_has_no_twin(row):
    name = row.funzero.split("(")[0].replace("_", "")
    assert row.tx() and name not in {n.lower() for n in dir(torch.optim)}


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run `python -m tests.numerics.torch_optim_table`"
