"""`vjp`: a function's output, and what takes cotangents of it back to its params and inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from funzero.core.spec import Specs
from funzero.core.state import StateSpecs
from funzero.executor.pull import Way, vjp_cut
from funzero.transforms.precision import Policy, checked
from funzero.transforms.vjp import Pull, vjp_whole


def vjp(
    fn: Callable[..., Any],
    params: Any,
    *inputs: Any,
    specs: StateSpecs | Specs | None = None,
    batch: Sequence[str] | None = None,
    precision: Policy | None = None,
    gather_budget: int | None = None,
    replay: bool = False,
) -> tuple[Any, Pull]:
    """The output of `fn(params, *inputs)`, and a function that pulls cotangents of it back.

    `pull(cotangent, last=False)` gives `(params_grads, *input_cotangents)`: products of the cotangent with the Jacobian,
    in the structures of params and of each input. It may be called any number of times; `last=True` frees the graph on
    the way, and is the last call.

    Args:
        fn: any function of trees of tensors to a tree of tensors.
        params: tree of whole tensors; with `specs` the local leaves that these describe (such as `state.params`), and
            `fn` sees them whole, wherever they are cut and kept. Every floating-point leaf is differentiated (with a
            `StateSpecs` those that it trains).
        inputs: trees of anything; with `specs` this rank's. Every floating-point tensor in them is differentiated: what
            should not be, goes into `fn` by a closure.
        specs: the layout of params, a `StateSpecs` or its `params`. Then `vjp` and `pull` are collective calls: each rank
            calls both as often as the others, and gradients are summed over the axes `batch` and cut like the params;
            input cotangents are those of this rank's inputs.
        batch: axes whose ranks have different inputs; default: the mesh's. (): all have the same, and nothing is summed.
        precision: a policy of `fz.precision`, as for `make_step`: of its compute dtype. Only with `specs`.
        gather_budget: bytes, as for `make_step`; only with `specs`.
        replay: keep no graph: each pull runs the forward again, with the same draws of torch's generators.

    Returns: (out, pull). Within a gradient, and without specs, both out and what pull gives can be differentiated further;
    else they carry no graph.

    A cotangent has the structure of out, and for each leaf the shape and dtype; `None` stands for zero, and is what leaves
    take that have no gradient (integers, bools, what is no tensor). In what pull returns, `None` stands where there is no
    gradient: for such leaves, and for those on which out does not depend. Undivided: a mean over ranks or samples is up
    to fn and the cotangent.

    Raises:
        ValueError: by path, on all ranks alike, a cotangent of another structure, shape, dtype or device, params that do
            not fit specs, an input that requires grad where there are specs; RuntimeError: a pull after the last.

    >>> import torch, funzero as fz
    >>> w, x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0])
    >>> y, pull = fz.vjp(lambda w, x: w @ x, w, x)
    >>> [t.tolist() for t in pull(torch.tensor([1.0, -2.0]))]
    [[[1.0, -1.0], [-2.0, 2.0]], [-5.0, -6.0]]
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("vjp: nothing can be differentiated within torch.inference_mode(); torch.no_grad() will do")
    if specs is None:
        given = {"batch": batch, "precision": precision, "gather_budget": gather_budget}
        useless = [name for name, value in given.items() if value is not None]
        if useless:
            raise ValueError(f"vjp: {useless} are of no use without specs; give specs, or leave them out")
        return vjp_whole(fn, params, inputs, replay)
    error = None
    if gather_budget is not None and gather_budget <= 0:
        error = ValueError(f"vjp: gather_budget is positive bytes or None, got {gather_budget}")
    budget = None if error else gather_budget
    way = Way.of(specs, None if batch is None else tuple(batch), checked(precision), budget)
    return vjp_cut(fn, params, inputs, way, replay, error)
