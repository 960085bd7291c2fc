"""Lookahead: slow weights that follow the fast ones every k steps.

Every k-th update: slow' = slow + alpha (fast - slow), and the params become slow'.

References: Zhang, Lucas, Hinton, Ba, "Lookahead Optimizer: k steps forward, 1 step back", 2019.
"""

from typing import Any

import torch

from funzero.core import abstract
from funzero.core import tree as tree_lib
from funzero.transforms.base import Hyperparams, Scalar, Transform, need_params, skip_missing
from funzero.transforms.chain import call_directly, resolved
from funzero.transforms.moments import counts, increment


def lookahead(
    fast_optimizer: Transform, sync_period: int, slow_step_size: Scalar, reset_state: bool = False
) -> Transform:
    """Lookahead around an optimizer of plain params; the state keeps the slow ones.

    The params of a leaf are those that Optax calls fast: after each `sync_period` updates of it they are the slow ones.

    Args:
        fast_optimizer: makes the steps between. sync_period: updates from one synchronisation to the next, at least 1.
        slow_step_size: alpha in the equation of this module.
        reset_state: starts the state of `fast_optimizer` anew at each synchronisation, except its `hyperparams`.

    >>> import funzero as fz
    >>> params, tx = {"w": torch.tensor(1.0)}, lookahead(fz.sgd(1.0), sync_period=1, slow_step_size=0.5)
    >>> tx.update({"w": torch.tensor(1.0)}, tx.init(params), params)[0]["w"]
    tensor(-0.5000)
    """
    if sync_period < 1:
        raise ValueError(f"lookahead: sync_period must be at least 1, got {sync_period}")
    hyper = Hyperparams({"slow_step_size": slow_step_size}, count="schedule_count")

    def init(params: Any) -> Any:
        own = {"count": counts(params), "slow": tree_lib.map(torch.clone, params)}
        return {**hyper.init(params), **own, "fast": fast_optimizer.init(params)}

    def update(updates: Any, state: Any, params: Any = None, *, call: Any = call_directly) -> tuple[Any, Any]:
        need_params(params, "lookahead")
        alpha = hyper.read(state)["slow_step_size"]
        count = increment(state["count"])
        synced = tree_lib.map(lambda t: t % sync_period == 0, count)
        updates, fast = call(fast_optimizer, updates, state["fast"], params)

        def next_slow(u: torch.Tensor, p: torch.Tensor, slow: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
            return torch.where(now, slow + alpha * (p + u - slow), slow).to(slow.dtype)

        slow = tree_lib.map(next_slow, updates, params, state["slow"], synced)
        out = tree_lib.map(lambda u, p, s, now: torch.where(now, s - p, u), updates, params, slow, synced)
        if reset_state:
            fast = _restarted(fast_optimizer, params, fast, synced)
        return out, {**hyper.advance(state), "count": count, "slow": slow, "fast": fast}

    # A new state cannot be made from pieces of leaves unless it is element by element.
    opaque = reset_state and not _element_wise(fast_optimizer)
    return Transform(
        init,
        skip_missing(update, init),
        needs="leaf" if opaque else "element",
        quantum=fast_optimizer.quantum,
        name="lookahead",
        parts=() if opaque else (fast_optimizer,),
        separate=fast_optimizer.separate and not reset_state,
        resolve=lambda shapes: lookahead(resolved(fast_optimizer, shapes), sync_period, slow_step_size, reset_state),
    )


def _element_wise(tx: Transform) -> bool:
    return tx.needs == "element" and all(_element_wise(part) for part in tx.parts)


def _restarted(tx: Transform, params: Any, state: Any, synced: Any) -> Any:
    """`state` as `tx.init` makes it, for the leaves that are synchronised; what belongs to no leaf, if one of them is."""
    names = tree_lib.paths(state)
    fresh = tree_lib.leaves(tx.init(params))
    origin = [source and source.path for source in abstract.sources(tx.init, params)[1]]
    flags = dict(zip(*tree_lib.flatten_with_paths(synced)[:2], strict=True))
    some = torch.stack(list(flags.values())).any() if flags else torch.tensor(False)

    def pick(name: str, old: torch.Tensor, new: torch.Tensor, source: str | None) -> torch.Tensor:
        if "hyperparams" in name.split("/"):
            return old
        return torch.where(some if source is None else flags[source], new, old)

    held, treedef = tree_lib.flatten(state)
    return tree_lib.unflatten(treedef, [pick(*row) for row in zip(names, held, fresh, origin, strict=True)])
