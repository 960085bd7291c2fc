"""Trains a GAN on points of a ring: two states, and the judgement of one handed to the other as a cotangent."""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus

import funzero as fz

ROWS, NOISE = 64, 8  # rows of a step, over all ranks

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 64), nn.Tanh(), nn.Linear(64, 2))
discriminator = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))


def generate(params, noise):
    return fz.functional_call(generator, params, noise)


def judge(params, points):  # how real they look
    return fz.functional_call(discriminator, params, points).squeeze(-1)


def d_loss(params, batch):
    real, fake = judge(params, batch["real"]), judge(params, batch["fake"])
    return fz.Loss((softplus(-real) + softplus(fake)).sum(), weight=len(real))


def init(mesh, stage, dtype=torch.float32):
    states = []
    for module, rate in ((generator, 1e-3), (discriminator, 2e-3)):
        params, tx = fz.tree.map(lambda p: p.to(dtype), fz.split_module(module)[0]), fz.adam(rate, b1=0.5)
        specs = fz.zero_specs(params, tx, mesh, stage=stage)
        states.append(fz.init_state(params, tx, specs=specs))
    g_step = fz.make_step(None, fz.adam(1e-3, b1=0.5))  # it only updates
    return *states, g_step, fz.make_step(d_loss, fz.adam(2e-3, b1=0.5))


def train_g(g, d, g_step, noise):
    fake, pull_g = fz.vjp(generate, g.params, noise, specs=g.specs)
    judged, pull_d = fz.vjp(judge, d.params, fake, specs=d.specs)
    _, fake_bar = pull_d(-torch.sigmoid(-judged), last=True)  # the derivative of softplus(-judged); d stays as it is
    grads, _ = pull_g(fake_bar, last=True)
    return g_step.update(fz.accumulate_into(g, grads, weight=ROWS))


def draw(step, mesh, dtype=torch.float32):
    rng = torch.Generator().manual_seed(step)
    angle, noise = torch.rand(ROWS, generator=rng), torch.randn(2 * ROWS, NOISE, generator=rng)
    ring = torch.stack([angle.mul(2 * torch.pi).cos(), angle.mul(2 * torch.pi).sin()], 1)
    batch = {"real": ring, "noise": noise[:ROWS], "other": noise[ROWS:]}
    return fz.data.local({n: x.to(mesh.device, dtype) for n, x in batch.items()}, mesh)


def train(mesh, *, steps, stage, dtype=torch.float32):
    g, d, g_step, d_step = init(mesh, stage, dtype)
    for t in range(steps):
        batch = draw(t, mesh, dtype)
        fake = fz.call(generate, g, batch["noise"])
        d, judged = d_step(d, {"real": batch["real"], "fake": fake})
        g, _ = train_g(g, d, g_step, batch["other"])
    return g, d, judged


if __name__ == "__main__":
    mesh = fz.make_mesh(dp=-1)
    g, _, judged = train(mesh, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 600, stage=3)
    radius = fz.call(generate, g, torch.randn(1000, NOISE, device=mesh.device)).norm(dim=1)
    if mesh.rank == 0:
        print(
            f"loss of the discriminator {judged.loss:.3f}; radius of what is made {radius.mean():.2f} ({radius.std():.2f})"
        )
