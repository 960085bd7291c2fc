"""An update by a fused kernel: at once where leaves are on the device, part by part where they live elsewhere."""

import dataclasses
from collections.abc import Sequence

import torch

from funzero.core.spec import Layout
from funzero.executor import dispatch
from funzero.executor.dispatch import Draw, Leaf, Moment, Rule, Scale
from funzero.executor.donate import make_writable
from funzero.executor.stores import store_of
from funzero.executor.stream import Operand, Part, parts, stream

Index = range | torch.Tensor


@dataclasses.dataclass(frozen=True)
class Target:
    """One leaf that is updated.

    Attributes:
        moments, master: places in opt_state. decays: whether it decays.
        draws: (words, index) of the param and of each moment, for stochastic rounding; empty without.
    """

    moments: tuple[int, ...]
    master: int | None
    decays: bool
    draws: tuple[Draw, ...] = ()


@dataclasses.dataclass
class KernelUpdate:
    """One update of the chosen leaves.

    Attributes:
        layouts: of opt_state. weight_decay: of the leaves that decay. scale: of the gradients.
        skip: 0-dim bool on the device, or None.
        donate: whether leaves may be written where they are; else new ones are made.
    """

    layouts: Sequence[Layout]
    rule: Rule
    weight_decay: float
    scale: Scale
    skip: torch.Tensor | None
    donate: bool

    def run(
        self,
        targets: Sequence[Target],
        counts: Sequence[int],
        pieces: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        opt_state: list[torch.Tensor],
    ) -> None:
        """Writes pieces in place, and leaves of `opt_state` in place or replaces them.

        Args:
            counts: of each leaf, this update included. pieces, grads: 1-D or of piece shape, on the device; the former
                are writable.
        """
        places = [i for t in targets for i in (*t.moments, t.master) if i is not None]
        make_writable(opt_state, [i for i in places if store_of(self.layouts[i]) is None], self.donate)
        now: list[Leaf] = []
        later: list[Part] = []
        for k, (target, piece, grad) in enumerate(zip(targets, pieces, grads, strict=True)):
            operands = [Operand(piece, piece), Operand(grad)]
            operands += [self._operand(opt_state, i) for i in (*target.moments, target.master) if i is not None]
            quantum = max(self.layouts[i].spec.quantum for i in target.moments) if target.moments else 1
            cut = list(parts(k, piece.numel(), operands, quantum))
            if all(x.store is None for x in operands):
                now.append(self._leaf(target, counts[k], cut[0], [x.source.view(-1) for x in operands]))
            else:
                later += cut
        dispatch.update(now, self.rule, self.scale, self.skip)

        def one(part: Part, tensors: list[torch.Tensor]) -> None:
            dispatch.update(
                [self._leaf(targets[part.leaf], counts[part.leaf], part, tensors)], self.rule, self.scale, self.skip
            )

        if later:
            stream(later, pieces[0].device, one)

    def _operand(self, opt_state: list[torch.Tensor], i: int) -> Operand:
        store = store_of(self.layouts[i])
        if store is None:
            return Operand(opt_state[i], opt_state[i])
        old = opt_state[i]
        new = opt_state[i] = store.writable(old, self.donate)
        return Operand(new if store.same_room(old, new) else old, new, store)

    def _leaf(self, target: Target, count: int, part: Part, tensors: list[torch.Tensor]) -> Leaf:
        param, grad, *rest = tensors
        return Leaf(
            param,
            grad,
            tuple(Moment(x) for x in rest[: len(target.moments)]),
            master=None if target.master is None else rest[-1],
            count=count,
            weight_decay=self.weight_decay if target.decays else None,
            draws=tuple(Draw(d.words, _within(d.index, part)) for d in target.draws),
        )


def _within(index: Index, part: Part) -> Index:
    return index[part.begin : part.end]
