"""Sums of squares and accumulation."""

import pytest
import torch

from kernels import ops, reference
from kernels.batch import Squares
from tests.kernels.common import floats, levels, library, same

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(n: int, dtype: torch.dtype, special: bool = False) -> torch.Tensor:
    return floats(n, dtype, torch.Generator().manual_seed(n), special)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7, 31, 33, 1023, 1025, 4099, 70_001])
def test_square_sum_is_near_the_reference_and_equal_at_all_levels_and_threads(n, dtype):
    x = values(n, dtype)
    for chunk in (1, 3, 4, 8, 9, 40, 1024, 5000, 1 << 40):
        first = library(0).square_sum(x, chunk, 1)
        torch.testing.assert_close(first, reference.square_sum(x, min(chunk, n + 1)), rtol=1e-13, atol=0)
        for level in levels():
            for threads in (1, 2, 3):
                same(library(level).square_sum(x, chunk, threads), first, f"level {level}, {threads} threads")


def test_square_sum_is_exact_where_the_sum_is():
    x = torch.randint(-1000, 1000, (50_001,), dtype=torch.float32)
    assert torch.equal(ops.square_sum(x, 777), reference.square_sum(x, 777))


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_sum_of_pieces_cut_at_chunks(dtype):
    x, chunk = values(20_000, dtype), 512
    whole = ops.square_sum(x, chunk)
    pieces = [ops.square_sum(piece, chunk) for piece in x.split(7 * chunk)]
    same(torch.cat(pieces), whole, "pieces")


def test_square_sum_of_what_is_not_finite():
    x = torch.ones(3000)
    x[10], x[1500], x[2900] = float("nan"), float("inf"), 3e38
    assert ops.square_sum(x, 1000).isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7, 1023, 1025, 4099, 70_001])
@pytest.mark.parametrize("special", [False, True])
def test_accumulate(n, dtype, special):
    grad, start = values(n, dtype, special), values(n, torch.float32, special)
    for weight in (1.0, 1 / 3, 0.0, -1e30):
        wanted = start.clone()
        reference.accumulate(wanted, grad, weight)
        for level in levels():
            for threads in (1, 3):
                got = torch.cat([start, start[:0]])
                library(level).accumulate(got, grad, weight, threads)
                same(got, wanted, f"level {level}, weight {weight}")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_few_elements_are_summed_as_in_a_larger_chunk(level):
    """Zeros behind them add nothing, so the order of the sum shows."""
    x = values(1000, torch.float32)
    for chunk in (1, 2, 3, 4, 5, 7, 8):
        few = library(level).square_sum(x, chunk, 1)
        rows = torch.nn.functional.pad(x, (0, -len(x) % chunk)).view(-1, chunk)
        wide = torch.nn.functional.pad(rows, (0, 32 - chunk)).contiguous()
        same(few, library(level).square_sum(wide.view(-1), 32, 1), f"chunk {chunk}")


def test_many_tensors_at_once_and_again():
    given = [
        (values(n, dtype), chunk)
        for n, chunk, dtype in ((700, 4, torch.float32), (0, 8, torch.float16), (5000, 64, torch.bfloat16))
    ]
    firsts = [2, 177, 200]
    rows = [(len(x), chunk, first, x.dtype) for (x, chunk), first in zip(given, firsts, strict=True)]
    batch, out = Squares(rows), torch.full((300,), -1.0, dtype=torch.float64)
    for threads in (1, 3):
        batch.fill(out, [x for x, _ in given], threads)
        right = torch.full_like(out, -1.0)
        for (x, chunk), first in zip(given, firsts, strict=True):
            right[first : first - -len(x) // chunk] = ops.square_sum(x, chunk)
        assert torch.equal(out, right)
    with pytest.raises(
        ValueError, match=r"tensors\[0\] is torch.float32 of 699 elements, must be torch.float32 of 700"
    ):
        batch.fill(out, [x[:-1] if len(x) else x for x, _ in given], 1)
    with pytest.raises(ValueError, match="out has 200 elements, must have at least 279"):
        batch.fill(out[:200], [x for x, _ in given], 1)
    with pytest.raises(ValueError, match=r"tensors\[0\] is torch.float64 of 700"):
        batch.fill(out, [x.double() for x, _ in given], 1)
    with pytest.raises(ValueError, match="dtypes"):
        Squares([(3, 1, 0, torch.float64)])
