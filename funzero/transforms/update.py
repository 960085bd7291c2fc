"""The update: transformed gradients are added to the params; and hyper-parameters of a state are set."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.state import TrainState
from funzero.transforms.base import Transform
from funzero.transforms.precision import Policy, checked
from funzero.transforms.storage import rounder, update_stored, whole_index


def apply_updates(params: Any, updates: Any) -> Any:
    """params + updates, in the params' dtypes; a leaf whose update is `None` (or missing) stays as it is.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.25)})["w"]
    tensor(0.7500)
    """
    given = dict(zip(*tree_lib.flatten_with_paths(updates)[:2], strict=True))

    def add(path: str, p: torch.Tensor) -> torch.Tensor:
        return p if path not in given else (p + given[path]).to(p.dtype)

    return tree_lib.map_with_path(add, params)


def apply_update(tx: Transform, state: TrainState, grads: Any, *, precision: Policy | None = None) -> TrainState:
    """One update of whole leaves in one process: the reference that the executor must reproduce.

    Args:
        tx: the optimizer. state: whose params are whole here. grads: finalised gradients, `None` where there is none.
        precision: the policy that the state is kept by.

    Returns: the state with new params, opt_state and step; its window is closed.
    """
    policy = checked(precision)
    round_to = rounder(policy, state.key, state.step, whole_index(state.params))
    frozen = _frozen(state)
    seen = tree_lib.prune(state.params, frozen.__contains__)
    trained, opt_state = update_stored(tx, policy, _given(grads, seen), state.opt_state, seen, round_to)
    params = tree_lib.graft(state.params, trained)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, accum=())


def _frozen(state: TrainState) -> set[str]:
    """Paths, below params, of what the state's optimizer does not know of."""
    if state.specs is None:
        return set()
    return set(tree_lib.paths(state.params)) - set(tree_lib.paths(state.specs.grads.tree))


def _given(grads: Any, params: Any) -> Any:
    """`grads` in the structure of `params`, with `None` where there is no gradient."""
    found = dict(zip(*tree_lib.flatten_with_paths(grads)[:2], strict=True))
    return tree_lib.map_with_path(lambda path, _: found.get(path), params)


def with_hyperparams(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """The same state with other hyper-parameters; every step function goes on with it as it is.

    Args:
        values: {name or glob: number}. A name such as "learning_rate" sets it in every transform that has it; a glob
            over full paths, such as "opt_state/**/hyperparams/weight_decay", the leaves it matches. The others share
            memory with `state`.

    Raises ValueError for a name that no transform keeps as a number (a schedule is a function, not a leaf).

    >>> import funzero as fz
    >>> state = fz.init_state({"w": torch.zeros(2)}, fz.adam(1e-3))
    >>> new = fz.with_hyperparams(state, {"learning_rate": 0.5})
    >>> float(new.opt_state["scale_by_learning_rate"]["hyperparams"]["learning_rate"])
    0.5
    """
    paths = [f"opt_state/{p}" for p in tree_lib.paths(state.opt_state)]
    kept = [p for p in paths if p.split("/")[-2] == "hyperparams"] if paths else []
    globs = {n if "/" in n else f"opt_state/**/hyperparams/{n}": v for n, v in values.items()}
    hits = dict(zip(kept, tree_lib.match_globs(globs, kept, "with_hyperparams"), strict=True))

    def changed(path: str, leaf: torch.Tensor) -> torch.Tensor:
        glob = hits.get(f"opt_state/{path}")
        if glob is None:
            return leaf
        return torch.as_tensor(globs[glob], dtype=leaf.dtype, device=leaf.device).detach().reshape(leaf.shape).clone()

    state = tree_lib.map(torch.Tensor.detach, state)  # leaf objects of its own: donating one must not poison the other
    return dataclasses.replace(state, opt_state=tree_lib.map_with_path(changed, state.opt_state))
