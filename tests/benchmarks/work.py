"""The work that every system here does: models, batches, and how a step is timed. One process runs one system."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SMALL = {"vocab": 4096, "context": 256, "width": 256, "heads": 4, "layers": 6}  # 6.9M params, batch 8 x 256
MEDIUM = {"vocab": 4096, "context": 256, "width": 512, "heads": 8, "layers": 8}  # 29.5M params, batch 4 x 128 a rank


class Block(nn.Module):
    """A transformer block with biases, pre-norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """A plain GPT that returns its mean loss."""

    def __init__(self, vocab: int, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).flatten(0, 1), labels.flatten())


class Tiny(nn.Module):
    """50 Linear(16, 16): 100 leaves and next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def batch(rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and labels."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4096, (rows, length), generator=g), torch.randint(0, 4096, (rows, length), generator=g)


def task(name: str, rank: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model, equal on all ranks, and this rank's batch."""
    torch.manual_seed(0)
    if name == "tiny":
        model: nn.Module = Tiny()
        torch.manual_seed(rank)
        return model, (torch.randn(4, 16), torch.zeros(4))
    model = GPT(**(SMALL if name == "small" else MEDIUM))
    return model, batch(8, 256, rank) if name == "small" else batch(4, 128, rank)


def reset_peak() -> None:
    """Starts VmHWM anew."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def peak_rss_mb() -> float:
    """VmHWM of this process."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("VmHWM"))


def timed(step: Callable[[], Any], runs: int, warmup: int) -> tuple[float, float]:
    """Median seconds of a step, and the loss of the last."""
    from torch import distributed as dist

    loss = None
    for _ in range(warmup):
        loss = step()
    times = []
    for _ in range(runs):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - start)
    assert loss is not None
    value = loss.detach().double().clone()
    if dist.is_initialized() and os.environ.get("BENCH_LOCAL_LOSS"):
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return statistics.median(times), float(value)
