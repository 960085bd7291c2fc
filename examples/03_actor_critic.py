"""Actor and critic with a frozen reference of the actor and an EMA target of the critic: four states in one program."""

import dataclasses
import sys

import torch
from torch import nn

import funzero as fz

ROWS, STATES, ACTIONS = 256, 6, 4  # rows of a step, over all ranks
GAMMA, BETA, TAU = 0.5, 0.05, 0.1  # discount, weight of the reference, rate of the target

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(STATES, 32), nn.Tanh(), nn.Linear(32, ACTIONS))
critic = nn.Sequential(nn.Linear(STATES, 32), nn.Tanh(), nn.Linear(32, 1))


def log_probs(params, s):
    return fz.functional_call(policy, params, s).log_softmax(-1)


def value(params, s):
    return fz.functional_call(critic, params, s).squeeze(-1)


def actor_loss(params, batch):  # policy gradient, and the distance to the reference
    logp = log_probs(params, batch["s"])
    gain = batch["advantage"] * logp.gather(-1, batch["action"][:, None]).squeeze(-1)
    distance = (logp.exp() * (logp - batch["reference"])).sum(-1)
    return fz.Loss((BETA * distance - gain).sum(), weight=len(gain), aux={"distance": distance.mean()})


def critic_loss(params, batch):
    return fz.Loss((value(params, batch["s"]) - batch["target"]).square().sum(), weight=len(batch["s"]))


def init(mesh, stage, dtype=torch.float32):
    states, steps = [], []
    for module, loss in ((policy, actor_loss), (critic, critic_loss)):
        params, tx = fz.tree.map(lambda p: p.to(dtype), fz.split_module(module)[0]), fz.adam(5e-3)
        specs = fz.zero_specs(params, tx, mesh, stage=stage)
        states.append(fz.init_state(params, tx, specs=specs))
        frozen = fz.zero_specs(params, fz.identity(), mesh, stage=stage, trainable={"**": False})
        states.append(fz.init_state(params, fz.identity(), specs=frozen, trainable={"**": False}))
        steps.append(fz.make_step(loss, tx))
    return states, steps


def follow(target, state):  # element by element, so it works on whatever this rank has of each leaf
    params = fz.tree.map(lambda t, p: t.lerp(p, TAU), target.params, state.params)
    return dataclasses.replace(target, params=params)


def draw(step, mesh, dtype=torch.float32):
    rng = torch.Generator().manual_seed(step)
    batch = {"s": torch.randn(ROWS, STATES, generator=rng), "u": torch.rand(ROWS, 1, generator=rng)}
    return fz.data.local({n: x.to(mesh.device, dtype) for n, x in batch.items()}, mesh)


def act(logp, s, u):  # the world: the reward is the entry of s that the action names, and moves it to the front
    action = (logp.exp().cumsum(-1) < u).sum(-1).clamp(max=ACTIONS - 1)
    return action, s.gather(-1, action[:, None]).squeeze(-1), s.roll(1, -1)


def train(mesh, *, steps, stage, dtype=torch.float32):
    (actor, reference, judge, target), (actor_step, critic_step) = init(mesh, stage, dtype)
    for t in range(steps):
        s, u = draw(t, mesh, dtype).values()
        action, reward, after = act(fz.call(log_probs, actor, s), s, u)
        goal = reward + GAMMA * fz.call(value, target, after)
        batch = {"s": s, "action": action, "advantage": goal - fz.call(value, judge, s)}
        actor, metrics = actor_step(actor, batch | {"reference": fz.call(log_probs, reference, s)})
        judge, fit = critic_step(judge, {"s": s, "target": goal})
        target = follow(target, judge)
    return actor, judge, target, (reward.mean(), metrics.aux["distance"], fit.loss)


if __name__ == "__main__":
    mesh = fz.make_mesh(dp=-1)
    *_, (reward, distance, loss) = train(mesh, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 300, stage=3)
    if mesh.rank == 0:
        print(
            f"reward {reward:.2f} (the best is 1.03), distance to the reference {distance:.2f}, critic's loss {loss:.2f}"
        )
