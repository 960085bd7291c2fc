"""Trains a byte-level GPT on the source of Python's own standard library: with plain python, or at ZeRO-3 under torchrun."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

import funzero as fz
from funzero.cli.corpus import load_corpus, sample_rows

ROWS, CONTEXT = 8, 128  # of a step, over all ranks


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4, context: int = CONTEXT) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, 256, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = 0.3 if name.startswith(("token", "position")) else weight.shape[1] ** -0.5
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(weight, std=std / math.sqrt(2 * layers) if residual else std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def setup(mesh, model, checkpoints, *, steps, stage=3, seed=0):
    def loss_fn(params, batch):  # pure; a sum and its count, so that batches of any size mix
        return fz.Loss(*fz.losses.cross_entropy(fz.functional_call(model, params, batch["tokens"]), batch["labels"]))

    schedule = fz.schedules.warmup_cosine(4e-3, warmup=min(40, steps // 4), total=steps, end=2e-4)
    tx = fz.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=lambda p: fz.tree.map(lambda x: x.dim() >= 2, p))
    params, _ = fz.split_module(model)
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
    state = fz.init_state(params, tx, key=seed, specs=specs)
    state = state if checkpoints.latest() is None else checkpoints.restore(state)
    return loss_fn, fz.make_step(loss_fn, tx, specs=specs, max_norm=1.0), state


def train(mesh, step, state, text, *, steps, seed=0):
    while (at := int(state.step)) < steps:  # data are a function of (seed, step): a resumed run reads the same
        rows = sample_rows(text, ROWS, CONTEXT, seed, at).to(mesh.device)
        state, metrics = step(state, fz.data.local({"tokens": rows[:, :-1], "labels": rows[:, 1:]}, mesh))
        yield state, metrics


if __name__ == "__main__":
    mesh, steps = fz.make_mesh(dp=-1), int(sys.argv[1]) if len(sys.argv) > 1 else 300
    checkpoints = fz.CheckpointManager("runs/gpt", every_steps=100)  # a run that was stopped goes on from the latest
    torch.manual_seed(0)
    _, step, first = setup(mesh, GPT(), checkpoints, steps=steps)
    with checkpoints.on_signal():  # Ctrl-C, or the SIGTERM of a cluster: saves after the step that runs
        for state, metrics in train(mesh, step, first, load_corpus().train, steps=steps):
            if mesh.rank == 0 and metrics.step % 20 == 0:
                print(f"step {metrics.step}  {metrics.loss / math.log(2):.3f} bits per byte", flush=True)
            if checkpoints.after_step(state, last=bool(metrics.step == steps)):
                break
    if mesh.rank == 0:
        print(f"step {checkpoints.latest()} is the latest checkpoint in {checkpoints.root}")
