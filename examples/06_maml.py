"""MAML: learns params from which one step of an optimizer adapts to a task; the outer gradient goes through that step.

Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", 2017.
"""

import sys

import torch
from torch import nn

import funzero as fz

TASKS, SHOTS = 16, 10  # tasks of a step, over all ranks; points to adapt to, and to judge by

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
inner = fz.sgd(0.05, momentum=0.9)


def error(params, x, y):
    return (fz.functional_call(net, params, x) - y).square().mean()


def adapted(params, x, y, times=2):
    opt_state = inner.init(params)
    for _ in range(times):
        _, pull = fz.vjp(error, params, x, y)
        grads, *_ = pull(1.0)
        updates, opt_state = inner.update(grads, opt_state, params)
        params = fz.apply_updates(params, updates)
    return params


def loss_fn(params, tasks):
    losses = [error(adapted(params, x[:SHOTS], y[:SHOTS]), x[SHOTS:], y[SHOTS:]) for x, y in zip(*tasks, strict=True)]
    return fz.Loss(torch.stack(losses).sum(), weight=len(losses))


def init(mesh, stage, dtype=torch.float32):
    params, tx = fz.tree.map(lambda p: p.to(dtype), fz.split_module(net)[0]), fz.adam(3e-3)
    return fz.init_state(params, tx, specs=fz.zero_specs(params, tx, mesh, stage=stage)), fz.make_step(loss_fn, tx)


def draw(step, mesh, dtype=torch.float32):  # sines of some amplitude and phase
    rng = torch.Generator().manual_seed(step)
    amplitude, phase = torch.rand(2, TASKS, 1, 1, generator=rng).unbind()
    x = 10 * torch.rand(TASKS, 2 * SHOTS, 1, generator=rng) - 5
    y = (0.5 + 2 * amplitude) * (x + 3 * phase).sin()
    return fz.data.local((x.to(mesh.device, dtype), y.to(mesh.device, dtype)), mesh)


def train(mesh, *, steps, stage, dtype=torch.float32):
    state, step = init(mesh, stage, dtype)
    for t in range(steps):
        state, metrics = step(state, draw(t, mesh, dtype))
    return state, metrics


if __name__ == "__main__":
    mesh = fz.make_mesh(dp=-1)
    _, first = train(mesh, steps=1, stage=3)
    _, metrics = train(mesh, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 150, stage=3)
    if mesh.rank == 0:
        print(f"error after adapting: {first.loss:.2f} at first, now {metrics.loss:.2f}")
