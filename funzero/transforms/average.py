"""Moving averages of the updates (`ema`) and of the params (`polyak_averaging`).

References: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; Kingma and Ba, "Adam: A
Method for Stochastic Optimization", 2014 (the correction for the start at 0).
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms import moments
from funzero.transforms.accumulate import accumulation_dtype
from funzero.transforms.base import Hyperparams, Scalar, Transform, find_state, leafwise, need_params
from funzero.transforms.moments import counts, first_moment, increment, zeros


def ema(decay: Scalar, debias: bool = True, accumulator_dtype: torch.dtype | None = None) -> Transform:
    """m' = decay * m + (1 - decay) * u; the update is m' / (1 - decay^t'), or m' without `debias`.

    Args:
        accumulator_dtype: of m; None: the param's.

    >>> tx = ema(0.9)
    >>> tx.update({"w": torch.tensor(2.0)}, tx.init({"w": torch.tensor(0.0)}))[0]["w"]
    tensor(2.)
    """
    hyper = Hyperparams({"decay": decay}, count="schedule_count")

    def init(params: Any) -> Any:
        count = {"count": counts(params)} if debias else {}
        return {**hyper.init(params), **count, "ema": zeros(params, accumulator_dtype)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        decay = hyper.read(state)["decay"]
        new = {"ema": first_moment(updates, state["ema"], decay)}
        out = new["ema"]
        if debias:
            new["count"] = increment(state["count"])
            out = moments.debias(out, decay, new["count"])
        return out, {**hyper.advance(state), **new}

    return leafwise("ema", init, update)


def polyak_averaging(decay: Scalar, debias: bool = True) -> Transform:
    """Keeps an average of the params: a' = decay * a + (1 - decay) * (p + u); the updates pass through.

    It comes last in a chain, where p + u are the new params. The average is in float32 or wider; a leaf that has not
    taken part yet has its params as average.

    Args:
        decay: a number, or a schedule of the count of applied updates.
        debias: weights the new params so that the average is that of all params after an update, as if started at 0 and
            divided by 1 - decay^t; False starts it at the initial params.

    >>> import funzero as fz
    >>> params = {"w": torch.tensor(1.0)}
    >>> tx = fz.chain(fz.sgd(1.0), polyak_averaging(0.9))
    >>> _, state = tx.update({"w": torch.tensor(0.5)}, tx.init(params), params)
    >>> averaged_params(state)
    {'w': tensor(0.5000)}
    """
    hyper = Hyperparams({"decay": decay})

    def init(params: Any) -> Any:
        wide = tree_lib.map(_widened, params)
        # Real, also for complex leaves: the sum of the weights of what has been averaged.
        sums = {"weight": tree_lib.map(lambda a: a.real.new_zeros(()), wide)} if debias else {}
        return {**hyper.init(params), **sums, "averaged_params": wide}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        need_params(params, "polyak_averaging")
        decay = hyper.read(state)["decay"]
        new, share = {}, tree_lib.map(lambda u: 1 - decay, updates)
        if debias:
            new["weight"] = tree_lib.map(lambda w: decay * w + (1 - decay), state["weight"])
            share = tree_lib.map(lambda w: (1 - decay) / w, new["weight"])

        def moved(u: torch.Tensor, p: torch.Tensor, a: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return a + s * ((p + u).to(p.dtype).to(a.dtype) - a)

        new["averaged_params"] = tree_lib.map(moved, updates, params, state["averaged_params"], share)
        return updates, {**hyper.advance(state), **new}

    return leafwise("polyak_averaging", init, update)


def _widened(p: torch.Tensor) -> torch.Tensor:
    """A copy in float32 or wider."""
    return torch.zeros_like(p, dtype=accumulation_dtype(p.dtype)) + p


def averaged_params(state: Any) -> Any:
    """The average of the params that `polyak_averaging` keeps: a tree like the params, float32 or wider.

    Args:
        state: the optimizer's state, or the part of it that holds the average.

    Raises ValueError if there is no average in it, or several.
    """
    return find_state(state, {"averaged_params"}, "averaged_params")["averaged_params"]
