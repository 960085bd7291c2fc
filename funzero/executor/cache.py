"""The gather cache: whole data of cut leaves, present while they are needed and no longer."""

import dataclasses
from collections.abc import Callable

import torch

from funzero.core.collectives import Pending
from funzero.core.mesh import Mesh
from funzero.executor.forms import Forms
from funzero.executor.gather_list import Gather, plan_gathers
from funzero.executor.shards import Shards

FINISHED = -1
AHEAD = 2  # entries of the list that are posted before they are asked for


class Program:
    """What is remembered of one loss function between micro-batches: the lists, once they are agreed, and that it ran."""

    def __init__(self) -> None:
        self.gathers: tuple[Gather, ...] | None = None
        self.reductions: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.tried = False


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """`budget`: bytes of whole data, or None for no limit. `always_ask`: every miss is a round (leaf_use="any")."""

    budget: int | None
    always_ask: bool


class GatherCache:
    """Whole pieces of cut leaves by form (see `Forms`), within a budget; lives for one call of a step.

    Args:
        forms: of the lazy leaves, in the compute dtype and others. shards: their local data.
        round_: asks all ranks: takes the leaf that this one needs (or FINISHED), gives every rank's answer.
    """

    def __init__(
        self,
        mesh: Mesh,
        forms: Forms,
        shards: Shards,
        options: CacheOptions,
        program: Program,
        round_: Callable[[int], list[int]],
    ):
        self._mesh, self._forms, self._shards = mesh, forms, shards
        self._budget, self._always_ask = options.budget, options.always_ask
        self._program, self._round = program, round_
        self.leaf_of_storage: dict[int, int] = {}
        self.on_drop: Callable[[int], object] = lambda leaf: None
        self.bytes = self.peak_bytes = 0
        self._data: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._flying: dict[int, Pending] = {}
        self._position = 0
        self._uses: list[int] = []
        self._recorded: list[Gather] = []

    @property
    def recording(self) -> bool:
        """True while every miss is a round."""
        return self._always_ask or self._program.gathers is None

    def get(self, leaf: int) -> torch.Tensor:
        """The whole piece of a leaf; a collective unless it is here already."""
        if not self._uses or self._uses[-1] != leaf:
            self._uses.append(leaf)
        found = self._data.get(leaf)
        if found is not None:
            return found
        return self._ask(leaf) if self.recording else self._advance(leaf)

    def _ask(self, leaf: int) -> torch.Tensor:
        """A round: all ranks gather what any of them needs."""
        loaded = {k: self._load(k) for k in self._wanted(leaf)}
        return loaded[leaf]

    def _wanted(self, leaf: int) -> list[int]:
        answers = self._round(leaf)
        return [k for k in dict.fromkeys(answers) if k != FINISHED]

    def _load(self, leaf: int) -> torch.Tensor:
        """Gathers while recording: the first that came leaves first, since the future is not known."""
        if leaf in self._data:
            return self._data[leaf]
        evict = []
        while self._budget is not None and self._data and self.bytes + self._forms.bytes(leaf) > self._budget:
            victim = next(iter(self._data))
            self._drop(victim)
            evict.append(victim)
        self._recorded.append(Gather(leaf, tuple(evict)))
        self._post(leaf)
        return self._land(leaf)

    def _advance(self, leaf: int) -> torch.Tensor:
        """Issues the list up to `leaf`, and a little more."""
        gathers = self._program.gathers or ()
        while leaf not in self._flying:
            if self._position == len(gathers):
                raise RuntimeError(
                    f"{self._forms[leaf].path}: rank {self._mesh.rank} uses this leaf where the list of gathers, "
                    "agreed in the first step, does not serve it; ranks or steps use different leaves: pass "
                    'make_step(leaf_use="any")'
                )
            self._issue(gathers[self._position])
        found = self._land(leaf)
        for ahead in gathers[self._position : self._position + AHEAD]:
            # An entry that evicts may go out only while the entry right before it is in use: `early` says no more.
            if ahead.evict and not (ahead.early and gathers[self._position - 1].leaf == leaf):
                break
            self._issue(ahead)
        for ahead in gathers[self._position : self._position + AHEAD]:
            self._shards.ahead(ahead.leaf)
        return found

    def _issue(self, entry: Gather) -> None:
        for victim in entry.evict:
            self._drop(victim)
        self._post(entry.leaf)
        self._position += 1

    def _post(self, leaf: int) -> None:
        self._flying[leaf] = self._shards.post(leaf)
        self.bytes += self._forms.bytes(leaf)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        assert self._budget is None or self.bytes <= max(self._budget, self._forms.bytes(leaf)), (
            "the gather budget is exceeded"
        )

    def _land(self, leaf: int) -> torch.Tensor:
        whole = self._flying.pop(leaf).wait()
        self._data[leaf] = whole
        self._versions[leaf] = whole._version
        self.leaf_of_storage[whole.untyped_storage().data_ptr()] = leaf
        return whole

    def offset(self, leaf: int) -> int:
        """Where the data of a leaf that is here begin in their storage, in elements."""
        return int(self._data[leaf].storage_offset())

    def _drop(self, leaf: int) -> None:
        if leaf in self._flying:
            self._land(leaf)
        whole = self._data.pop(leaf)
        if whole._version != self._versions.pop(leaf):
            raise RuntimeError(f"{self._forms[leaf].path}: loss_fn wrote to this param in place; return new values")
        del self.leaf_of_storage[whole.untyped_storage().data_ptr()]
        self.bytes -= self._forms.bytes(leaf)
        self.on_drop(leaf)

    def finish(self) -> None:
        """The end of a micro-batch on this rank: joins what the others still need, and keeps what a limit allows."""
        if self.recording:
            while True:
                answers = self._round(FINISHED)
                if all(a == FINISHED for a in answers):
                    break
                for k in dict.fromkeys(answers):
                    if k != FINISHED:
                        self._load(k)
            if not self._always_ask:
                self._program.gathers = self._agreed()
        else:
            for entry in (self._program.gathers or ())[self._position :]:
                self._issue(entry)
        self._uses, self._recorded = [], []
        if self._budget is None:
            self._position = len(self._program.gathers or ())
        else:
            self.clear()

    def _agreed(self) -> tuple[Gather, ...]:
        """The list to go by from now on: planned if all ranks that had data used the leaves alike, else as recorded."""
        longest = int(self._mesh.gather_host(torch.tensor([len(self._uses)])).max())
        row = torch.full((longest,), FINISHED)
        row[: len(self._uses)] = torch.tensor(self._uses, dtype=torch.int64)
        kinds = {tuple(r) for r in self._mesh.gather_host(row).tolist()} - {(FINISHED,) * longest}
        if len(kinds) > 1:
            return tuple(self._recorded)
        uses = [k for k in next(iter(kinds), ()) if k != FINISHED]
        return plan_gathers(uses, {k: self._forms.bytes(k) for k in uses}, self._budget)

    def abandon(self) -> None:
        """Lets go of all data without waiting: after a failure nobody may be there to finish what is under way."""
        self._flying, self._data, self.leaf_of_storage = {}, {}, {}

    def clear(self) -> None:
        """Drops all data; waits for what is under way."""
        for leaf in [*self._flying, *self._data]:
            self._drop(leaf)
        self._position = 0
