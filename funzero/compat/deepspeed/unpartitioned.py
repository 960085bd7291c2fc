"""What DeepSpeed keeps whole: checkpoints without ZeRO, and universal ones."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from funzero.compat.deepspeed.partitions import MASTER, Optimizer, described
from funzero.compat.deepspeed.pickles import load


def read_stage0(
    path: Path, model: dict[str, Any], names: Sequence[Sequence[str]] | None
) -> tuple[Optimizer, dict[str, str]]:
    """A torch optimizer numbers the params through its groups; a float32 master is a list for each group."""
    module = {n: x for n, x in model["module"].items() if n not in model["buffer_names"]}
    shared = _same_memory(module)
    state = model.get("optimizer") or {}
    inner = state.get("optimizer_state_dict", state)
    param_groups = inner.get("param_groups", [])
    counts = [len(group["params"]) for group in param_groups]
    if names is None:
        names = [[n for n in module if n not in shared]] if len(counts) == 1 else [()] * len(counts)
    _check_names(path, names, counts, module)
    if "fp32_groups_flat" in state:
        raise ValueError(f"{path}: DeepSpeed's fused float16 optimizer without ZeRO is not read; save it with stage 1")
    tensors: dict[str, dict[str, torch.Tensor]] = {MASTER: {}}
    step, shapes = {}, []
    for i, (group, own) in enumerate(zip(param_groups, names, strict=True)):
        for at, (number, name) in enumerate(zip(group["params"], own, strict=True)):
            shapes.append({name: module[name].shape})
            entries = inner["state"].get(number, {})
            mirrors = {k: v for k, v in entries.items() if k != "step" and isinstance(v, torch.Tensor) and v.dim()}
            if "fp32_groups" in state:
                mirrors[MASTER] = state["fp32_groups"][i][at]
            for key, value in mirrors.items():
                if value.shape != module[name].shape:
                    raise ValueError(f"{path}: {key} of {name} is {list(value.shape)}, not {list(module[name].shape)}")
                tensors.setdefault(key, {})[name] = value.detach().clone()
            if "step" in entries:
                step[name] = int(entries["step"])
    found = described(tensors, step, shapes, param_groups, state)
    return dataclasses.replace(found, loss_scale=_stage0_scale(state)), shared


def _check_names(path: Path, names: Sequence[Sequence[str]], counts: list[int], module: dict[str, Any]) -> None:
    unknown = sorted({n for group in names for n in group} - module.keys())
    if unknown or [len(group) for group in names] != counts:
        raise ValueError(
            f"{path}: stage 0 does not say which params its optimizer has: give names=, a list for each of its "
            f"{len(counts)} groups, of {counts} names in their order" + (f"; there is no {unknown}" if unknown else "")
        )


def _stage0_scale(state: dict[str, Any]) -> dict[str, Any]:
    scale = {k: state[k] for k in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window") if k in state}
    return scale | {"dynamic": state["dynamic_loss_scale"]} if scale else {}


def _same_memory(module: dict[str, torch.Tensor]) -> dict[str, str]:
    """{later name: first name} of entries that are one tensor."""
    seen: dict[Any, str] = {}
    shared = {}
    for name, x in module.items():
        first = seen.setdefault((x.data_ptr(), x.shape, x.stride()), name) if x.numel() else name
        if first != name:
            shared[name] = first
    return shared


def read_universal(path: Path, shapes: list[dict[str, Any]]) -> Optimizer:
    """One folder a param and one file a tensor; those made from stage 3 are flat and have no step of their own."""
    common = load(path / "zero" / "optimizer_state.pt")
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    step = {}
    for group, sizes in enumerate(shapes):
        for name, shape in sizes.items():
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"{path}: {name!r} is not the name of a param")
            for file in sorted((path / "zero" / name).glob("*.pt")):
                value = load(file)
                if file.stem == "step":
                    step[name] = int(value)
                    continue
                whole = value["param"] if isinstance(value, dict) else value.view(*shape)
                tensors.setdefault(MASTER if file.stem == "fp32" else file.stem, {})[name] = whole.clone()
            inner = common.get("optimizer_state_dict", {}).get("state", {}).get(group, {})
            if "step" in inner:
                step.setdefault(name, int(inner["step"]))
    missing = sorted({n for group in shapes for n in group} - tensors.get(MASTER, {}).keys())
    if missing:
        raise ValueError(f"{path}/zero: there is no fp32.pt of {', '.join(missing)}")
    return described(tensors, step, shapes, common.get("param_groups", []), common)
