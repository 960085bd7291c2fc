"""An update by a fused kernel: at once where leaves are on the device, part by part where they live elsewhere."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from funzero.core.spec import Layout
from funzero.executor import dispatch
from funzero.executor.dispatch import Batch, Draw, Leaf, Moment, Rule, Scale
from funzero.executor.donate import make_writable
from funzero.executor.stores import store_of
from funzero.executor.stream import Operand, Part, parts, stream


@dataclasses.dataclass(frozen=True)
class Targets:
    """The leaves that are updated, one entry each.

    Attributes:
        layouts: of opt_state. moments, masters: places in it; no masters: an empty list. decays: whether a leaf decays.
    """

    layouts: Sequence[Layout]
    moments: list[tuple[int, ...]]
    masters: list[int]
    decays: list[bool]

    @functools.cached_property
    def places(self) -> list[tuple[int, ...]]:
        """What a leaf has in opt_state."""
        if not self.masters:
            return self.moments
        return [(*moments, master) for moments, master in zip(self.moments, self.masters, strict=True)]

    @functools.cached_property
    def here(self) -> list[int]:
        """The leaves all of which is on the device."""
        return [k for k, row in enumerate(self.places) if all(store_of(self.layouts[i]) is None for i in row)]

    @functools.cached_property
    def columns(self) -> list[tuple[int, ...]]:
        """Places in opt_state of the leaves that are here: one column for each moment, and one for the masters."""
        return list(zip(*(self.places[k] for k in self.here), strict=True))

    @functools.cached_property
    def away(self) -> list[int]:
        """The others."""
        return sorted(set(range(len(self.places))) - set(self.here))

    @functools.cached_property
    def on_device(self) -> list[int]:
        """Places in opt_state that are on the device."""
        return [i for row in self.places for i in row if store_of(self.layouts[i]) is None]

    @functools.cached_property
    def batches(self) -> dict[type[Rule], Batch]:
        """What the kernel has prepared for the leaves that are here."""
        return {}


@dataclasses.dataclass
class KernelUpdate:
    """One update.

    Attributes:
        weight_decay: of the leaves that decay. scale: of the gradients. skip: 0-dim bool on the device, or None.
        donate: whether leaves may be written where they are; else new ones are made.
    """

    rule: Rule
    weight_decay: float
    scale: Scale
    skip: torch.Tensor | None
    donate: bool

    def run(
        self,
        targets: Targets,
        counts: Sequence[int],
        pieces: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        opt_state: list[torch.Tensor],
        draws: Sequence[tuple[Draw, ...]],
    ) -> None:
        """Writes pieces in place, and leaves of `opt_state` in place or replaces them.

        Args:
            counts: of each leaf, this update included. pieces, grads: contiguous, on the device; the former are writable.
            draws: for stochastic rounding, of each leaf's param and moments; or empty.
        """
        make_writable(opt_state, targets.on_device, self.donate)
        make = functools.partial(self._leaf, targets, counts, draws)
        if targets.here and not draws:
            here = targets.here if targets.away else range(len(pieces))
            columns = [[pieces[k] for k in here], [grads[k] for k in here]]
            columns += [[opt_state[i] for i in places] for places in targets.columns]
            batch = targets.batches.get(type(self.rule))
            if batch is None:
                rows = list(zip(*columns, strict=True))
                examples = [make(k, [x.view(-1) for x in row]) for k, row in zip(here, rows, strict=True)]
                batch = targets.batches[type(self.rule)] = Batch(examples, self.rule)
            how = [counts[k] for k in here], self.weight_decay, self.rule, self.scale
            dispatch.update_batch(batch, columns, *how, skip=self.skip)
        elif targets.here:
            of = {k: [pieces[k], grads[k], *(opt_state[i] for i in targets.places[k])] for k in targets.here}
            leaves = [make(k, [x.view(-1) for x in tensors]) for k, tensors in of.items()]
            dispatch.update(leaves, self.rule, self.scale, self.skip)
        if targets.away:

            def one(part: Part, tensors: list[torch.Tensor]) -> None:
                made = make(part.leaf, tensors, slice(part.begin, part.end))
                dispatch.update([made], self.rule, self.scale, self.skip)

            stream(self._parts(targets, pieces, grads, opt_state), pieces[0].device, one)

    def _leaf(
        self,
        targets: Targets,
        counts: Sequence[int],
        draws: Sequence[tuple[Draw, ...]],
        k: int,
        tensors: Sequence[torch.Tensor],
        part: slice = slice(None),
    ) -> Leaf:
        count = len(targets.moments[k])
        return Leaf(
            tensors[0],
            tensors[1],
            tuple(Moment(x) for x in tensors[2 : 2 + count]),
            master=tensors[-1] if targets.masters else None,
            count=counts[k],
            weight_decay=self.weight_decay if targets.decays[k] else None,
            draws=tuple(Draw(d.words, d.index[part]) for d in draws[k]) if draws else (),
        )

    def _parts(
        self,
        targets: Targets,
        pieces: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        opt_state: list[torch.Tensor],
    ) -> Iterator[Part]:
        """The parts of the leaves that are away; replaces these in `opt_state` by what is written."""
        for k in targets.away:
            operands = [Operand(pieces[k], pieces[k]), Operand(grads[k])]
            for i in targets.places[k]:
                store, old = store_of(targets.layouts[i]), opt_state[i]
                new = opt_state[i] = old if store is None else store.writable(old, self.donate)
                same = store is None or store.same_room(old, new)
                operands.append(Operand(new if same else old, new, store))
            quantum = max((targets.layouts[i].spec.quantum for i in targets.places[k]), default=1)
            yield from parts(k, pieces[k].numel(), operands, quantum)
