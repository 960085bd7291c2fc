"""A state as named leaves, and back: what a checkpoint holds of it.

Sums that a window holds over ranks are made on the way out; on the way in the first rank gets them and the others
nothing, which adds up to the same.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.core.spec import Layout, Spec
from funzero.core.state import EMPTY_NODE, Accumulator, StateSpecs, TrainState
from funzero.transforms.losses import aux_of_paths

WINDOW = "accum/weight"  # there only in mid-window


def specs_of(state: TrainState) -> StateSpecs:
    """The layout of a state; raises ValueError if it has none."""
    if state.specs is None:
        raise ValueError("the state has no specs; make it with fz.init_state")
    return state.specs


def frozen(specs: StateSpecs) -> frozenset[str]:
    """Paths of the params that are not trained."""
    trained = {f"params/{n}" for n in tree_lib.paths(specs.grads.tree)}
    return frozenset(x.path for x in specs.params.layouts if x.path not in trained)


def local_leaves(state: TrainState) -> Iterator[tuple[Layout, Callable[[], torch.Tensor]]]:
    """(layout, function that gives the local leaf) of everything in a state, in the same order on all ranks.

    In mid-window the functions are collective calls, to be made in this order.
    """
    specs, accum = specs_of(state), state.accum
    for name, leaf in _scalars(state).items():
        yield _replicated(name, leaf, specs.mesh), functools.partial(_same, leaf)
    trees = {"params": state.params, "opt_state": state.opt_state, "buffers": state.buffers}
    if isinstance(accum, Accumulator):
        trees["accum"] = accum.grads
    for field, tree in trees.items():
        for leaf, layout in zip(tree_lib.leaves(tree), specs.fields[field].layouts, strict=True):
            axes = layout.spec.unreduced
            total = functools.partial(collectives.all_sum, leaf, layout.mesh, axes)
            yield layout.with_spec(unreduced=()), total if axes else functools.partial(_same, leaf)
    if isinstance(accum, Accumulator):
        for name, leaf in _window(accum, specs.mesh):
            yield _replicated(name, leaf, specs.mesh), functools.partial(_same, leaf)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def expected(like: TrainState, in_window: bool) -> dict[str, Layout]:
    """Layouts of the leaves that a checkpoint must have for `like`, by path."""
    specs = specs_of(like)
    fields = [s for name, s in specs.fields.items() if name != "accum" or in_window]
    layouts = {x.path: x for s in fields for x in s.layouts}
    others = _scalars(like)
    if in_window:
        one = torch.empty((), dtype=torch.float64, device="meta")
        others |= {WINDOW: one, "accum/loss": one, "accum/times": one.to(torch.int32)}
        others["accum/used"] = torch.empty(len(specs.grads.layouts), dtype=torch.uint8, device="meta")
        names = (f"accum/{x.path}" for x in specs.buffers.layouts)
        others |= dict(zip(names, tree_lib.leaves(specs.buffers.abstract()), strict=True))
    return layouts | {name: _replicated(name, leaf, specs.mesh) for name, leaf in others.items()}


def leaves_of(like: TrainState) -> dict[str, torch.Tensor]:
    """The local leaves of a state without its window, by path."""
    specs, out = specs_of(like), _scalars(like)
    for field in ("params", "opt_state", "buffers"):
        paths = (x.path for x in specs.fields[field].layouts)
        out |= dict(zip(paths, tree_lib.leaves(getattr(like, field)), strict=True))
    return out


def nodes(state: TrainState) -> dict[str, str]:
    """{path: kind} of the containers in a state, its window left out."""
    out = {}
    for field in ("params", "opt_state", "buffers", "loss_scale"):
        for path, kind in tree_lib.containers(getattr(state, field)).items():
            out[tree_lib.prefix_path(field, path)] = kind
    return out


def assembled(like: TrainState, local: dict[str, torch.Tensor], window: dict[str, torch.Tensor]) -> TrainState:
    """A state with the structure of `like`.

    Args:
        local: local leaves by path. window: what else there is of a window, replicated; empty between windows.
    """
    specs = specs_of(like)

    def tree(field: str) -> Any:
        return tree_lib.unflatten(specs.fields[field].treedef, [local[x.path] for x in specs.fields[field].layouts])

    return dataclasses.replace(
        like,
        step=local["step"],
        params=tree("params"),
        opt_state=tree("opt_state"),
        accum=_accumulator(specs, tree("accum"), window) if window else EMPTY_NODE,
        loss_scale=tree_lib.map_with_path(lambda n, _: local[f"loss_scale/{n}"], like.loss_scale),
        skips=local["skips"],
        key=local["key"].cpu(),
        buffers=tree("buffers"),
    )


def _accumulator(specs: StateSpecs, grads: Any, window: dict[str, torch.Tensor]) -> Accumulator:
    def own(x: torch.Tensor) -> torch.Tensor:  # the first rank holds the sum
        return x if specs.mesh.index(specs.mesh.batch) == 0 else torch.zeros_like(x)

    aux = {n.removeprefix("accum/aux/"): x for n, x in window.items() if n.startswith("accum/aux/")}
    buffers = [window[f"accum/{x.path}"] for x in specs.buffers.layouts]
    return Accumulator(
        grads=grads,
        weight=own(window["accum/weight"]),
        loss=own(window["accum/loss"]),
        aux=aux_of_paths({n: own(x) for n, x in aux.items()}),
        times=window["accum/times"].cpu(),
        used=window["accum/used"].cpu(),
        buffers=tree_lib.unflatten(specs.buffers.treedef, buffers),
    )


def _replicated(name: str, leaf: torch.Tensor, mesh: Mesh) -> Layout:
    return Layout(name, tuple(leaf.shape), leaf.dtype, Spec(), mesh)


def _scalars(state: TrainState) -> dict[str, torch.Tensor]:
    """What is no part of the specs: equal on all ranks."""
    names, leaves, _ = tree_lib.flatten_with_paths(state.loss_scale)
    scale = {f"loss_scale/{n}": x for n, x in zip(names, leaves, strict=True)}
    return {"step": state.step, "skips": state.skips, "key": state.key, **scale}


def _window(accum: Accumulator, mesh: Mesh) -> Iterator[tuple[str, torch.Tensor]]:
    def total(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_sum(x, mesh, mesh.batch)

    weight = total(accum.weight)
    yield WINDOW, weight
    yield "accum/loss", total(accum.loss)
    yield "accum/times", accum.times
    yield "accum/used", collectives.all_max(accum.used, mesh, mesh.batch)
    for name, leaf in zip(*tree_lib.flatten_with_paths(accum.aux)[:2], strict=True):
        yield f"accum/aux/{name}", total(leaf)
    share = torch.where(weight == 0, 1 / mesh.size(mesh.batch), accum.weight / weight)
    for name, leaf in zip(*tree_lib.flatten_with_paths(accum.buffers)[:2], strict=True):
        yield f"accum/buffers/{name}", collectives.mean_buffer(leaf, share, mesh)
