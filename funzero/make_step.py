"""The composed step: `make_step` puts the pure pieces and their executor together."""

from collections.abc import Callable, Mapping
from typing import Any

from funzero.core.state import Metrics, StateSpecs, TrainState
from funzero.executor.options import StepOptions
from funzero.executor.run import Runner, no_loss
from funzero.transforms.base import Transform
from funzero.transforms.grad import Takes
from funzero.transforms.precision import Policy, checked
from funzero.transforms.remat import checked_rules


class Step:
    """A training step; see `make_step`. It holds nothing that belongs to the training: that is all in the state."""

    def __init__(self, runner: Runner):
        self._runner = runner

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """One update from one batch of this rank (or `fz.data.EMPTY`): (new state, metrics). A collective call."""
        return self._runner.step(state, batch)

    def accumulate(self, state: TrainState, batch: Any) -> TrainState:
        """Adds a batch to the window. Ranks may differ in the number of calls before `update`."""
        return self._runner.accumulate(state, batch)

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Closes the window with an update: (new state, metrics). A collective call."""
        return self._runner.update(state)


def make_step(
    loss_fn: Callable[..., Any] | None,
    tx: Transform,
    *,
    specs: StateSpecs | None = None,
    accumulate: int = 1,
    max_norm: float | None = None,
    reduction: str = "mean",
    precision: Policy | None = None,
    trainable: Any = None,
    remat: Mapping[str, Any] | None = None,
    gather_budget: int | None = None,
    leaf_use: str = "same",
    max_skips: int = 100,
    donate: bool = True,
) -> Step:
    """A step function `state, metrics = step(state, batch)`.

    Args:
        loss_fn: `loss_fn(params, batch)` gives a 0-dim tensor or `fz.Loss`. With a keyword `key` it gets the key of its
            micro-batch, else it runs under torch generators seeded from that. With a keyword `buffers` it gets the
            state's and returns the new ones in its `Loss`. None: the step has only `update`, for windows that
            `accumulate_into` fills.
        specs: the layout of the states it will be given; default: whatever layout a state has.
        accumulate: micro-batches that each batch is cut into, along dim 0.
        max_norm: clip by global norm to this; None: no clip (the norm is reported all the same).
        reduction: "mean": (sum of totals) / (sum of weights) over all micro-batches and batch ranks. "sum": divides by
            nothing.
        precision: a policy of `fz.precision`; default float32, which leaves every leaf's dtype as it is.
        trainable: as given to the specs; checked against them.
        remat: {glob of module paths: policy of `fz.remat`}: submodules of what loss_fn calls by `fz.functional_call` that
            are computed again in the backward; the last match wins.
        gather_budget: bytes of whole data of cut params that may be present at a time on a rank, pending reductions
            included, besides the leaf in use. None: no limit. Small leaves (below 64 KiB) do not count.
        leaf_use: "same": ranks use the same leaves in the same order in each micro-batch (checked). "any": they agree
            on each gather, which costs a fraction of a millisecond each.
        max_skips: after so many skipped steps in a row the next call raises.
        donate: reuse the storage of the state passed in, whose leaves then raise on use. False keeps both.

    Raises:
        ValueError: an option out of range; at a call, input that does not fit, on all ranks alike.
    """
    if accumulate < 1:
        raise ValueError(f"make_step: accumulate is at least 1, got {accumulate}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"make_step: reduction is 'mean' or 'sum', got {reduction!r}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"make_step: max_norm must be positive or None, got {max_norm}")
    if gather_budget is not None and gather_budget <= 0:
        raise ValueError(f"make_step: gather_budget is positive bytes or None, got {gather_budget}")
    if leaf_use not in ("same", "any"):
        raise ValueError(f"make_step: leaf_use is 'same' or 'any', got {leaf_use!r}")
    policy = checked(precision)
    rules = checked_rules(remat)
    options = StepOptions(accumulate, max_norm, reduction, policy, gather_budget, leaf_use, max_skips, donate, rules)
    loss_fn = no_loss if loss_fn is None else loss_fn
    return Step(Runner(loss_fn, Takes.of(loss_fn), tx, specs, trainable, options))
