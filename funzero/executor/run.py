"""The loop behind a step: header, micro-batches, update, and the state that comes out."""

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.core.errors import LossScaleError, SkipLimitError
from funzero.core.state import EMPTY_NODE, Metrics, StateSpecs, TrainState
from funzero.data import EMPTY, split
from funzero.executor import agree
from funzero.executor.cache import CacheOptions, Program
from funzero.executor.donate import check_usable, poison
from funzero.executor.flat import FlatState
from funzero.executor.foreign import Looks
from funzero.executor.init import check_made_for, check_trainable
from funzero.executor.micro import MicroBatch, cast_batch
from funzero.executor.options import StepOptions
from funzero.executor.placement import Placement
from funzero.executor.plan import Plan
from funzero.executor.reduce import SmallReductions
from funzero.executor.selection import Selection, Selections
from funzero.executor.session import Session
from funzero.executor.sound import first_spoilt
from funzero.executor.update import Clipped, clip, update_leaves
from funzero.executor.window import Landing, Window, as_node, open_window, rounding
from funzero.transforms import loss_scale
from funzero.transforms.accumulate import mean_aux
from funzero.transforms.base import Transform
from funzero.transforms.grad import Takes
from funzero.transforms.loss_scale import LossScale
from funzero.transforms.rng import fold_in


class Bound:
    """A step bound to one layout: its plans, made at the first call with a state of that layout."""

    def __init__(self, specs: StateSpecs, tx: Transform, options: StepOptions):
        check_made_for(specs, tx, options.precision, "make_step")
        self.plan = Plan(specs, options.precision)
        self.tx = self.plan.resolved(tx)
        self.placement = Placement(
            self.plan, CacheOptions(options.gather_budget, options.leaf_use == "any"), options.remat
        )
        self.program = Program()
        self.looks = Looks([*specs.params.layouts, *specs.opt_state.layouts])
        self.small = SmallReductions(self.plan, frozenset(self.placement.micro_routes))
        self.signature = zlib.crc32(f"{tree_lib.show(specs)} {options}".encode())
        self._treedef: Any = None
        self.selections = Selections(self.plan, self.tx)

    def open(self, state: TrainState) -> FlatState:
        """The leaves of a state."""
        flat = FlatState.open(state, self.plan.specs, self._treedef)
        self._treedef = flat.treedef
        return flat


class Runner:
    """Runs the calls of a `Step`. What it keeps between calls are plans, the name of a leaf for one message, and which
    state it has returned last, which needs no second look."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        takes: Takes,
        tx: Transform,
        specs: StateSpecs | None,
        trainable: Any,
        options: StepOptions,
    ):
        self._loss_fn, self._takes, self._tx, self._options = loss_fn, takes, tx, options
        self._specs, self._trainable = specs, trainable
        self._bounds: dict[tuple[StateSpecs, Any], Bound] = {}  # by layout, and who serves its mesh
        self._returned: weakref.ref[TrainState] | None = None
        self._bad_leaf = ""

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One window of one batch."""
        bound, micros, _ = self._enter(state, batch, agree.STEP)
        with bound.plan.mesh.guard():
            flat = bound.open(state)
            window = open_window(bound.plan, flat, self._options.donate)
            self._run(bound, flat, window, micros, closes=True)
            return self._finish(bound, flat, window)

    def accumulate(self, state: TrainState, batch: Any) -> TrainState:
        """One batch of a window."""
        bound, micros, _ = self._enter(state, batch, agree.ACCUMULATE)
        with bound.plan.mesh.guard():
            flat = bound.open(state)
            window = open_window(bound.plan, flat, self._options.donate)
            self._run(bound, flat, window, micros)
            flat.accum = as_node(bound.plan, window)
            return self._close(flat)

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """The end of a window; joins the micro-batches of ranks that are not there yet."""
        bound, micros, rows = self._enter(state, EMPTY, agree.UPDATE)
        flat = bound.open(state)
        window = open_window(bound.plan, flat, self._options.donate)
        while (rows[:, 0] == agree.ACCUMULATE).any():
            with bound.plan.mesh.guard():
                self._run(bound, flat, window, micros)
            rows = agree.agree(bound.plan.mesh, agree.Header(agree.UPDATE, False, "", bound.signature))
        with bound.plan.mesh.guard():
            return self._finish(bound, flat, window)

    def _enter(self, state: TrainState, batch: Any, action: int) -> tuple[Bound, list[Any], torch.Tensor]:
        """Checks the input and agrees with the peers: what runs, the micro-batches, all headers."""
        if self._loss_fn is no_loss and action != agree.UPDATE:
            no_loss(state.params, batch)
        bound = self._bind(state)
        mesh, error = bound.plan.mesh, None
        micros: list[Any] = [None] * self._options.accumulate
        has_batch = batch is not EMPTY
        try:
            self._check(bound, state, batch)
            if has_batch:
                micros = split(cast_batch(bound.plan, batch), self._options.accumulate)
        except (ValueError, TypeError, RuntimeError) as found:
            error = found
        text = agree.describe_batch(batch) if has_batch and mesh.world > 1 and error is None else ""
        rows = agree.agree(mesh, agree.Header(action, has_batch, text, bound.signature, error))
        return bound, micros, rows

    def _bind(self, state: TrainState) -> Bound:
        if not isinstance(state, TrainState):
            raise TypeError(f"step: expected a TrainState, got {type(state).__name__}; make it with fz.init_state")
        specs = state.specs
        if specs is None:
            raise ValueError("step: the state has no specs; make it with fz.init_state")
        if self._specs is not None and specs is not self._specs and specs != self._specs:
            difference = _first_difference(specs, self._specs)
            raise ValueError(f"step: the state's layout is not the step's:\n{difference}\nfz.reshard the state")
        key = specs, specs.mesh.comm
        if key not in self._bounds:
            check_trainable(specs, specs.params.abstract(), self._trainable, "make_step")
            self._bounds[key] = Bound(specs, self._tx, self._options)
        return self._bounds[key]

    def _check(self, bound: Bound, state: TrainState, batch: Any) -> None:
        check_usable(state.step)
        if self._returned is None or self._returned() is not state:
            bound.looks.check([*tree_lib.leaves(state.params), *tree_lib.leaves(state.opt_state)])
        device, policy = bound.plan.mesh.device, self._options.precision
        if policy.loss_scale is not None and state.loss_scale is EMPTY_NODE:
            raise ValueError(
                f"precision {policy.name} needs a loss scale and the state has none; "
                "pass the same precision=, or loss_scale=, to init_state"
            )
        if device.type == "cpu" and isinstance(state.loss_scale, LossScale):
            _check_scale(state.loss_scale, self._bad_leaf)
        if device.type == "cpu" and int(state.skips) >= self._options.max_skips:
            count = int(state.skips)
            raise SkipLimitError(
                f"{count} steps in a row were skipped (max_skips={self._options.max_skips}){self._bad_leaf}; "
                "mend the data or the rate, or allow more with make_step(max_skips=...)"
            )
        kinds = (
            {x.device.type for x in tree_lib.leaves(batch) if isinstance(x, torch.Tensor)}
            if batch is not EMPTY
            else set()
        )
        if kinds - {device.type}:
            pairs = zip(*tree_lib.flatten_with_paths(batch)[:2], strict=True)
            path, x = next((p, x) for p, x in pairs if isinstance(x, torch.Tensor) and x.device.type != device.type)
            raise ValueError(f"batch/{path}: is on {x.device}, the mesh is on {device}; move it there with .to")

    def _run(self, bound: Bound, flat: FlatState, window: Window, micros: list[Any], closes: bool = False) -> None:
        """Adds micro-batches to the window; a rank without data joins with zeros.

        Args:
            closes: the window ends with the last of them, so large gradients are reduced as they come.
        """
        plan = bound.plan
        try:
            with Session(bound.placement, flat.params, bound.program) as session:
                for i, batch in enumerate(micros):
                    micro = None
                    if batch is not None:
                        index = window.times * plan.batch_ranks + plan.batch_index
                        buffers = tree_lib.unflatten(plan.specs.buffers.treedef, window.buffers)
                        micro = MicroBatch(batch, fold_in(flat.key, int(flat.step), index), buffers)
                    last = closes and i == len(micros) - 1
                    landing = Landing(window, bound.placement, rounding(plan, flat, window), last)
                    session.differentiate(self._loss_fn, self._takes, micro, landing, bound.small, flat.scale)
        except BaseException:
            if window.spoilt:
                poison(flat.old, spent=True)
            raise

    def _finish(self, bound: Bound, flat: FlatState, window: Window) -> tuple[TrainState, Metrics]:
        plan, options = bound.plan, self._options
        used, weight, loss, aux = agree.close_window(plan, window)
        selection = bound.selections.of(used)
        clipped = clip(selection, selection.reduce(window), weight, flat.scale, options)
        norm = clipped.norm
        finite, empty = torch.isfinite(norm) & torch.isfinite(loss), weight == 0
        skip = ~finite | empty
        on_host = plan.mesh.device.type == "cpu"
        if on_host and bool(skip):
            self._bad_leaf = (
                "; their weight was 0" if bool(empty) else f"; the first bad gradient is that of {clipped.bad()}"
            )
            refused = torch.zeros_like(skip)
        else:
            largest = norm if options.max_norm is None else norm.clamp(max=options.max_norm)
            refused = self._apply(selection, flat, window, clipped, largest, weight, None if on_host else skip)
            refused = refused & ~skip
            skip = skip | refused
        flat.step = flat.step + ~skip
        flat.skips = torch.where(skip, flat.skips + 1, 0).to(torch.int32)
        flat.accum = EMPTY_NODE
        divisor = torch.where(empty, 1.0, weight)
        metrics = Metrics(
            loss=loss / divisor if options.reduction == "mean" else loss,
            grad_norm=norm,
            weight=weight,
            loss_scale=torch.ones((), device=norm.device) if flat.scale is None else flat.scale.clone(),
            skipped=skip,
            skipped_in_a_row=flat.skips.clone(),
            step=flat.step.clone(),
            aux=mean_aux(aux, divisor),
        )
        if isinstance(flat.loss_scale, LossScale):
            moved = loss_scale.update(flat.loss_scale, finite)
            flat.loss_scale = tree_lib.map(
                lambda new, old: torch.where(empty | refused, old, new), moved, flat.loss_scale
            )
        return self._close(flat), metrics

    def _close(self, flat: FlatState) -> TrainState:
        state = flat.close(self._options.donate)
        self._returned = weakref.ref(state)
        return state

    def _apply(
        self,
        selection: Selection,
        flat: FlatState,
        window: Window,
        clipped: Clipped,
        largest: torch.Tensor,
        weight: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        """The update, unless it would spoil the state: 0-dim bool that tells. Arguments as of `update_leaves`."""
        plan, donate = selection.plan, self._options.donate
        buffers = _new_buffers(plan, window, flat.buffers, weight)
        spoilt = first_spoilt(flat.buffers, buffers, plan.mesh) if buffers else torch.zeros_like(weight)
        if skip is None and int(spoilt):
            self._bad_leaf = f"; {plan.specs.buffers.layouts[len(buffers) - int(spoilt)].path} would not be finite"
            return spoilt > 0
        skip = skip if skip is None else skip | (spoilt > 0)
        try:
            found = update_leaves(selection, flat, clipped, largest, skip, donate)
        except BaseException:
            if donate and (flat.spoilt or flat.accum is not EMPTY_NODE):  # sums are divided where they lie
                poison(flat.old, spent=True)
            raise
        if skip is not None:
            stays = skip | (found > 0)
            flat.buffers = [torch.where(stays, a, b) for a, b in zip(flat.buffers, buffers, strict=True)]
        elif int(found):
            self._bad_leaf = f"; {selection.refuser(int(found))} would not be finite after the update"
        else:
            flat.buffers = buffers
        return (spoilt > 0) | (found > 0)


def no_loss(params: Any, batch: Any) -> Any:
    """The loss function of a step that has none."""
    raise ValueError("make_step(None, ...) has no loss to differentiate: it has only update")


def _check_scale(scale: LossScale, bad_leaf: str) -> None:
    if scale.scaling.on_minimum == "raise" and bool(scale.exhausted):
        raise LossScaleError(
            f"gradients overflow at the smallest loss scale, {float(scale.scale)}{bad_leaf}; "
            "the model diverges, or on_minimum='skip' lets the step be skipped"
        )


def _new_buffers(plan: Plan, window: Window, old: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """The buffers after an update: floats averaged over the batch axes by weight, the others at their largest."""

    def merge(new: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        if plan.batch_ranks > 1:
            new = collectives.mean_buffer(new, window.weight / weight, plan.mesh)
        return new.to(before.dtype).detach()

    return [merge(a, b) for a, b in zip(window.buffers, old, strict=True)]


def _first_difference(found: StateSpecs, expected: StateSpecs) -> str:
    a, b = tree_lib.show(found).splitlines(), tree_lib.show(expected).splitlines()
    pair = next(((x, y) for x, y in zip(a, b, strict=False) if x != y), (f"{len(a)} leaves", f"{len(b)} leaves"))
    return f"  state: {pair[0]}\n  step:  {pair[1]}"
