"""Schedule-free learning: an average of the iterates takes the place of a falling learning rate.

z' = z + base(g),  w' = w + l^r,  c = l^r / w',  x' = (1 - c) x + c z',  y' = b1 x' + (1 - b1) z'

The params are y, where gradients are taken; x is the point to evaluate at; l is the largest learning rate so far.

References: Defazio et al., "The Road Less Scheduled", 2024.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms import schedules
from funzero.transforms.base import Hyperparams, Scalar, Transform, find_state, need_params, scalar_kind, skip_missing
from funzero.transforms.basic import add_decayed_weights, scale_by_learning_rate
from funzero.transforms.chain import call_directly, chain, resolved
from funzero.transforms.moments import is_zero
from funzero.transforms.optim.rmsprop import scale_by_rms
from funzero.transforms.optim.sgd import sgd


def schedule_free(
    base_optimizer: Transform, learning_rate: Scalar, b1: Scalar = 0.9, weight_lr_power: Scalar = 2.0
) -> Transform:
    """Schedule-free iterates around an optimizer without momentum of its own, see the equations of this module.

    The state holds `z` like the params, and a `weight_sum` for each leaf, so that a leaf which took no part keeps its
    average. Evaluate at `schedule_free_eval_params`.

    Args:
        base_optimizer: makes the steps of z, with its learning rate.
        learning_rate: the same number or schedule again, for the weights; here, as in Optax, a schedule is read at the
            count of the update that is made, from 1.
        b1: above 0: how near the params are to x. weight_lr_power: r in the equations.
    """
    if is_zero(b1):
        raise ValueError("schedule_free: b1 must be above 0, since x is found from the params and z by dividing by b1")
    ahead = (lambda count: learning_rate(count + 1)) if callable(learning_rate) else learning_rate
    hyper = Hyperparams({"learning_rate": ahead, "b1": b1, "weight_lr_power": weight_lr_power})

    def init(params: Any) -> Any:
        return {
            **hyper.init(params),
            "weight_sum": tree_lib.map(lambda p: p.new_zeros((), dtype=_real(p)), params),
            "max_lr": torch.zeros((), **scalar_kind(params)),
            "z": tree_lib.map(torch.clone, params),
            "base": base_optimizer.init(params),
        }

    def update(updates: Any, state: Any, params: Any = None, *, call: Any = call_directly) -> tuple[Any, Any]:
        need_params(params, "schedule_free")
        h = hyper.read(state)
        b1, max_lr = h["b1"], torch.maximum(state["max_lr"], h["learning_rate"].to(state["max_lr"]))
        weight = max_lr ** h["weight_lr_power"]
        sums = tree_lib.map(lambda w: (w + weight).to(w.dtype), state["weight_sum"])
        steps, base = call(base_optimizer, updates, state["base"], params)
        z = tree_lib.map(lambda z, u: (z + u).to(z.dtype), state["z"], steps)

        def change(y: torch.Tensor, before: torch.Tensor, z: torch.Tensor, total: torch.Tensor) -> Any:
            share = torch.where(total == 0, torch.zeros_like(total), weight / total)  # 0/0 while the rate is 0
            x = (1 - share) * _eval_point(y, before, b1) + share * z
            return b1 * x + (1 - b1) * z - y

        out = tree_lib.map(change, params, state["z"], z, sums)
        new = {"weight_sum": sums, "max_lr": max_lr, "z": z, "base": base}
        return out, {**hyper.advance(state), **new}

    return Transform(
        init,
        skip_missing(update, init),
        needs="element",
        quantum=base_optimizer.quantum,
        name="schedule_free",
        parts=(base_optimizer,),
        separate=base_optimizer.separate,
        resolve=lambda shapes: schedule_free(resolved(base_optimizer, shapes), learning_rate, b1, weight_lr_power),
    )


def _real(p: torch.Tensor) -> torch.dtype:
    """The dtype of sums of weights."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def _eval_point(y: torch.Tensor, z: torch.Tensor, b1: Any) -> Any:
    return (y - (1 - b1) * z) / b1


def schedule_free_eval_params(state: Any, params: Any) -> Any:
    """The params to evaluate at: x = (y - (1 - b1) z) / b1.

    Args:
        state: the state of `schedule_free`, or of a chain that holds one. params: those that are trained, y.

    >>> params, tx = {"w": torch.tensor(1.0)}, schedule_free_sgd(0.5)
    >>> schedule_free_eval_params(tx.init(params), params)["w"]
    tensor(1.)
    """
    held = find_state(state, {"z", "weight_sum", "max_lr"}, "schedule_free_eval_params")
    b1 = held.get("hyperparams", {}).get("b1")
    if b1 is None:
        raise ValueError("schedule_free_eval_params: the state has no b1; pass schedule_free a number for it")
    return tree_lib.map(lambda y, z: _eval_point(y, z, b1).to(y.dtype), params, held["z"])


def schedule_free_sgd(
    learning_rate: Scalar = 1.0,
    warmup_steps: int | None = None,
    b1: Scalar = 0.9,
    weight_decay: Scalar | None = None,
    weight_lr_power: Scalar = 2.0,
) -> Transform:
    """Schedule-free gradient descent; Optax's formula and defaults.

    Args:
        learning_rate: a number. warmup_steps: over which it rises from 0 in a straight line.
        weight_decay: added to the gradient, see `add_decayed_weights`. b1, weight_lr_power: see `schedule_free`.
    """
    rate = _warmed_up(learning_rate, warmup_steps)
    base = sgd(rate) if weight_decay is None else chain(add_decayed_weights(weight_decay), sgd(rate))
    return schedule_free(base, rate, b1, weight_lr_power)


def schedule_free_adamw(
    learning_rate: Scalar = 0.0025,
    warmup_steps: int | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    weight_lr_power: Scalar = 2.0,
) -> Transform:
    """Schedule-free AdamW; Optax's formula and defaults. The average takes the place of Adam's first moment.

    Args:
        learning_rate: a number. warmup_steps: over which it rises from 0 in a straight line.
        b2, eps, weight_decay: as for `adamw`. b1, weight_lr_power: see `schedule_free`.

    >>> sorted(schedule_free_adamw().init({})["base"])
    ['add_decayed_weights', 'scale_by_learning_rate', 'scale_by_rms']
    """
    rate = _warmed_up(learning_rate, warmup_steps)
    base = chain(
        scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(rate),
    )
    return schedule_free(base, rate, b1, weight_lr_power)


def _warmed_up(rate: Scalar, steps: int | None) -> Scalar:
    if steps is None:
        return rate
    if callable(rate):
        raise ValueError("warmup_steps needs a number for the learning rate; let the schedule rise by itself")
    rise = schedules.linear(0.0, 1.0, steps)
    return lambda count: rise(count) * rate
