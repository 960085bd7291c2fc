"""`random_bits16`: half a word for each element, however it is asked for; the halves look random, and round right on average."""

import math

import pytest
import torch

from funzero.transforms import precision, storage
from funzero.transforms import random as r
from funzero.transforms.rounding import stochastic_round

N = 1 << 19
FAR = (1 << 33) - 70_000  # a range from here passes a multiple of 2^33, where the upper half of a pair's number changes


def chi_square(x, cells):
    """Of counts of integers in [0, cells), in standard deviations from its mean."""
    expected = x.numel() / cells
    counts = torch.bincount(x.flatten().long(), minlength=cells).double()
    return float(((counts - expected) ** 2 / expected).sum() - (cells - 1)) / math.sqrt(2 * (cells - 1))


def related(x, y):
    """The largest deviation of what two runs of draws have to do with each other, in standard deviations."""
    n = x.numel()
    flips = torch.stack([(((x ^ y) >> i) & 1).double().mean() for i in range(16)])
    crossed = [torch.corrcoef(torch.stack([(x >> i & 1).double(), (y >> j & 1).double()]))[0, 1] for i, j in CROSSED]
    return max(
        float((flips - 0.5).abs().max()) * 2 * math.sqrt(n),
        max(abs(float(c)) for c in crossed) * math.sqrt(n),
        abs(float(torch.corrcoef(torch.stack([x, y]).double())[0, 1])) * math.sqrt(n),
        abs(chi_square((x >> 12) << 4 | y >> 12, 256)),
        abs(chi_square((x & 15) << 4 | (y & 15), 256)),
    )


CROSSED = [(15, 0), (0, 15), (15, 14), (14, 15), (8, 0), (7, 8)]
STREAMS = {
    "a key": lambda: r.random_bits16(r.key(0), range(N)),
    "its neighbour": lambda: r.random_bits16(r.key(1), range(N)),
    "a folded key": lambda: r.random_bits16(r.fold_in(r.key(0), 1), range(N)),
    "another word": lambda: r.random_bits16(torch.tensor([0, 1]), range(N)),
    "far": lambda: r.random_bits16(r.key(0), range(FAR - 1, FAR - 1 + N)),
    "the second 2^33": lambda: r.random_bits16(r.key(0), range(1 << 33, (1 << 33) + N)),
    **{f"{what} of step {i}": lambda what=what, i=i: rounding(i, what) for what in ("params", "mu/w") for i in (1, 2)},
    "nu of step 1": lambda: rounding(1, "nu/w"),
    "another leaf": lambda: rounding(1, "params", "b"),
}


def rounding(step, what, path="w"):
    """What an update rounds by."""
    rounder = storage.rounder(precision.bf16_pure, r.key(0), torch.tensor(step), lambda path: range(N))
    return r.random_bits16(rounder._stream(path, what), range(N))


def test_elements_share_the_words_of_bits():
    words, halves = r.bits(r.key(3), 500), r.random_bits16(r.key(3), range(1000))
    assert halves.dtype == torch.int32 and int(halves.min()) >= 0 and int(halves.max()) < 1 << 16
    assert torch.equal(halves[::2], words & 0xFFFF) and torch.equal(halves[1::2], (words >> 16) & 0xFFFF)


def test_values_stay_the_same_for_ever():
    """A checkpoint holds a key, so what a key gives may not change between versions."""
    assert r.random_bits16(r.key(0), range(3, 8)).tolist() == PINNED[0]
    assert r.random_bits16(r.key(0), torch.tensor([1 << 40, (1 << 40) + 1, 5, (1 << 33) + 5])).tolist() == PINNED[1]


@pytest.mark.parametrize("first", [0, 12_345, FAR, FAR + 1])
def test_pieces_agree_with_the_whole(first):
    k, n = r.key(3), 140_001
    whole = r.random_bits16(k, range(first, first + n))
    assert whole.shape == (n,) and torch.equal(r.random_bits16(k, torch.arange(first, first + n)), whole)
    for start, length in ((0, 0), (1, 0), (0, 1), (1, 1), (7, 999), (8, 999), (32_767, 2), (69_000, 2_001), (n - 1, 1)):
        piece = r.random_bits16(k, range(first + start, first + start + length))
        assert torch.equal(piece, whole[start : start + length]), (start, length)
    at = torch.tensor([[0, 5, 4, 32_768], [69_999, 70_000, 140_000, 5]])
    assert torch.equal(r.random_bits16(k, at + first), whole[at])
    assert r.random_bits16(k, range(9, 3)).shape == (0,)
    assert torch.equal(torch.func.vmap(lambda i: r.random_bits16(k, i))(at + first), whole[at])


@pytest.mark.parametrize("where", [torch.arange(3, dtype=torch.int32), torch.ones(3), range(-1, 3)])
def test_bad_places(where):
    with pytest.raises((TypeError, ValueError), match=r"index: expected int64, got|offset: expected at least 0, got"):
        r.random_bits16(r.key(0), where)


# Quality. Keys are fixed, so nothing here fails by chance; bounds are five standard deviations.


@pytest.mark.parametrize("name", STREAMS)
def test_each_half_is_uniform(name):
    for x in (STREAMS[name]()[i::2] for i in (0, 1)):
        assert abs(chi_square(x, 1 << 16)) < 5
        assert abs(float(x.double().mean()) - 32767.5) < 5 * 65536 / math.sqrt(12 * N / 2)
        ones = torch.stack([((x >> i) & 1).double().mean() for i in range(16)])
        assert float((ones - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(N / 2)


@pytest.mark.parametrize("name", STREAMS)
def test_halves_and_neighbours_are_independent(name):
    x = STREAMS[name]()
    assert related(x[::2], x[1::2]) < 5
    for lag in (1, 2, 3, 4, 16, 512, 1024, 4096):
        for parity in (0, 1):
            y = x[parity::2] if lag % 2 == 0 else x[parity:][: N - lag]
            assert related(y[: len(y) - lag], y[lag:]) < 5, lag


def test_streams_are_independent_of_each_other():
    found = {name: make()[: N // 4] for name, make in STREAMS.items()}
    for name, x in found.items():
        for other, y in found.items():
            if name < other:
                assert related(x, y) < 5.5, (name, other)
                assert related(x[::2], y[1::2]) < 5.5 and related(x[1::2], y[::2]) < 5.5, (name, other)


@pytest.mark.parametrize("value", [1 + 2.0**-9, -0.999, 3e-5, 1 + 2.0**-20])
def test_rounding_is_right_on_average(value):
    x = torch.full((N,), value)
    step = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    up = abs(value) / step % 1
    for name in ("a key", "mu/w of step 2"):
        out = stochastic_round(x, bits=STREAMS[name]()).double()
        for part in (out, out[::2], out[1::2], out[: N // 7]):
            error = abs(float(part.mean()) - float(x[0].double()))
            assert error < 5 * step * math.sqrt(up * (1 - up) / part.numel())


PINNED = [[1989, 60354, 33968, 13534, 967], [21412, 36164, 33968, 39107]]
