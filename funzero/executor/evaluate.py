"""Forward passes without gradient or change: evaluation and calls, through the same gathers as a step."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.state import EMPTY_NODE, Metrics, StateSpecs, TrainState
from funzero.data import EMPTY
from funzero.executor import agree
from funzero.executor.cache import CacheOptions, Program
from funzero.executor.donate import check_usable
from funzero.executor.micro import MicroBatch, call_loss, cast_batch
from funzero.executor.placement import Placement
from funzero.executor.plan import Plan
from funzero.executor.session import Session
from funzero.executor.window import Window
from funzero.transforms.accumulate import mean_aux
from funzero.transforms.grad import Takes, detached
from funzero.transforms.losses import Loss
from funzero.transforms.precision import Policy, checked
from funzero.transforms.rng import fold_in, seeded

_EVAL_STREAM = -1


def make_eval(
    loss_fn: Callable[..., Any], *, specs: StateSpecs | None = None, precision: Policy | None = None
) -> Callable[[TrainState, Any], Metrics]:
    """A function `(state, batch) -> Metrics` that evaluates a loss: no gradient, nothing changes. A collective call.

    Args:
        loss_fn, precision: as for `make_step`. specs: the layout of the states; default: whatever a state has.

    Returns: the function. Its batch is this rank's, or `fz.data.EMPTY`; loss and aux are means by weight over all
    ranks, and `grad_norm` is NaN.
    """
    takes = Takes.of(loss_fn)
    bounds: dict[tuple[StateSpecs, Any], tuple[Placement, Program]] = {}

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        placement, program = _bind(state, specs, checked(precision), bounds, always_ask=False)
        plan = placement.plan
        text = "" if batch is EMPTY else agree.describe_batch(batch)
        signature = zlib.crc32(tree_lib.show(plan.specs.params).encode())
        agree.agree(plan.mesh, agree.Header(agree.EVAL, batch is not EMPTY, text, signature))
        key = fold_in(state.key, _EVAL_STREAM, plan.batch_index)

        def run(params: Any) -> Loss:
            with seeded(key, plan.mesh.device):
                micro = MicroBatch(cast_batch(plan, batch), key, state.buffers)
                return dataclasses.replace(detached(call_loss(loss_fn, takes, params, micro)), buffers=None)

        with plan.mesh.guard():
            window = _empty_window(plan, state)
            loss = _forward(placement, program, state, None if batch is EMPTY else run)
            if loss is not None:
                window.add_loss(loss)
            _, weight, total, aux = agree.close_window(plan, window)
        return Metrics(
            loss=total / weight,
            grad_norm=torch.full_like(total, float("nan")),
            weight=weight,
            loss_scale=torch.ones((), device=total.device),
            skipped=weight == 0,
            skipped_in_a_row=state.skips.clone(),
            step=state.step.clone(),
            aux=mean_aux(aux, weight),
        )

    return evaluate


def _empty_window(plan: Plan, state: TrainState) -> Window:
    zero = torch.zeros((), dtype=torch.float64, device=plan.mesh.device)
    return Window([], [], zero, zero, EMPTY_NODE, 0, tree_lib.leaves(state.buffers))


def _bind(
    state: TrainState,
    specs: StateSpecs | None,
    policy: Policy,
    bounds: dict[tuple[StateSpecs, Any], tuple[Placement, Program]],
    *,
    always_ask: bool,
) -> tuple[Placement, Program]:
    check_usable(state.step)
    if state.specs is None:
        raise ValueError("the state has no specs; make it with fz.init_state")
    if specs is not None and specs != state.specs:
        raise ValueError("the state's layout is not the one given as specs; fz.reshard the state")
    key = state.specs, state.specs.mesh.comm
    if key not in bounds:
        options = CacheOptions(budget=None, always_ask=always_ask)
        bounds[key] = Placement(Plan(state.specs, policy), options), Program()
    return bounds[key]


def _forward(placement: Placement, program: Program, state: TrainState, fn: Callable[[Any], Any] | None) -> Any:
    with Session(placement, tree_lib.leaves(state.params), program) as session:
        return session.forward(fn)


def call(fn: Callable[..., Any], state: TrainState, *inputs: Any, precision: Policy | None = None) -> Any:
    """`fn(params, *inputs)` with the state's params, without gradient: a forward alone. A collective call.

    Args:
        fn: such as a function that generates; params are global (local pieces where a partition cuts them).
    """
    placement, program = _bind(state, None, checked(precision), {}, always_ask=True)
    with placement.plan.mesh.guard():
        return _forward(placement, program, state, lambda params: fn(params, *inputs))
