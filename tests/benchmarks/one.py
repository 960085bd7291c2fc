"""Runs one system on one task and prints a JSON line. `python -m tests.benchmarks.one SYSTEM TASK`, also under torchrun.

Systems: torch, ddp, fsdp2, fz0 ... fz3 (a ZeRO stage), fz3:40 (with a gather budget of 40 MB).
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # the peers' torch.optim imports it: with it glibc's free lists differ, 7 % of the tiny step
import torch.distributed as dist
from torch import nn

import funzero as fz
from tests.benchmarks.work import peak_rss_mb, reset_peak, task, timed

RATE = 1e-4


def torch_loop(model: nn.Module, params: list[Any], batch: Any) -> Callable[[], torch.Tensor]:
    """What a user of plain torch writes."""
    opt = torch.optim.AdamW(params, lr=RATE, fused=True)

    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        return loss

    return step


def peer(system: str, name: str, model: nn.Module, batch: Any) -> Callable[[], torch.Tensor]:
    """A loop of plain torch, DDP or FSDP2."""
    if system == "ddp":
        return torch_loop(nn.parallel.DistributedDataParallel(model), list(model.parameters()), batch)
    if system == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks if name == "medium" else ():  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return torch_loop(model, list(model.parameters()), batch)


def funzero(system: str, model: nn.Module, batch: Any) -> Callable[[], torch.Tensor]:
    """The same with funzero; the module itself is on meta."""
    stage, _, budget = system.removeprefix("fz").partition(":")
    params, _ = fz.split_module(model)
    tx = fz.adamw(RATE, weight_decay=1e-2)
    specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=int(stage))
    state = fz.init_state(params, tx, specs=specs)
    del params
    model.to("meta")

    def loss_fn(p: Any, b: Any) -> torch.Tensor:
        return fz.functional_call(model, p, *b)

    step = fz.make_step(loss_fn, tx, specs=specs, max_norm=1.0, gather_budget=int(budget) * 2**20 if budget else None)

    def run() -> torch.Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics.loss

    return run


def main(system: str, name: str) -> None:
    """Prints system, task, seconds of a step, peak RSS after initialisation, and the loss after the last step."""
    warnings.filterwarnings("ignore")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(2 if ranks == 1 and name == "small" else 1)
    if ranks > 1:
        dist.init_process_group("gloo")
    model, batch = task(name, dist.get_rank() if ranks > 1 else 0)
    if not system.startswith("fz"):
        os.environ["BENCH_LOCAL_LOSS"] = "1"
        step = peer(system, name, model, batch)
    else:
        step = funzero(system, model, batch)
    reset_peak()
    seconds, loss = timed(step, *((100, 10) if name == "tiny" else (5, 2)))
    if ranks == 1 or dist.get_rank() == 0:
        print(json.dumps({"system": system, "task": name, "step_s": seconds, "peak_mb": peak_rss_mb(), "loss": loss}))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
