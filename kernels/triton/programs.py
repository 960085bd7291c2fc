"""What runs on the device. The arithmetic is that of `reference`, operation by operation.

[Note: the same numbers in Triton's interpreter] It computes in bfloat16 on the raw bits, cuts float32 off instead of
rounding it, and widens subnormal numbers wrongly. So every value becomes float32 as it is loaded, and between bfloat16 and
float32 there are integer operations, whose results are the same everywhere.

[Note: arguments in tuples] None in a tuple is known to the compiler, and so is an int where it is 1 or a multiple of 16;
a float is not. So hyper-parameters are floats there, and so are the halves of the words of a key: exact, and a new key
compiles nothing. In the interpreter they are Python's floats, which are rounded to float32 when they meet a tensor; so no
two of them meet each other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import reference

LARGEST = tl.constexpr(reference.LARGEST)


class Pointers(NamedTuple):
    """Where a leaf lies, and its elements. master, skip: or None."""

    param: Any
    grad: Any
    master: Any
    skip: Any
    n: Any


class Held(NamedTuple):
    """A moment as it is kept; all but `kept` None where that is not codes. borders: between the values of `book`."""

    kept: Any
    scales: Any
    book: Any
    borders: Any
    n_borders: Any


class Numbers(NamedTuple):
    """Scalars of an update; those that a rule does not use are 0. rest1, rest2: 1 - b1, 1 - b2. weight_decay: or None."""

    step: Any
    divisor: Any
    factor: Any
    weight_decay: Any
    b1: Any
    rest1: Any = 0.0
    b2: Any = 0.0
    rest2: Any = 0.0
    c1: Any = 0.0
    c2: Any = 0.0
    eps: Any = 0.0


@triton.jit
def update(at, moments, draws, x, RULE: tl.constexpr, PAIRS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """One update of SPAN elements, in a tensor of BLOCK.

    Args:
        at: `Pointers`. moments: `Held`. draws: of the param and of each moment, see `bits16`; or None. x: `Numbers`.
        RULE: adam, lion, sgd, trace or nesterov. PAIRS: see `bits16`. SPAN: where there are codes, the elements that
            share a scale.
    """
    if at.skip is not None:  # noqa: SIM102 - Triton before 3.9 evaluates both sides of `and`
        if tl.load(at.skip):
            return
    lane = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * SPAN
    mask = lane < at.n - start
    if SPAN < BLOCK:
        mask = mask & (lane < SPAN)
    i = start + lane
    g = tl.div_rn(read(at.grad, i, mask), x.divisor) * x.factor
    if at.master is None:
        base = at.param
    else:
        base = at.master
    p = read(base, i, mask)
    if RULE == "adam":
        v = load(moments[1], i, mask)
        if moments[1].scales is not None:
            v = v * v
        m = x.b1 * load(moments[0], i, mask) + x.rest1 * g
        v = x.b2 * v + x.rest2 * (g * g)
        u = tl.div_rn(tl.div_rn(m, x.c1), tl.sqrt_rn(tl.div_rn(v, x.c2)) + x.eps)
        if moments[1].scales is not None:
            v = tl.sqrt_rn(v)
        store(moments[0], m, draws[1], i, mask, PAIRS)
        store(moments[1], v, draws[2], i, mask, PAIRS)
    elif RULE == "lion":
        m = load(moments[0], i, mask)
        c = x.b1 * m + x.rest1 * g
        u = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, 0.0))
        store(moments[0], x.b2 * m + x.rest2 * g, draws[1], i, mask, PAIRS)
    elif RULE == "sgd":
        u = g
    else:
        m = g + x.b1 * load(moments[0], i, mask)
        u = m
        if RULE == "nesterov":
            u = g + x.b1 * m
        store(moments[0], m, draws[1], i, mask, PAIRS)
    if x.weight_decay is not None:
        u = u + x.weight_decay * p
    p = p + u * x.step
    if at.master is not None:
        tl.store(at.master + i, p, mask=mask)
    tl.store(at.param + i, rounded(p, at.param.dtype.element_ty, draws[0], i, mask, PAIRS), mask=mask)


@triton.jit
def read(pointer, i, mask):
    """Floats in float32; 0 outside."""
    x = tl.load(pointer + i, mask=mask, other=0.0)
    if pointer.dtype.element_ty == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def load(moment, i, mask):
    """A moment in float32."""
    if moment.scales is None:
        x = read(moment.kept, i, mask)
    else:
        code = tl.load(moment.kept + i, mask=mask, other=0).to(tl.int32)
        x = tl.load(moment.book + code) * tl.load(moment.scales + tl.program_id(0))
    return x


@triton.jit
def store(moment, x, draw, i, mask, PAIRS: tl.constexpr):
    """Writes a moment in the form in which it is kept."""
    if moment.scales is None:
        x = rounded(x, moment.kept.dtype.element_ty, draw, i, mask, PAIRS)
    else:
        # As integers, since a maximum of floats loses NaN; without a sign both have the same order.
        size = tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        scale = tl.max(size, 0).to(tl.float32, bitcast=True)
        tl.store(moment.scales + tl.program_id(0), scale)
        x = encoded(tl.div_rn(x, tl.where(scale == 0, 1.0, scale)), moment)
    tl.store(moment.kept + i, x, mask=mask)


@triton.jit
def encoded(x, moment):
    """How many borders are below each value: uint8. All of them are for NaN."""
    code = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(8):
        probe = code + ((128 >> k) - 1)
        inside = probe < moment.n_borders
        border = tl.load(moment.borders + probe, mask=inside, other=0.0)
        code = tl.where(inside & ((border < x) | (x != x)), probe + 1, code)
    return code.to(tl.uint8)


@triton.jit
def rounded(x, dtype: tl.constexpr, draw, i, mask, PAIRS: tl.constexpr):
    """float32 in another dtype, with a draw stochastically if that is bfloat16."""
    if dtype == tl.bfloat16:
        pattern = x.to(tl.uint32, bitcast=True)
        near = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        # Adding to the bits of NaN may carry into the sign, which leaves 0.
        near = tl.where((pattern & 0x7FFFFFFF) > 0x7F800000, pattern >> 16, near)
        if draw is not None:
            up = (pattern + bits16(draw, i, mask, PAIRS)) >> 16
            near = tl.where((pattern & 0x7FFFFFFF) > LARGEST, near, up)
        result = near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def bits16(draw, i, mask, PAIRS: tl.constexpr):
    """16 random bits of each element: uint32.

    draw: the lower and the upper 16 bits of each of: the key's words, both halves of the first index; and then, where
    indices are not consecutive, all of them. No None instead: Triton 3.6 loses it in a tuple that is passed on twice.
    PAIRS: indices are consecutive and the first is even, so that a hash serves two neighbours in the tensor.
    """
    if len(draw) == 10:
        index = (word(draw[8], draw[9]).to(tl.int64) << 32 | word(draw[6], draw[7]).to(tl.int64)) + i
    else:
        index = tl.load(draw[10] + i, mask=mask, other=0)
    if PAIRS:
        even, _ = tl.split(tl.reshape(index, (i.shape[0] // 2, 2)))
        x = hashed(draw, even)
        x = tl.interleave(x & 0xFFFF, x >> 16)
    else:
        x = hashed(draw, index)
        x = tl.where((index & 1) == 0, x & 0xFFFF, x >> 16)
    return x


@triton.jit
def hashed(draw, index):
    """The hash of each index's pair: uint32; see `reference.bits16`."""
    pair = index >> 1
    x = mix(pair.to(tl.uint32) + word(draw[0], draw[1]))
    return mix(x + mix((pair >> 32).to(tl.uint32) + word(draw[4], draw[5])) + word(draw[2], draw[3]))


@triton.jit
def word(low, high):
    """A uint32 of its halves."""
    return tl.cast(high, tl.uint32) << 16 | tl.cast(low, tl.uint32)


@triton.jit
def mix(x):
    """lowbias32 of uint32; see `reference.mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def square_sum(x, parts, n, chunk, pieces, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of one of the `pieces` of a chunk; each has PIECE elements, the last may be shorter."""
    program = tl.program_id(0).to(tl.int64)
    start = program // pieces * chunk
    first = start + program % pieces * PIECE
    sums = tl.zeros([BLOCK], tl.float64)
    for k in range(0, PIECE, BLOCK):
        i = first + k + tl.arange(0, BLOCK)
        value = read(x, i, (i < start + chunk) & (i < n)).to(tl.float64)
        sums += value * value
    tl.store(parts + program, summed(sums, BLOCK))


@triton.jit
def total(parts, sums, pieces, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the parts of a chunk, of which there are at most STEPS * BLOCK."""
    row = parts + tl.program_id(0).to(tl.int64) * pieces
    found = tl.zeros([BLOCK], tl.float64)
    for k in range(0, STEPS):
        i = k * BLOCK + tl.arange(0, BLOCK)
        found += tl.load(row + i, mask=i < pieces, other=0.0)
    tl.store(sums + tl.program_id(0), summed(found, BLOCK))


@triton.jit
def summed(x, BLOCK: tl.constexpr):
    """The sum of a tensor, by halves: two values have one sum, while the order of more depends on how they are aligned."""
    for k in tl.static_range(1, 20):
        if BLOCK >> k > 1:
            x = tl.sum(tl.reshape(x, (2, BLOCK >> k)), 0)
    return tl.sum(x, 0)


@triton.jit
def accumulate(acc, grad, weight, n, BLOCK: tl.constexpr):
    """acc = acc + weight * grad, of BLOCK elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(acc + i, read(acc, i, mask) + weight * read(grad, i, mask), mask=mask)
