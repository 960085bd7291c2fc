"""Draws by key: the same element gets the same bits however it is asked for, and the bits look random."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from funzero.transforms import counter
from funzero.transforms import random as r
from funzero.transforms.rounding import stochastic_round

DRAWS = {
    "bits": lambda k, **where: r.bits(k, **where),
    "uniform": lambda k, **where: r.uniform(k, low=-1.0, high=2.5, **where),
    "uniform64": lambda k, **where: r.uniform(k, dtype=torch.float64, **where),
    "uniform16": lambda k, **where: r.uniform(k, dtype=torch.bfloat16, **where),
    "normal": lambda k, **where: r.normal(k, mean=1.0, std=3.0, **where),
    "bernoulli": lambda k, **where: r.bernoulli(k, 0.3, **where),
    "randint": lambda k, **where: r.randint(k, where.pop("shape", None), -5, 1000, **where),
}
N = 1 << 18
FAR = (1 << 32) - 70_000  # a range from here passes a multiple of 2^32, and is cut there


def pair(*keys):
    return [torch.tensor(k, dtype=torch.int64) for k in keys]


@pytest.fixture(autouse=True)
def global_generators_stay():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("first", [0, 12_345, FAR])
def test_pieces_agree_with_the_whole(name, first):
    draw, k, n = DRAWS[name], r.key(3), 140_001  # more than a tile
    whole = draw(k, shape=(n,), offset=first)
    assert torch.equal(draw(k, shape=(3, 46_667), offset=first).flatten(), whole)
    for start, length in ((0, 0), (0, 1), (7, 999), (32_767, 2), (69_000, 2_000), (n - 1, 1)):
        assert torch.equal(draw(k, shape=length, offset=first + start), whole[start : start + length])
    at = torch.tensor([0, 5, 32_768, 69_999, 70_000, 140_000, 5])
    assert torch.equal(draw(k, index=(at + first).reshape(7, 1)), whole[at].reshape(7, 1))
    assert draw(k, shape=()).shape == () and torch.equal(draw(k, shape=()), draw(k, shape=1)[0])


@pytest.mark.parametrize("name", DRAWS)
def test_threads_and_vmap_change_nothing(name):
    draw, k = DRAWS[name], r.key(4)
    whole = draw(k, shape=100_000)
    torch.set_num_threads(2)
    try:
        assert torch.equal(draw(k, shape=100_000), whole)
    finally:
        torch.set_num_threads(1)
    at = torch.arange(20).reshape(4, 5)
    assert torch.equal(torch.func.vmap(lambda i: draw(k, index=i))(at), whole[:20].reshape(4, 5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", DRAWS)
def test_gpu_equals_cpu(name):
    k = r.key(5)
    here, there = (DRAWS[name](k, shape=N, offset=FAR, device=d) for d in ("cpu", "cuda"))
    if name == "normal":
        assert (here != there.cpu()).sum() <= N // 1000 and torch.allclose(here, there.cpu(), rtol=1e-6)
    else:
        assert torch.equal(here, there.cpu())


def test_values_stay_the_same_for_ever():
    """A checkpoint holds a key, so what a key gives may not change between versions."""
    assert r.bits(r.key(0), 4).tolist() == PINNED[0]
    assert r.bits(torch.tensor([-3, 1 << 40]), index=torch.tensor([1 << 40, 5, (1 << 32) + 5])).tolist() == PINNED[1]
    assert r.split(r.key(1), 2).tolist() == PINNED[2]


def test_keys():
    a, b, c = r.split(r.key(0), 3)
    assert len({tuple(k.tolist()) for k in (a, b, c, r.key(0), r.fold_in(r.key(0), 0), r.fold_in(r.key(0), 1))}) == 6
    assert r.split(r.key(0), 0).shape == (0, 2)
    assert torch.equal(r.bits(a, 9), r.bits(a.clone(), 9)) and not torch.equal(r.bits(a, 9), r.bits(b, 9))


# Quality. Keys are fixed, so nothing here fails by chance; bounds are five standard deviations.

STREAMS = {
    "a key": lambda: r.bits(r.key(0), N),
    "another key": lambda: r.bits(r.key(1), N),
    "a folded key": lambda: r.bits(r.fold_in(r.key(0), 1), N),
    "its neighbour": lambda: r.bits(r.fold_in(r.key(0), 2), N),
    "a split key": lambda: r.bits(r.split(r.key(0))[0], N),
    "another stream": lambda: r.bits(torch.tensor([0, 1]), N),
    "a second word": lambda: counter.Words(r.key(0), 1).at(torch.arange(N)),
    "the second 2^32": lambda: r.bits(r.key(0), N, offset=1 << 32),
    "the third 2^32": lambda: r.bits(r.key(0), N, offset=2 << 32),
    "strided": lambda: r.bits(r.key(0), index=torch.arange(N) * 4096),
    "every 2^32": lambda: r.bits(r.key(0), index=torch.arange(N) << 32),
    "many keys": lambda: torch.cat([r.bits(r.key(i), 1) for i in range(4096)]).repeat_interleave(N // 4096),
}


def each_bit(words):
    """The mean of each of the 32 bits."""
    return torch.stack([((words >> i) & 1).double().mean() for i in range(32)])


def chi_square(counts):
    """In standard deviations from its mean."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", [n for n in STREAMS if n != "many keys"])
def test_bits_of_a_stream(name):
    words = STREAMS[name]()
    assert ((each_bit(words) - 0.5).abs() < 5 * 0.5 / math.sqrt(N)).all()
    u = words.double() / 2**32
    assert abs(float(u.mean())) < 5 / math.sqrt(12 * N)
    assert abs(float(u.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / N)
    for shift in (0, 8, 16, 24):
        assert abs(chi_square(torch.bincount((words >> shift) & 255, minlength=256).double())) < 5
    for lag in (1, 2, 3, 16, 4096):
        top = (words >> 28) & 15
        both = torch.bincount(top[:-lag] * 16 + top[lag:], minlength=256).double()
        assert abs(chi_square(both)) < 5, lag
        assert ((each_bit(words[:-lag] ^ words[lag:]) - 0.5).abs() < 5 * 0.5 / math.sqrt(N - lag)).all(), lag


def test_streams_are_independent_of_each_other():
    found = {name: make() for name, make in STREAMS.items() if name not in ("strided", "every 2^32", "many keys")}
    for name, x in found.items():
        for other, y in found.items():
            if name < other:
                assert ((each_bit(x ^ y) - 0.5).abs() < 5 * 0.5 / math.sqrt(N)).all(), (name, other)
                corr = float(torch.corrcoef(torch.stack([x, y]).double())[0, 1])
                assert abs(corr) < 5 / math.sqrt(N), (name, other)


def test_first_draws_of_neighbouring_keys():
    words = STREAMS["many keys"]()[:: N // 4096]
    assert ((each_bit(words) - 0.5).abs() < 5 * 0.5 / 64).all()
    assert ((each_bit(words[1:] ^ words[:-1]) - 0.5).abs() < 5 * 0.5 / 64).all()


def test_every_bit_of_index_and_key_flips_every_bit():
    n = 4096
    index = torch.randint(0, 1 << 40, (n,), generator=torch.Generator().manual_seed(0))
    base = r.bits(r.key(9), index=index)
    for bit in range(42):
        flipped = each_bit(base ^ r.bits(r.key(9), index=index ^ (1 << bit)))
        assert ((flipped - 0.5).abs() < 5.5 * 0.5 / math.sqrt(n)).all(), bit
    for bit in range(63):
        for other in pair([9 ^ (1 << bit), 0], [9, 1 << bit]):
            flipped = each_bit(base ^ r.bits(other, index=index))
            assert ((flipped - 0.5).abs() < 5.5 * 0.5 / math.sqrt(n)).all(), bit


def test_a_key_gives_every_word_at_most_once_in_2_to_the_32():
    """The hash is invertible; one that is not loses randomness in each round."""
    words = r.bits(r.key(0), 1 << 20)
    assert words.unique().numel() == words.numel()


# Distributions


def test_uniform():
    for dtype, digits in ((torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)):
        u = r.uniform(r.key(0), N, dtype=dtype)
        assert u.dtype == dtype and float(u.min()) >= 0 and float(u.max()) < 1
        steps = u.double() * 2.0**digits
        assert torch.equal(steps, steps.round())
        assert float(u.double().mean()) == pytest.approx(0.5 * (1 - 2.0**-digits), abs=5 / math.sqrt(12 * N))
    moved = r.uniform(r.key(0), N, low=-3.0, high=5.0)
    assert torch.equal(moved, r.uniform(r.key(0), N) * 8 - 3)


def test_normal():
    z = r.normal(r.key(0), N, dtype=torch.float64)
    assert float(z.mean()) == pytest.approx(0, abs=5 / math.sqrt(N))
    assert float(z.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / N))
    assert float((z**3).mean()) == pytest.approx(0, abs=5 * math.sqrt(15 / N))
    assert float((z**4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / N))
    inside = torch.erf(z / math.sqrt(2)).mul(128).add(128).long().clamp(0, 255)
    assert abs(chi_square(torch.bincount(inside, minlength=256).double())) < 5
    assert torch.equal(r.normal(r.key(0), N), z.float())
    moved = r.normal(r.key(0), 9, mean=2.0, std=3.0, dtype=torch.float64)
    assert torch.allclose(moved, z[:9] * 3 + 2)


@pytest.mark.parametrize("p", [0.0, 1e-4, 0.1, 0.5, 0.999, 1.0])
def test_bernoulli(p):
    mean = float(r.bernoulli(r.key(0), p, N).double().mean())
    assert mean == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / N))


def test_randint():
    x = r.randint(r.key(0), N, -3, 10)
    assert abs(chi_square(torch.bincount(x + 3, minlength=13).double())) < 5
    wide = r.randint(r.key(0), N, 0, 1 << 31)
    assert int(wide.min()) >= 0 and int(wide.max()) < 1 << 31
    assert float(wide.double().mean()) == pytest.approx(2.0**30, rel=10 / math.sqrt(12 * N))
    assert r.randint(r.key(0), 5, 7, 8).tolist() == [7] * 5


def test_permutation():
    orders = [tuple(r.permutation(r.key(i), 4).tolist()) for i in range(2400)]
    counts = torch.tensor([orders.count(o) for o in sorted(set(orders))]).double()
    assert len(counts) == 24 and abs(chi_square(counts)) < 5
    assert sorted(r.permutation(r.key(0), 10_000).tolist()) == list(range(10_000))
    assert r.permutation(r.key(0), 0).tolist() == []


def test_categorical():
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    x = r.categorical(r.key(0), p.log().expand(N, 4))
    for i, want in enumerate(p.tolist()):
        assert float((x == i).double().mean()) == pytest.approx(want, abs=5 * math.sqrt(want * (1 - want) / N))
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    whole = r.categorical(r.key(1), rows)
    assert torch.equal(r.categorical(r.key(1), rows[2:4], offset=10), whole[2:4])
    assert torch.equal(r.categorical(r.key(1), rows.T, dim=0, index=torch.arange(30).reshape(6, 5).T), whole)


# Dropout


def test_dropout_is_the_mask_over_what_is_kept():
    x, k = torch.randn(300, 500, generator=torch.Generator().manual_seed(0)), r.key(0)
    keep = r.bernoulli(k, 0.9, x.shape)
    assert torch.equal(r.dropout(x, 0.1, k), x * (1 / 0.9) * keep)
    assert abs(float(keep.double().mean()) - 0.9) < 5 * 0.3 / math.sqrt(x.numel())
    assert torch.equal(r.dropout(x, 0.0, k), x) and not r.dropout(x, 1.0, k).any()
    index = torch.arange(x.numel()).reshape(x.shape)
    assert torch.equal(r.dropout(x, 0.1, k, index=index), r.dropout(x, 0.1, k))
    columns = r.dropout(x[:, 100:200], 0.1, k, index=index[:, 100:200])
    assert torch.equal(columns, r.dropout(x, 0.1, k)[:, 100:200]), "a tensor-parallel piece"
    assert r.dropout(x.bfloat16(), 0.1, k).dtype == torch.bfloat16
    assert torch.equal(r.dropout(x.T, 0.1, k), r.dropout(x.T.contiguous(), 0.1, k))


# Forward mode makes torch load decompositions that it still compiles with torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_dropout_under_autograd_and_torch_func():
    x = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k = r.key(2)
    keep = r.bernoulli(k, 0.5, 20).double() * 2

    def fn(x):
        return r.dropout(x, 0.5, k)

    with torch.random.fork_rng():  # the checks themselves draw
        assert torch.autograd.gradcheck(fn, x.clone().requires_grad_())
        assert torch.autograd.gradgradcheck(lambda x: fn(x**3), x.clone().requires_grad_())
    assert torch.equal(torch.func.grad(lambda x: fn(x).sum())(x), keep)
    assert torch.equal(torch.func.hessian(lambda x: fn(x**2).sum())(x), torch.diag(2 * keep))
    assert torch.equal(torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1], keep)
    rows = x.reshape(4, 5)
    shared = torch.func.vmap(fn)(rows)
    assert torch.equal(shared, torch.stack([fn(row) for row in rows]))
    apart = torch.func.vmap(lambda x, i: r.dropout(x, 0.5, k, index=i))(rows, torch.arange(20).reshape(4, 5))
    assert torch.equal(apart, fn(x).reshape(4, 5))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_repeats_under_checkpoint(use_reentrant):
    w = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def fn(w, k):
        return torch.tanh(r.dropout(torch.tanh(w), 0.5, k))

    a, b = (w.clone().requires_grad_() for _ in range(2))
    fn(a, r.key(3)).sum().backward()
    checkpoint(fn, b, r.key(3), use_reentrant=use_reentrant, preserve_rng_state=False).sum().backward()
    assert torch.equal(a.grad, b.grad) and float((a.grad == 0).double().mean()) > 0.25


def test_dropout_scales_as_torch_does():
    with torch.random.fork_rng():
        ours, torchs = (torch.ones(4, dtype=torch.bfloat16) for _ in range(2))
        ours, torchs = r.dropout(ours, 0.5, r.key(0)), F.dropout(torchs, 0.5)
    assert {*ours.tolist(), *torchs.tolist()} <= {0.0, 2.0}


# Stochastic rounding


def test_br19_c():
    """[BR19] (c): 0.999 in bfloat16 is one of its two neighbours, and right in the mean; a function of the seed."""
    x = torch.full((10_000,), 0.999)
    out = stochastic_round(x, bits=r.random_bits16(r.key(0), range(10_000)))
    assert out.dtype == torch.bfloat16 and set(out.tolist()) == {1.0, 0.99609375}
    assert float(out.double().mean()) == pytest.approx(0.999, abs=1e-4)
    again = stochastic_round(x, bits=r.random_bits16(r.key(0), range(10_000)))
    other = stochastic_round(x, bits=r.random_bits16(r.key(1), range(10_000)))
    assert torch.equal(out, again) and not torch.equal(out, other)
    pieces = [stochastic_round(x[a:b], bits=r.random_bits16(r.key(0), range(a, b))) for a, b in ((0, 77), (77, 10_000))]
    assert torch.equal(torch.cat(pieces), out)
    at = torch.tensor([9_999, 3, 500])
    assert torch.equal(stochastic_round(x[:3], bits=r.random_bits16(r.key(0), at)), out[at])


@pytest.mark.parametrize("value", [1.00001, -1.00001, 3e-41, -2e-39, 123456.7, 3.3e38, -1e-20])
def test_every_draw_counts_once(value):
    """Over all 65,536 values of the bits the mean is the value itself."""
    x = torch.full((1 << 16,), value)
    out = stochastic_round(x, bits=torch.arange(1 << 16, dtype=torch.int32)).double()
    assert float(out.mean()) == pytest.approx(float(x[0].double()), rel=1e-15)
    assert len(out.unique()) == 2 and float(out.abs().min()) < abs(float(x[0])) < float(out.abs().max())


def test_what_bfloat16_holds_stays():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for bits in (0, 1, 1 << 15, (1 << 16) - 1):
        out = stochastic_round(every.float(), bits=torch.full(every.shape, bits, dtype=torch.int32))
        assert torch.equal(out.view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])
        assert torch.equal(out.isnan(), every.isnan())
        odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
        assert odd.isnan().all()
        assert stochastic_round(odd, bits=torch.full((4,), bits, dtype=torch.int32)).isnan().all()


def test_only_what_nearest_makes_infinite_becomes_infinite():
    largest = float(torch.finfo(torch.bfloat16).max)
    x = torch.tensor([largest, largest * (1 + 2**-10), float(torch.finfo(torch.float32).max)])
    x = torch.cat([x, -x])
    for bits in (0, (1 << 16) - 1):
        out = stochastic_round(x, bits=torch.full((6,), bits, dtype=torch.int32))
        assert torch.equal(out, x.bfloat16()) and out.isinf().tolist() == [False, False, True] * 2


BAD = {
    "key: expected int64 \\[2\\], got torch.float32": (ValueError, lambda: r.bits(torch.zeros(2), 3)),
    "key: expected a seed or an int64 tensor \\[2\\], got str": (TypeError, lambda: r.key("a")),
    "split: n must be at least 0, got -1": (ValueError, lambda: r.split(r.key(0), -1)),
    "give a shape, or the index of each element": (ValueError, lambda: r.bits(r.key(0))),
    "offset: expected at least 0, got -1": (ValueError, lambda: r.bits(r.key(0), 3, offset=-1)),
    "index: expected int64, got torch.int32": (
        TypeError,
        lambda: r.bits(r.key(0), index=torch.zeros(2, dtype=torch.int32)),
    ),
    "index: it has the shape \\[2\\]; leave out shape and offset": (
        ValueError,
        lambda: r.bits(r.key(0), 3, index=torch.arange(2)),
    ),
    "uniform: expected a dtype among .*, got torch.int64": (
        TypeError,
        lambda: r.uniform(r.key(0), 3, dtype=torch.int64),
    ),
    "bernoulli: p must be within \\[0, 1\\], got 1.5": (ValueError, lambda: r.bernoulli(r.key(0), 1.5, 3)),
    "randint: high - low must be within \\[1, 2\\^31\\], got 3 - 3": (
        ValueError,
        lambda: r.randint(r.key(0), 3, 3, 3),
    ),
    "permutation: n must be at least 0, got -2": (ValueError, lambda: r.permutation(r.key(0), -2)),
    "random_bits16: a range must have step 1": (ValueError, lambda: r.random_bits16(r.key(0), range(0, 9, 2))),
    "dropout: rate must be within \\[0, 1\\], got -0.1": (
        ValueError,
        lambda: r.dropout(torch.ones(2), -0.1, r.key(0)),
    ),
    "dropout: index must have the shape \\[2\\] of x, got \\[3\\]": (
        ValueError,
        lambda: r.dropout(torch.ones(2), 0.1, r.key(0), index=torch.arange(3)),
    ),
    "stochastic_round: expected float32 to torch.bfloat16, got torch.float64": (
        TypeError,
        lambda: stochastic_round(torch.ones(2).double(), bits=torch.zeros(2, dtype=torch.int32)),
    ),
    "stochastic_round: bits must be int32 \\[2\\], got torch.int32 \\[3\\]; make them with random_bits16": (
        ValueError,
        lambda: stochastic_round(torch.ones(2), bits=torch.zeros(3, dtype=torch.int32)),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message):
    kind, call = BAD[message]
    with pytest.raises(kind, match=message):
        call()


PINNED = [
    [1385547525, 130376414, -2068780094, 63386846],
    [1249922013, -525210909, 1123657599],
    [[-5716134823434715175, -552951407814017064], [-8946007514392541845, -8719502579280693983]],
]
