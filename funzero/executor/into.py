"""Gradients that did not come from a step's own loss join its window."""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.spec import Layout
from funzero.core.state import TrainState
from funzero.executor.cache import CacheOptions
from funzero.executor.disk import DiskLeaf
from funzero.executor.donate import check_usable
from funzero.executor.flat import FlatState
from funzero.executor.place import cut_flat
from funzero.executor.placement import Placement
from funzero.executor.plan import Plan
from funzero.executor.window import Landing, as_node, open_window, rounding
from funzero.transforms.precision import Policy, checked


def accumulate_into(
    state: TrainState, grads: Any, weight: float | torch.Tensor = 1, *, precision: Policy | None = None
) -> TrainState:
    """Adds gradients to a state's window, as a micro-batch of a step would; `step.update` closes it.

    Args:
        state: it stays usable; its leaves on disk only as long as the new one is not donated.
        grads: tree like its params, each leaf cut like its param, and summed over the batch axes already, as `pull` of a
            `vjp` gives them; `None` where there is none. Undivided and without a loss scale, whatever the state's is. Equal
            calls on all ranks; nothing is sent.
        weight: what they count in the mean, all ranks together: a number or a 0-dim tensor.
        precision: the step's policy, if that accumulates in less than float32.

    Returns: the new state.

    Raises ValueError by path for gradients that do not fit the params.

    >>> import torch, funzero as fz
    >>> state = fz.init_state({"w": torch.zeros(2)}, fz.sgd(1.0))
    >>> for _ in range(2):
    ...     state = fz.accumulate_into(state, {"w": torch.tensor([1.0, 3.0])})
    >>> state, metrics = fz.make_step(None, fz.sgd(1.0)).update(state)
    >>> state.params["w"].tolist()
    [-1.0, -3.0]
    """
    check_usable(state.step)
    for leaf in tree_lib.leaves(state):
        if isinstance(leaf, DiskLeaf):
            leaf.check()
    specs = state.specs
    if specs is None:
        raise ValueError("accumulate_into: the state has no specs; make it with fz.init_state")
    plan = Plan(specs, checked(precision))
    flat = FlatState.open(state, specs)
    window = open_window(plan, flat, False)
    placement = Placement(plan, CacheOptions(None, always_ask=False))
    landing = Landing(window, placement, rounding(plan, flat, window), False)
    for k, grad in _fitting(plan, grads):
        window.used[k] = True
        layout = specs.accum.layouts[k]
        landing.add(k, _placed(grad, specs.params.layouts[plan.trained[k]], layout, flat.scale))
    window.outbox.settle()
    window.times += 1
    window.weight = window.weight + torch.as_tensor(weight).double() / plan.batch_ranks  # the ranks add theirs up
    flat.accum = as_node(plan, window)
    return flat.close(False)


def _fitting(plan: Plan, grads: Any) -> list[tuple[int, torch.Tensor]]:
    """The gradients that are there, by trained leaf, checked."""
    kept = dict(zip(tree_lib.paths(plan.specs.params.tree), plan.specs.params.layouts, strict=True))
    place = {path: k for k, path in enumerate(tree_lib.paths(plan.specs.grads.tree))}
    found = {n: g for n, g in zip(*tree_lib.flatten_with_none(grads), strict=True) if g is not None}
    unknown = sorted(found.keys() - kept.keys())
    if unknown:
        raise ValueError(
            f"accumulate_into: grads have {unknown[:3]}, which the params have not; give a tree like params"
        )
    frozen = sorted(found.keys() - place.keys())
    if frozen:
        raise ValueError(f"accumulate_into: grads/{frozen[0]}: the param does not train; give None")
    for name, grad in found.items():
        x = kept[name]
        fits = isinstance(grad, torch.Tensor) and grad.is_floating_point() == x.dtype.is_floating_point
        if not fits or tuple(grad.shape) != x.local_shape or grad.device != x.mesh.device:
            here = tree_lib.dtype_and_shape(x.dtype, x.local_shape)
            raise ValueError(
                f"accumulate_into: grads/{name}: expected {here} on {x.mesh.device}, cut like the param, got "
                f"{tree_lib.describe(grad)}{f' on {grad.device}' if isinstance(grad, torch.Tensor) else ''}"
            )
    return [(place[name], grad) for name, grad in found.items()]


def _placed(grad: torch.Tensor, kept: Layout, accum: Layout, scale: torch.Tensor | None) -> torch.Tensor:
    """A gradient as the accumulator is laid out, on memory of its own: of a sum that is not made yet, the first rank has
    all of it."""
    if kept.is_flat and kept.spec.flat != accum.spec.flat:
        raise ValueError(
            f"{accum.path}: is cut over {accum.spec.flat}, its param over {kept.spec.flat}; reshard the state"
        )
    part = grad.detach().to(accum.dtype, copy=True)
    part = part if kept.is_flat else cut_flat(part, accum)
    if accum.mesh.index(accum.spec.unreduced):
        return torch.zeros_like(part)
    return part if scale is None else part * scale.to(part.dtype)
