"""A decoder-only transformer with gated feed-forwards and shared heads of keys, for plans: it never gets memory."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Counts. kv_heads: heads of keys and values. inner: width of the feed-forward. context: tokens of a row."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    context: int


PRESETS = {
    "125m": Sizes(12, 768, 12, 12, 2048, 50304, 1024),
    "1b": Sizes(16, 2048, 32, 8, 8192, 128256, 4096),
    "8b": Sizes(32, 4096, 32, 8, 14336, 128256, 4096),
    "70b": Sizes(80, 8192, 64, 8, 28672, 128256, 4096),
    "405b": Sizes(126, 16384, 128, 8, 53248, 128256, 4096),
}


class Layer(nn.Module):
    """Attention and a gated feed-forward, pre-norm."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = s.heads, s.kv_heads, s.width // s.heads
        self.norm1, self.norm2 = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.q, self.proj = nn.Linear(s.width, s.width, bias=False), nn.Linear(s.width, s.width, bias=False)
        self.kv = nn.Linear(s.width, 2 * s.kv_heads * self.size, bias=False)
        self.gate, self.up = nn.Linear(s.width, s.inner, bias=False), nn.Linear(s.width, s.inner, bias=False)
        self.down = nn.Linear(s.inner, s.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, self.kv_heads, self.size)).permute(2, 0, 3, 1, 4)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Tokens and labels [rows, context] -> mean loss. Positions are left out: they take next to no memory."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.tok = nn.Embedding(s.vocab, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm, self.head = nn.RMSNorm(s.width), nn.Linear(s.width, s.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
