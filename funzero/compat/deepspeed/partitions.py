"""From the flat pieces of DeepSpeed's ranks to whole tensors.

[Note: DeepSpeed's flat pieces] Stages 1 and 2 put the params of a group one after another into one buffer and cut that
into equal pieces, so a param lies on any number of ranks in a row; each rank's file says where in its piece a param's
part begins (`param_slice_mappings`), and the last pieces end in padding. Stage 3 cuts each param on its own: rank r has
elements r * k to (r + 1) * k of it, k = ceil(n / ranks), and its buffer holds such parts one after another, each padded
to k. `base_optimizer_state` (stage 3: `optimizer_state_dict`) holds buffers that are cut in the same way, one for each
key of the optimizer's state.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from funzero.compat.deepspeed.pickles import load

RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt$")
MASTER = "params"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What DeepSpeed's optimizer knows: whole tensors by state key and name, `MASTER` being the float32 params.

    Attributes:
        tensors: {key: {name: tensor}}. step: by name, where the optimizer counts. groups: by name, the index of its
            param group. hyperparams: of each param group. loss_scale: fields of the loss scaler.
    """

    tensors: dict[str, dict[str, torch.Tensor]]
    step: dict[str, int]
    groups: dict[str, int]
    hyperparams: list[dict[str, Any]]
    loss_scale: dict[str, Any]


def rank_files(folder: Path, kind: str) -> list[Path]:
    """The `model` or `optim` files of the ranks, in the order of the ranks.

    Raises ValueError for tensor-parallel ranks or a gap.
    """
    found = {}
    for path in folder.iterdir():
        match = RANK.search(path.name)
        if match and match[3] == kind:
            if int(match[2]):
                raise ValueError(f"{path}: tensor-parallel ranks; convert it with deepspeed's ds_to_universal first")
            found[int(match[1])] = path
    gaps = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if gaps:
        raise ValueError(f"{folder}: the *_{kind}_states.pt files of ranks {gaps} are missing")
    return [found[r] for r in range(len(found))]


def read_partitions(folder: Path, shapes: list[dict[str, Any]]) -> Optimizer:
    """Whole tensors from the files of all ranks, one file at a time.

    Args:
        shapes: of each flat buffer, {name: shape} in its order.

    Raises ValueError for files that are missing or do not have all elements.
    """
    files = rank_files(folder, "optim")
    sizes = {name: torch.Size(shape) for group in shapes for name, shape in group.items()}
    whole: dict[str, dict[str, torch.Tensor]] = {}
    filled: dict[tuple[str, str], int] = {}
    step: dict[str, int] = {}
    first: dict[str, Any] = {}
    for rank, path in enumerate(files):
        state = load(path)["optimizer_state_dict"]
        first = first or state
        if not {"param_slice_mappings", "fp32_flat_groups"} & state.keys():
            raise ValueError(
                f"{path}: does not say where its params lie; it is no file of ZeRO's, or of an old DeepSpeed"
            )
        _check_count(path, state.get("partition_count", len(files)), len(files))
        inner = _inner(state)
        flats = state["fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"]
        for group, flat in enumerate(flats):
            entries = inner.get(group, {})
            buffers = {MASTER: flat} | {k: v for k, v in entries.items() if _is_flat(v, flat)}
            for name, at, start, count in _parts(state, shapes[group], group, rank, len(files)):
                for key, buffer in buffers.items():
                    into = whole.setdefault(key, {})
                    if name not in into:
                        into[name] = torch.empty(sizes[name].numel(), dtype=buffer.dtype)
                    done = filled.get((key, name), 0)
                    if start not in (None, done) or at + count > buffer.numel() or done + count > into[name].numel():
                        raise ValueError(f"{path}: {key} of {name}: {count} elements at {at} do not fit")
                    into[name][done : done + count] = buffer[at : at + count]
                    filled[key, name] = done + count
                if "step" in entries:
                    step[name] = int(entries["step"])
    short = [f"{k} of {n}: {c} of {whole[k][n].numel()}" for (k, n), c in filled.items() if c < whole[k][n].numel()]
    short += [f"params of {name}" for name in sizes.keys() - whole.get(MASTER, {}).keys() if sizes[name].numel()]
    if short:
        raise ValueError(f"{folder}: the ranks' files do not have all elements: {'; '.join(sorted(short)[:3])}")
    tensors = {key: {n: x.view(sizes[n]) for n, x in tree.items()} for key, tree in whole.items()}
    return described(tensors, step, shapes, _param_groups(first), first)


def described(
    tensors: dict[str, dict[str, torch.Tensor]],
    step: dict[str, int],
    shapes: list[dict[str, Any]],
    param_groups: list[dict[str, Any]],
    state: dict[str, Any],
) -> Optimizer:
    """An `Optimizer` with what one rank's file says about all of them; a flat buffer's number is its param's there."""
    owner = {buffer: i for i, group in enumerate(param_groups) for buffer in group.get("params", ())}
    groups = {name: owner.get(i, i) for i, group in enumerate(shapes) for name in group}
    for name, index in groups.items():  # Apex and DeepSpeed's own Adam may count once for a whole group
        if index < len(param_groups) and "step" in param_groups[index]:
            step.setdefault(name, int(param_groups[index]["step"]))
        elif "base_optimizer_state_step" in state:
            step.setdefault(name, int(state["base_optimizer_state_step"]))
    hyperparams = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in param_groups]
    scaler = state.get("loss_scaler")
    return Optimizer(tensors, step, groups, hyperparams, dict(vars(scaler)) if scaler is not None else {})


def _check_count(path: Path, count: Any, found: int) -> None:
    counts = set(count) if isinstance(count, list) else {count}
    if counts != {found}:
        raise ValueError(
            f"{path}: written by groups of {sorted(counts)} ranks, and there are files of {found}; all are needed, and "
            "expert-parallel groups have to be converted with deepspeed's ds_to_universal first"
        )


def _inner(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The wrapped optimizer's state by flat buffer; DeepSpeed's elastic checkpoints have a list of them."""
    found = state.get("base_optimizer_state", state.get("optimizer_state_dict", {}))
    return dict(enumerate(found)) if isinstance(found, list) else found.get("state", {})


def _param_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    found = state.get("base_optimizer_state", state.get("optimizer_state_dict", {}))
    return [] if isinstance(found, list) else found.get("param_groups", [])


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    """A state buffer has an element for each of the params', and may have padding that those do not have."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() >= flat.numel()


def _parts(
    state: dict[str, Any], shapes: dict[str, Any], group: int, rank: int, ranks: int
) -> Iterator[tuple[str, int, int | None, int]]:
    """(name, where its part begins in this rank's buffer, where in the param or None for "next", elements)."""
    if "fp32_flat_groups" not in state:
        for name, address in state["param_slice_mappings"][group].items():
            yield name, address.start, None, address.numel
        return
    at = 0
    for name, shape in shapes.items():
        n = math.prod(shape)
        k = math.ceil(n / ranks)
        start = min(rank * k, n)
        yield name, at, start, min(start + k, n) - start
        at += k


def whole_frozen(files: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Frozen params from the model files of all ranks: whole in the first one, or cut like stage 3's."""
    shapes = files[0].get("frozen_param_shapes") or {}
    out = {}
    for name, shape in shapes.items():
        n = math.prod(shape)
        parts = [file["frozen_param_fragments"][name].reshape(-1) for file in files]
        flat = parts[0] if parts[0].numel() == n else torch.cat(parts)[:n]
        if flat.numel() != n:
            raise ValueError(f"{name}: the ranks' files have {flat.numel()} of {n} elements of this frozen param")
        out[name] = flat.view(*shape).clone()
    return out
