"""A critic of two distributions with a gradient penalty: the gradient by its input is part of the loss."""

import sys

import torch
from torch import nn

import funzero as fz

ROWS = 64  # of a step, over all ranks
WEIGHT = 10.0  # of the penalty (Gulrajani et al., "Improved Training of Wasserstein GANs", 2017)

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))


def judge(params, points):
    return fz.functional_call(critic, params, points).squeeze(-1)


def loss_fn(params, batch):
    real, fake, t = batch["real"], batch["fake"], batch["t"]
    gap = judge(params, real) - judge(params, fake)
    score, pull = fz.vjp(judge, params, t * real + (1 - t) * fake)
    _, slope = pull(torch.ones_like(score))  # each score depends on its own point alone
    penalty = (slope.norm(dim=1) - 1).square()
    return fz.Loss(
        (WEIGHT * penalty - gap).sum(), weight=len(gap), aux={"gap": gap.mean(), "slope": slope.norm(dim=1).mean()}
    )


def init(mesh, stage, dtype=torch.float32):
    params, tx = fz.tree.map(lambda p: p.to(dtype), fz.split_module(critic)[0]), fz.adam(2e-3, b1=0.5)
    return fz.init_state(params, tx, specs=fz.zero_specs(params, tx, mesh, stage=stage)), fz.make_step(loss_fn, tx)


def draw(step, mesh, dtype=torch.float32):  # two clouds, 2 apart
    rng = torch.Generator().manual_seed(step)
    real, fake = torch.randn(2, ROWS, 2, generator=rng).mul(0.3).unbind()
    batch = {"real": real + torch.tensor([2.0, 0.0]), "fake": fake, "t": torch.rand(ROWS, 1, generator=rng)}
    return fz.data.local({n: x.to(mesh.device, dtype) for n, x in batch.items()}, mesh)


def train(mesh, *, steps, stage, dtype=torch.float32):
    state, step = init(mesh, stage, dtype)
    for t in range(steps):
        state, metrics = step(state, draw(t, mesh, dtype))
    return state, metrics


if __name__ == "__main__":
    mesh = fz.make_mesh(dp=-1)
    _, metrics = train(mesh, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 300, stage=3)
    if mesh.rank == 0:
        print(f"distance {metrics.aux['gap']:.2f} (it is 2), slope {metrics.aux['slope']:.2f}")
