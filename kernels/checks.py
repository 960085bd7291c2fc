"""Refuses arguments that a kernel would misread: every pointer that reaches C has passed here."""

from collections.abc import Sequence

import torch

from . import reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
_FLOAT32, _INT64 = (torch.float32,), (torch.int64,)


def leaf(x: reference.Leaf, rule: reference.Rule, name: str) -> None:
    """Raises ValueError that names what is wrong with a leaf, and what it should be."""
    param, n, device = x.param, x.param.numel(), x.param.device
    tensor(param, f"{name}.param", FLOATS, n, device)
    tensor(x.grad, f"{name}.grad", FLOATS, n, device)
    if x.master is not None:
        tensor(x.master, f"{name}.master", _FLOAT32, n, device)
    wanted = 2 if isinstance(rule, reference.Adam) else int(isinstance(rule, reference.Lion) or rule.decay is not None)
    if len(x.moments) != wanted:
        raise ValueError(f"{name}.moments: {len(x.moments)}, but {type(rule).__name__} has {wanted}")
    for i, moment in enumerate(x.moments):
        _moment(moment, f"{name}.moments[{i}]", n, device)
    if x.draws and len(x.draws) != 1 + wanted:
        raise ValueError(f"{name}.draws: {len(x.draws)}, must be none, or 1 for the param and {wanted} for its moments")
    for i, draw in enumerate(x.draws):
        _draw(draw, f"{name}.draws[{i}]", n, device)


def tensor(x: torch.Tensor, name: str, dtypes: Sequence[torch.dtype], n: int, device: torch.device) -> None:
    """Raises ValueError unless `x` is [n], contiguous, of one of the dtypes, on the device."""
    right = x.dtype in dtypes and x.dim() == 1 and x.numel() == n and x.device == device
    if right and x.layout == torch.strided and x.is_contiguous() and not x.is_neg():
        return
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}, must be {' or '.join(str(dtype) for dtype in dtypes)}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, must be on {device}")
    if x.dim() != 1 or x.numel() != n:
        raise ValueError(f"{name} has shape {list(x.shape)}, must be [{n}]")
    raise ValueError(f"{name} is not contiguous")


def _moment(x: reference.Moment, name: str, n: int, device: torch.device) -> None:
    tensor(x.values, f"{name}.values", _MOMENTS, n, device)
    if x.values.dtype != torch.uint8:
        if x.scales is not None:
            raise ValueError(f"{name} has scales, but values in {x.values.dtype}, not codes in uint8")
        return
    if x.scales is None or x.book is None or x.block < 1:
        raise ValueError(f"{name} holds codes, so it needs scales, a book and a block of at least 1, not {x.block}")
    tensor(x.scales, f"{name}.scales", _FLOAT32, -(-n // x.block), device)
    if not 1 <= x.book.numel() <= 256:
        raise ValueError(f"{name}.book has {x.book.numel()} values, must have 1 to 256")
    tensor(x.book, f"{name}.book", _FLOAT32, x.book.numel(), device)


def _draw(x: reference.Draw, name: str, n: int, device: torch.device) -> None:
    if not isinstance(x.index, range):
        tensor(x.index, f"{name}.index", _INT64, n, device)
    elif len(x.index) != n or x.index.step != 1:
        raise ValueError(f"{name}.index is {x.index}, must be {n} long with step 1")
