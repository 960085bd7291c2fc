"""Making a state: placed leaf by leaf, so that a rank holds one whole leaf at a time."""

from typing import Any

import torch

from funzero.core import abstract
from funzero.core import tree as tree_lib
from funzero.core.mesh import local_mesh
from funzero.core.spec import Layout, Specs
from funzero.core.state import EMPTY_NODE, StateSpecs, TrainState
from funzero.executor import place
from funzero.transforms.base import Transform
from funzero.transforms.chain import resolved
from funzero.transforms.rng import make_key
from funzero.zero import default_specs, optimized, trainable_paths


def init_state(
    params: Any,
    tx: Transform,
    *,
    key: int | torch.Tensor = 0,
    specs: StateSpecs | None = None,
    buffers: Any = EMPTY_NODE,
    trainable: Any = None,
    donate: bool = False,
) -> TrainState:
    """The state at the start of training.

    Args:
        params: tree of whole leaves (global view), equal on every rank.
        key: seed, or int64 [2], for every random draw of training.
        specs: the layout; default: everything whole on one device.
        buffers: tree of the model's buffers.
        trainable: tree of bools or {glob: bool}; the others are frozen.
        donate: leaves that are already placed as the layout says are used as they are; else all are copied.

    Raises TypeError or ValueError for a tree that cannot be trained, naming the leaf.
    """
    abstract.check_params(params)
    shapes = abstract.eval_shape(params)
    if specs is None:
        specs = default_specs(shapes, tx, local_mesh(), trainable, buffers)
    check_trainable(specs, shapes, trainable, "init_state")
    _check_fit(params, specs.params)
    _check_fit(buffers, specs.buffers)
    return TrainState(
        step=torch.zeros((), dtype=torch.int32, device=specs.mesh.device),
        params=_place(params, specs.params, donate),
        opt_state=_init_opt(tx, params, specs),
        accum=EMPTY_NODE,
        loss_scale=EMPTY_NODE,
        skips=torch.zeros((), dtype=torch.int32, device=specs.mesh.device),
        key=make_key(key),
        buffers=_place(buffers, specs.buffers, donate),
        specs=specs,
    )


def abstract_state(
    params: Any,
    tx: Transform,
    *,
    specs: StateSpecs | None = None,
    buffers: Any = EMPTY_NODE,
    trainable: Any = None,
) -> TrainState:
    """The state that `init_state` would make, without memory: meta tensors with this rank's local shapes."""
    shapes = abstract.eval_shape(params)
    if specs is None:
        specs = default_specs(shapes, tx, local_mesh(), trainable, buffers)
    check_trainable(specs, shapes, trainable, "abstract_state")
    count = torch.empty((), dtype=torch.int32, device="meta")
    return TrainState(
        step=count,
        params=specs.params.abstract(local=True),
        opt_state=specs.opt_state.abstract(local=True),
        accum=EMPTY_NODE,
        loss_scale=EMPTY_NODE,
        skips=count.clone(),
        key=torch.empty(2, dtype=torch.int64, device="meta"),
        buffers=specs.buffers.abstract(local=True),
        specs=specs,
    )


def check_trainable(specs: StateSpecs, shapes: Any, trainable: Any, caller: str) -> None:
    """Refuses a `trainable=` that differs from the one the specs were made with."""
    if trainable is None:
        return
    expected = tree_lib.paths(specs.grads.tree)
    found = tree_lib.paths(optimized(shapes, trainable_paths(shapes, trainable)))
    if expected != found:
        differ = sorted(set(expected) ^ set(found))[:3]
        raise ValueError(
            f"{caller}: trainable= differs from that of the specs at {differ}; pass the same to zero_specs"
        )


def _check_fit(tree: Any, specs: Specs) -> None:
    leaves, treedef = tree_lib.flatten(tree)
    if treedef != specs.treedef:
        differ = sorted(set(tree_lib.paths(tree)) ^ set(tree_lib.paths(specs.tree)))[:3]
        raise ValueError(f"the specs were made for another tree; they differ at {differ}")
    for leaf, layout in zip(leaves, specs.layouts, strict=True):
        if tuple(leaf.shape) != layout.shape or leaf.dtype != layout.dtype:
            found = tree_lib.dtype_and_shape(leaf.dtype, tuple(leaf.shape))
            expected = tree_lib.dtype_and_shape(layout.dtype, layout.shape)
            raise ValueError(f"{layout.path}: the specs say {expected}, got {found}; make the specs from these params")


def _place(tree: Any, specs: Specs, donate: bool) -> Any:
    def one(leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
        part = place.cut(leaf, layout)
        ready = part.device == layout.mesh.device and part.is_contiguous() and part.numel() == leaf.numel()
        return part.detach() if donate and ready else place.store(part, layout)

    leaves, treedef = tree_lib.flatten(tree)
    return tree_lib.unflatten(treedef, [one(x, y) for x, y in zip(leaves, specs.layouts, strict=True)])


def _init_opt(tx: Transform, params: Any, specs: StateSpecs) -> Any:
    """The optimizer's state. `tx.init` runs on one whole param at a time, so that only one state of it is whole.

    State that is made from no param is taken from a run that gives it the dtype that all params together give.
    """
    seen = tree_lib.prune(params, lambda path: path not in set(tree_lib.paths(specs.grads.tree)))
    tx = resolved(tx, abstract.eval_shape(seen))
    layouts = dict(zip(tree_lib.paths(specs.opt_state.tree), specs.opt_state.layouts, strict=True))
    made: dict[str, torch.Tensor] = {}
    names = tree_lib.paths(seen)
    for only in [{name} for name in names] or [set()]:
        state = tx.init(tree_lib.prune(seen, lambda path, only=only: path not in only))  # type: ignore[misc]
        for name, leaf in zip(*tree_lib.flatten_with_paths(state)[:2], strict=True):
            layout = layouts[name]
            if name not in made and leaf.dtype == layout.dtype:
                made[name] = place.store(place.cut(leaf, layout), layout)
    return tree_lib.unflatten(specs.opt_state.treedef, [made[name] for name in layouts])
