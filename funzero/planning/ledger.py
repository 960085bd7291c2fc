"""Bytes by what they are for, and the moments when they are most."""

from collections import defaultdict

# What bytes count for. Where there is no accelerator the device and the host are one memory, "together". "staging" is host
# memory that only an accelerator needs, "accelerator" the device's side of the same: elsewhere both are one tensor.
PLACES = {
    "device": ("device", "together"),
    "host": ("host", "together"),
    "disk": ("disk",),
    "staging": ("host",),
    "accelerator": ("device",),
}
TOTALS = ("device", "host", "disk", "together")


class Ledger:
    """Running totals.

    Attributes:
        phase: what is going on. total: bytes now, of each of `TOTALS`. peak: the most of each at a time. top: what was on
        the device when it held most. where: when that was.
    """

    def __init__(self) -> None:
        self.total, self.peak = dict.fromkeys(TOTALS, 0), dict.fromkeys(TOTALS, 0)
        self.top: dict[str, int] = {}
        self.phase = self.where = ""
        self._held: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, nbytes: int, place: str = "device") -> None:
        """Takes memory in one of `PLACES`, or gives it back."""
        if "device" in PLACES[place]:
            self._held[name] += nbytes
        for kind in PLACES[place]:
            self.total[kind] += nbytes
        if nbytes > 0:
            self._look(PLACES[place], {})

    def touch(self, **more: int) -> None:
        """What comes and goes at this moment, on the device and on top of the rest."""
        self._look(PLACES["device"], {k.replace("_", " "): v for k, v in more.items()})

    def _look(self, kinds: tuple[str, ...], more: dict[str, int]) -> None:
        extra = sum(more.values())
        for kind in kinds:
            if self.total[kind] + extra > self.peak[kind]:
                self.peak[kind] = self.total[kind] + extra
                if kind == "device":
                    self.where = self.phase
                    self.top = {n: self._held.get(n, 0) + more.get(n, 0) for n in dict.fromkeys([*self._held, *more])}

    def held(self, name: str) -> int:
        """What a name holds on the device now."""
        return self._held[name]
