"""Transforms: an optimizer piece is a pair of pure functions, `init` and `update`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import abstract
from funzero.core import tree as tree_lib

NEEDS = ("leaf", "norm", "element")
Schedule = Callable[[torch.Tensor], Any]
Scalar = float | torch.Tensor | Schedule
Reduce = Callable[[str, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Transform:
    """`init(params) -> state` and `update(updates, state, params) -> (updates, state)`.

    Attributes:
        needs: what `update` must be handed when leaves are cut over ranks. `leaf`: whole leaves (the safe default; its
            output is cut again). `norm`: pieces, and a keyword `reduce(path, x)` that sums `x` over the ranks that
            share the leaf. `element`: any piece.
        quantum: the pieces of a cut leaf begin at multiples of so many elements.
        name: the entry of its state in a chain.
        parts: the transforms that a composite is made of; its `update` takes a keyword
            `call(part, updates, state, params)` through which it runs them.
        resolve: evaluates masks and labels once on abstract global shapes; returns the transform to use from then on.
        fused: (kernel name, static arguments) for the executor to recognise, or None.
        separate: whether each leaf is updated by itself: an update of some leaves, with their state and what in the
            state is made from no param, gives these leaves and the latter what an update of all would. Then leaves that
            do not live on the device come to it a few at a time, else (the safe default) all at once.

    `None` in the updates means that a leaf did not take part: its param and the state made from it stay as they are.

    References: the pair of functions follows Optax (DeepMind, 2020).
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    needs: str = "leaf"
    quantum: int = 1
    name: str = "transform"
    parts: tuple["Transform", ...] = ()
    resolve: "Callable[[Any], Transform] | None" = None
    fused: tuple[str, tuple[Any, ...]] | None = None
    separate: bool = False

    def __post_init__(self) -> None:
        if self.needs not in NEEDS:
            raise ValueError(f"Transform(needs={self.needs!r}): expected one of {NEEDS}")


def unshared(path: str, x: torch.Tensor) -> torch.Tensor:
    """The `reduce` of whole leaves: `x` itself."""
    return x


def need_params(params: Any, name: str) -> None:
    """Refuses an update without params."""
    if params is None:
        raise ValueError(f"{name}: update needs the params and got None; call update(updates, state, params)")


def missing_paths(updates: Any, params: Any) -> set[str]:
    """The paths of `params` at which `updates` has no leaf."""
    return set(tree_lib.paths(params)) - set(tree_lib.paths(updates))


def skip_missing(update: Callable[..., tuple[Any, Any]], init: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    """Makes `update` accept `None` in the updates, by leaving such leaves out of all its trees."""

    def run(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        given = tree_lib.flatten_with_none(updates)[1]
        if all(x is not None for x in given):
            return update(updates, state, params, **extra)
        if params is None:
            raise ValueError("update: the updates hold None, which needs params=... to tell whose state stays")
        absent = missing_paths(updates, params)
        _, origin = abstract.sources(init, params)
        held = {
            p for p, made in zip(tree_lib.paths(state), origin, strict=True) if made is not None and made.path in absent
        }
        new_updates, new_state = update(
            tree_lib.prune(without_none(updates, params), absent.__contains__),
            tree_lib.prune(state, held.__contains__),
            tree_lib.prune(params, absent.__contains__),
            **extra,
        )
        return tree_lib.graft(updates, new_updates), tree_lib.graft(state, new_state)

    return run


def without_none(updates: Any, params: Any) -> Any:
    """`updates` in the structure of `params`, so that both prune alike."""
    return tree_lib.graft(params, updates)


def leafwise(
    name: str,
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    needs: str = "element",
    fused: tuple[str, tuple[Any, ...]] | None = None,
    quantum: int = 1,
    separate: bool = True,
) -> Transform:
    """A transform that is not a composite: it accepts `None` in its updates, and its state keeps its dtypes."""

    def keep_dtypes(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        new_updates, new = update(updates, state, params, **extra)
        return new_updates, tree_lib.map(lambda old, x: x.to(old.dtype), state, new)

    if any(isinstance(x, Hyperparams) and x.live for x in (fused or (name, ()))[1]):
        fused = None  # a kernel reads its numbers from the state
    run = skip_missing(keep_dtypes, init)
    return Transform(init, run, needs=needs, quantum=quantum, name=name, fused=fused, separate=separate)


def find_state(state: Any, keys: set[str], what: str) -> dict[str, Any]:
    """The one dict inside `state` that has these entries."""
    found: list[dict[str, Any]] = []

    def walk(sub: Any) -> None:
        if isinstance(sub, dict) and keys <= sub.keys():
            found.append(sub)
        elif isinstance(sub, dict):
            for child in sub.values():
                walk(child)

    walk(state)
    if len(found) != 1:
        raise ValueError(
            f"{what}: expected one place in the state with {sorted(keys)}, found {len(found)}; pass that part of it"
        )
    return found[0]


def scalar_kind(params: Any) -> dict[str, Any]:
    """The dtype and device of scalars kept for these params: float32, or float64 when a param is."""
    leaves = tree_lib.leaves(params)
    wide = any(x.dtype in (torch.float64, torch.complex128) for x in leaves)
    device = next((x.device for x in leaves), torch.device("cpu"))
    return {"dtype": torch.float64 if wide else torch.float32, "device": device}


@dataclasses.dataclass(frozen=True)
class Hyperparams:
    """Numbers become leaves of the state, schedules are evaluated at one count of applied updates.

    The leaves are float32, or float64 when a param is (so that float64 runs do not lose the digits of `0.1`). They are
    kept under `hyperparams`, so a new value needs no new step function. A 0-dim tensor is used as it is, and is no leaf:
    gradients flow to it.

    Attributes:
        given: number, tensor or schedule, by name. count: the entry of the count that the schedules read.
    """

    given: dict[str, Any]
    count: str = "count"

    @property
    def live(self) -> bool:
        """Whether some value is a tensor of the caller's."""
        return any(isinstance(v, torch.Tensor) for v in self.given.values())

    def init(self, params: Any) -> dict[str, Any]:
        """The part of a transform's state that these hyper-parameters need."""
        kind = scalar_kind(params)
        numbers = {
            k: torch.full((), float(v), **kind)
            for k, v in self.given.items()
            if not callable(v) and not isinstance(v, torch.Tensor)
        }
        state: dict[str, Any] = {"hyperparams": numbers} if numbers else {}
        if any(callable(v) for v in self.given.values()):
            state[self.count] = torch.zeros((), dtype=torch.int32, device=kind["device"])
        return state

    def read(self, state: dict[str, Any]) -> dict[str, Any]:
        """The values for this update, by name; 0-dim tensors."""
        values = dict(state.get("hyperparams", {}))
        for name, value in self.given.items():
            if callable(value):
                value = value(state[self.count].to(torch.float64))
                values[name] = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
            elif isinstance(value, torch.Tensor):
                values[name] = value
        return values

    def advance(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state after one update."""
        if not any(callable(v) for v in self.given.values()):
            return state
        return {**state, self.count: state[self.count] + 1}
