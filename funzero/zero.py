"""Tables of specs: a ZeRO stage, tensor and expert partitions are values made here.

References: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from funzero.core import abstract
from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.core.spec import MEMORY_KINDS, Layout, P, Spec, Specs
from funzero.core.state import StateSpecs
from funzero.transforms.base import Transform
from funzero.transforms.chain import resolved
from funzero.transforms.grad import differentiable
from funzero.transforms.precision import Policy, checked
from funzero.transforms.storage import stored

Trainable = Any


def trainable_paths(shapes: Any, trainable: Trainable) -> frozenset[str]:
    """The paths of the leaves that train.

    Args:
        shapes: tree of params. trainable: None (all that can have a gradient), a tree of bools like params, or a
            dict {glob: bool} whose last match wins (no match: trains).
    """
    names, found, _ = tree_lib.flatten_with_paths(shapes)
    able = {n for n, x in zip(names, found, strict=True) if differentiable(x)}
    if trainable is None:
        return frozenset(able)
    mask_names, flags, _ = tree_lib.flatten_with_paths(trainable)
    if mask_names == names:
        wanted = {n for n, flag in zip(names, flags, strict=True) if flag}
    elif isinstance(trainable, Mapping) and all(isinstance(v, bool) for v in trainable.values()):
        hits = tree_lib.match_globs(trainable, names, "trainable")
        wanted = {n for n, glob in zip(names, hits, strict=True) if glob is None or trainable[glob]}
    else:
        raise ValueError("trainable: expected a tree of bools with the leaves of params, or {glob: bool}")
    return frozenset(wanted & able)


def optimized(tree: Any, trains: frozenset[str]) -> Any:
    """The part of a params-shaped tree that the optimizer sees."""
    return tree_lib.prune(tree, lambda path: path not in trains)


def zero_specs(
    shapes: Any,
    tx: Transform,
    mesh: Mesh,
    *,
    stage: int,
    axis: str | tuple[str, ...] | None = None,
    rules: Mapping[str, P] | None = None,
    replicate: str | None = None,
    persist_below: int = 0,
    trainable: Trainable = None,
    buffers: Any = (),
    precision: Policy | None = None,
) -> StateSpecs:
    """The layout of a whole state for a ZeRO stage.

    Args:
        shapes: tree of params or meta tensors (global view), see `eval_shape`.
        stage: 0: all replicated. 1: opt_state cut. 2: the accumulator too. 3: params too.
        axis: what to cut over; default: for each leaf all batch axes that neither its partition nor `replicate` uses.
        rules: {glob below params/: P(...)}, the last match wins.
        replicate: an axis that holds copies (HSDP).
        persist_below: leaves with fewer elements keep replicated params at stage 3.
        trainable: tree of bools or {glob: bool}; other leaves have no accumulator and no optimizer state.
        buffers: tree of the model's buffers; always replicated.
        precision: the policy that the state is kept by, as for `init_state` and `make_step`.

    Raises ValueError for an unknown stage or axis, a rule that matches nothing or does not fit its leaf.

    >>> from funzero import adamw, abstract_mesh
    >>> specs = zero_specs({"w": torch.empty(10, device="meta")}, adamw(1e-3), abstract_mesh(dp=4), stage=3)
    >>> specs.params.layouts[0].local_shape
    (3,)
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_specs: stage is 0, 1, 2 or 3, got {stage!r}")
    if replicate is not None and replicate not in mesh.names:
        raise ValueError(f"zero_specs: replicate={replicate!r} is not an axis of the mesh {mesh.describe()}")
    policy = checked(precision)
    shapes = kept_shapes(abstract.eval_shape(shapes), policy)
    names = tree_lib.paths(shapes)
    trains = trainable_paths(shapes, trainable)
    hits = tree_lib.match_globs(rules or {}, names, "rules")
    parts = {n: P() if hit is None else (rules or {})[hit] for n, hit in zip(names, hits, strict=True)}
    tx = resolved(tx, optimized(shapes, trains))

    def cut(path: str, quantum: int = 1) -> Spec:
        used = {*parts[path].axes, replicate}
        wanted = mesh.batch if axis is None else (axis,) if isinstance(axis, str) else axis
        return Spec(parts[path], tuple(a for a in wanted if a not in used), quantum=quantum)

    def params_spec(path: str, leaf: torch.Tensor) -> Spec:
        small = leaf.numel() < persist_below
        return cut(path, tx.quantum) if stage == 3 and not small else Spec(parts[path])

    params = Specs.bind(mesh, tree_lib.map_with_path(params_spec, shapes), shapes, "params")
    seen = optimized(shapes, trains)
    grads = tree_lib.map_with_path(
        lambda p, _: cut(p, tx.quantum) if stage else Spec(parts[p], quantum=tx.quantum), seen
    )
    accum = tree_lib.map_with_path(lambda p, _: _accum_spec(cut(p, tx.quantum), stage, mesh), seen)
    wide = tree_lib.map(lambda x: torch.empty(x.shape, dtype=policy.accum_dtype(x.dtype), device="meta"), seen)
    bound = Specs.bind(mesh, grads, wide, "grads")
    return StateSpecs(
        params=params,
        opt_state=_opt_specs(stored(tx, policy), seen, bound),
        accum=Specs.bind(mesh, accum, wide, "accum/grads"),
        grads=bound,
        buffers=Specs.bind(mesh, Spec(), abstract.eval_shape(buffers), "buffers"),
    )


def with_memory(specs: StateSpecs, kinds: Mapping[str, str], *, folder: str | Path | None = None) -> StateSpecs:
    """The same layout with other memories.

    Args:
        kinds: {glob of full paths, such as "params/**", "accum/**" or "opt_state/**": "device", "host" or "disk"}; the
            last match wins. A finalised gradient lives where its accumulator does. Leaves without dims (counts,
            hyper-parameters) stay on the device, and so do buffers.
        folder: of what lives on disk; ranks and runs may share it, and it is made if it is not there. Default: a temporary
            folder of each process, with a warning if that is in memory.

    Raises ValueError for an unknown kind, and for a glob that matches no leaf.

    >>> import funzero as fz
    >>> tx, mesh = fz.adamw(1e-3), fz.abstract_mesh(dp=2)
    >>> specs = fz.zero_specs({"w": torch.empty(10, 4, device="meta")}, tx, mesh, stage=1)
    >>> specs = with_memory(specs, {"params/**": "host", "opt_state/**": "disk", "opt_state/**/mu/**": "host"})
    >>> [x.spec.memory for x in (*specs.params.layouts, *specs.opt_state.layouts) if x.shape]
    ['host', 'host', 'disk']
    """
    unknown = sorted(set(kinds.values()) - set(MEMORY_KINDS))
    if unknown:
        raise ValueError(f"with_memory: a memory is one of {MEMORY_KINDS}, got {unknown[0]!r}")
    fields = {name: specs.fields[name].layouts for name in ("params", "opt_state", "accum")}
    paths = [x.path for layouts in fields.values() for x in layouts]
    hits = dict(zip(paths, tree_lib.match_globs(kinds, paths, "with_memory"), strict=True))
    where = None if folder is None else str(Path(folder).resolve())

    def moved(layout: Layout, path: str) -> Layout:
        glob = hits[path]
        if glob is None or not layout.shape:
            return layout
        return layout.with_spec(memory=kinds[glob], folder=where if kinds[glob] == "disk" else None)

    made = {name: specs.fields[name].map(lambda x: moved(x, x.path)) for name in fields}
    at = {x.path.removeprefix("accum/"): x.path for x in fields["accum"]}
    return dataclasses.replace(specs, **made, grads=specs.grads.map(lambda x: moved(x, at[x.path])))


def kept_shapes(shapes: Any, policy: Policy) -> Any:
    """Abstract params in the dtypes in which a policy keeps them."""
    return tree_lib.map(lambda x: torch.empty(x.shape, dtype=policy.params_dtype(x.dtype), device="meta"), shapes)


def _accum_spec(cut: Spec, stage: int, mesh: Mesh) -> Spec:
    """Cut from stage 2 on; what is not cut is a sum over the batch axes that is not yet made."""
    flat = cut.flat if stage >= 2 else ()
    open_axes = tuple(a for a in mesh.batch if a not in (*cut.partition.axes, *flat))
    return dataclasses.replace(cut, flat=flat, unreduced=open_axes)


def _opt_specs(tx: Transform, seen: Any, grads: Specs) -> Specs:
    """A leaf made from a param, of its shape or of one element a block, is cut like its gradient; others are replicated."""
    state, origin = abstract.sources(tx.init, seen)
    by_path = dict(zip(tree_lib.paths(grads.tree), grads.layouts, strict=True))
    names, leaves, treedef = tree_lib.flatten_with_paths(state)
    specs = [
        abstract.state_spec(leaf, made, by_path[made.path] if made else None, f"opt_state/{name}")
        for name, leaf, made in zip(names, leaves, origin, strict=True)
    ]
    return Specs.bind(grads.mesh, tree_lib.unflatten(treedef, specs), state, "opt_state")


def default_specs(
    shapes: Any, tx: Transform, mesh: Mesh, trainable: Trainable, buffers: Any, precision: Policy | None = None
) -> StateSpecs:
    """Everything whole on the one device of a mesh of one rank."""
    return zero_specs(shapes, tx, mesh, stage=0, trainable=trainable, buffers=buffers, precision=precision)
