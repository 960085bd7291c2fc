"""A folder of checkpoints: when to save, in the background or not, which to keep, which is the latest."""

import contextlib
import math
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from funzero.checkpoint import contents
from funzero.checkpoint import save as saving
from funzero.checkpoint.agree import on_all
from funzero.checkpoint.manifest import MANIFEST, read_manifest
from funzero.checkpoint.restore import restore
from funzero.core.errors import CheckpointError
from funzero.core.mesh import Mesh
from funzero.core.state import TrainState

_NAME = re.compile(r"step-([0-9]{8,})")
_LEFT = re.compile(r"\.(step-[0-9]{8,})\.[0-9a-f]{8}\.tmp(\.old)?")


class CheckpointManager:
    """Checkpoints of one run, one folder for each step, in a root folder that all ranks see.

    Args:
        root: the folder. keep: how many of the last ones stay. keep_every: those whose step it divides stay for ever.
        best: (metric, "min" or "max"): the best one by it stays too.
        background: `save` returns when this rank's share is copied to host memory, and writes it while training goes on.
        every_steps, every_s: when `after_step` saves.

    At most one save is under way: another one waits for it. What went wrong in the background is raised by the next
    `save`, `wait` or `restore`. All methods that take a state are collective calls.

    >>> import tempfile, funzero as fz
    >>> state = fz.init_state({"w": torch.ones(3)}, fz.sgd(0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manager = CheckpointManager(folder)
    ...     _ = manager.save(state)
    ...     manager.wait()
    ...     new = manager.restore(state)
    ...     manager.latest()
    0
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        best: tuple[str, str] | None = None,
        background: bool = True,
        every_steps: int | None = None,
        every_s: float | None = None,
    ):
        if keep < 1:
            raise ValueError(f"CheckpointManager: keep must be at least 1, got {keep}")
        if best is not None and best[1] not in ("min", "max"):
            raise ValueError(f"CheckpointManager: best is (name of a metric, 'min' or 'max'), got {best!r}")
        self.root = Path(root)
        self._keep, self._keep_every, self._best = keep, keep_every, best
        self._background, self._every_steps, self._every_s = background, every_steps, every_s
        self._job: saving.Job | None = None
        self._asked, self._last_step = False, -1
        self._last_save = time.monotonic()

    def path(self, step: int) -> Path:
        """The name of the checkpoint of a step."""
        return self.root / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        if not self.root.is_dir():
            return []
        found = [(m, x) for x in self.root.iterdir() if (m := _NAME.fullmatch(x.name))]
        return sorted(int(m[1]) for m, x in found if (x / MANIFEST).is_file())

    def latest(self) -> int | None:
        """The step of the checkpoint that was completed last, or None.

        That is not the highest step if a run went back to an earlier one.
        """
        return next(reversed(self._by_age()), None)

    def _by_age(self) -> list[int]:
        """Steps in the order in which they were saved, as the manifests say: times of files change when they are copied."""
        ages = []
        for step in self.steps():
            path = self.path(step)
            with contextlib.suppress(FileNotFoundError):  # removed by the first rank in this moment
                try:
                    saved = read_manifest(path).saved
                except CheckpointError:  # it keeps its place, so that a restore says that it is damaged
                    saved = (path / MANIFEST).stat().st_mtime
                ages.append((saved, step))
        return [step for _, step in sorted(ages)]

    def best_step(self) -> int | None:
        """The step with the best metric, the later one of equals; None without one."""
        if self._best is None:
            return None
        name, way = self._best
        known = []
        for step in self.steps():
            with contextlib.suppress(CheckpointError, OSError):  # a damaged one is not the best
                value = read_manifest(self.path(step)).metrics.get(name, math.nan)
                if not math.isnan(value):
                    known.append((value if way == "max" else -value, step))
        return max(known)[1] if known else None

    def extra(self, step: int | None = None) -> Any:
        """The `extra` of a checkpoint, the latest unless told otherwise."""
        return read_manifest(self.path(self._chosen(step, None))).extra

    def save(
        self,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Any = None,
        overwrite: bool = False,
    ) -> Path:
        """Saves a state under its step.

        Args:
            metrics: numbers that `best` may look at. extra: anything JSON can say.
            overwrite: replace a checkpoint of the same step.

        Returns: the name; with background=True the checkpoint is there after the next `wait`, `save` or `restore`.
        """
        self.wait()
        path, mesh = self.path(int(state.step)), contents.specs_of(state).mesh
        numbers = on_all(mesh, lambda: {k: float(v) for k, v in (metrics or {}).items()})
        draft = saving.begin(path, mesh, extra, overwrite, clean=self._clean_up)
        self._last_step = int(state.step)
        self._job, self._last_save = saving.Job(draft, overwrite, after=self.prune), time.monotonic()
        self._job.start(lambda: saving.take(state, extra, metrics=numbers, copy=self._background))
        if not self._background:
            self.wait()
        return path

    def wait(self) -> None:
        """Returns when no save is under way; raises what went wrong with the last one, on all ranks."""
        job, self._job = self._job, None
        if job is not None:
            job.wait()

    def restore(self, like: TrainState, step: int | None = None, **options: Any) -> Any:
        """Restores a step, the latest unless told otherwise; `options` are those of `fz.restore`.

        Raises FileNotFoundError if there is none.
        """
        self.wait()
        return restore(self.path(self._chosen(step, contents.specs_of(like).mesh)), like, **options)

    def _chosen(self, step: int | None, mesh: Mesh | None) -> int:
        found = step if step is not None else self.latest() if mesh is None else on_all(mesh, self.latest)
        if mesh is not None:  # what the first rank sees, should a file system show it to the others later
            text = mesh.exchange_text("" if found is None else str(found))[0]
            found = int(text) if text else None
        if found is None:
            raise FileNotFoundError(f"{self.root} holds no complete checkpoint")
        return found

    def after_step(
        self,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        extra: Callable[[], Any] | Any = None,
        last: bool = False,
    ) -> bool:
        """To be called between two steps: saves if it is time, or if a stop was asked for on any rank.

        Args:
            extra: as for `save`, or a function that makes it, called only if something is saved.
            last: the run ends with this step: save it in any case, and wait until it is on disk.

        Returns: True if the run should end: a stop was asked for, and the state is on disk.
        """
        mesh, step = contents.specs_of(state).mesh, int(state.step)
        late = self._every_s is not None and time.monotonic() - self._last_save >= self._every_s
        flags = mesh.gather_host(torch.tensor([self._asked, late], dtype=torch.uint8))
        stop = bool(flags[:, 0].any())
        self._asked = self._asked and not stop  # one request, one stop
        due = last or (self._every_steps is not None and step % self._every_steps == 0)
        if stop or (due and step != self._last_step) or bool(flags[0, 1]):
            made = on_all(mesh, extra) if callable(extra) else extra
            earlier = self._failure() if stop else None  # it must not keep this save from being made
            self.save(state, metrics=metrics, extra=made, overwrite=True)
            if stop:
                self.wait()
            if earlier is not None:
                raise earlier
        if last:
            self.wait()
        return stop

    def request_stop(self) -> None:
        """Asks for a save and a stop after the step that runs, as a signal does; enough on one rank."""
        self._asked = True

    def stop_requested(self, mesh: Mesh) -> bool:
        """Whether a stop was asked for on any rank: for loops that have nothing to save. A collective call."""
        return bool(mesh.gather_host(torch.tensor([self._asked], dtype=torch.uint8)).any())

    def _failure(self) -> OSError | None:
        """What went wrong with the last save, on all ranks; waits for its end."""
        try:
            self.wait()
        except OSError as error:
            return error
        return None

    @contextlib.contextmanager
    def on_signal(self, *numbers: int) -> Iterator[None]:
        """Within the block SIGTERM and SIGINT (or others) ask for a save after the step that runs; see `after_step`.

        A second SIGINT interrupts at once.
        """
        chosen = numbers or (signal.SIGTERM, signal.SIGINT)
        before = {n: signal.getsignal(n) for n in chosen}

        def ask(number: int, frame: Any) -> None:
            self.request_stop()
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)

        for number in chosen:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _clean_up(self) -> None:
        """Removes what was left half done."""
        for left in self.root.glob(".step-*.tmp*"):
            if (found := _LEFT.fullmatch(left.name)) is not None:
                saving.clean_up(self.root / found[1])

    def prune(self, *, dry_run: bool = False) -> list[int]:
        """Removes the checkpoints that need not stay, as each save does; the steps that went. Not a collective call.

        Args:
            dry_run: only say which.
        """
        steps = self._by_age()
        stay = {*steps[-self._keep :], self.best_step()}
        stay |= {s for s in steps if self._keep_every is not None and s % self._keep_every == 0}
        gone = [s for s in steps if s not in stay]
        for step in () if dry_run else gone:
            self.delete(step)
        return gone

    def delete(self, step: int) -> None:
        """Removes the checkpoint of a step. Not a collective call."""
        path = self.path(step)
        # Its name goes first, since a name means complete.
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        os.rename(path, hidden)
        shutil.rmtree(hidden)
