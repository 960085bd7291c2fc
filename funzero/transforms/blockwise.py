"""Tensors kept in a few bits an element: codes of values, and one float32 scale for each block of the flattened leaf.

x ~ scale * book[code],  scale = max |x| of the block,  code = that of the nearest value of the book

The signed book is dynamic: each power of ten from 1 downwards has half as many values as the one above it, evenly
spread. So large values are told apart finely, and small ones, down to 1e-6 of the largest with 8 bits, from 0. The
positive book keeps the ratio of a value to its code near 1 wherever it lies (within 1.26 with 4 bits, 1.03 with 8).

References: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021; Li et al., "Memory Efficient
Optimizers with 4-bit States", 2023.
"""

import functools

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

Book = npt.NDArray[np.float32]


@functools.cache
def signed_book(bits: int) -> Book:
    """Values from -1 to 1 in order, symmetric about a 0: 2^bits - 1 of them.

    >>> signed_book(3).tolist()
    [-1.0, -0.550000011920929, -0.10000000149011612, 0.0, 0.10000000149011612, 0.550000011920929, 1.0]
    """
    decades = [np.linspace(0.1, 1, 2**i + 1)[1:] * 10.0 ** (i - bits + 2) for i in range(bits - 1)]
    half = np.concatenate(decades)
    return np.concatenate([-half[::-1], [0], half]).astype(np.float32)


@functools.cache
def positive_book(bits: int) -> Book:
    """Values from 10^(1 - bits) to 1 in order, each in the same ratio to the next: 2^bits of them, none of which is 0.

    >>> positive_book(2).round(2).tolist()
    [0.10000000149011612, 0.2199999988079071, 0.46000000834465027, 1.0]
    """
    return np.logspace(1 - bits, 0, 2**bits).astype(np.float32)


def encode(x: torch.Tensor, book: Book, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a 1-D tensor.

    Args:
        x: [n], float. block: elements that share a scale, counted from the first.

    Returns: uint8 [n], and float32 [ceil(n / block)]: 0 for a block of zeros, else not.

    >>> codes, scales = encode(torch.tensor([0.5, -2.0, 0.0]), signed_book(8), block=2)
    >>> decode(codes, scales, signed_book(8), block=2)
    tensor([ 0.5094, -2.0000,  0.0000])
    """
    rows = F.pad(x, (0, -x.numel() % block)).view(-1, block)
    scales = rows.abs().amax(1).float() if rows.numel() else x.new_zeros(0, dtype=torch.float32)
    normal = rows / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
    values = torch.from_numpy(book).to(x.device)
    borders = ((values[1:] + values[:-1]) / 2).to(normal.dtype)
    return torch.bucketize(normal, borders, out_int32=True).view(-1)[: x.numel()].to(torch.uint8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, book: Book, block: int) -> torch.Tensor:
    """The values of codes and scales: float32 [n]."""
    values = torch.from_numpy(book).to(codes.device).index_select(0, codes.int())
    rows = F.pad(values, (0, -codes.numel() % block)).view(-1, block)
    return (rows * scales.unsqueeze(1)).view(-1)[: codes.numel()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16, two to a byte, the first in the low bits: uint8 [n] -> uint8 [ceil(n / 2)]."""
    pairs = F.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """Undoes `pack`, for n codes."""
    return torch.stack([packed & 15, packed >> 4], 1).view(-1)[:n]
