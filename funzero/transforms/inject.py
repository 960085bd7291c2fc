"""Hyper-parameters of a user's own factory of transforms, as leaves of the state."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from funzero.transforms.base import Hyperparams, Transform, skip_missing
from funzero.transforms.chain import call_directly, resolved


def inject_hyperparams(
    factory: Callable[..., Transform], static_args: str | Iterable[str] = ()
) -> Callable[..., Transform]:
    """Wraps a factory so that its numbers are leaves under `hyperparams`, and its schedules follow a count of updates.

    funzero's own transforms do this by themselves. Here `factory` is called at each update with 0-dim tensors in place
    of numbers and schedules, so it may compute with them; bools, `None` and other values pass as they are.

    Args:
        factory: keyword arguments -> Transform. Every call with the same other arguments must give the same state.
        static_args: names of numbers and functions (such as masks) that are passed as they are.

    Returns: a function with the arguments of `factory`.

    Raises ValueError for a static argument that `factory` does not have.

    >>> import funzero as fz
    >>> tx = inject_hyperparams(lambda rate: fz.chain(fz.scale_by_adam(), fz.scale(-2 * rate)))(rate=0.1)
    >>> tx.init({})["hyperparams"]
    {'rate': tensor(0.1000)}
    """
    signature = inspect.signature(factory)
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    if not rest and static - set(signature.parameters):
        raise ValueError(f"inject_hyperparams: {factory} has no arguments {sorted(static - set(signature.parameters))}")

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Transform:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        for name in rest:
            named |= named.pop(name)
        given = {k: v for k, v in named.items() if k not in static and _is_hyperparam(v)}
        fixed = {k: v for k, v in named.items() if k not in given}
        return _injected(lambda values: factory(**fixed, **values), given)

    return make


def _is_hyperparam(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or callable(value) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _injected(build: Callable[[dict[str, Any]], Transform], given: dict[str, Any]) -> Transform:
    given = {k: v if callable(v) else float(v) for k, v in given.items()}
    hyper = Hyperparams(given)
    zero = torch.zeros((), dtype=torch.float64)
    start = {k: v(zero) if callable(v) else v for k, v in given.items()}
    first = build({k: torch.as_tensor(v, dtype=torch.float64) for k, v in start.items()})

    def init(params: Any) -> Any:
        return {**hyper.init(params), "inner": first.init(params)}

    def update(updates: Any, state: Any, params: Any = None, *, call: Any = call_directly) -> tuple[Any, Any]:
        out, inner = call(build(hyper.read(state)), updates, state["inner"], params)
        return out, {**hyper.advance(state), "inner": inner}

    def resolve(shapes: Any) -> Transform:
        return _injected(lambda values: resolved(build(values), shapes), given)

    return Transform(
        init,
        skip_missing(update, init),
        needs=first.needs,
        quantum=first.quantum,
        name="inject_hyperparams",
        parts=(first,),
        resolve=resolve,
        separate=first.separate,
    )
