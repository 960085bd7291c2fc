"""A plain, safe checkpoint: one safetensors file of global leaves and a JSON manifest, in a folder that is renamed into
place when all of it is on disk. Its name exists only if it is complete.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from funzero.checkpoint import files
from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.core.spec import Layout, Spec
from funzero.core.state import EMPTY_NODE, Accumulator, StateSpecs, TrainState
from funzero.executor import place
from funzero.transforms.losses import aux_of_paths

FORMAT = 1
LEAVES, MANIFEST = "leaves.safetensors", "manifest.json"


def save(path: str | Path, state: TrainState, *, overwrite: bool = False) -> None:
    """Writes a state as global leaves. A collective call; the first rank writes.

    Args:
        path: the folder to make. state: any layout, also in mid-window (sums over ranks are made on the way).
        overwrite: replace a checkpoint of that name; the old one stays until the new is complete.

    Raises on every rank, with the cause: FileExistsError, OSError.
    """
    specs = _specs_of(state)
    path, first = Path(path), specs.mesh.rank == 0
    taken = first and path.exists() and not overwrite
    _agree(specs.mesh, FileExistsError(f"{path} exists; give another name or overwrite=True") if taken else None)
    with specs.mesh.guard():
        leaves = {}
        for name, leaf in _global_leaves(state, specs):
            if first:
                leaves[name] = leaf.detach().to("cpu", copy=True).contiguous()
    error = None
    if first:
        try:
            _write(path, leaves, overwrite)
        except OSError as found:
            error = found
    _agree(specs.mesh, error)


def _specs_of(state: TrainState) -> StateSpecs:
    if state.specs is None:
        raise ValueError("the state has no specs; make it with fz.init_state")
    return state.specs


def _agree(mesh: Mesh, error: Exception | None) -> None:
    """Raises an error that any rank met on all of them: on that rank as it is, on the others as an OSError."""
    texts = mesh.exchange_text("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise OSError(f"rank {rank}: {text}")


def _global_leaves(state: TrainState, specs: StateSpecs) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, whole leaf) of everything in a state, one at a time, in the same order on all ranks."""
    yield from _replicated(state).items()
    accum = state.accum
    trees = {"params": state.params, "opt_state": state.opt_state, "buffers": state.buffers}
    if isinstance(accum, Accumulator):
        trees["accum"] = accum.grads
    for field, tree in trees.items():
        for leaf, layout in zip(tree_lib.leaves(tree), specs.fields[field].layouts, strict=True):
            yield layout.path, place.whole(leaf, layout)
    if isinstance(accum, Accumulator):
        yield from _window_scalars(accum, specs.mesh)


def _replicated(state: TrainState) -> dict[str, torch.Tensor]:
    """What is no part of the specs: equal on all ranks."""
    names, leaves, _ = tree_lib.flatten_with_paths(state.loss_scale)
    scale = {f"loss_scale/{n}": x for n, x in zip(names, leaves, strict=True)}
    return {"step": state.step, "skips": state.skips, "key": state.key, **scale}


def _window_scalars(accum: Accumulator, mesh: Mesh) -> Iterator[tuple[str, torch.Tensor]]:
    def total(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_sum(x, mesh, mesh.batch)

    weight = total(accum.weight)
    yield "accum/weight", weight
    yield "accum/loss", total(accum.loss)
    yield "accum/times", accum.times
    yield "accum/used", collectives.all_max(accum.used, mesh, mesh.batch)
    for name, leaf in zip(*tree_lib.flatten_with_paths(accum.aux)[:2], strict=True):
        yield f"accum/aux/{name}", total(leaf)
    for name, leaf in zip(*tree_lib.flatten_with_paths(accum.buffers)[:2], strict=True):
        if leaf.dtype.is_floating_point:
            yield f"accum/buffers/{name}", total(leaf.double() * (accum.weight / weight)).to(leaf.dtype)
        else:
            yield f"accum/buffers/{name}", collectives.all_max(leaf, mesh, mesh.batch)


def _write(path: Path, leaves: dict[str, torch.Tensor], overwrite: bool) -> None:
    manifest = {
        "format": FORMAT,
        "leaves": {
            n: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")} for n, x in leaves.items()
        },
    }
    with files.new_folder(path, overwrite=overwrite) as folder:
        files.write_safetensors(folder / LEAVES, leaves)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def restore(path: str | Path, like: TrainState) -> TrainState:
    """Reads a checkpoint into a layout.

    Args:
        path: what `save` made, on any number of ranks, in any layout.
        like: a state, or what `abstract_state` gives: says which leaves there are and where they go. Its window does
            not matter: `accum` comes as the file has it.

    Returns: a new state. Each rank reads one whole leaf at a time and keeps its part.

    Raises, on every rank: ValueError with every path that is missing, unexpected, or of another shape or dtype; OSError
    for a file that cannot be read.
    """
    specs, state, error = _specs_of(like), like, None
    try:
        state = _read(Path(path), like, specs)
    except (OSError, ValueError) as found:
        error = found
    _agree(specs.mesh, error)
    return state


def _read(path: Path, like: TrainState, specs: StateSpecs) -> TrainState:
    manifest = json.loads((path / MANIFEST).read_text())
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: checkpoint format {manifest.get('format')!r}, this version reads {FORMAT}")
    found = manifest["leaves"]
    expected = _expected(like, specs, "accum/weight" in found)
    _check_same(path, expected, found)
    local = {}
    for layout in expected.values():
        whole = files.read_safetensors(path / LEAVES, layout.path).view(layout.shape)
        local[layout.path] = _own_part(whole, layout)
    others = {n: files.read_safetensors(path / LEAVES, n) for n in found if n not in expected}
    return _assembled(like, specs, local, others)


def _own_part(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    part = place.store(place.cut(whole, layout), layout)
    if layout.spec.unreduced and layout.mesh.index(layout.spec.unreduced):
        part.zero_()  # a sum over ranks: the first holds it, the others add nothing
    return part


def _expected(like: TrainState, specs: StateSpecs, in_window: bool) -> dict[str, Layout]:
    mesh = specs.mesh
    fields = [s for name, s in specs.fields.items() if name != "accum" or in_window]
    layouts = {x.path: x for s in fields for x in s.layouts}
    for name, leaf in _replicated(like).items():
        layouts[name] = Layout(name, tuple(leaf.shape), leaf.dtype, Spec(), mesh)
    return layouts


def _check_same(path: Path, expected: dict[str, Layout], found: dict[str, Any]) -> None:
    known = {n for n in found if not n.startswith("accum/") or n.startswith("accum/grads/")}
    lines = [f"missing: {n}" for n in sorted(expected.keys() - found.keys())]
    lines += [f"unexpected: {n}" for n in sorted(known - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        want = tree_lib.dtype_and_shape(expected[name].dtype, expected[name].shape)
        have = tree_lib.dtype_and_shape(getattr(torch, found[name]["dtype"]), tuple(found[name]["shape"]))
        if want != have:
            lines.append(f"{name}: expected {want}, the checkpoint has {have}")
    if lines:
        raise ValueError(f"{path} does not fit `like`:\n" + "\n".join(lines))


def _assembled(
    like: TrainState, specs: StateSpecs, local: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> TrainState:
    def tree(field: str) -> Any:
        return tree_lib.unflatten(specs.fields[field].treedef, [local[x.path] for x in specs.fields[field].layouts])

    accum: Any = EMPTY_NODE
    if others:
        device, holds = specs.mesh.device, specs.mesh.index(specs.mesh.batch) == 0
        moved = {n: x.to(device) * (1 if holds else 0) for n, x in others.items()}
        accum = Accumulator(
            grads=tree("accum"),
            weight=moved["accum/weight"],
            loss=moved["accum/loss"],
            aux=aux_of_paths({n.removeprefix("accum/aux/"): x for n, x in moved.items() if n.startswith("accum/aux/")}),
            times=others["accum/times"],
            used=others["accum/used"],
            buffers=tree_lib.unflatten(
                specs.buffers.treedef, [others[f"accum/{x.path}"].to(device) for x in specs.buffers.layouts]
            ),
        )
    return dataclasses.replace(
        like,
        step=local["step"],
        params=tree("params"),
        opt_state=tree("opt_state"),
        accum=accum,
        loss_scale=tree_lib.map_with_path(lambda n, _: local[f"loss_scale/{n}"], like.loss_scale),
        skips=local["skips"],
        key=local["key"].cpu(),
        buffers=tree("buffers"),
    )
