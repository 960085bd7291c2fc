"""What the sums of a window take while gradients land, by the executor's own rules: see `executor/window.py`."""

from funzero.core.spec import Layout
from funzero.executor.placement import Placement
from funzero.planning.ledger import Ledger
from funzero.planning.queues import GRADS
from funzero.planning.stores import OutboxModel, StoresModel
from funzero.transforms.precision import LOW

SUMS = "sums"


class WindowModel:
    """See `executor.window.Window` and `Landing`: gradients are counted by whoever brings them until they are taken.

    Attributes:
        sums: device bytes of the sums so far, by trained leaf; 0 of one that lives elsewhere. final: of sums that are
            laid out as finalised gradients.
    """

    def __init__(self, placement: Placement, stores: StoresModel, ledger: Ledger):
        self._placement, self._stores, self._ledger = placement, stores, ledger
        specs = placement.plan.specs
        self._accum, self._grads = specs.accum.layouts, specs.grads.layouts
        self._scaled = placement.plan.policy.loss_scale is not None
        self.outbox = OutboxModel(ledger)
        self.sums: dict[int, int] = {}
        self.final: dict[int, int] = {}

    def _put(self, layout: Layout, held: int, *, new: bool) -> None:
        """Values of `held` bytes leave the device for a leaf's room, which is a new one or that of the old sum."""
        if new:
            self._ledger.add(SUMS, layout.local_bytes, layout.spec.memory)
        self._stores.wrote(layout, layout.local_bytes)
        self.outbox.put(GRADS, held)

    def add(self, k: int, held: int, dense: bool = True) -> bool:
        """A gradient laid out as the accumulator joins its sum; True if its memory has become that of the sum."""
        layout, ledger = self._accum[k], self._ledger
        size, away, old = layout.local_bytes, k in self._placement.sums_away, self.sums.get(k)
        wide = k in self._placement.widened and (layout.is_flat or not self._scaled)
        if wide:
            ledger.add(GRADS, size)
        made, total = wide, size if wide else held
        if old is not None:
            if away:
                self._stores.fetch(GRADS, layout)
            if layout.dtype in LOW:
                ledger.touch(gradients=4 * 4 * (size // layout.dtype.itemsize))  # in float32 and its bits, rounded
            ledger.add(GRADS, size)
            made, total = True, size
        if not away:
            ledger.add(GRADS, -(old or 0))
            self.sums[k] = total
        else:
            if not made and not dense:  # laid end to end to be written
                ledger.add(GRADS, size)
                made, total = True, size
            self._put(layout, total, new=old is None)
            self.sums[k] = 0
            if old is not None:
                self._stores.release(GRADS, layout)
        if wide and old is not None:
            ledger.add(GRADS, -size)
        return not made

    def reduced(self, k: int, held: int) -> bool:
        """The sum over ranks of a large leaf has come; True if its memory is kept."""
        if k in self._placement.micro_routes:
            return self.add(k, held)
        layout, dtype = self._grads[k], self._placement.window_routes[k][0].dtype
        cast = dtype != layout.dtype
        if cast:
            held = layout.local_bytes
            self._ledger.add(GRADS, held)
        self.final[k] = held
        if layout.spec.memory != "device":
            self.final[k] = 0
            self._put(layout, held, new=True)
        return not cast

    def finish(self, grads: dict[int, int]) -> None:
        """Adds what has not landed one by one, of so many bytes each; all of it is there until the end."""
        own = dict(grads)
        small = [k for k in grads if self._accum[k].is_flat]
        self._ledger.touch(gradients=3 * sum(self._accum[k].n * self._accum[k].dtype.itemsize for k in small))
        for k in small:  # summed and cut in a bundle
            grads[k] = self._accum[k].local_bytes
            self._ledger.add(GRADS, grads[k])
        taken = [k for k, held in grads.items() if self.add(k, held)]
        self.outbox.settle()
        for k, held in own.items():
            if k not in taken or k in small:
                self._ledger.add(GRADS, -held)
            if k not in taken and k in small:
                self._ledger.add(GRADS, -grads[k])

    def reduce(self) -> None:
        """The end of the window: what is not final becomes so; see `Selection.reduce`."""
        left = [k for k in self.sums if k not in self.final]
        here = [k for k in left if self._grads[k].spec.memory == "device"]
        go = self._placement.plan.travelling
        cast = [(self._accum[k], go(self._accum[k])) for k in here if go(self._accum[k]).dtype != self._accum[k].dtype]
        self._ledger.touch(gradients=sum(a.local_bytes + b.local_bytes for a, b in cast))  # there and back
        for k in left:
            if k in here:
                self.final[k] = self.sums.pop(k)
            else:
                self._reduce_away(k)
        self.outbox.settle()
        for k in list(self.sums):
            self._drop(k)

    def _reduce_away(self, k: int) -> None:
        accum, grads = self._accum[k], self._grads[k]
        self.final[k] = 0
        if accum.local_shape == grads.local_shape and accum.mesh.size(accum.spec.unreduced) == 1:
            del self.sums[k]
            return
        self._stores.fetch(GRADS, accum)
        self._ledger.touch(gradients=2 * accum.local_bytes)
        self._ledger.add(GRADS, grads.local_bytes)
        self._put(grads, grads.local_bytes, new=True)
        self._stores.release(GRADS, accum)
        self._drop(k)

    def _drop(self, k: int) -> None:
        """A sum that nobody needs any more."""
        held = self.sums.pop(k)
        self._ledger.add(GRADS, -held)
        if k in self._placement.sums_away:
            self._ledger.add(SUMS, -self._accum[k].local_bytes, self._accum[k].spec.memory)
