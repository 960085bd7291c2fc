"""Distils a teacher that is cut over all ranks and never differentiated into a student of another layout."""

import sys

import torch
from torch import nn

import funzero as fz

ROWS, WIDTH, CLASSES = 128, 10, 5  # rows of a step, over all ranks

torch.manual_seed(0)
big = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES))
small = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def teach(params, x):
    return (3 * fz.functional_call(big, params, x)).log_softmax(-1)


def loss_fn(params, batch):  # KL divergence from the teacher
    logp = fz.functional_call(small, params, batch["x"]).log_softmax(-1)
    kl = (batch["teacher"].exp() * (batch["teacher"] - logp)).sum(-1)
    same = (logp.argmax(-1) == batch["teacher"].argmax(-1)).double().mean()
    return fz.Loss(kl.sum(), weight=len(kl), aux={"agree": same})


def init(mesh, stage, dtype=torch.float32):
    params = []
    for module in (big, small):
        params.append(fz.tree.map(lambda p: p.to(dtype), fz.split_module(module)[0]))
    none = {"**": False}  # no gradients, no sums, no moments
    frozen = fz.zero_specs(params[0], fz.identity(), mesh, stage=3, trainable=none)
    teacher = fz.init_state(params[0], fz.identity(), specs=frozen, trainable=none)
    tx = fz.adamw(1e-2, weight_decay=0.01)
    student = fz.init_state(params[1], tx, specs=fz.zero_specs(params[1], tx, mesh, stage=stage))
    return teacher, student, fz.make_step(loss_fn, tx)


def draw(step, mesh, dtype=torch.float32):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return fz.data.local(x.to(mesh.device, dtype), mesh)


def train(mesh, *, steps, stage, dtype=torch.float32):
    teacher, student, step = init(mesh, stage, dtype)
    for t in range(steps):
        x = draw(t, mesh, dtype)
        student, metrics = step(student, {"x": x, "teacher": fz.call(teach, teacher, x)})
    return student, metrics


if __name__ == "__main__":
    mesh = fz.make_mesh(dp=-1)
    _, metrics = train(mesh, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 400, stage=1)
    if mesh.rank == 0:
        print(f"KL divergence {metrics.loss:.4f}, same answer in {100 * metrics.aux['agree']:.0f} %")
