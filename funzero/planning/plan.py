"""`plan`: what a training step takes, before there is anything to run it on."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.core.spec import MEMORY_KINDS, Layout
from funzero.core.state import StateSpecs, TrainState
from funzero.executor.plan import Plan
from funzero.planning import show
from funzero.planning.limits import Limits, read_limits
from funzero.planning.simulate import Options, Replay, simulate
from funzero.planning.trace import Timeline, trace
from funzero.transforms.base import Transform
from funzero.transforms.precision import Policy, checked
from funzero.transforms.remat import checked_rules


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that a rank takes in each memory, and together in the two first where they are one."""

    device: int
    host: int
    together: int
    disk: int

    def shortfalls(self, limits: Limits, ranks_per_host: int) -> list[str]:
        """See `MemoryPlan.shortfalls`."""
        wanted = [("host memory", self.host * ranks_per_host, limits.host)]
        if limits.device is None:
            wanted = [("host memory", self.together * ranks_per_host, limits.host)]
        else:
            wanted.append(("device memory", self.device, limits.device))
        if limits.disk is not None:
            wanted.append(("disk", self.disk * ranks_per_host, limits.disk))
        return [
            f"{what}: needs {show.size(need)}, {show.size(limit.available)} available (limit {limit.source}, "
            f"{show.size(limit.total)})"
            for what, need, limit in wanted
            if need > limit.available
        ]


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a step takes. All counts are bytes; a peak is that of the rank that holds most, which is the first.

    Attributes:
        specs: the layout. state: {memory: {field: bytes on the first rank}}. ranks: {memory: bytes of state on each rank}.
        step: what the first rank takes beside its state. timeline: of one micro-batch, in order.
    """

    specs: StateSpecs
    state: Mapping[str, Mapping[str, int]]
    ranks: Mapping[str, tuple[int, ...]]
    step: Replay
    timeline: Timeline

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.specs.mesh

    @property
    def device(self) -> int:
        """The most bytes on a device at a time."""
        return sum(self.state["device"].values()) + self.growth

    @property
    def growth(self) -> int:
        """How many of these a step takes beside the state, at most."""
        return sum(self.step.device.values())

    @property
    def host(self) -> int:
        """The most bytes in host memory that a rank takes there, beside its device."""
        return sum(self.state["host"].values()) + self.step.host

    @property
    def together(self) -> int:
        """The most bytes of a rank where the device and the host are one memory, as on a machine without accelerator."""
        return sum(self.state["device"].values()) + sum(self.state["host"].values()) + self.step.together

    @property
    def disk(self) -> int:
        """Bytes on disk of a rank."""
        return sum(self.state["disk"].values()) + self.step.disk

    def shortfalls(self, limits: Limits, ranks_per_host: int = 1) -> list[str]:
        """What does not fit, one line each; empty if all does. Without a device limit the device is host memory."""
        return Needs(self.device, self.host, self.together, self.disk).shortfalls(limits, ranks_per_host)

    def fits(self, limits: Limits | None = None, ranks_per_host: int = 1) -> bool:
        """Whether it fits; default: into what this process may use."""
        return not self.shortfalls(read_limits() if limits is None else limits, ranks_per_host)

    def __str__(self) -> str:
        """A table."""
        return show.table(self)

    def chart(self, path: str | Path, limits: Limits | None = None) -> None:
        """Writes a stacked bar chart as an HTML page."""
        Path(path).write_text(show.chart(self, limits))


def plan(
    loss_fn: Callable[..., Any],
    abstract_state: TrainState,
    batch: Any,
    *,
    accumulate: int = 1,
    remat: Mapping[str, Any] | None = None,
    gather_budget: int | None = None,
    tx: Transform | None = None,
    precision: Policy | None = None,
    donate: bool = True,
) -> MemoryPlan:
    """Bytes and volumes of a training step in any layout, without processes and without memory of the model's size.

    Args:
        loss_fn, accumulate, remat, gather_budget, precision, donate: as for `make_step`.
        abstract_state: from `fz.abstract_state(..., specs=...)`; the specs' mesh may be an `abstract_mesh` of any size.
        batch: of one rank, whole: a tree of tensors (those on meta will do) or of what has a shape and a dtype.
        tx: the optimizer; without it the update is taken to be one that a fused kernel runs in place.

    Returns: the plan, whose `str` is a table.

    Raises ValueError for a state without specs, and for a loss that looks at values of tensors.

    >>> import torch, funzero as fz
    >>> params = {"w": torch.empty(1000, 1000, device="meta")}
    >>> tx, mesh = fz.adamw(1e-3), fz.abstract_mesh(dp=8)
    >>> state = fz.abstract_state(params, tx, specs=fz.zero_specs(params, tx, mesh, stage=3))
    >>> made = plan(lambda p, b: (b @ p["w"]).square().sum(), state, torch.empty(4, 1000, device="meta"))
    >>> made.state["device"]["params"], made.state["device"]["opt_state"]
    (500000, 1000024)
    """
    specs = abstract_state.specs
    if specs is None:
        raise ValueError("plan: the state has no specs; make it with fz.abstract_state(params, tx, specs=...)")
    if accumulate < 1:
        raise ValueError(f"plan: accumulate is at least 1, got {accumulate}")
    whole, rules = Plan(specs, checked(precision)), checked_rules(remat)
    timeline = trace(loss_fn, whole, batch, accumulate, rules)
    options = Options(tx, accumulate, gather_budget, donate)
    return planned(whole, abstract_state, timeline, options)


def planned(whole: Plan, abstract_state: TrainState, timeline: Timeline, options: Options) -> MemoryPlan:
    """The plan that belongs to a timeline."""
    specs = whole.specs
    scalars = [
        abstract_state.step,
        abstract_state.skips,
        abstract_state.key,
        *tree_lib.leaves(abstract_state.loss_scale),
    ]
    others = sum(x.nbytes for x in scalars)
    fields = {n: s.layouts for n, s in specs.fields.items() if n != "accum"}
    state = {m: {n: _here(x, m) for n, x in fields.items()} for m in MEMORY_KINDS}
    state["device"]["scalars"] = others
    ranks = {
        m: _by_rank([x for s in fields.values() for x in s if x.spec.memory == m], specs.mesh) for m in MEMORY_KINDS
    }
    ranks["device"] = tuple(n + others for n in ranks["device"])
    return MemoryPlan(specs, state, ranks, simulate(whole, timeline, options), timeline)


def _here(layouts: tuple[Layout, ...], memory: str) -> int:
    return sum(x.local_bytes for x in layouts if x.spec.memory == memory)


def _by_rank(layouts: list[Layout], mesh: Mesh) -> tuple[int, ...]:
    """What each rank stores of these."""
    places: dict[tuple[str, ...], np.ndarray[Any, Any]] = {}
    total = np.zeros(mesh.world, dtype=np.int64)
    for x in layouts:
        axes = x.spec.flat
        if axes not in places:
            places[axes] = np.array([mesh.index(axes, r) for r in range(mesh.world)], dtype=np.int64)
        at = places[axes]
        count = np.minimum((at + 1) * x.run, x.n) - np.minimum(at * x.run, x.n) if x.is_flat else x.n
        total += count * x.dtype.itemsize
    return tuple(total.tolist())
