"""`funzero.random`: draws that are functions of a key and of an element's index in the global tensor.

No global generator is read or moved. See [Note: counter-based draws] in `counter`. Arguments that all draws share:

    key: int64 [2] in host memory, from `key`, `fold_in` or `split`; equal keys give equal draws, so use each for one.
    shape: of what is drawn; element i in row-major order has the index offset + i.
    offset: where a contiguous piece begins in the global tensor, in elements.
    index: instead of the two, an int64 tensor of indices in the global tensor; the result has its shape and device.
    device: of the result; default: that of `index`, or torch's default device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from funzero.transforms import counter, rng
from funzero.transforms.rng import fold_in

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "dropout",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "random_bits16",
    "split",
    "uniform",
]

Shape = int | Sequence[int]
_SPLIT = 0x73706C69  # sets the keys of `split` apart from those of `fold_in` with small numbers
_UNSIGNED = (1 << 32) - 1
# How many random bits a number in [0, 1) of each dtype has; as many as it can hold, so that none is rounded up to 1.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def key(seed: int) -> torch.Tensor:
    """A key from a seed: int64 [2] in host memory.

    >>> key(7).tolist()
    [7, 0]
    """
    return rng.make_key(seed)


def split(key: torch.Tensor, n: int = 2) -> torch.Tensor:
    """`n` new keys, the rows of an int64 [n, 2]; the first ones are the same for every `n`.

    >>> a, b = split(key(0))
    >>> torch.equal(split(key(0), 3)[1], b)
    True
    """
    if n < 0:
        raise ValueError(f"split: n must be at least 0, got {n}")
    return torch.stack([fold_in(key, _SPLIT, i) for i in range(n)]) if n else torch.empty(0, 2, dtype=torch.int64)


def bits(
    key: torch.Tensor,
    shape: Shape | None = None,
    *,
    index: torch.Tensor | None = None,
    offset: int = 0,
    device: Any = None,
) -> torch.Tensor:
    """32 random bits for each element, as int32 in [-2^31, 2^31). The same on every device.

    >>> whole = bits(key(0), (2, 3))
    >>> torch.equal(bits(key(0), 3, offset=3), whole[1])
    True
    """
    return _draw(lambda w: w, key, shape, 1, torch.int32, (index, offset, device))


def random_bits16(key: torch.Tensor, where: torch.Tensor | range, *, device: Any = None) -> torch.Tensor:
    """16 random bits for each element, as int32 in [0, 2^16); what `stochastic_round` takes. The same on every device.

    Half a word of `bits`: elements 2 j and 2 j + 1 of the global tensor have the lower and the upper half of its word j.

    Args:
        where: int64 tensor of indices in the global tensor, or a range of them with step 1.

    >>> int(random_bits16(key(0), range(1000)).amax()) < 65536
    True
    """
    if isinstance(where, range):
        if where.step != 1:
            raise ValueError(f"random_bits16: a range must have step 1, got {where}; give an int64 tensor of indices")
        start, n = where.start, len(where)
        words = bits(key, (start + n + 1) // 2 - start // 2, offset=start // 2, device=device)
        # As memory has the halves of words: lower ones first, on a little-endian machine.
        return words.view(torch.uint16)[start % 2 :][:n].to(torch.int32)
    words = bits(key, index=where // 2, device=device)
    return torch.where((where % 2 == 0).to(words.device), words, words >> 16) & 0xFFFF


def uniform(
    key: torch.Tensor,
    shape: Shape | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
    index: torch.Tensor | None = None,
    offset: int = 0,
    device: Any = None,
) -> torch.Tensor:
    """Uniform on [low, high), a multiple of 2^-24 before scaling (2^-53 in float64). The same on every device.

    With bounds of one's own a number just below `high` may be rounded up to it.

    >>> u = uniform(key(0), 1000)
    >>> bool(((u >= 0) & (u < 1)).all())
    True
    """
    digits = _digits("uniform", dtype)
    drawn = _draw(lambda *w: _unit(digits, *w), key, shape, 1 + (digits > 32), dtype, (index, offset, device))
    # Two operations: were they one, a device might round once where another rounds twice.
    return drawn if (low, high) == (0.0, 1.0) else (drawn * (high - low)) + low


def normal(
    key: torch.Tensor,
    shape: Shape | None = None,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype = torch.float32,
    index: torch.Tensor | None = None,
    offset: int = 0,
    device: Any = None,
) -> torch.Tensor:
    """Normal with this mean and standard deviation, within 6.8 deviations.

    The logarithm and the cosine are taken in float64 and then rounded, so devices rarely differ, and then in the last
    bit. It is made of two words of 32 bits, in float64 too.

    References: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.

    >>> normal(key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    _digits("normal", dtype)

    def make(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        radius = torch.sqrt(-2 * torch.log(_open_unit(first)))
        return radius * torch.cos(second.to(torch.float64) * (2 * math.pi / 2**32)) * std + mean

    return _draw(make, key, shape, 2, dtype, (index, offset, device))


def bernoulli(
    key: torch.Tensor,
    p: float,
    shape: Shape | None = None,
    *,
    index: torch.Tensor | None = None,
    offset: int = 0,
    device: Any = None,
) -> torch.Tensor:
    """True with probability p, rounded to a multiple of 2^-32; bool. The same on every device.

    >>> bernoulli(key(0), 0.0, 3).tolist()
    [False, False, False]
    """
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli: p must be within [0, 1], got {p}")
    return _draw(lambda w: _below(w, p), key, shape, 1, torch.bool, (index, offset, device))


def randint(
    key: torch.Tensor,
    shape: Shape | None,
    low: int,
    high: int,
    *,
    index: torch.Tensor | None = None,
    offset: int = 0,
    device: Any = None,
) -> torch.Tensor:
    """Whole numbers from low up to, but not including, high; int64. The same on every device.

    The probabilities of two numbers differ by less than 2^-64. `high - low` is at most 2^31.

    >>> sorted(set(randint(key(0), 100, 2, 5).tolist()))
    [2, 3, 4]
    """
    size = high - low
    if not 0 < size <= 1 << 31:
        raise ValueError(f"randint: high - low must be within [1, 2^31], got {high} - {low}")

    def make(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        # The upper 64 of the 96 bits of (64 random bits) * size; no step leaves the range of an int64.
        return (((_unsigned(first) * size) + ((_unsigned(second) * size) >> 32)) >> 32) + low

    return _draw(make, key, shape, 2, torch.int64, (index, offset, device))


def permutation(key: torch.Tensor, n: int, *, device: Any = None) -> torch.Tensor:
    """The numbers 0 .. n - 1 in random order; int64 [n]. The same on every device.

    >>> sorted(permutation(key(0), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    if n < 0:
        raise ValueError(f"permutation: n must be at least 0, got {n}")

    def make(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first.to(torch.int64) << 32) | _unsigned(second)

    return torch.argsort(_draw(make, key, n, 2, torch.int64, (None, 0, device)), stable=True)


def categorical(
    key: torch.Tensor,
    logits: torch.Tensor,
    *,
    dim: int = -1,
    index: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A class with probability softmax(logits) along `dim`; int64 in the shape of logits without `dim`.

    Args:
        logits: any shape; -inf is a class that never comes.
        index, offset: of the elements of `logits` in the global tensor.

    The largest of logits + Gumbel noise, in float64; where two are within rounding, devices may differ.

    References: Maddison, Tarlow and Minka, "A* Sampling", 2014.

    >>> int(categorical(key(0), torch.tensor([-torch.inf, 0.0, -torch.inf])))
    1
    """

    def make(word: torch.Tensor) -> torch.Tensor:
        return -torch.log(-torch.log(_open_unit(word)))

    shape = None if index is not None else logits.shape
    noise = _draw(make, key, shape, 1, torch.float64, (index, offset, logits.device))
    return torch.argmax(logits.detach() + noise, dim=dim)


def dropout(
    x: torch.Tensor, rate: float, key: torch.Tensor, *, index: torch.Tensor | None = None, offset: int = 0
) -> torch.Tensor:
    """x / (1 - rate), and zero with probability `rate`: a function of its arguments, the same mask on every device.

    What stays is `bernoulli(key, 1 - rate)`. A key repeats its mask, so recomputation in the backward needs no generator
    state; the backward keeps one byte for each element. Under `torch.func.vmap` all samples share a mask; map over
    `index` to give them masks of their own.

    Args:
        index, offset: of the elements of `x` in the global tensor; default: x is the whole.

    References: Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014.

    >>> x = torch.ones(6)
    >>> torch.equal(dropout(x, 0.5, key(0))[2:], dropout(x[2:], 0.5, key(0), offset=2))
    True
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout: rate must be within [0, 1], got {rate}")
    if rate == 0:
        return x.clone()
    if index is not None and index.shape != x.shape:
        raise ValueError(f"dropout: index must have the shape {list(x.shape)} of x, got {list(index.shape)}")
    shape = None if index is not None else x.shape
    keep = _draw(lambda w: _below(w, 1 - rate), key, shape, 1, torch.bool, (index, offset, x.device))
    return x * (1 / (1 - rate) if rate < 1 else 0.0) * keep


def _draw(
    make: Callable[..., torch.Tensor],
    key: torch.Tensor,
    shape: Shape | None,
    words: int,
    dtype: torch.dtype,
    where: tuple[torch.Tensor | None, int, Any],
) -> torch.Tensor:
    """make(words of 32 bits) for each element; `where` is (index, offset, device)."""
    key = rng.make_key(key)
    index, offset, device = where
    if index is not None:
        if index.dtype != torch.int64:
            raise TypeError(f"index: expected int64, got {index.dtype}")
        if offset or (shape is not None and _sizes(shape) != tuple(index.shape)):
            raise ValueError(f"index: it has the shape {list(index.shape)}; leave out shape and offset")
        index = index if device is None else index.to(device)
        return make(*(counter.Words(key, word).at(index) for word in range(words))).to(dtype)
    if shape is None:
        raise ValueError("give a shape, or the index of each element")
    if offset < 0:
        raise ValueError(f"offset: expected at least 0, got {offset}")
    out = torch.empty(_sizes(shape), dtype=dtype, device=device)
    counter.fill(out, key, words, offset, make)
    return out


def _sizes(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _digits(where: str, dtype: torch.dtype) -> int:
    if dtype not in _DIGITS:
        raise TypeError(f"{where}: expected a dtype among {[str(d) for d in _DIGITS]}, got {dtype}")
    return _DIGITS[dtype]


def _unsigned(word: torch.Tensor) -> torch.Tensor:
    return word.to(torch.int64) & _UNSIGNED


def _unit(digits: int, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
    """A multiple of 2^-digits in [0, 1)."""
    if second is None:
        return ((first >> (32 - digits)) & ((1 << digits) - 1)).to(torch.float32) * 2.0**-digits
    upper, lower = _unsigned(first) >> 5, _unsigned(second) >> 6
    return ((upper << 26) | lower).to(torch.float64) * 2.0**-53


def _open_unit(word: torch.Tensor) -> torch.Tensor:
    """Float64 strictly between 0 and 1."""
    return ((word.to(torch.float64) + 2.0**31) + 0.5) * 2.0**-32


def _below(word: torch.Tensor, p: float) -> torch.Tensor:
    """True with probability p."""
    bound = round(p * 2**32) - 2**31
    return word < bound if bound < 2**31 else torch.ones_like(word, dtype=torch.bool)
