"""The training state: one immutable tree, and what it gathers within a window."""

import dataclasses
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.spec import Specs
from funzero.core.tree import node, static

EMPTY_NODE: tuple[()] = ()


@dataclasses.dataclass(frozen=True)
class StateSpecs:
    """The layout of a whole state: one `Specs` for each field, and `grads` for finalised gradients.

    Attributes:
        params, opt_state, buffers: as in the state.
        accum: the sums of an `Accumulator`, also while the state's node is empty.
        grads: finalised gradients, for the norm, the clip and the update.
    """

    params: Specs
    opt_state: Specs
    accum: Specs
    grads: Specs
    buffers: Specs

    @property
    def mesh(self) -> Any:
        """The mesh."""
        return self.params.mesh

    @property
    def fields(self) -> dict[str, Specs]:
        """The specs that describe leaves of a state, by field."""
        return {"params": self.params, "opt_state": self.opt_state, "accum": self.accum, "buffers": self.buffers}


@tree_lib.show.register
def _show_state_specs(specs: StateSpecs) -> str:
    return tree_lib.table([x.columns() for s in specs.fields.values() for x in s.layouts])


@node
class Accumulator:
    """Partial sums of a window.

    Attributes:
        grads: sums of undivided gradients, as `specs.accum` says. weight, loss: float64 0-dim sums of this rank.
        aux: sums of the loss's extras. times: int32 0-dim, micro-batch times so far, equal on all ranks.
        used: uint8 [trainable leaves] in host memory, 1 where a gradient came on this rank.
    """

    grads: Any
    weight: torch.Tensor
    loss: torch.Tensor
    aux: Any
    times: torch.Tensor
    used: torch.Tensor
    buffers: Any = EMPTY_NODE


@node
class TrainState:
    """Everything that training remembers.

    Attributes:
        step: int32 0-dim, applied updates. params, opt_state, buffers: trees of local leaves, cut as `specs` says.
        accum: an empty node between windows, an `Accumulator` inside one.
        loss_scale: an empty node without a loss scale. skips: int32 0-dim, skipped steps in a row.
        key: int64 [2], (seed, stream).
        specs: the layout; static metadata.
    """

    step: torch.Tensor
    params: Any
    opt_state: Any
    accum: Any
    loss_scale: Any
    skips: torch.Tensor
    key: torch.Tensor
    buffers: Any
    specs: StateSpecs | None = static(default=None)


@node
class Metrics:
    """What a step reports: 0-dim tensors, global over the mesh and equal on every rank.

    Attributes:
        loss: float64, mean by weight. grad_norm: float64, before the clip. weight: float64 sum of weights.
        loss_scale: float32. skipped: bool. skipped_in_a_row, step: int32 (step counts applied updates).
        aux: the loss's extras, averaged by weight; `Sum` leaves are added.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    weight: torch.Tensor
    loss_scale: torch.Tensor
    skipped: torch.Tensor
    skipped_in_a_row: torch.Tensor
    step: torch.Tensor
    aux: Any = EMPTY_NODE
