"""Chains that a fused kernel covers: recognised once, then run in place on lists of leaves."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from funzero import _compat
from funzero.core import tree as tree_lib
from funzero.core.spec import Specs
from funzero.executor.lanes import Kernel, run_in_vectors
from funzero.transforms.base import Hyperparams, Transform
from funzero.transforms.chain import part_names
from funzero.transforms.precision import wide_dtype
from funzero.transforms.storage import Rounder

Reader = Callable[[list[torch.Tensor]], float]


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that one kernel call serves: places among the chosen ones, and of their state in opt_state."""

    places: list[int]
    mu: list[int]
    nu: list[int]
    count: list[int]
    decays: bool


@dataclasses.dataclass(frozen=True)
class FusedAdam:
    """adam or adamw: where its parts lie among the leaves of opt_state.

    Attributes:
        mu, nu, count: places by trained leaf. decays: whether a trained leaf decays. counts: the schedules' counts.
        hyper: readers of the hyper-parameters.
    """

    mu: list[int]
    nu: list[int]
    count: list[int]
    decays: list[bool]
    schedule_counts: list[int]
    hyper: dict[str, Reader]

    def written(self, chosen: tuple[int, ...]) -> list[int]:
        """The places in opt_state that an update of the chosen trained leaves writes to."""
        return [where[i] for where in (self.mu, self.nu) for i in chosen] + self.schedule_counts

    def groups(self, chosen: tuple[int, ...], dtypes: list[torch.dtype]) -> list[Group]:
        """The chosen trained leaves in groups that one kernel call serves; `dtypes` are theirs, in order."""
        kinds = [(d, self.decays[i]) for d, i in zip(dtypes, chosen, strict=True)]
        return [
            self._group(chosen, [k for k, other in enumerate(kinds) if other == kind]) for kind in dict.fromkeys(kinds)
        ]

    def _group(self, chosen: tuple[int, ...], places: list[int]) -> Group:
        leaves = [chosen[k] for k in places]
        mu, nu, count = ([column[i] for i in leaves] for column in (self.mu, self.nu, self.count))
        return Group(places, mu, nu, count, self.decays[leaves[0]])

    def read(self, opt_state: list[torch.Tensor]) -> dict[str, float]:
        """The hyper-parameters of the update that comes next."""
        return {name: read(opt_state) for name, read in self.hyper.items()}

    def run(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        opt_state: list[torch.Tensor],
        hyper: dict[str, float],
        chosen: tuple[int, ...],
        groups: list[Group],
        skip: torch.Tensor | None,
    ) -> None:
        """Updates in place.

        Args:
            params, grads: of the chosen trained leaves. opt_state: all leaves, those of `written` writable; the counts
                are replaced. hyper: see `read`.
            skip: 0-dim bool on the device, or None when this update is known to happen.
        """
        self._advance(opt_state, chosen, skip)
        for g in groups:
            columns = [
                [params[k] for k in g.places],
                [grads[k] for k in g.places],
                [opt_state[i] for i in g.mu],
                [opt_state[i] for i in g.nu],
            ]
            kernel = self._bound(hyper, g.decays, skip)
            run_in_vectors(columns, [opt_state[i] for i in g.count], kernel, written=[0, 2, 3])

    def run_rounded(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        opt_state: list[torch.Tensor],
        hyper: dict[str, float],
        names: dict[int, tuple[str, str, str]],
        round_to: Rounder,
        skip: torch.Tensor | None,
    ) -> None:
        """The same for leaves kept in less than float32: widened, updated and rounded one by one.

        Args:
            names: {chosen trained leaf: its name and those of its mu and nu}, in order. The others as of `run`.
        """
        self._advance(opt_state, tuple(names), skip)
        for k, (i, labels) in enumerate(names.items()):
            kept = (params[k], opt_state[self.mu[i]], opt_state[self.nu[i]])
            p, mu, nu = wide = [x.to(wide_dtype(params[k].dtype)) for x in kept]
            columns = [[p], [grads[k].to(p.dtype)], [mu], [nu]]
            run_in_vectors(columns, [opt_state[self.count[i]]], self._bound(hyper, self.decays[i], skip), [0, 2, 3])
            for what, x, new in zip(labels, kept, wide, strict=True):
                x.copy_(round_to(labels[0], what, new, x.dtype))

    def _bound(self, hyper: dict[str, float], decays: bool, skip: torch.Tensor | None) -> Kernel:
        return functools.partial(
            _kernel,
            lr=hyper["learning_rate"],
            beta1=hyper["b1"],
            beta2=hyper["b2"],
            eps=hyper["eps"],
            weight_decay=hyper["weight_decay"] if decays else 0.0,
            found_inf=None if skip is None else skip.to(torch.float32),
        )

    def _advance(self, opt_state: list[torch.Tensor], chosen: tuple[int, ...], skip: torch.Tensor | None) -> None:
        """Adds 1 to the counts of the chosen leaves, which all become views of one new tensor, and of the schedules."""
        counts = torch.stack([opt_state[i] for i in self.count])
        one: Any = 1 if skip is None else (~skip).to(torch.int32)
        if len(chosen) == len(self.count):
            counts += one
        else:
            counts[torch.tensor(list(chosen), device=counts.device)] += one
        for i, count in zip(self.count, counts.unbind(), strict=True):
            opt_state[i] = count
        for i in self.schedule_counts:
            opt_state[i].add_(one)


def is_tame(hyper: dict[str, float], largest: float) -> bool:
    """True if an update of finite leaves by gradients up to `largest` is finite, so that nobody has to look at it.

    The second moment is a mean of squares that do not overflow, so no first moment is beyond the root of the largest
    number, and what is divided by it is at least eps. Holds for params below a tenth of the largest number.
    """
    most = torch.finfo(torch.float32).max
    rate, b1, b2, eps, decay = (hyper[n] for n in ("learning_rate", "b1", "b2", "eps", "weight_decay"))
    if not (0 <= b1 < 1 and 0 <= b2 < 1 and eps > 0 and largest**2 < most):
        return False
    return abs(rate) * math.sqrt(most) / (1 - b1) / eps < most / 10 and abs(rate * decay) <= 1


def _kernel(columns: list[list[torch.Tensor]], counts: list[torch.Tensor], **hyper: Any) -> None:
    params, grads, mu, nu = columns
    _compat.fused_adamw(params, grads, mu, nu, counts, **hyper)


def match(tx: Transform, specs: Specs, names: list[str]) -> FusedAdam | None:
    """The fused form of `tx`, or None.

    Args:
        tx: with masks resolved. specs: of opt_state. names: paths of the trained leaves, below params.
    """
    kinds = [p.fused[0] if p.fused else None for p in tx.parts]
    if kinds[:1] != ["scale_by_adam"] or kinds[-1:] != ["scale_by_learning_rate"] or len(kinds) not in (2, 3):
        return None
    if any(x.dtype not in (torch.bfloat16, torch.float32, torch.float64, torch.int32) for x in specs.layouts):
        return None
    entries = part_names(tx.parts)
    place = {path: i for i, path in enumerate(tree_lib.paths(specs.tree))}
    adam, rate = entries[0], entries[-1]
    if any(f"{adam}/mu/{n}" not in place for n in names):
        return None  # these parts are not a chain's but a partition's
    sources = [(adam, tx.parts[0]), (rate, tx.parts[-1])]
    decays = [False] * len(names)
    if len(kinds) == 3:
        middle, entry = tx.parts[1], entries[1]
        kept: Any = names
        if kinds[1] == "masked":
            middle, kept = middle.fused[1]  # type: ignore[index]
            entry = f"{entry}/masked"
        if not middle.fused or middle.fused[0] != "add_decayed_weights":
            return None
        sources.append((entry, middle))
        decays = [n in set(kept) for n in names]
    hyper: dict[str, Reader] = {"weight_decay": lambda leaves: 0.0}
    for entry, part in sources:
        hyper |= _readers(entry, part.fused[1][0], place)  # type: ignore[index]
    return FusedAdam(
        mu=[place[f"{adam}/mu/{n}"] for n in names],
        nu=[place[f"{adam}/nu/{n}"] for n in names],
        count=[place[f"{adam}/count/{n}"] for n in names],
        decays=decays,
        schedule_counts=[place[path] for path in (_count_path(e, part) for e, part in sources) if path in place],
        hyper=hyper,
    )


def _count_path(entry: str, part: Transform) -> str:
    """Where the count of its schedules lies, if it has any."""
    return f"{entry}/{part.fused[1][0].count}"  # type: ignore[index]


def _readers(entry: str, hyper: Hyperparams, place: dict[str, int]) -> dict[str, Reader]:
    def stored(i: int) -> Reader:
        return lambda leaves: float(leaves[i])

    def scheduled(schedule: Any, i: int) -> Reader:
        return lambda leaves: float(schedule(leaves[i].to(torch.float64)))

    return {
        name: scheduled(value, place[f"{entry}/{hyper.count}"])
        if callable(value)
        else stored(place[f"{entry}/hyperparams/{name}"])
        for name, value in hyper.given.items()
    }
