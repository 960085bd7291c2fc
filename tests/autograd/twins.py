"""The worked examples by torch alone, in one process: modules, torch.optim and torch.autograd."""

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

import funzero as fz

F64 = torch.float64
Params = dict[str, torch.Tensor]


def example(name: str) -> Any:
    """The module of an example; the last imports another beside it."""
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"examples.{name}")


def rows(module: Any, t: int) -> Any:
    """The global batch of a step."""
    return module.draw(t, fz.abstract_mesh(dp=1), F64)


def twin(*modules: nn.Module) -> list[nn.Module]:
    """Copies in float64."""
    return [copy.deepcopy(m).double() for m in modules]


def named(module: nn.Module) -> Params:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def gan(steps: int) -> list[Params]:
    ex = example("02_gan")
    g, d = twin(ex.generator, ex.discriminator)
    g_opt = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for t in range(steps):
        batch = rows(ex, t)
        d_opt.zero_grad()
        (softplus(-d(batch["real"])) + softplus(d(g(batch["noise"]).detach()))).mean().backward()
        d_opt.step()
        g_opt.zero_grad()
        softplus(-d(g(batch["other"]))).mean().backward()
        g_opt.step()
    return [named(g), named(d)]


def actor_critic(steps: int) -> list[Params]:
    ex = example("03_actor_critic")
    actor, judge = twin(ex.policy, ex.critic)
    reference, target = copy.deepcopy(actor), copy.deepcopy(judge)
    actor_opt, judge_opt = (torch.optim.Adam(m.parameters(), lr=5e-3) for m in (actor, judge))
    for t in range(steps):
        s, u = rows(ex, t).values()
        with torch.no_grad():
            action, reward, after = ex.act(actor(s).log_softmax(-1), s, u)
            goal = reward + ex.GAMMA * target(after).squeeze(-1)
            advantage, ref = goal - judge(s).squeeze(-1), reference(s).log_softmax(-1)
        logp = actor(s).log_softmax(-1)
        gain = advantage * logp.gather(-1, action[:, None]).squeeze(-1)
        actor_opt.zero_grad()
        (ex.BETA * (logp.exp() * (logp - ref)).sum(-1) - gain).mean().backward()
        actor_opt.step()
        judge_opt.zero_grad()
        (judge(s).squeeze(-1) - goal).square().mean().backward()
        judge_opt.step()
        with torch.no_grad():
            for a, b in zip(target.parameters(), judge.parameters(), strict=True):
                a.lerp_(b, ex.TAU)
    return [named(actor), named(judge), named(target)]


def distil(steps: int) -> list[Params]:
    ex = example("04_distil")
    big, small = twin(ex.big, ex.small)
    opt = torch.optim.AdamW(small.parameters(), lr=1e-2, weight_decay=0.01)
    for t in range(steps):
        x = rows(ex, t)
        with torch.no_grad():
            teacher = (3 * big(x)).log_softmax(-1)
        opt.zero_grad()
        nn.functional.kl_div(small(x).log_softmax(-1), teacher, reduction="batchmean", log_target=True).backward()
        opt.step()
    return [named(small)]


def gradient_penalty(steps: int) -> list[Params]:
    ex = example("05_gradient_penalty")
    (critic,) = twin(ex.critic)
    opt = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for t in range(steps):
        real, fake, mix = rows(ex, t).values()
        points = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(points).sum(), points, create_graph=True)
        opt.zero_grad()
        gap = critic(real) - critic(fake)
        (ex.WEIGHT * (slope.norm(dim=1) - 1).square() - gap.squeeze(-1)).mean().backward()
        opt.step()
    return [named(critic)]


def maml(steps: int) -> list[Params]:
    ex = example("06_maml")
    (net,) = twin(ex.net)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for t in range(steps):
        losses = []
        for x, y in zip(*rows(ex, t), strict=True):
            params = dict(net.named_parameters())
            speed = {n: torch.zeros_like(p) for n, p in params.items()}
            for _ in range(2):
                out = torch.func.functional_call(net, params, (x[: ex.SHOTS],))
                error = (out - y[: ex.SHOTS]).square().mean()
                grads = torch.autograd.grad(error, list(params.values()), create_graph=True)
                speed = {n: 0.9 * v + g for (n, v), g in zip(speed.items(), grads, strict=True)}
                params = {n: p - 0.05 * speed[n] for n, p in params.items()}
            out = torch.func.functional_call(net, params, (x[ex.SHOTS :],))
            losses.append((out - y[ex.SHOTS :]).square().mean())
        opt.zero_grad()
        torch.stack(losses).mean().backward()
        opt.step()
    return [named(net)]


def two_groups(steps: int) -> list[Params]:
    ex = example("07_two_groups")
    eye, speaker = twin(ex.eye, ex.speaker)
    opt = torch.optim.Adam([*eye.parameters(), *speaker.parameters()], lr=3e-3)
    (pictures, classes, *_), (text, target) = ex.digits.load(F64), ex.digits.spelled()
    for t in range(steps):
        rows = torch.randint(len(classes), (ex.MICROS, ex.ROWS), generator=torch.Generator().manual_seed(t))
        x, y = pictures[rows.view(-1)], classes[rows.view(-1)]
        opt.zero_grad()
        logits = speaker(eye(x), text[y]).transpose(1, 2)
        (nn.functional.cross_entropy(logits, target[y], ignore_index=-100, reduction="sum") / len(x)).backward()
        opt.step()
    return [named(eye), named(speaker)]


TWINS = {
    "02_gan": gan,
    "03_actor_critic": actor_critic,
    "04_distil": distil,
    "05_gradient_penalty": gradient_penalty,
    "06_maml": maml,
}
