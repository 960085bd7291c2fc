"""The cheapest layout that fits: layouts are tried in the order of what they cost in time.

[Note: the order of cost] Smaller micro-batches do the same work in more pieces, so they are tried first, up to one row.
Then come the stages: 1 sends no more than 0, 2 more often in a window, 3 half as much again, and a gather budget sends
params twice. Recomputation adds a third of the arithmetic. Memory elsewhere moves every byte of it over a bus in each step:
the optimizer's state in host memory, then the accumulator and the params, then the same on disk, which is slower still.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.core.spec import MEMORY_KINDS
from funzero.core.state import StateSpecs
from funzero.executor.init import abstract_state
from funzero.executor.plan import Plan
from funzero.planning.limits import Limits
from funzero.planning.plan import MemoryPlan, Needs, planned
from funzero.planning.queues import UNDER_WAY, WHOLE
from funzero.planning.simulate import Options
from funzero.planning.trace import Timeline, trace
from funzero.transforms.base import Transform
from funzero.transforms.precision import Policy, checked
from funzero.transforms.remat import checked_rules
from funzero.zero import with_memory, zero_specs

ANYWAY = ("activations", WHOLE, UNDER_WAY)  # what a step takes, wherever its state and its sums are
FIELDS = ("opt_state", "accum", "params")
ELSEWHERE: tuple[dict[str, str], ...] = (
    {},
    *(dict.fromkeys(FIELDS[: i + 1], "host") for i in range(3)),
    *({**dict.fromkeys(FIELDS, "host"), **dict.fromkeys(FIELDS[: i + 1], "disk")} for i in range(3)),
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to train: what `zero_specs`, `with_memory` and `make_step` are told. memory: {field: kind}."""

    stage: int
    accumulate: int
    remat: Mapping[str, Any] | None
    memory: Mapping[str, str]
    gather_budget: int | None

    def __str__(self) -> str:
        words = [f"stage={self.stage}", f"accumulate={self.accumulate}"]
        words += [f"remat={dict(self.remat)}"] if self.remat else []
        words += [f"gather_budget={self.gather_budget}"] if self.gather_budget else []
        words += [f"{field} on {kind}" for field, kind in self.memory.items()]
        return ", ".join(words)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The outcome of a search.

    Attributes:
        choice, plan: the first that fits; if none does, of those tried the one that takes least of the device.
        fits: whether it does. reasons: what did not fit before, one line a choice.
    """

    choice: Choice
    plan: MemoryPlan
    fits: bool
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """What is to be trained. shapes: tree of meta params. batch: of one rank, whole."""

    loss_fn: Callable[..., Any]
    shapes: Any
    tx: Transform
    mesh: Mesh
    batch: Any
    precision: Policy | None = None

    @functools.cached_property
    def _stages(self) -> dict[int, StateSpecs]:
        return {}

    def specs_of_stage(self, stage: int) -> StateSpecs:
        """The layout with everything on the device."""
        if stage not in self._stages:
            made = zero_specs(self.shapes, self.tx, self.mesh, stage=stage, precision=self.precision)
            self._stages[stage] = made
        return self._stages[stage]

    def specs(self, choice: Choice) -> StateSpecs:
        """The layout."""
        made = self.specs_of_stage(choice.stage)
        kinds = {f"{field}/**": kind for field, kind in choice.memory.items() if made.fields[field].layouts}
        return with_memory(made, kinds)


def propose(
    model: Model,
    limits: Limits,
    *,
    accumulate: int = 1,
    remat: Mapping[str, Any] | None = None,
    ranks_per_host: int = 1,
    known: Timeline | None = None,
) -> Proposal:
    """The cheapest way to train that fits, see [Note: the order of cost].

    Args:
        accumulate: micro-batches to begin with. remat: the rules that recomputation would go by, such as
            {"blocks.*": "nothing"}; without them it is not tried.
        ranks_per_host: how many ranks share the host's memory and disk.
        known: a timeline of `accumulate` micro-batches without recomputation, if there is one.
    """
    timelines: dict[tuple[int, bool], Timeline] = {} if known is None else {(accumulate, False): known}
    reasons: list[str] = []
    floors: dict[tuple[Any, ...], int] = {}
    state, least = None, None
    for choice in _choices(model, accumulate, remat):
        key = choice.accumulate, choice.remat is not None
        rest = (*key, choice.stage, choice.gather_budget)
        lacks = _at_least(model, choice, floors.get(rest, 0)).shortfalls(limits, ranks_per_host)
        if lacks and least is not None:
            reasons.append(f"{choice}: at least: {'; '.join(lacks)}")
            continue
        whole = Plan(model.specs(choice), checked(model.precision))
        if key not in timelines:
            timelines[key] = trace(model.loss_fn, whole, model.batch, choice.accumulate, checked_rules(choice.remat))
        if state is None:  # what is asked of it below is the same in every layout
            state = abstract_state(model.shapes, model.tx, specs=whole.specs, precision=model.precision)
        options = Options(model.tx, choice.accumulate, choice.gather_budget, donate=True)
        made = planned(whole, state, timelines[key], options)
        lacks = made.shortfalls(limits, ranks_per_host)
        if not lacks:
            return Proposal(choice, made, True, tuple(reasons))
        reasons.append(f"{choice}: {'; '.join(lacks)}")
        floors[rest] = max(floors.get(rest, 0), sum(made.step.device.get(x, 0) for x in ANYWAY))
        if least is None or _most(made, limits) < _most(least[1], limits):
            least = choice, made
    assert least is not None
    return Proposal(*least, False, tuple(reasons))


def _most(made: MemoryPlan, limits: Limits) -> int:
    return made.device if limits.device else made.together


def _at_least(model: Model, choice: Choice, floor: int) -> Needs:
    """What a layout cannot do without: its state where that is kept, and `floor` bytes on the device."""
    here = {kind: 0 for kind in MEMORY_KINDS}
    here["device"] = floor
    for field, sequence in model.specs_of_stage(choice.stage).fields.items():
        if field != "accum":
            here[choice.memory.get(field, "device")] += sequence.local_bytes
    return Needs(here["device"], here["host"], here["device"] + here["host"], here["disk"])


def _choices(model: Model, accumulate: int, remat: Mapping[str, Any] | None) -> Iterator[Choice]:
    """All of them, the cheapest first."""
    rows = [x.shape[0] for x in tree_lib.leaves(model.batch) if hasattr(x, "shape") and len(x.shape)]
    times = [accumulate * 2**i for i in range(30) if rows and rows[0] % (accumulate * 2**i) == 0] or [accumulate]
    largest = max((x.numel() for x in tree_lib.leaves(model.shapes)), default=0)
    budget = max(64 << 20, 4 * largest * _itemsize(model))
    stages = [0, 1, 2, 3] if model.mesh.size(model.mesh.batch) > 1 else [0]
    recomputed = [None, remat] if remat else [None]
    for memory, rules, stage, limit, count in itertools.product(ELSEWHERE, recomputed, stages, [None, budget], times):
        if limit is None or stage == 3 or (stage == stages[-1] and "params" in memory):  # params to be brought here
            yield Choice(stage, count, rules, memory, limit)


def _itemsize(model: Model) -> int:
    compute = checked(model.precision).compute_dtype(torch.float32)
    return compute.itemsize
