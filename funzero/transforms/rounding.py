"""Stochastic rounding of float32 to bfloat16."""

import torch


def stochastic_round(x: torch.Tensor, *, bits: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rounds to one of the two neighbours; up in magnitude with the probability of the distance to the lower one.

    The mean over `bits` is x exactly. What `dtype` can hold stays as it is, so do infinities and NaN. Above the largest
    finite number it rounds to nearest, so only what nearest makes infinite becomes infinite. The same on every device.

    Args:
        x: float32.
        bits: int32 in the shape of `x`, uniform in [0, 2^16), from `funzero.random.random_bits16`.
        dtype: bfloat16.

    References: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.

    >>> x = torch.full((2,), 1 + 2**-8)  # halfway between 1 and its upper neighbour
    >>> stochastic_round(x, bits=torch.tensor([2**15 - 1, 2**15], dtype=torch.int32)).tolist()
    [1.0, 1.0078125]
    """
    if x.dtype != torch.float32 or dtype != torch.bfloat16:
        raise TypeError(f"stochastic_round: expected float32 to torch.bfloat16, got {x.dtype} to {dtype}")
    if bits.dtype != torch.int32 or bits.shape != x.shape:
        raise ValueError(
            f"stochastic_round: bits must be int32 {list(x.shape)}, got {bits.dtype} {list(bits.shape)}; "
            "make them with random_bits16"
        )
    pattern = x.contiguous().view(torch.int32)
    # bfloat16 is the upper half of float32. The sum carries into it with probability (lower half) / 2^16.
    rounded = ((pattern + bits) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where((pattern & 0x7FFFFFFF) > _LARGEST, x.to(torch.bfloat16), rounded)


_LARGEST = 0x7F7F0000  # the largest finite bfloat16; beyond it a carry would make an infinity, or a NaN out of one
