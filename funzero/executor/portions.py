"""Which leaves an optimizer without a kernel works on at a time.

[Note: portions] All leaves at once is the safe choice, and costs the memory of all. Where something lives elsewhere, and
every leaf is updated by itself (`Transform.separate`), leaves come to the device in portions of a few megabytes: a portion
is some trained leaves, what in opt_state is made from them, and what in it is made from no param, which every portion
gets as it was and makes the same new values of. Portions are formed by global sizes, so that ranks agree on them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from funzero.core import abstract
from funzero.core import tree as tree_lib
from funzero.core.spec import Specs
from funzero.executor.plan import Plan
from funzero.transforms.base import Transform
from funzero.transforms.storage import stored

PORTION_BYTES = 16 << 20  # of params, gradients and state, if it is more than one leaf


@dataclasses.dataclass(frozen=True)
class Portion:
    """Some leaves of an update.

    Attributes:
        chosen: the trained leaves that take part, in list order. trained: these, and those that only show their shapes.
        state: places in opt_state. trained_def, state_def: the structures of just these.
    """

    chosen: tuple[int, ...]
    trained: tuple[int, ...]
    state: tuple[int, ...]
    trained_def: Any
    state_def: Any


def whole(plan: Plan, chosen: Sequence[int]) -> Portion:
    """All leaves."""
    trained, state = plan.specs.grads, plan.specs.opt_state
    every = tuple(range(len(trained.layouts)))
    return Portion(tuple(chosen), every, tuple(range(len(state.layouts))), trained.treedef, state.treedef)


def portions(plan: Plan, tx: Transform, chosen: Sequence[int]) -> list[Portion]:
    """The chosen leaves in portions of about PORTION_BYTES. tx: the optimizer, separate."""
    trained, state = plan.specs.grads, plan.specs.opt_state
    names = tree_lib.paths(trained.tree)
    sources = abstract.sources(stored(tx, plan.policy).init, trained.abstract())[1]
    owner = [None if source is None else source.path for source in sources]
    sizes = {n: 2 * x.n * x.dtype.itemsize for n, x in zip(names, trained.layouts, strict=True)}  # with its param
    for name, x in zip(owner, state.layouts, strict=True):
        if name is not None:
            sizes[name] += x.n * x.dtype.itemsize
    made: list[list[int]] = []
    members: list[int] = []
    held = 0
    for k in chosen:
        if members and held + sizes[names[k]] > PORTION_BYTES:
            made.append(members)
            members, held = [], 0
        members.append(k)
        held += sizes[names[k]]
    return [_portion(ours, names, owner, trained, state) for ours in [*made, members]]


def _portion(members: list[int], names: list[str], owner: list[str | None], trained: Specs, state: Specs) -> Portion:
    ours = {names[k] for k in members}
    state_paths = tree_lib.paths(state.tree)
    others = {path for path, name in zip(state_paths, owner, strict=True) if name is not None and name not in ours}
    leaves, trained_def = _kept(trained, set(names) - ours)
    places, state_def = _kept(state, others)
    return Portion(tuple(members), leaves, places, trained_def, state_def)


def _kept(specs: Specs, dropped: set[str]) -> tuple[tuple[int, ...], Any]:
    """The places of the leaves that are left, and the structure that these have."""
    numbered = tree_lib.unflatten(specs.treedef, range(len(specs.layouts)))
    places, treedef = tree_lib.flatten(tree_lib.prune(numbered, dropped.__contains__))
    return tuple(places), treedef
