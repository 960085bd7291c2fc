"""Chains that a fused kernel covers: recognised once, then run in place, leaf by leaf or part by part."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.spec import Specs
from funzero.executor.dispatch import Adam, Lion, Momentum, Rule
from funzero.transforms.base import Hyperparams, Transform
from funzero.transforms.blockwise import positive_book, signed_book
from funzero.transforms.chain import part_names

Reader = Callable[[list[torch.Tensor]], float]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of params and gradients
MOMENTS = (torch.float32, torch.bfloat16)
CODED = (torch.uint8, torch.float32)  # codes, and their scales


@dataclasses.dataclass(frozen=True)
class Codes:
    """How a moment is kept in codes. book: float32 on the CPU. block: elements that share a scale."""

    book: torch.Tensor
    block: int


@dataclasses.dataclass(frozen=True)
class FusedChain:
    """An optimizer that one kernel runs: where its parts lie among the leaves of opt_state.

    Attributes:
        moments: of each trained leaf, in the kernel's order; those in codes with their scales in turn. codes: of each moment;
        empty if they are floats. count: of each trained leaf; empty if there are none.
        decays: whether a trained leaf decays. schedule_counts: what its schedules count by.
        rule: the kernel's hyper-parameters, from those that `read` gives. hyper: readers of the hyper-parameters.
    """

    moments: list[tuple[int, ...]]
    count: list[int]
    decays: list[bool]
    schedule_counts: list[int]
    rule: Callable[[dict[str, float]], Rule]
    hyper: dict[str, Reader]
    codes: tuple[Codes, ...] = ()

    def read(self, opt_state: list[torch.Tensor]) -> dict[str, float]:
        """The hyper-parameters of the update that comes next."""
        return {name: read(opt_state) for name, read in self.hyper.items()}

    def advance(self, opt_state: list[torch.Tensor], chosen: tuple[int, ...], skip: torch.Tensor | None) -> list[int]:
        """Adds 1 to the counts of the chosen leaves, which all become views of one new tensor, and of the schedules.

        Args:
            skip: 0-dim bool on the device: adds 0 if it is true; or None.

        Returns: the new counts of the chosen leaves (as if nothing were skipped).
        """
        one: Any = 1 if skip is None else (~skip).to(torch.int32)
        for i in self.schedule_counts:
            opt_state[i].add_(one)
        if not self.count:
            return [1] * len(chosen)
        counts = _stacked([opt_state[i] for i in self.count])
        new = [n + 1 for n in counts.tolist()]
        if len(chosen) == len(self.count):
            counts = counts + one
        else:
            counts = counts.clone()
            counts[torch.tensor(list(chosen), device=counts.device)] += one
        for i, count in zip(self.count, counts.unbind(), strict=True):
            opt_state[i] = count
        return new if len(chosen) == len(new) else [new[i] for i in chosen]


def _stacked(scalars: list[torch.Tensor]) -> torch.Tensor:
    """0-dim tensors as one [n]; a view of them if they lie in a row, as `advance` leaves them."""
    first, n = scalars[0], len(scalars)
    at, size = first.data_ptr(), first.itemsize
    in_a_row = list(map(torch.Tensor.data_ptr, scalars)) == list(range(at, at + size * n, size))
    return first.as_strided((n,), (1,)) if in_a_row else torch.stack(scalars)


def is_tame(rule: Rule, weight_decay: float, largest: float) -> bool:
    """True if an update of finite leaves by gradients up to `largest` is finite, so that nobody has to look at it.

    No square of a gradient overflows, so no first moment or trace is beyond the root of the largest number (over 1 -
    decay), and what Adam divides by is at least eps. Holds for params below a tenth of the largest number.
    """
    most = torch.finfo(torch.float32).max
    bound = _largest_update(rule, math.sqrt(most))
    if bound is None or not largest**2 < most:
        return False
    largest_step = abs(rule.learning_rate) * bound
    decays = abs(weight_decay) <= 5 and abs(rule.learning_rate * weight_decay) <= 1
    return bound < most / 10 and largest_step < most / 10 and decays


def _largest_update(rule: Rule, most: float) -> float | None:
    """The largest |u| that gradients up to `most` can lead to; None if there is no bound."""
    if isinstance(rule, Lion):
        return 1.0 if 0 <= rule.b1 <= 1 and 0 <= rule.b2 <= 1 else None
    if isinstance(rule, Momentum):
        decay = rule.decay or 0.0
        return 2 * most / (1 - decay) if 0 <= decay < 1 else None
    tame = 0 <= rule.b1 < 1 and 0 <= rule.b2 < 1 and rule.eps > 0
    return most / (1 - rule.b1) / rule.eps if tame else None


def match(tx: Transform, specs: Specs, names: list[str]) -> FusedChain | None:
    """The fused form of `tx`, or None.

    Args:
        tx: with masks resolved. specs: of opt_state. names: paths of the trained leaves, below params.
    """
    kinds = [p.fused[0] if p.fused else None for p in tx.parts]
    entries = part_names(tx.parts)
    place = {path: i for i, path in enumerate(tree_lib.paths(specs.tree))}
    if kinds[-1:] != ["scale_by_learning_rate"] or len(kinds) > 3:
        return None
    direction = _DIRECTIONS.get(kinds[0]) if len(kinds) > 1 and kinds[0] in _DIRECTIONS else None
    middle = tx.parts[(direction is not None) : -1]
    if len(middle) > 1:
        return None
    sources = [(entries[-1], tx.parts[-1])] + ([(entries[0], tx.parts[0])] if direction else [])
    decays = [False] * len(names)
    if middle:
        part, entry, kept = _decayed(middle[0], entries[-2], names)
        if part is None:
            return None
        sources.append((entry, part))
        decays = [n in kept for n in names]
    moments: tuple[str, ...] = direction.moments if direction else ()
    needed = {f"{entries[0]}/{m}/{n}" for m in moments for n in names}
    needed |= {_hyper_path(e, part.fused[1][0], name) for e, part in sources for name in part.fused[1][0].given}  # type: ignore[index]
    if not needed <= place.keys():
        return None  # these parts are not a chain's but a partition's
    hyper: dict[str, Reader] = {"weight_decay": lambda leaves: 0.0}
    for entry, part in sources:
        hyper |= _readers(entry, part.fused[1][0], place)  # type: ignore[index]
    rest = tx.parts[0].fused[1][1:] if direction else ()  # type: ignore[index]
    counted = direction is not None and direction.counts
    return FusedChain(
        moments=[tuple(place[f"{entries[0]}/{m}/{n}"] for m in moments) for n in names],
        count=[place[f"{entries[0]}/count/{n}"] for n in names] if counted else [],
        decays=decays,
        schedule_counts=[place[path] for path in (_count_path(e, part) for e, part in sources) if path in place],
        rule=(lambda h: direction.rule(h, *rest)) if direction else (lambda h: Momentum(h["learning_rate"])),
        hyper=hyper,
        codes=direction.codes(*rest) if direction else (),
    )


@dataclasses.dataclass(frozen=True)
class _Direction:
    """What a transform's kernel is. moments: its entries in the state. counts: whether it counts each leaf's updates.
    rule, codes: from its static arguments, see `FusedChain`."""

    moments: tuple[str, ...]
    counts: bool
    rule: Callable[..., Rule]
    codes: Callable[..., tuple[Codes, ...]] = lambda *rest: ()


def _in_8_bits(block: int) -> tuple[Codes, ...]:
    return tuple(Codes(torch.from_numpy(book(8)), block) for book in (signed_book, positive_book))


_DIRECTIONS: dict[Any, _Direction] = {
    "scale_by_adam": _Direction(("mu", "nu"), True, lambda h: Adam(h["learning_rate"], h["b1"], h["b2"], h["eps"])),
    "scale_by_adam_8bit": _Direction(
        ("mu", "mu_scale", "nu", "nu_scale"),
        True,
        lambda h, block: Adam(h["learning_rate"], h["b1"], h["b2"], h["eps"]),
        _in_8_bits,
    ),
    "scale_by_lion": _Direction(("mu",), False, lambda h: Lion(h["learning_rate"], h["b1"], h["b2"])),
    "trace": _Direction(("trace",), False, lambda h, nesterov: Momentum(h["learning_rate"], h["decay"], nesterov)),
}


def _decayed(part: Transform, entry: str, names: list[str]) -> tuple[Transform | None, str, set[str]]:
    """The weight decay in the middle of a chain, where its state lies, and which leaves decay; None for anything else."""
    kept: Any = names
    if part.fused and part.fused[0] == "masked":
        part, kept = part.fused[1]
        entry = f"{entry}/masked"
    is_decay = part.fused is not None and part.fused[0] == "add_decayed_weights"
    return (part if is_decay else None), entry, set(kept)


def _count_path(entry: str, part: Transform) -> str:
    """Where the count of its schedules lies, if it has any."""
    return f"{entry}/{part.fused[1][0].count}"  # type: ignore[index]


def _hyper_path(entry: str, hyper: Hyperparams, name: str) -> str:
    """Where what a hyper-parameter is made from lies: its number, or the count of its schedule."""
    return f"{entry}/{hyper.count}" if callable(hyper.given[name]) else f"{entry}/hyperparams/{name}"


def _readers(entry: str, hyper: Hyperparams, place: dict[str, int]) -> dict[str, Reader]:
    def stored(i: int) -> Reader:
        return lambda leaves: float(leaves[i])

    def scheduled(schedule: Any, i: int) -> Reader:
        return lambda leaves: float(schedule(leaves[i].to(torch.float64)))

    places = {name: place[_hyper_path(entry, hyper, name)] for name in hyper.given}
    return {n: scheduled(v, places[n]) if callable(v) else stored(places[n]) for n, v in hyper.given.items()}
