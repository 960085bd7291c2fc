"""The update: transformed gradients are added to the params."""

import dataclasses
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.state import TrainState
from funzero.transforms.base import Transform


def apply_updates(params: Any, updates: Any) -> Any:
    """params + updates, in the params' dtypes; a leaf whose update is `None` (or missing) stays as it is.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.25)})["w"]
    tensor(0.7500)
    """
    given = dict(zip(*tree_lib.flatten_with_paths(updates)[:2], strict=True))

    def add(path: str, p: torch.Tensor) -> torch.Tensor:
        return p if path not in given else (p + given[path]).to(p.dtype)

    return tree_lib.map_with_path(add, params)


def apply_update(tx: Transform, state: TrainState, grads: Any) -> TrainState:
    """One update of whole leaves in one process: the reference that the executor must reproduce.

    Args:
        tx: the optimizer. state: whose params are whole here. grads: finalised gradients, `None` where there is none.

    Returns: the state with new params, opt_state and step; its window is closed.
    """
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = apply_updates(state.params, updates)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, accum=())
