"""Placing leaves: from the global view to the local one and back, and from any layout to any other."""

import dataclasses
from typing import Any

import torch

from funzero.core import collectives, comm
from funzero.core import tree as tree_lib
from funzero.core.spec import Layout, Specs
from funzero.core.state import Accumulator, StateSpecs, TrainState
from funzero.executor.stores import fetch, keep, store_of


def cut(leaf: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a whole leaf, as a view where the cut allows it."""
    if tuple(leaf.shape) != layout.shape:
        raise ValueError(f"{layout.path}: the spec says a global shape {layout.shape}, got {tuple(leaf.shape)}")
    piece = leaf[layout.box] if layout.shape else leaf
    return cut_flat(piece, layout)


def cut_flat(piece: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's range of a piece."""
    return piece.reshape(-1)[slice(*layout.bounds(layout.index))] if layout.is_flat else piece


def whole_piece(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Undoes the flat cut: the piece, of shape `layout.piece_shape` and on the device; a view if nothing is cut."""
    local = fetch(local, layout)
    if not layout.is_flat:
        return local
    return collectives.post_gather(local, layout).wait()


def whole(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The global leaf, on every rank."""
    piece = whole_piece(local, layout)
    if layout.spec.unreduced:
        piece = collectives.all_sum(piece, layout.mesh, layout.spec.unreduced)
    axes = layout.spec.partition.axes
    if layout.mesh.size(axes) == 1:
        return piece
    group = layout.mesh.group(axes)
    rows = piece.new_empty(layout.mesh.size(axes) * layout.n)
    comm.all_gather_equal(rows, piece.contiguous().view(-1), group).wait()
    out = piece.new_empty(layout.shape)
    for row, rank in zip(rows.view(layout.mesh.size(axes), layout.n), layout.mesh.places(group), strict=True):
        out[layout.box_of(rank)] = row.view(layout.piece_shape)
    return out


def _pairs(tree: Any, specs: Specs) -> tuple[list[Any], list[Layout]]:
    leaves, treedef = tree_lib.flatten(tree)
    if treedef != specs.treedef:
        names = set(tree_lib.paths(tree)) ^ set(tree_lib.paths(specs.tree))
        raise ValueError(f"the tree has other leaves than its specs; they differ at {sorted(names)[:3]}")
    return leaves, list(specs.layouts)


def shard(tree: Any, specs: Specs) -> Any:
    """Cuts a tree of whole leaves.

    Args:
        tree: global view, equal on every rank.
        specs: such as `state_specs.params`.

    Returns: the local view: new leaves on the mesh's device that share no memory with `tree`.
    """
    leaves, layouts = _pairs(tree, specs)
    made = [keep(cut(x, layout), layout) for x, layout in zip(leaves, layouts, strict=True)]
    return tree_lib.unflatten(specs.treedef, made)


def gather(tree: Any, specs: Specs) -> Any:
    """Makes a tree of local leaves whole, on every rank; the result never aliases the input. A collective call."""
    leaves, layouts = _pairs(tree, specs)
    made = []
    for local, layout in zip(leaves, layouts, strict=True):
        full = whole(local, layout)
        made.append(full.clone() if store_of(layout) is None and full.data_ptr() == local.data_ptr() else full)
    return tree_lib.unflatten(specs.treedef, made)


def _move(local: torch.Tensor, old: Layout, new: Layout) -> torch.Tensor:
    if old.spec == new.spec and old.mesh == new.mesh:
        return local
    full = whole(local, old)
    part = keep(cut(full, new), new)
    if new.spec.unreduced and new.mesh.index(new.spec.unreduced):
        part.zero_()  # the sum over these axes is the leaf: one rank holds it, the others nothing
    return part


def reshard_tree(tree: Any, old: Specs, new: Specs) -> Any:
    """Local leaves in another layout of the same mesh's ranks, one leaf at a time. A collective call."""
    leaves, layouts = _pairs(tree, old)
    if old.treedef != new.treedef:
        raise ValueError("reshard: the new specs describe another tree")
    return tree_lib.unflatten(
        old.treedef, [_move(x, a, b) for x, a, b in zip(leaves, layouts, new.layouts, strict=True)]
    )


def reshard(state: TrainState, specs: StateSpecs) -> TrainState:
    """The same state in another layout, live: any layout to any layout of the same ranks. A collective call.

    Args:
        state: made with specs. specs: the new layout, for the same params and optimizer.

    Returns: a new state; leaves whose layout does not change share memory with the old one.
    """
    if state.specs is None:
        raise ValueError("reshard: the state has no specs; make it with init_state")
    before = state.specs
    state = tree_lib.map(torch.Tensor.detach, state)  # leaf objects of its own: donating one must not poison the other
    moved = {}
    for field, old in before.fields.items():
        if field == "accum":
            continue
        moved[field] = reshard_tree(getattr(state, field), old, specs.fields[field])
    accum = state.accum
    if isinstance(accum, Accumulator):
        accum = dataclasses.replace(accum, grads=reshard_tree(accum.grads, before.accum, specs.accum))
    return dataclasses.replace(state, **moved, accum=accum, specs=specs)
