"""Random words: a hash of (key, word, index). What a draw is made of.

[Note: counter-based draws] Element i of a tensor gets the hash of the key and of i, its index in the global tensor, and
of nothing else: no state moves, so a rank that holds a piece draws that piece and all pieces agree with the whole. Only
integer operations that wrap modulo 2^32 are used, so CPU and GPU give the same bits.

The hash is two rounds of `lowbias32`, an invertible map of 32 bits in which every input bit flips every output bit with
a probability close to one half. Before the first round the low half of the index is added to one word of the key, before
the second another word of the key and a hash of the high half.

References: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011 (the idea); Wellons, "Prospecting
for Hash Functions", 2018 (`lowbias32`).
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from funzero.transforms import rng

_TILE = 1 << 17  # elements for each CPU thread: larger leaves the cache, smaller makes threads wait for each other
_TILE_DEVICE = 1 << 24
_SMALL = 1 << 16  # on the CPU, up to so many elements numpy is faster: its calls cost less, and it needs no threads
_STREAM = 0x66756E7A  # sets these keys apart from those of `fold_in` by a user
_SPAN = 1 << 32
# Shift right, the mask that makes the shift of a signed word a logical one, and the factor of each third of lowbias32.
_THIRDS = ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, 0x846CA68B - _SPAN), (16, 0xFFFF, 1))


def signed(x: int) -> int:
    """The 32 low bits of an integer as an int32."""
    return ((x + (1 << 31)) & (_SPAN - 1)) - (1 << 31)


Ints = TypeVar("Ints", torch.Tensor, "np.ndarray[Any, Any]")


def _mix(x: Ints) -> Ints:
    """lowbias32, in place on an int32 tensor or array."""
    for shift, mask, factor in _THIRDS:
        shifted = x >> shift
        shifted &= mask
        x ^= shifted
        if factor != 1:
            x *= factor
    return x


def _mix_number(x: int) -> int:
    """The same of one int32 in a Python number: a tensor of one element takes a hundred times as long."""
    for shift, mask, factor in _THIRDS:
        x ^= (x >> shift) & mask
        x = signed(x * factor)
    return x


class Words:
    """The stream number `word` of a key: 32 random bits for each index, as int32."""

    def __init__(self, key: torch.Tensor, word: int) -> None:
        first, second = rng.fold_in(key, _STREAM, word).tolist()
        self._add = signed(first)
        self._then, self._high = signed(first >> 32), signed(second)

    @property
    def parts(self) -> tuple[int, int, int]:
        """The int32 words that are added: to the low half of the index, before the second round, to the high half."""
        return self._add, self._then, self._high

    def at(self, index: torch.Tensor) -> torch.Tensor:
        """Those of an int64 tensor of indices, in its shape."""
        x = (((index + (self._add + (1 << 31))) & (_SPAN - 1)) - (1 << 31)).to(torch.int32)
        _mix(x)
        # The sum modulo 2^32 of the low half may not carry into the high half, so the latter is read from the index.
        x += _mix((index >> 32).to(torch.int32) + self._high) + self._then
        return _mix(x)

    def span(self, first: int, steps: Ints) -> Ints:
        """Those of first, first + 1, ...; `steps` is int32 0, 1, ... and the high half must be the same for all."""
        x = steps + signed(first + self._add)
        _mix(x)
        x += signed(_mix_number(signed((first >> 32) + self._high)) + self._then)
        return _mix(x)


def tiles(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of pieces of [0, count), at most `size` long, within which (first + start) >> 32 is constant."""
    start = 0
    while start < count:
        length = min(size, count - start, _SPAN - (first + start) % _SPAN)
        yield start, length
        start += length


def fill(out: torch.Tensor, key: torch.Tensor, words: int, first: int, make: Callable[..., Any]) -> None:
    """Writes make(word 0, word 1, ...) of the indices first, first + 1, ... to a contiguous tensor, tile by tile."""
    if out.is_meta:
        return
    flat = out.view(-1)
    size = _TILE * torch.get_num_threads() if out.device.type == "cpu" else _TILE_DEVICE
    streams = [Words(key, word) for word in range(words)]
    if out.device.type == "cpu" and flat.numel() <= _SMALL:
        count = np.arange(flat.numel(), dtype=np.int32)
        for start, length in tiles(first, flat.numel(), size):
            drawn = [torch.from_numpy(s.span(first + start, count[:length])) for s in streams]
            flat[start : start + length] = make(*drawn)
        return
    steps = torch.arange(min(size, flat.numel()), dtype=torch.int32, device=out.device)
    for start, length in tiles(first, flat.numel(), size):
        flat[start : start + length] = make(*(s.span(first + start, steps[:length]) for s in streams))
