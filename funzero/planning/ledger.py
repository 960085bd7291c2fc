"""Bytes by what they are for, and the moment when they are most."""

from collections import defaultdict


class Ledger:
    """Running totals.

    Attributes:
        total: bytes now. peak: the most bytes at a time. top: what they were then. where: when that was.
    """

    def __init__(self) -> None:
        self.peak, self.where = 0, ""
        self.top: dict[str, int] = {}
        self._held: defaultdict[str, int] = defaultdict(int)
        self.total = 0
        self.phase = ""

    def add(self, name: str, nbytes: int) -> None:
        """Takes memory, or gives it back."""
        self._held[name] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self._keep({})

    def swap(self, name: str, old: int, new: int) -> None:
        """New memory is filled from old, which then goes."""
        self.add(name, new)
        self.add(name, -old)

    def touch(self, **more: int) -> None:
        """What comes and goes at this moment, on top of the rest."""
        if self.total + sum(more.values()) > self.peak:
            self._keep({k.replace("_", " "): v for k, v in more.items()})

    def _keep(self, more: dict[str, int]) -> None:
        self.peak, self.where = self.total + sum(more.values()), self.phase
        names = dict.fromkeys([*self._held, *more])
        self.top = {n: self._held.get(n, 0) + more.get(n, 0) for n in names}

    def held(self, name: str) -> int:
        """What a name holds now."""
        return self._held[name]
