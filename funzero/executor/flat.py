"""A state as lists: flattened once when a call begins, made a tree again once when it ends."""

import dataclasses
import itertools
import operator
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.state import EMPTY_NODE, StateSpecs, TrainState
from funzero.executor.donate import poison


@dataclasses.dataclass
class FlatState:
    """The leaves of a state by field, in tree order; what a call works on.

    Attributes:
        old: all leaves of the state that came in, those of its window last. treedef: its structure with an empty window.
        spoilt: whether some of them may have been written over.
    """

    step: torch.Tensor
    params: list[torch.Tensor]
    opt_state: list[torch.Tensor]
    loss_scale: Any
    skips: torch.Tensor
    key: torch.Tensor
    buffers: list[torch.Tensor]
    accum: Any
    old: list[torch.Tensor]
    treedef: Any
    spoilt: bool = False

    @property
    def scale(self) -> torch.Tensor | None:
        """The loss scale, 0-dim float32, or None without one."""
        return None if self.loss_scale is EMPTY_NODE else self.loss_scale.scale

    @staticmethod
    def open(state: TrainState, specs: StateSpecs, treedef: Any = None) -> "FlatState":
        """Flattens a state of this layout.

        Args:
            treedef: the structure that it probably has.
        """
        inner = tree_lib.leaves(state.accum)
        leaves, treedef = tree_lib.flatten_as(dataclasses.replace(state, accum=EMPTY_NODE) if inner else state, treedef)
        step, *rest = leaves
        p, o = len(specs.params.layouts), len(specs.params.layouts) + len(specs.opt_state.layouts)
        s = o + len(tree_lib.leaves(state.loss_scale))
        skips, key, *buffers = rest[s:]
        return FlatState(
            step, rest[:p], rest[p:o], state.loss_scale, skips, key, buffers, state.accum, leaves + inner, treedef
        )

    def close(self, donate: bool) -> TrainState:
        """The new state, on leaves of its own: what it took over from the old one is the same memory as another tensor, so
        that a state can be donated later without the other. Under donation the old leaves raise."""
        scale = tree_lib.leaves(self.loss_scale) if self.loss_scale is not EMPTY_NODE else ()
        leaves = [self.step, *self.params, *self.opt_state, *scale, self.skips, self.key, *self.buffers]
        for i in itertools.compress(itertools.count(), map(operator.is_, leaves, self.old)):
            leaves[i] = leaves[i].detach()
        if self.accum is not EMPTY_NODE:
            kept = {id(x) for x in self.old}
            self.accum = tree_lib.map(lambda x: x.detach() if id(x) in kept else x, self.accum)
        if donate:
            poison(self.old)
        state: TrainState = tree_lib.unflatten(self.treedef, leaves)
        return state if self.accum is EMPTY_NODE else dataclasses.replace(state, accum=self.accum)
