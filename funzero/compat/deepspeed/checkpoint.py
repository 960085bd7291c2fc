"""DeepSpeed's checkpoints as funzero states: ZeRO stages 0 to 3 on any number of ranks, and universal ones.

DeepSpeed is not needed. A rank's file is read one at a time, and nothing in a file is run, see `pickles`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from funzero.compat.deepspeed.partitions import MASTER, rank_files, read_partitions, whole_frozen
from funzero.compat.deepspeed.pickles import load
from funzero.compat.deepspeed.unpartitioned import read_stage0, read_universal
from funzero.core import tree as tree_lib
from funzero.core.spec import Layout, Specs
from funzero.core.state import EMPTY_NODE, TrainState
from funzero.executor import place
from funzero.executor.stores import keep
from funzero.transforms.rng import make_key
from funzero.transforms.storage import MASTER as MASTER_ENTRY


@dataclasses.dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """What a DeepSpeed checkpoint holds; tensors are whole, on the CPU, in the dtype of the file.

    Attributes:
        params: by torch's name: the float32 master where there is one, else the module's weight. A tied one has one.
        moments: {key of the optimizer's state: {name: tensor like the param}}, such as `exp_avg` and `exp_avg_sq`.
        step: by name, the optimizer's count of updates; empty for an optimizer without a count.
        groups: by name, the index of its param group; frozen params have none.
        hyperparams: of each param group: `lr`, `betas`, `eps`, `weight_decay`, ... (a schedule's rate of that moment).
        shared: {another name of a tied param: its name in `params`}.
        buffers: by name.
        loss_scale: fields of DeepSpeed's loss scaler, `cur_scale` and others; empty where the file has none.
        global_steps: updates, skipped ones included. skipped_steps: those.
    """

    params: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    step: dict[str, int]
    groups: dict[str, int]
    hyperparams: list[dict[str, Any]]
    shared: dict[str, str]
    buffers: dict[str, torch.Tensor]
    loss_scale: dict[str, Any]
    global_steps: int
    skipped_steps: int


@torch.no_grad()  # DeepSpeed saves Parameters, and a copy of one would require a gradient
def read_checkpoint(
    folder: str | Path, tag: str | None = None, *, names: Sequence[Sequence[str]] | None = None
) -> DeepSpeedCheckpoint:
    """Reads what `save_checkpoint` of a DeepSpeed engine or its `ds_to_universal` wrote.

    Args:
        folder: that was given to `save_checkpoint`. tag: of the checkpoint in it; default: what `latest` or
            `latest_universal` says.
        names: of the params of each param group, in order. Only for stage 0, whose files do not have them, and where
            the optimizer was not simply given all the model's params in one group.

    Raises ValueError for a checkpoint cut over tensor-parallel, pipeline or expert ranks that is not universal, for
    missing pieces, and for a file that wants to run anything, see `pickles.load`. FileNotFoundError.
    """
    path = _tag_folder(Path(folder), tag)
    files = [load(file) for file in _model_files(path)]
    model = files[0]
    universal = (path / "zero").is_dir()
    _check_plain(path, model, universal)
    if model.get("param_shapes") is None:
        found, shared = read_stage0(path, model, names)
    else:
        found = (read_universal if universal else read_partitions)(path, model["param_shapes"])
        shared = dict(model.get("shared_params") or {})
    buffers = set(model["buffer_names"])
    held = whole_frozen(files) | found.tensors.get(MASTER, {})
    params = {
        n: held[n] if n in held else x.clone() for n, x in model["module"].items() if n not in {*buffers, *shared}
    }
    cut = rank_files(path, "model") or int(model.get("mp_world_size") or 1) > 1
    if cut and params.keys() - held.keys():
        raise ValueError(f"{path}: no file has all of {', '.join(sorted(params.keys() - held.keys()))}")
    return DeepSpeedCheckpoint(
        params=params,
        moments={key: tree for key, tree in found.tensors.items() if key != MASTER},
        step=found.step,
        groups=found.groups,
        hyperparams=found.hyperparams,
        shared=shared,
        buffers={n: model["module"][n].clone() for n in model["buffer_names"]},
        loss_scale=found.loss_scale,
        global_steps=int(model["global_steps"]),
        skipped_steps=int(model["skipped_steps"]),
    )


def _tag_folder(folder: Path, tag: str | None) -> Path:
    if tag is None:
        pointers = [folder / name for name in ("latest", "latest_universal") if (folder / name).is_file()]
        if not pointers:
            raise FileNotFoundError(f"{folder}: neither `latest` nor `latest_universal` is there; give tag=")
        tag = pointers[0].read_text().strip()
    if tag in ("", ".", "..") or "/" in tag or "\\" in tag or "\0" in tag:
        raise ValueError(f"{folder}: the tag {tag!r} is not the name of a folder in it")
    path = folder / tag
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such folder")
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"{path}: leads out of {folder}")
    return path


def _model_files(path: Path) -> list[Path]:
    return rank_files(path, "model") or [path / "mp_rank_00_model_states.pt"]


def _check_plain(path: Path, model: Any, universal: bool) -> None:
    """Refuses what is cut in other ways than ZeRO's."""
    if not isinstance(model, dict) or not {"module", "buffer_names", "global_steps"} <= model.keys():
        raise ValueError(f"{path}: its model file is not one of DeepSpeed's")
    if model["module"] is None:
        raise ValueError(f"{path}: a pipeline's checkpoint has its params in files of layers, which are not read")
    experts = [x.name for x in path.glob("layer_*_expert_*_model_states.pt")]
    if experts or (int(model.get("mp_world_size") or 1) > 1 and not universal):
        raise ValueError(
            f"{path}: cut over {'expert' if experts else 'tensor'}-parallel ranks; "
            "only ZeRO's cuts are undone, or those that deepspeed's ds_to_universal has undone"
        )


MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
COUNTS = ("count", "schedule_count")
# funzero's name of a hyper-parameter: how a param group of torch's has it
HYPERPARAMS = {
    "learning_rate": lambda group: group["lr"],
    "b1": lambda group: group["betas"][0],
    "b2": lambda group: group["betas"][1],
    "eps": lambda group: group["eps"],
    "weight_decay": lambda group: group["weight_decay"],
    "decay": lambda group: group["momentum"],
}


def to_state(
    found: DeepSpeedCheckpoint,
    like: TrainState,
    *,
    moments: Mapping[str, str] = MOMENTS,
    key: int | torch.Tensor = 0,
) -> TrainState:
    """A state of `like`'s layout with what a DeepSpeed checkpoint holds. Each rank keeps its part; no communication.

    Values come in the dtypes of `like`: moments that are float32 there stay float32, whatever the params are. A param in
    an optimizer's group that has not been updated yet gets zeros. Counts and `step` are numbers of applied updates.

    Args:
        found: from `read_checkpoint`. like: a state, or what `abstract_state` gives, whose params are a flat dict under
            torch's names, as from `split_module`, with the buffers that the checkpoint has.
        moments: {entry of the optimizer's state: DeepSpeed's key}; the default is Adam's.
        key: the state's, since DeepSpeed keeps no random state.

    Returns: a state between windows. Hyper-parameters that are leaves of `like` are those of the param groups; where an
    optimizer's groups differ, it has to be an `fz.partition` with a part for each (a weight decay of 0 in some groups is
    left to the mask). Whether decay is decoupled is up to the optimizer of `like`.

    Raises ValueError with every name that is missing, unexpected, of another shape, or ambiguous.
    """
    if like.specs is None:
        raise ValueError("to_state: `like` has no specs; make it with abstract_state or init_state")
    filler = _Filler(found, like, dict(moments))
    params = filler.tree(like.specs.params, lambda layout: filler.params.get(_name(layout)))
    buffers = filler.tree(like.specs.buffers, lambda layout: filler.buffers.get(_name(layout)))
    opt_state = filler.tree(like.specs.opt_state, filler.opt_leaf)
    scale = filler.loss_scale()
    lines = sorted(filler.lines + filler.unexpected())
    if lines:
        raise ValueError("the DeepSpeed checkpoint does not fit `like`:\n" + "\n".join(lines))
    count = torch.tensor(filler.applied, dtype=torch.int32, device=like.specs.mesh.device)
    return dataclasses.replace(
        like,
        step=count,
        params=params,
        opt_state=opt_state,
        accum=EMPTY_NODE,
        loss_scale=scale,
        skips=torch.zeros_like(count),
        key=make_key(key),
        buffers=buffers,
    )


def _name(layout: Layout) -> str:
    """The path below the field: `params/a.weight` is `a.weight`."""
    return layout.path.partition("/")[2]


class _Filler:
    """Looks leaves up, and notes what does not fit in `lines`."""

    def __init__(self, found: DeepSpeedCheckpoint, like: TrainState, moments: dict[str, str]):
        self.found, self.like, self.moments = found, like, moments
        self.params = {tree_lib.escape(n): x for n, x in found.params.items()}
        self.buffers = {tree_lib.escape(n): x for n, x in found.buffers.items()}
        self.names = {tree_lib.escape(n): n for n in found.params}
        self.applied = found.global_steps - found.skipped_steps
        self.lines: list[str] = []
        self.used: set[tuple[str, str]] = set()
        self.old = dict(zip(*tree_lib.flatten_with_paths(like.opt_state)[:2], strict=True))
        self.owned = [x.path.split("/") for x in like.specs.opt_state.layouts if x.path.split("/")[-2] in moments]

    def tree(self, specs: Specs, value: Any) -> Any:
        """The leaves that `value(layout)` gives, cut; None is noted as missing."""
        return tree_lib.unflatten(specs.treedef, [self.part(x, value(x)) for x in specs.layouts])

    def part(self, layout: Layout, whole: torch.Tensor | None) -> torch.Tensor | None:
        if whole is None:
            self.lines.append(f"missing: {layout.path}")
            return None
        if tuple(whole.shape) != layout.shape:
            self.lines.append(f"{layout.path}: expected {list(layout.shape)}, got {list(whole.shape)}")
            return None
        return keep(place.cut(whole, layout).to(layout.dtype), layout)

    def opt_leaf(self, layout: Layout) -> torch.Tensor | None:
        *above, entry, last = layout.path.split("/")
        name = self.names.get(last)
        if entry == "hyperparams":
            return self.hyperparam(layout, above, last)
        if entry in self.moments:
            return None if name is None else self.moment(self.moments[entry], name)
        if entry == "count":
            return None if name is None else torch.tensor(self.count(name), dtype=layout.dtype)
        if entry == MASTER_ENTRY:
            return self.params.get(last)
        return torch.tensor(self.applied, dtype=layout.dtype) if last in COUNTS else None

    def moment(self, key: str, name: str) -> torch.Tensor | None:
        self.used.add((key, name))
        if name in self.found.moments.get(key, {}):
            return self.found.moments[key][name]
        fresh = name in self.found.groups and not any(name in tree for tree in self.found.moments.values())
        return torch.zeros_like(self.found.params[name]) if fresh else None

    def count(self, name: str) -> int:
        return self.found.step.get(name, 0) if self.found.step else self.applied

    def hyperparam(self, layout: Layout, above: list[str], last: str) -> torch.Tensor | None:
        """What the groups say of the params that this part of the optimizer updates."""
        names: set[str] = set()
        for depth in range(len(above), 0, -1):
            names = {self.names[p[-1]] for p in self.owned if p[:depth] == above[:depth] and p[-1] in self.names}
            if names:
                break
        groups = [self.found.hyperparams[i] for i in {self.found.groups.get(n, -1) for n in names} if i >= 0]
        try:
            values = {float(HYPERPARAMS[last](group)) for group in groups}
        except (KeyError, IndexError):
            values = set()
        if last == "weight_decay" and len(values) > 1:
            values.discard(0.0)
        if len(values) > 1:
            self.lines.append(
                f"{layout.path}: the param groups say {sorted(values)}; make the optimizer of `like` by fz.partition, "
                "with a part for each group"
            )
        old = self.old[_name(layout)]
        return torch.tensor(values.pop(), dtype=torch.float64) if values else None if old.device.type == "meta" else old

    def loss_scale(self) -> Any:
        like, scaler = self.like.loss_scale, self.found.loss_scale
        if like == EMPTY_NODE:
            return like
        if "cur_scale" not in scaler:
            self.lines.append("missing: loss_scale")
            return like
        finite = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1 if "last_overflow_iter" in scaler else 0
        values = {
            "scale": float(scaler["cur_scale"]),
            "finite": finite,
            "patience": scaler.get("cur_hysteresis", 1),
            "exhausted": False,
        }
        device = self.like.specs.mesh.device
        leaves = {k: torch.tensor(v, dtype=getattr(like, k).dtype, device=device) for k, v in values.items()}
        return dataclasses.replace(like, **leaves)

    def unexpected(self) -> list[str]:
        specs = self.like.specs
        lines = [f"unexpected: params/{n}" for n in self.params.keys() - {_name(x) for x in specs.params.layouts}]
        lines += [f"unexpected: buffers/{n}" for n in self.buffers.keys() - {_name(x) for x in specs.buffers.layouts}]
        for key, tree in self.found.moments.items():
            lines += [f"unexpected: {key} of {name}" for name in tree if (key, name) not in self.used]
        return lines
