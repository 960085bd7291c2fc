"""Each kernel in a few lines of torch: its definition, which every backend must reproduce, on a CPU bit for bit.

An update is one pass over a leaf. With gradient g, param p (of the master copy, where there is one), all in float32:

    g = (grad / divisor) * factor                                  `Scale`: weight, loss scale and clip
    Adam       m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) (g g),  u = (m' / c1) / (sqrt(v' / c2) + eps)
               with c1 = 1 - b1^count and c2 = 1 - b2^count
    Lion       u = sign(b1 m + (1 - b1) g),  m' = b2 m + (1 - b2) g
    Momentum   t' = g + decay t,  u = t', or g + decay t' with nesterov; without decay u = g
    p' = p + (u + weight_decay p) (-learning_rate)

Each operation rounds once, in the order written; no product and sum are fused. Scalars are computed in float64 and
rounded to float32 once. Results go back in the dtypes in which they are kept: to nearest, ties to even; or stochastically
where `Draw`s are given; moments in 8 bits by the books of `blockwise`. p' goes to the master in full.

References: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014; Loshchilov and Hutter, "Decoupled Weight
Decay Regularization", 2017; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023; Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2021.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

LARGEST = 0x7F7F0000  # the bits of the largest finite bfloat16
_SPAN = 1 << 32


class Adam(NamedTuple):
    """Hyper-parameters of Adam and AdamW; two moments, m and v. In 8 bits the root of v is kept."""

    learning_rate: float
    b1: float
    b2: float
    eps: float


class Lion(NamedTuple):
    """Hyper-parameters of Lion; one moment."""

    learning_rate: float
    b1: float
    b2: float


class Momentum(NamedTuple):
    """Hyper-parameters of gradient descent. decay: of its one moment, the trace; None: there is none."""

    learning_rate: float
    decay: float | None = None
    nesterov: bool = False


Rule = Adam | Lion | Momentum


class Scale(NamedTuple):
    """What a gradient is divided by, and then multiplied by."""

    divisor: float = 1.0
    factor: float = 1.0


UNSCALED = Scale()


class Moment(NamedTuple):
    """A moment as it is kept.

    Attributes:
        values: [n], float32, bfloat16, or uint8 codes. scales: of codes, float32 [ceil(n / block)], else None.
        book: of codes, float32 in ascending order, at most 256 values. block: elements that share a scale.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    book: torch.Tensor | None = None
    block: int = 0


class Draw(NamedTuple):
    """16 random bits for each element: half a hash of three int32 words of a key and of half the element's index.

    Attributes:
        words: (add, then, high). index: global indices of the elements, a range with step 1 or int64 [n].
    """

    words: tuple[int, int, int]
    index: range | torch.Tensor


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What one update reads and writes, all 1-D, contiguous, on one device.

    Attributes:
        param: [n], float32, bfloat16 or float16; written. grad: [n], any of these; read.
        moments: as many as the rule has; written. master: float32 [n], which is updated in place of `param`; or None.
        count: of this leaf's updates, this one included. weight_decay: None adds nothing.
        draws: for stochastic rounding: of the param, then of each moment, used where that is bfloat16 (a param with a
            master is rounded to nearest); or empty.
    """

    param: torch.Tensor
    grad: torch.Tensor
    moments: tuple[Moment, ...] = ()
    master: torch.Tensor | None = None
    count: int = 1
    weight_decay: float | None = None
    draws: tuple[Draw, ...] = ()


def update(leaves: Sequence[Leaf], rule: Rule, scale: Scale = UNSCALED) -> None:
    """One update of each leaf in place; see the module's docstring."""
    for leaf in leaves:
        _update(leaf, rule, scale)


def _update(leaf: Leaf, rule: Rule, scale: Scale) -> None:
    base = leaf.param if leaf.master is None else leaf.master
    p, g = base.float(), (leaf.grad.float() / scale.divisor) * scale.factor
    old = [load(m) for m in leaf.moments]
    if isinstance(rule, Adam) and leaf.moments[1].scales is not None:
        old[1] = old[1] * old[1]
    u, new = _direction(rule, g, old, leaf.count)
    if leaf.weight_decay is not None:
        u = u + leaf.weight_decay * p
    after = p + u * -rule.learning_rate
    if isinstance(rule, Adam) and leaf.moments[1].scales is not None:
        new[1] = root(new[1])
    draws: list[Any] = list(leaf.draws) or [None] * (1 + len(new))
    if leaf.master is not None:
        leaf.master.copy_(after)
        draws[0] = None
    leaf.param.copy_(rounded(after, leaf.param.dtype, draws[0]))
    for moment, value, draw in zip(leaf.moments, new, draws[1:], strict=True):
        store(moment, value, draw)


def _direction(
    rule: Rule, g: torch.Tensor, old: list[torch.Tensor], count: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    if isinstance(rule, Adam):
        m = rule.b1 * old[0] + (1 - rule.b1) * g
        v = rule.b2 * old[1] + (1 - rule.b2) * (g * g)
        return (m / (1 - rule.b1**count)) / (root(v / (1 - rule.b2**count)) + rule.eps), [m, v]
    if isinstance(rule, Lion):
        u = torch.sign(rule.b1 * old[0] + (1 - rule.b1) * g)
        return u, [rule.b2 * old[0] + (1 - rule.b2) * g]
    if rule.decay is None:
        return g, []
    trace = g + rule.decay * old[0]
    return (g + rule.decay * trace if rule.nesterov else trace), [trace]


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root of float32, rounded once. torch's own is MKL's on a CPU, which misses the last bit of every sixth."""
    return x.double().sqrt().float()


def load(moment: Moment) -> torch.Tensor:
    """A moment in float32."""
    if moment.scales is None:
        return moment.values.float()
    assert moment.book is not None
    values = moment.book.index_select(0, moment.values.int())
    rows = F.pad(values, (0, -values.numel() % moment.block)).view(-1, moment.block)
    return (rows * moment.scales.unsqueeze(1)).view(-1)[: values.numel()]


def store(moment: Moment, value: torch.Tensor, draw: Draw | None) -> None:
    """Writes a moment in the form in which it is kept. Codes are those of the nearest value, the lower of two."""
    if moment.scales is None:
        moment.values.copy_(rounded(value, moment.values.dtype, draw))
        return
    assert moment.book is not None
    rows = F.pad(value, (0, -value.numel() % moment.block)).view(-1, moment.block)
    scales = rows.abs().amax(1) if rows.numel() else value.new_zeros(0)
    normal = rows / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
    borders = (moment.book[1:] + moment.book[:-1]) / 2
    moment.values.copy_(torch.bucketize(normal, borders, out_int32=True).view(-1)[: value.numel()])
    moment.scales.copy_(scales)


def rounded(x: torch.Tensor, dtype: torch.dtype, draw: Draw | None) -> torch.Tensor:
    """float32 in another dtype. With a draw to bfloat16: up in magnitude with the probability of the distance.

    What overflows only by the draw is rounded to nearest, and so are infinities and NaN.
    """
    if draw is None or dtype != torch.bfloat16:
        return x.to(dtype)
    pattern = x.contiguous().view(torch.int32)
    up = ((pattern + bits16(draw, x.numel(), x.device)) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where((pattern & 0x7FFFFFFF) > LARGEST, x.to(torch.bfloat16), up)


def bits16(draw: Draw, n: int, device: torch.device) -> torch.Tensor:
    """The bits of each element: int32 [n] in [0, 2^16). Elements 2 j and 2 j + 1 share the hash x of the pair j:

    x = mix(low half of j + add);  x = mix(x + mix(high half of j + high) + then), all modulo 2^32.

    The even element has its lower 16 bits, the odd one its upper 16: so hashes in a row are draws in a row where memory is
    little-endian.
    """
    add, then, high = draw.words
    where = draw.index
    index = torch.arange(where.start, where.stop, device=device) if isinstance(where, range) else where.view(n)
    pair = index >> 1
    x = mix(wrap(pair + add))
    x = mix(x + mix(wrap((pair >> 32) + high)) + then)
    return torch.where((index & 1) == 0, x, x >> 16) & 0xFFFF


def wrap(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64, as int32."""
    return (((x + (1 << 31)) & (_SPAN - 1)) - (1 << 31)).to(torch.int32)


def mix(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 (Wellons, "Prospecting for Hash Functions", 2018) of int32; shifts are logical, products wrap."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - _SPAN)
    return x ^ ((x >> 16) & 0xFFFF)


def square_sum(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Sums of squares of chunks of `chunk` elements, the last may be shorter: float64 [ceil(n / chunk)]; x: [n].

    An element that is not finite makes its sum so. Squares and sums are in float64; the order of a sum is the backend's.
    """
    rows = F.pad(x, (0, -x.numel() % chunk)).view(-1, chunk)
    return rows.double().square().sum(1)


def accumulate(acc: torch.Tensor, grad: torch.Tensor, weight: float = 1.0) -> None:
    """acc = acc + weight * grad in place, in float32; acc: [n] float32; grad: [n], float32, bfloat16 or float16."""
    acc.add_(weight * grad.float())
