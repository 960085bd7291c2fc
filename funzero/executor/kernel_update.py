"""An update by a fused kernel: at once where leaves are on the device, part by part where they live elsewhere."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch

from funzero.core.spec import Layout
from funzero.executor import dispatch
from funzero.executor.bus import Arrival
from funzero.executor.dispatch import Batch, Draw, Leaf, Moment, Rule, Scale
from funzero.executor.donate import make_writable
from funzero.executor.fused import Codes
from funzero.executor.stores import Store, start_fetch, start_fetch_range, store_of
from funzero.executor.stream import Operand, Part, parts, stream


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is updated here of one param.

    Attributes:
        at: its place among the params. kept: its layout. part: the layout of the range of it that is updated, if not all.
    """

    at: int
    kept: Layout
    part: Layout | None

    @functools.cached_property
    def store(self) -> Store | None:
        """Where the param is kept; None: on the device."""
        return store_of(self.kept)

    @functools.cached_property
    def begin(self) -> int:
        """The first element of the local param that is updated."""
        return 0 if self.part is None else self.part.bounds(self.part.index)[0]

    def start(self, leaf: torch.Tensor) -> Arrival:
        """Starts to bring its values to the device."""
        if self.part is None:
            return start_fetch(leaf, self.kept)
        return start_fetch_range(leaf, self.kept, *self.part.bounds(self.part.index))

    def here(self, leaf: torch.Tensor) -> torch.Tensor:
        """Its values on the device; a view of the leaf if that is there."""
        return self.start(leaf).wait()


@dataclasses.dataclass(frozen=True)
class Targets:
    """The leaves that are updated, one entry each.

    Attributes:
        layouts: of opt_state. moments, masters: places in it; no masters: an empty list. decays: whether a leaf decays.
        pieces: of the params. grads: layouts of the gradients. codes: see `FusedChain`.
    """

    layouts: Sequence[Layout]
    moments: list[tuple[int, ...]]
    masters: list[int]
    decays: list[bool]
    pieces: list[Piece]
    grads: Sequence[Layout]
    codes: tuple[Codes, ...] = ()

    def moments_of(self, kept: Sequence[torch.Tensor]) -> tuple[Moment, ...]:
        """A leaf's moments, or a part of them, as a kernel takes them."""
        if not self.codes:
            return tuple(map(Moment, kept))
        return tuple(Moment(*row, *book) for *row, book in zip(kept[::2], kept[1::2], self._books, strict=True))

    @functools.cached_property
    def _books(self) -> list[tuple[torch.Tensor, int]]:
        return [(x.book.to(self.grads[0].mesh.device), x.block) for x in self.codes]

    @functools.cached_property
    def per(self) -> tuple[int, ...]:
        """How many elements of a leaf stand for one of what is at its `places`."""
        if self.codes:
            return (*(n for x in self.codes for n in (1, x.block)), *((1,) if self.masters else ()))
        return (1,) * max(map(len, self.places), default=0)

    @functools.cached_property
    def places(self) -> list[tuple[int, ...]]:
        """What a leaf has in opt_state."""
        if not self.masters:
            return self.moments
        return [(*moments, master) for moments, master in zip(self.moments, self.masters, strict=True)]

    @functools.cached_property
    def here(self) -> list[int]:
        """The leaves all of which is on the device."""
        kinds = zip(self.places, self.pieces, self.grads, strict=True)
        homes = [[x.kept, g, *(self.layouts[i] for i in row)] for row, x, g in kinds]
        return [k for k, row in enumerate(homes) if all(store_of(x) is None for x in row)]

    @functools.cached_property
    def views(self) -> list[tuple[int, Piece | None]]:
        """Of the leaves that are here, the place of the param, and its piece if that is not all of it."""
        return [(x.at, None if x.part is None else x) for x in (self.pieces[k] for k in self.here)]

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
        grads: Sequence[torch.Tensor],
        params: list[torch.Tensor],
        opt_state: list[torch.Tensor],
        draws: Sequence[tuple[Draw, ...]],
    ) -> None:
        """Writes leaves of `params` and `opt_state` in place, or replaces them.

        Args:
            counts: of each leaf, this update included. grads: contiguous. params: those on the device are writable.
            draws: for stochastic rounding, of each leaf's param and moments; or empty.
        """
        make_writable(opt_state, targets.on_device, self.donate)
        make = functools.partial(self._leaf, targets, counts, draws)
        pieces = [params[i] if x is None else x.here(params[i]) for i, x in targets.views]
        if targets.here and not draws and not targets.codes:
            columns = [pieces, [grads[k] for k in targets.here] if targets.away else grads]
            columns += [[opt_state[i] for i in places] for places in targets.columns]
            batch = targets.batches.get(type(self.rule))
            if batch is None:
                rows = list(zip(*columns, strict=True))
                examples = [make(k, [x.view(-1) for x in row]) for k, row in zip(targets.here, rows, strict=True)]
                batch = targets.batches[type(self.rule)] = Batch(examples, self.rule)
            ours = [counts[k] for k in targets.here] if targets.away else counts
            dispatch.update_batch(batch, columns, ours, self.weight_decay, self.rule, self.scale, skip=self.skip)
        elif targets.here:
            of = zip(targets.here, pieces, strict=True)
            given = [(k, [p, grads[k], *(opt_state[i] for i in targets.places[k])]) for k, p in of]
            leaves = [make(k, [x.view(-1) for x in row]) for k, row in given]
            dispatch.update(leaves, self.rule, self.scale, self.skip)
        if targets.away:

            def one(part: Part, tensors: list[torch.Tensor]) -> None:
                made = make(part.leaf, tensors, slice(part.begin, part.end))
                dispatch.update([made], self.rule, self.scale, self.skip)

            stream(self._parts(targets, grads, params, opt_state), targets.grads[0].mesh.device, one)

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
            targets.moments_of(tensors[2 : 2 + count]),
            master=tensors[-1] if targets.masters else None,
            count=counts[k],
            weight_decay=self.weight_decay if targets.decays[k] else None,
            draws=tuple(Draw(d.words, d.index[part]) for d in draws[k]) if draws else (),
        )

    def _parts(
        self,
        targets: Targets,
        grads: Sequence[torch.Tensor],
        params: list[torch.Tensor],
        opt_state: list[torch.Tensor],
    ) -> Iterator[Part]:
        """The parts of the leaves that are away; replaces these in `params` and `opt_state` by what is written."""
        for k in targets.away:
            piece, grad = targets.pieces[k], targets.grads[k]
            operands = [
                self._written(params, piece.at, piece.kept, piece.begin),
                Operand(grads[k], store=store_of(grad)),
            ]
            rows = zip(targets.places[k], targets.per, strict=True)
            operands += [self._written(opt_state, i, targets.layouts[i], per=per) for i, per in rows]
            quantum = max((targets.layouts[i].spec.quantum for i in targets.places[k]), default=1)
            yield from parts(k, math.prod(grad.local_shape), operands, quantum)

    def _written(self, leaves: list[torch.Tensor], i: int, layout: Layout, begin: int = 0, per: int = 1) -> Operand:
        """A leaf that is updated; in `leaves` it is replaced by the one that is written."""
        store, old = store_of(layout), leaves[i]
        new = leaves[i] = old if store is None else store.writable(old, self.donate)
        same = store is None or store.same_room(old, new)
        return Operand(new if same else old, new, store, per, begin)
