"""What leaves take on their way between memories, by the rules of `executor/stores.py`."""

from collections import deque

from funzero.core.spec import Layout
from funzero.executor.stores import OUTBOX_BYTES
from funzero.planning.ledger import Ledger

ON_THE_WAY = "on the way"


class StoresModel:
    """Leaves that are fetched, and what the disk has to do. `read`, `written`: bytes of it."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self.read = self.written = 0

    def fetch(self, name: str, layout: Layout, elements: int | None = None) -> int:
        """A local leaf, or some elements of it, comes to the device. Returns its bytes, which `release` gives back."""
        nbytes = layout.local_bytes if elements is None else elements * layout.dtype.itemsize
        self._ledger.add(name, nbytes)
        if layout.spec.memory == "disk":
            self.read += nbytes
            self._ledger.add(ON_THE_WAY, nbytes, "staging")
        return nbytes

    def bring(self, name: str, layout: Layout, elements: int | None = None) -> None:
        """The same, when it is there."""
        nbytes = self.fetch(name, layout, elements)
        if layout.spec.memory == "disk":
            self._ledger.add(ON_THE_WAY, -nbytes, "staging")

    def arrived(self, layout: Layout) -> None:
        """What a whole leaf came through is not needed any more."""
        if layout.spec.memory == "disk":
            self._ledger.add(ON_THE_WAY, -layout.local_bytes, "staging")

    def release(self, name: str, layout: Layout) -> None:
        """A leaf that was fetched whole goes."""
        self._ledger.add(name, -layout.local_bytes)
        self.arrived(layout)

    def wrote(self, layout: Layout, nbytes: int) -> None:
        """Bytes have been written to a leaf."""
        if layout.spec.memory == "disk":
            self.written += nbytes


class OutboxModel:
    """See `executor.stores.Outbox`."""

    def __init__(self, ledger: Ledger):
        self._ledger, self._bytes = ledger, 0
        self._flying: deque[int] = deque()

    def put(self, name: str, nbytes: int) -> None:
        """Takes values, which have counted under a name till now."""
        while self._flying and self._bytes + nbytes > OUTBOX_BYTES:
            self._land()
        self._flying.append(nbytes)
        self._bytes += nbytes
        self._ledger.add(name, -nbytes)
        self._ledger.add(ON_THE_WAY, nbytes, "host")

    def _land(self) -> None:
        nbytes = self._flying.popleft()
        self._bytes -= nbytes
        self._ledger.add(ON_THE_WAY, -nbytes, "host")

    def settle(self) -> None:
        """All has arrived."""
        while self._flying:
            self._land()
