"""Making a state: placed leaf by leaf, so that a rank holds one whole leaf at a time."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import abstract
from funzero.core import tree as tree_lib
from funzero.core.mesh import local_mesh
from funzero.core.spec import Layout, Specs
from funzero.core.state import EMPTY_NODE, StateSpecs, TrainState
from funzero.executor import place
from funzero.executor.plan import Plan
from funzero.executor.selection import writes_anew
from funzero.executor.stores import check_room, keep, store_of
from funzero.transforms.base import Transform
from funzero.transforms.chain import resolved
from funzero.transforms.loss_scale import as_scaling
from funzero.transforms.precision import Policy, checked
from funzero.transforms.rng import fold_in, make_key
from funzero.transforms.storage import stored
from funzero.zero import default_specs, kept_shapes, optimized, trainable_paths


def init_state(
    params: Any,
    tx: Transform,
    *,
    key: int | torch.Tensor = 0,
    specs: StateSpecs | None = None,
    buffers: Any = EMPTY_NODE,
    precision: Policy | None = None,
    loss_scale: Any = None,
    trainable: Any = None,
    donate: bool = False,
) -> TrainState:
    """The state at the start of training.

    Args:
        params: tree of whole leaves (global view), equal on every rank; or a mapping (or iterator of pairs) from path
            to thunk(key) -> whole leaf, run and cut one by one.
        key: seed, or int64 [2], for every random draw of training.
        specs: the layout; default: everything whole on one device.
        buffers: tree of the model's buffers.
        precision: the policy that the state is kept by; params are cast to its dtype, a master copy is made before that.
        loss_scale: a number, or `fz.loss_scale.dynamic(...)`; default: what the policy says, which for most is none.
        trainable: tree of bools or {glob: bool}; the others are frozen.
        donate: leaves that are already placed as the layout says are used as they are; else all are copied.

    Raises TypeError or ValueError for a tree that cannot be trained, naming the leaf; OSError for a disk without room.
    """
    thunks = abstract.thunks_of(params)
    if thunks is None:
        abstract.check_params(params)
    policy = checked(precision)
    shapes = kept_shapes(abstract.eval_shape(params if thunks is None else thunks), policy)
    if specs is None:
        specs = default_specs(shapes, tx, local_mesh(), trainable, buffers, policy)
    check_made_for(specs, tx, policy, "init_state")
    check_trainable(specs, shapes, trainable, "init_state")
    _check_fit(shapes, specs.params)
    _check_fit(buffers, specs.buffers)
    check_room(specs, twice=writes_anew(Plan(specs, policy), tx))
    rng = make_key(key)
    if thunks is None:
        makers: list[Callable[[], torch.Tensor]] = [functools.partial(_given, x) for x in tree_lib.leaves(params)]
    else:
        makers = [functools.partial(_made, thunks[path], rng, path) for path in tree_lib.paths(shapes)]
    placed, opt_state = _build(makers, tx, specs, policy, donate)
    return TrainState(
        step=torch.zeros((), dtype=torch.int32, device=specs.mesh.device),
        params=placed,
        opt_state=opt_state,
        accum=EMPTY_NODE,
        loss_scale=_scale(loss_scale, policy, specs.mesh.device),
        skips=torch.zeros((), dtype=torch.int32, device=specs.mesh.device),
        key=rng,
        buffers=_place(buffers, specs.buffers, donate),
        specs=specs,
    )


def abstract_state(
    params: Any,
    tx: Transform,
    *,
    specs: StateSpecs | None = None,
    buffers: Any = EMPTY_NODE,
    precision: Policy | None = None,
    loss_scale: Any = None,
    trainable: Any = None,
) -> TrainState:
    """The state that `init_state` would make, without memory: meta tensors with this rank's local shapes."""
    policy = checked(precision)
    shapes = kept_shapes(abstract.eval_shape(params), policy)
    if specs is None:
        specs = default_specs(shapes, tx, local_mesh(), trainable, buffers, policy)
    check_made_for(specs, tx, policy, "abstract_state")
    check_trainable(specs, shapes, trainable, "abstract_state")
    count = torch.empty((), dtype=torch.int32, device="meta")
    return TrainState(
        step=count,
        params=specs.params.abstract(local=True),
        opt_state=specs.opt_state.abstract(local=True),
        accum=EMPTY_NODE,
        loss_scale=_scale(loss_scale, policy, torch.device("meta")),
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


def check_made_for(specs: StateSpecs, tx: Transform, policy: Policy, caller: str) -> None:
    """Refuses a precision policy or an optimizer that the specs were not made for."""
    kept = dict(zip(tree_lib.paths(specs.params.tree), specs.params.layouts, strict=True))
    trained = [kept[path] for path in tree_lib.paths(specs.grads.tree)]
    pairs = [(x, policy.params_dtype(x.dtype)) for x in specs.params.layouts]
    pairs += [(a, policy.accum_dtype(x.dtype)) for a, x in zip(specs.accum.layouts, trained, strict=True)]
    lines = [f"{x.path} is {dtype} there, and {x.dtype} here" for x, dtype in pairs if x.dtype != dtype]
    if not lines:
        seen = tree_lib.unflatten(
            specs.grads.treedef, [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in trained]
        )
        made = abstract.eval_shape(lambda: stored(resolved(tx, specs.grads.abstract()), policy).init(seen))
        lines = _differences(dict(zip(*tree_lib.flatten_with_paths(made)[:2], strict=True)), specs.opt_state)
    if lines:
        raise ValueError(
            f"{caller}: the layout is not that of precision {policy.name} and this optimizer: {lines[0]}; "
            "pass the same tx and precision= to zero_specs, init_state and make_step"
        )


def _differences(made: dict[str, torch.Tensor], specs: Specs) -> list[str]:
    """Where an optimizer's state is not what the specs of opt_state say, one line each."""
    here = dict(zip(tree_lib.paths(specs.tree), specs.layouts, strict=True))
    lines = [f"opt_state/{n} is {'kept' if n in made else 'not kept'} there" for n in sorted(made.keys() ^ here.keys())]
    for name in sorted(made.keys() & here.keys()):
        x, y = made[name], here[name]
        if (x.dtype, tuple(x.shape)) != (y.dtype, y.shape):
            there = tree_lib.dtype_and_shape(x.dtype, tuple(x.shape))
            lines.append(f"{y.path} is {there} there, and {tree_lib.dtype_and_shape(y.dtype, y.shape)} here")
    return lines


def _scale(given: Any, policy: Policy, device: torch.device) -> Any:
    scaling = as_scaling(given) or policy.loss_scale
    return EMPTY_NODE if scaling is None else scaling.init(device)


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


def _given(leaf: torch.Tensor) -> torch.Tensor:
    return leaf


def _made(thunk: abstract.InitThunk, rng: torch.Tensor, path: str) -> torch.Tensor:
    """A leaf from its thunk, under a key of its own; drawn on the CPU, so that it is the same on every device."""
    with torch.device("cpu"):
        return thunk(fold_in(rng, zlib.crc32(path.encode()))).detach()


def _place(tree: Any, specs: Specs, donate: bool) -> Any:
    leaves, treedef = tree_lib.flatten(tree)
    return tree_lib.unflatten(treedef, [_placed(x, y, donate) for x, y in zip(leaves, specs.layouts, strict=True)])


def _placed(leaf: torch.Tensor, layout: Layout, donate: bool) -> torch.Tensor:
    part = place.cut(leaf, layout)
    ready = part.device == layout.mesh.device and part.is_contiguous() and part.numel() == leaf.numel()
    ready = ready and store_of(layout) is None
    return part.detach() if donate and ready else keep(part, layout)


def _build(
    makers: list[Callable[[], torch.Tensor]], tx: Transform, specs: StateSpecs, policy: Policy, donate: bool
) -> tuple[Any, Any]:
    """Params and optimizer state, leaf by leaf: `tx.init` runs on one whole param at a time.

    State that is made from no param is taken from a run that gives it the dtype that all params together give.
    """
    tx = stored(resolved(tx, specs.grads.abstract()), policy)
    shapes = specs.params.abstract()
    layouts = dict(zip(tree_lib.paths(specs.opt_state.tree), specs.opt_state.layouts, strict=True))
    trains = set(tree_lib.paths(specs.grads.tree))
    placed: list[torch.Tensor] = []
    state: dict[str, torch.Tensor] = {}

    def add(alone: Any) -> None:
        for name, leaf in zip(*tree_lib.flatten_with_paths(tx.init(alone))[:2], strict=True):
            if name not in state and leaf.dtype == layouts[name].dtype:
                state[name] = keep(place.cut(leaf, layouts[name]), layouts[name])

    for path, make, layout in zip(tree_lib.paths(shapes), makers, specs.params.layouts, strict=True):
        whole = make()
        if path in trains:
            add(tree_lib.map(lambda _, whole=whole: whole, tree_lib.prune(shapes, lambda p, path=path: p != path)))  # type: ignore[misc]
        placed.append(_placed(whole.to(layout.dtype), layout, donate))
    if not trains:
        add(tree_lib.prune(shapes, lambda p: True))
    opt_state = tree_lib.unflatten(specs.opt_state.treedef, [state[name] for name in layouts])
    return tree_lib.unflatten(specs.params.treedef, placed), opt_state
