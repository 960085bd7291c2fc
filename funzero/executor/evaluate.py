"""Forward passes without gradient or change: evaluation and calls, through the same gathers as a step."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.scope import scope
from funzero.core.state import EMPTY_NODE, Metrics, StateSpecs, TrainState
from funzero.data import EMPTY
from funzero.executor import agree
from funzero.executor.donate import check_usable
from funzero.executor.materialize import GatherAll
from funzero.executor.micro import MicroBatch, call_loss, cast_batch
from funzero.executor.plan import Plan
from funzero.executor.run import global_scalars
from funzero.executor.window import Window
from funzero.transforms.accumulate import mean_aux
from funzero.transforms.grad import Takes, detached
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
    policy, takes = checked(precision), Takes.of(loss_fn)
    plans: dict[StateSpecs, GatherAll] = {}

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        gather = _bound(state, specs, policy, plans)
        plan = gather.plan
        text = "" if batch is EMPTY else agree.describe_batch(batch)
        signature = zlib.crc32(tree_lib.show(plan.specs.params).encode())
        agree.agree(plan.mesh, agree.Header(agree.EVAL, batch is not EMPTY, text, signature))
        with plan.mesh.guard():
            window = _empty_window(plan, state)
            leaves = gather(tree_lib.leaves(state.params))
            if batch is not EMPTY:
                key = fold_in(state.key, _EVAL_STREAM, plan.batch_index)
                micro = MicroBatch(cast_batch(plan, batch), key, state.buffers)
                with scope(), seeded(key, plan.mesh.device), torch.no_grad():
                    params = tree_lib.unflatten(plan.specs.params.treedef, [x.detach() for x in leaves])
                    window.add_loss(
                        dataclasses.replace(detached(call_loss(loss_fn, takes, params, micro)), buffers=None)
                    )
            weight, loss, aux = global_scalars(plan, window)
        return Metrics(
            loss=loss / weight,
            grad_norm=torch.full_like(loss, float("nan")),
            weight=weight,
            loss_scale=torch.ones((), device=loss.device),
            skipped=weight == 0,
            skipped_in_a_row=state.skips.clone(),
            step=state.step.clone(),
            aux=mean_aux(aux, weight),
        )

    return evaluate


def _empty_window(plan: Plan, state: TrainState) -> Window:
    zero = torch.zeros((), dtype=torch.float64, device=plan.mesh.device)
    return Window([], [], zero, zero, EMPTY_NODE, 0, tree_lib.leaves(state.buffers))


def _bound(
    state: TrainState, specs: StateSpecs | None, policy: Policy, plans: dict[StateSpecs, GatherAll]
) -> GatherAll:
    check_usable(state.step)
    if state.specs is None:
        raise ValueError("the state has no specs; make it with fz.init_state")
    if specs is not None and specs != state.specs:
        raise ValueError("the state's layout is not the one given as specs; fz.reshard the state")
    if state.specs not in plans:
        plans[state.specs] = GatherAll(Plan(state.specs, policy))
    return plans[state.specs]


def call(fn: Callable[..., Any], state: TrainState, *inputs: Any, precision: Policy | None = None) -> Any:
    """`fn(params, *inputs)` with the state's params whole, without gradient: a forward alone. A collective call.

    Args:
        fn: such as a function that generates; params are global (local pieces where a partition cuts them).
    """
    gather = _bound(state, None, checked(precision), {})
    with gather.plan.mesh.guard(), scope(), torch.no_grad():
        leaves = [x.detach() for x in gather(tree_lib.leaves(state.params))]
        return fn(tree_lib.unflatten(gather.plan.specs.params.treedef, leaves), *inputs)
