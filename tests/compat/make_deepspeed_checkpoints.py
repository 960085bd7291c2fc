"""Writes the checkpoints of tests/compat/data with a real DeepSpeed: `python -m tests.compat.make_deepspeed_checkpoints`.

It needs `pip install deepspeed` and runs on two or three processes of a CPU. Each folder of the output holds what
`save_checkpoint` wrote, and `expected.safetensors`, gathered in the live engine by DeepSpeed's own functions:
`params/<name>`, `<state key>/<name>` at the time of the checkpoint, `grads/<name>` of one more step, and `after/<name>`,
the params after it.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

DATA = pathlib.Path(__file__).parent / "data"
# name: (ZeRO stage, ranks, dtype, optimizer, whether to make a universal one of it)
CASES = {
    "zero0_float32": (0, 2, "float32", "adamw", False),
    "zero0_bfloat16": (0, 2, "bfloat16", "adamw", False),
    "zero1_float32": (1, 2, "float32", "adamw", False),
    "zero1_bfloat16": (1, 2, "bfloat16", "adamw", True),
    "zero2_float32": (2, 2, "float32", "adamw", True),
    "zero2_bfloat16": (2, 3, "bfloat16", "adamw", False),
    "zero2_float16": (2, 2, "float16", "adamw", False),
    "zero2_float32_sgd": (2, 2, "float32", "sgd", False),
    "zero3_float32": (3, 2, "float32", "adamw", True),
    "zero3_bfloat16": (3, 3, "bfloat16", "adamw", False),
    "zero3_bfloat16_sgd": (3, 2, "bfloat16", "sgd", False),
}


class Model(nn.Module):
    """Sizes that the ranks do not divide, a weight of one element, a tied weight, a frozen weight, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.up = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 3, bias=False)
        self.down = nn.Linear(3, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.temperature = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.tensor([3, 1, 4]))
        self.register_buffer("shift", torch.tensor([0.5, -0.25, 0.125]))
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(self.embed(tokens)))
        h = self.head(self.down(self.frozen(h) + self.shift.to(h.dtype))) * self.temperature
        return nn.functional.cross_entropy(h[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict]:
    """Vectors and scalars do not decay; the two groups have rates of their own."""
    named = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in named if p.dim() > 1], "lr": 0.02, "weight_decay": 0.1},
        {"params": [p for p in named if p.dim() <= 1], "lr": 0.01, "weight_decay": 0.0},
    ]


def batches(rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, 11, (4, 6), generator=draw) for _ in range(4)]


def write(rank: int, name: str, folder: str, port: int) -> None:
    """One rank's part of one case."""
    stage, ranks, dtype, optimizer, _ = CASES[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    if dtype == "float16":  # DeepSpeed has no float16 on a CPU; torch has
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(7)
    model = Model()
    if optimizer == "adamw":
        opt = torch.optim.AdamW(groups(model), betas=(0.8, 0.95), eps=1e-6)
    else:
        opt = torch.optim.SGD(groups(model), momentum=0.75)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "initial_scale_power": 6, "hysteresis": 2},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 40},
        "gradient_clipping": 0.0,  # its default is 1
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config, dist_init_required=True)
    data = batches(rank)
    for tokens in data[:3]:
        engine.backward(engine(tokens))
        engine.step()
    keys = ("exp_avg", "exp_avg_sq") if optimizer == "adamw" else ("momentum_buffer",)
    expected = values(engine, stage, ("params", *keys))
    engine.save_checkpoint(folder, tag="global_step3")
    engine.backward(engine(data[3]))
    expected |= values(engine, stage, ("grads",))
    engine.step()
    expected |= {f"after/{n.partition('/')[2]}": x for n, x in values(engine, stage, ("params",)).items()}
    if rank == 0:
        save_file(expected, f"{folder}/expected.safetensors")
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


def values(engine: Any, stage: int, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Whole float32 tensors of every param, by `<key>/<name>`; frozen ones have params only."""
    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # DeepSpeed links only the first group's state
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for key in keys:
        for name, p in engine.module.named_parameters():
            if p.requires_grad or key == "params":
                found[f"{key}/{name}"] = value(engine, stage, key, p).detach().float().clone().contiguous()
    return found


def value(engine: Any, stage: int, key: str, p: nn.Parameter) -> torch.Tensor:
    import deepspeed
    from deepspeed import utils

    if not p.requires_grad:
        with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
            return p.data.clone()
    if key == "grads":
        return utils.safe_get_full_grad(p) / getattr(engine.optimizer, "loss_scale", 1)
    if stage == 3 or hasattr(p, "_hp_mapping"):
        return utils.safe_get_full_fp32_param(p) if key == "params" else utils.safe_get_full_optimizer_state(p, key)
    master = p  # ZeRO stage 0: every rank holds everything, in bfloat16 beside a float32 copy
    if hasattr(engine.optimizer, "fp32_groups"):
        low = [q for group in engine.optimizer.fp16_groups for q in group]
        high = [q for group in engine.optimizer.fp32_groups for q in group]
        master = next(h for q, h in zip(low, high, strict=True) if q is p)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return master if key == "params" else inner.state[master][key]


def universal(folder: pathlib.Path, out: pathlib.Path) -> None:
    """DeepSpeed's own converter."""
    shutil.rmtree(out, ignore_errors=True)
    command = ["-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers=1", "--num_merge_workers=1"]
    command += ["--inject_missing_state"]
    files = [f"--input_folder={folder}/global_step3", f"--output_folder={out}/global_step3"]
    subprocess.run([sys.executable, *command, *files], check=True, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    shutil.copy(folder / "expected.safetensors", out)


def write_case(name: str, data: pathlib.Path) -> None:
    """All ranks of one case, into a folder of that name in `data`."""
    folder = data / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(write, (name, str(folder), port), nprocs=CASES[name][1])
    if CASES[name][-1]:
        universal(folder, data / f"universal_of_{name}")
    for script in data.glob("**/zero_to_*.py"):
        script.unlink()


def main() -> None:
    for name in CASES:
        write_case(name, DATA)


if __name__ == "__main__":
    main()
