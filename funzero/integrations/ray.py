"""Groups of Ray actors with one model each: forwards and pulls by handle, updates, checkpoints and restarts.

Needs `pip install funzero[ray]`. Ray starts the processes, places them and carries activations and cotangents; within a
group the ranks talk as under any launcher, through process groups of their own.

[Note: who waits] Calls of a group return at once, and its actors run them in the order in which they were made, so the ranks
of a group always run the same. What one group gives another is a `Rows`: references that the other's actors resolve, so
the driver holds no tensors, and micro-batches of several models are under way at a time. Errors come up in `update`, `save`,
`restore` and `Rows.get`, which wait.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from funzero.core.errors import MeshError
from funzero.integrations.ray_actor import Model, Rows, Worker

Build = Callable[[], Model]


class ActorError(RuntimeError):
    """An actor of a group failed or is gone; the message names the group and the rank.

    Attributes:
        group: its name. rank: the one that failed first, as far as can be told.
    """

    def __init__(self, group: str, rank: int, text: str):
        super().__init__(text)
        self.group, self.rank = group, rank


class Group:
    """One model on some ranks, each an actor.

    Args:
        name: for messages. build: called on each rank when its process group is there: makes the mesh (`fz.make_mesh`)
            and gives a `Model`. ranks: how many. cpus, gpus: of each. strategy: of the placement group.
        timeout_s: of a collective within the group, and of the wait for resources.
    """

    def __init__(
        self,
        name: str,
        build: Build,
        *,
        ranks: int,
        cpus: float = 1,
        gpus: float = 0,
        strategy: str = "PACK",
        timeout_s: float = 600,
    ):
        self.name, self.ranks = name, ranks
        self._build, self._timeout_s = build, timeout_s
        self._bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._strategy, self._inputs = strategy, dict[int, int]()
        self._placement: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._start()

    def _start(self) -> None:
        self._placement = placement_group([self._bundle] * self.ranks, strategy=self._strategy)
        if not self._placement.wait(self._timeout_s):
            remove_placement_group(self._placement)
            raise TimeoutError(f"{self.name}: no room for {self.ranks} x {self._bundle} within {self._timeout_s} s")
        kind = ray.remote(Worker)
        self._actors = [
            kind.options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, i),
            ).remote(self.name, i, self.ranks, self._timeout_s, max(1, int(self._bundle["CPU"])))
            for i in range(self.ranks)
        ]
        try:
            address = self.wait([self._actors[0].listen.remote()])[0]
            self.wait([a.join.remote(address, self._build) for a in self._actors])
        except BaseException:
            self.stop()
            raise

    def forward(self, handle: int, *inputs: Any) -> Rows:
        """Begins `fn(params, *inputs)` on each rank's rows; its pull is kept under the handle.

        Args:
            inputs: each a `Rows`, or a tree of whole tensors, of which each rank takes its rows along dim 0.
        """
        given = [x if isinstance(x, Rows) else ray.put(x) for x in inputs]
        self._inputs[handle] = len(inputs)
        return self._rows([a.forward.options(num_returns=2).remote(handle, given) for a in self._actors])

    def pull(self, handle: int, cotangent: Any = None, *, weight: float = 1) -> list[Rows]:
        """Begins to pull a cotangent back; the gradients of the params join the window, the handle is free again.

        Args:
            cotangent: of the output: a `Rows`, a tree of whole tensors (cut like inputs), numbers for outputs without
                rows, or None for zero. weight: of these gradients in the mean, all ranks together.

        Returns: the cotangent of each input.
        """
        given = cotangent if isinstance(cotangent, Rows) else ray.put(cotangent)
        refs = [a.pull.options(num_returns=2).remote(handle, [given], weight) for a in self._actors]
        made = self._rows(refs)
        return [dataclasses.replace(made, at=i) for i in range(self._inputs.pop(handle, 0))]

    def _rows(self, refs: Sequence[Sequence[Any]]) -> Rows:
        counts, parts = zip(*refs, strict=True)
        return Rows(self, counts, parts)

    def update(self) -> dict[str, float]:
        """Closes the window with an update: the metrics. Waits for all that the group was asked."""
        found: dict[str, float] = self.wait([a.update.remote() for a in self._actors])[0]
        return found

    def save(self, path: str) -> None:
        """Saves the state; the path is on a file system that all ranks share."""
        self.wait([a.save.remote(path) for a in self._actors])

    def restore(self, path: str) -> None:
        """Goes on from a saved state; forwards that were under way are forgotten."""
        self._inputs.clear()
        self.wait([a.restore.remote(path) for a in self._actors])

    def params(self) -> Any:
        """The whole params, in host memory."""
        return self.wait([a.params.remote() for a in self._actors])[0]

    def restart(self, checkpoint: str | None = None) -> None:
        """New actors in place of all of the group's; from a checkpoint, if one is given."""
        self.stop()
        self._start()
        if checkpoint is not None:
            self.restore(checkpoint)

    def stop(self) -> None:
        """Ends the actors, and gives back their room."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._inputs.clear()
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def wait(self, refs: Sequence[Any]) -> list[Any]:
        """What the ranks give. Raises ActorError for the first cause, when all have answered or failed."""
        found, errors = [], dict[int, Exception]()
        for rank, ref in enumerate(refs):
            try:
                found.append(ray.get(ref))
            except (ray.exceptions.RayError, MeshError) as error:
                errors[rank] = error
        if not errors:
            return found
        rank = min(errors, key=lambda r: (_severity(errors[r]), r))
        first = errors[rank]
        what = "is gone" if isinstance(first, ray.exceptions.ActorDiedError) else "failed"
        said = str(getattr(first, "cause", None) or first).strip().splitlines() or [type(first).__name__]
        text = f"{self.name}: rank {rank} of {self.ranks} {what}: {said[-1]}"
        raise ActorError(self.name, rank, f"{text}; Group.restart(checkpoint) goes on from a checkpoint") from first


def _severity(error: Exception) -> int:
    """Low for a first cause: an actor that died, then what one met by itself; peers only tell that another is gone."""
    if isinstance(error, ray.exceptions.ActorDiedError):
        return 0
    return 2 if isinstance(getattr(error, "cause", error), MeshError) else 1
