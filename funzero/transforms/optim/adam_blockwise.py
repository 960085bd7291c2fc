"""Adam whose moments are kept in 8 or 4 bits an element, with one float32 scale for each block of a leaf.

m' = b1 m + (1 - b1) g,  v' = b2 v + (1 - b2) g^2,  u = (m' / (1 - b1^t')) / (sqrt(v' / (1 - b2^t')) + eps)

u is made from m' and v' before they are rounded. Kept are the codes of m', and those of sqrt(v') in a book without 0: a
v' rounded to 0 beside an m' that was not would make the next step as large as m / eps.

References: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021; Li et al., "Memory Efficient
Optimizers with 4-bit States", 2023; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014.
"""

from typing import Any

import torch

from funzero.core import abstract
from funzero.core import tree as tree_lib
from funzero.transforms import blockwise
from funzero.transforms.base import Hyperparams, Scalar, Transform, leafwise
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.chain import chain
from funzero.transforms.moments import columns

ENTRIES = ("count", "mu", "mu_scale", "nu", "nu_scale")


def scale_by_adam_8bit(b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8, block_size: int = 256) -> Transform:
    """Adam's direction with moments of 8 bits; see the equations of this module.

    The state holds for each leaf uint8 codes `mu` and `nu`, one float32 `mu_scale` and `nu_scale` for each block, and
    an int32 `count`: 2.03 bytes for each element of a param with blocks of 256. The last block of a leaf may be short.

    Args:
        block_size: elements of a flattened leaf that share a scale. Blocks do not depend on how the leaf is cut.

    >>> state = scale_by_adam_8bit().init({"w": torch.zeros(20, 30)})
    >>> [(str(state[k]["w"].dtype), len(state[k]["w"])) for k in ("mu", "mu_scale")]
    [('torch.uint8', 600), ('torch.float32', 3)]
    """
    return _scale_by_adam(8, b1, b2, eps, block_size)


def scale_by_adam_4bit(b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8, block_size: int = 128) -> Transform:
    """Adam's direction with moments of 4 bits, two to a byte: 1.06 bytes for each element; see `scale_by_adam_8bit`.

    Args:
        block_size: even.

    >>> state = scale_by_adam_4bit().init({"w": torch.zeros(20, 30)})
    >>> [(str(state[k]["w"].dtype), len(state[k]["w"])) for k in ("mu", "mu_scale")]
    [('torch.uint8', 300), ('torch.float32', 5)]
    """
    return _scale_by_adam(4, b1, b2, eps, block_size)


def _scale_by_adam(bits: int, b1: Scalar, b2: Scalar, eps: Scalar, block: int) -> Transform:
    name, per_byte = f"scale_by_adam_{bits}bit", 8 // bits
    if block < 1 or block % per_byte:
        raise ValueError(f"{name}: block_size is a positive multiple of {per_byte}, got {block}")
    hyper = Hyperparams({"b1": b1, "b2": b2, "eps": eps}, count="schedule_count")
    books = blockwise.signed_book(bits), blockwise.positive_book(bits)

    def load(packed: torch.Tensor, scales: torch.Tensor, book: blockwise.Book, like: torch.Tensor) -> torch.Tensor:
        codes = packed if per_byte == 1 else blockwise.unpack(packed, like.numel())
        return blockwise.decode(codes, scales, book, block).to(like.dtype).view_as(like)

    def store(x: torch.Tensor, book: blockwise.Book) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = blockwise.encode(x.reshape(-1), book, block)
        return codes if per_byte == 1 else blockwise.pack(codes), scales

    def start(path: str, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if p.is_complex():
            raise TypeError(f"{name}: {path} is {p.dtype}; give complex leaves another optimizer by partition(...)")
        count = p.new_zeros((), dtype=torch.int32)
        moment = [(per_byte, torch.uint8), (block, torch.float32)] * 2
        return count, *(abstract.zeros_per_block(p, size, dtype) for size, dtype in moment)

    def init(params: Any) -> Any:
        names, leaves, _ = tree_lib.flatten_with_paths(params)
        rows = [start(path, p) for path, p in zip(names, leaves, strict=True)]
        return {**hyper.init(params), **columns(ENTRIES, rows, params)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        h = hyper.read(state)
        b1, b2, eps = h["b1"], h["b2"], h["eps"]

        def one(g: torch.Tensor, count: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
            g, t = g.to(torch.promote_types(g.dtype, torch.float32)), count + 1
            m = b1 * load(kept[0], kept[1], books[0], g) + (1 - b1) * g
            v = b2 * load(kept[2], kept[3], books[1], g).square() + (1 - b2) * g * g
            u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
            return u, t, *store(m, books[0]), *store(v.sqrt(), books[1])

        trees = [updates, *(state[k] for k in ENTRIES)]
        rows = [one(*row) for row in zip(*map(tree_lib.leaves, trees), strict=True)]
        named = columns(("out", *ENTRIES), rows, updates)
        out = tree_lib.map(lambda u, g: u.to(g.dtype), named.pop("out"), updates)
        return out, {**hyper.advance(state), **named}

    return leafwise(name, init, update, quantum=block, fused=(name, (hyper, block)) if bits == 8 else None)


def adamw_8bit(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    block_size: int = 256,
) -> Transform:
    """`adamw` with moments of 8 bits, see `scale_by_adam_8bit`; the arguments are those of `adamw`.

    >>> sorted(adamw_8bit(1e-3).init({"w": torch.zeros(2)}))
    ['add_decayed_weights', 'scale_by_adam_8bit', 'scale_by_learning_rate']
    """
    direction = scale_by_adam_8bit(b1, b2, eps, block_size)
    return chain(
        direction, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate), name="adamw_8bit"
    )


def adamw_4bit(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    block_size: int = 128,
) -> Transform:
    """`adamw` with moments of 4 bits, see `scale_by_adam_4bit`; the arguments are those of `adamw`.

    >>> sorted(adamw_4bit(1e-3).init({"w": torch.zeros(2)}))
    ['add_decayed_weights', 'scale_by_adam_4bit', 'scale_by_learning_rate']
    """
    direction = scale_by_adam_4bit(b1, b2, eps, block_size)
    return chain(
        direction, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate), name="adamw_4bit"
    )
