"""Ranks for tests: pools of processes that live for the whole session, and one-off ranks for tests that kill some.

results = pool(2).run(fn, x)        # [fn(0, 2, x), fn(1, 2, x)], a top-level function of an importable module
outcomes = once(fn, 2, x)           # fresh processes; what each rank did, its death included
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
GRACE_S = 1.0  # how long the other ranks may still answer after one has failed


@dataclass(frozen=True)
class Outcome:
    """What one rank did: returned `value`, raised (`error` is its traceback), died (`exitcode`), or hung (`error`)."""

    rank: int
    value: Any = None
    error: str = ""
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the rank returned."""
        return not self.error and self.exitcode is None

    def __str__(self) -> str:
        if self.exitcode is not None:
            return f"rank {self.rank} died with exit code {self.exitcode}"
        return f"rank {self.rank}: {self.error or 'returned'}"


class _Failure(RuntimeError):
    def __init__(self, outcomes: Sequence[Outcome]):
        super().__init__("\n".join(str(outcome) for outcome in outcomes if not outcome.ok))
        self.outcomes = sorted(outcomes, key=lambda outcome: outcome.rank)


class RankError(_Failure):
    """A rank raised or died; the text holds every failed rank's traceback, the first to fail first."""


class RankTimeout(_Failure):
    """Ranks did not answer in time; the text holds where each of them was."""


class Pool:
    """`world` spawned processes joined in a gloo group. Get one from `pool`, which keeps it for the next caller.

    Args:
        one_device: all their groups share a gloo device, see `_share_gloo_device`.
    """

    def __init__(self, world: int, one_device: bool = False):
        self.world = world
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._open = True
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_worker, args=(rank, world, str(self._folder), theirs, one_device), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with self._killed_on_error():
            for process, (_, theirs) in zip(self._processes, pipes, strict=True):
                process.start()
                theirs.close()  # with our copy open, a dead worker's pipe would never end
            _raise_unless_ok(self._collect(START_TIMEOUT_S, GRACE_S))

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`fn(rank, world, *args)` on every rank; results by rank.

        Raises:
            RankError: a rank raised or died. RankTimeout: a rank gave no answer in `timeout` seconds. In both cases
                the processes are killed, for their collectives may be out of step; `pool(world)` starts new ones.
        """
        with self._killed_on_error():
            outcomes = self.outcomes(fn, *args, timeout=timeout, grace=GRACE_S)
            _raise_unless_ok(outcomes)
        return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]

    def outcomes(self, fn: Callable[..., Any], *args: Any, timeout: float, grace: float) -> list[Outcome]:
        """What each rank did, in the order of their answers; `grace` is the wait for others after a first failure."""
        if not self._open:
            raise ValueError(f"this pool of {self.world} ranks is closed; call pool({self.world}) for a new one")
        message = pickle.dumps((fn, args))
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a dead worker: _collect reports it with its exit code
                connection.send_bytes(message)
        return self._collect(timeout, grace)

    def close(self, join_s: float = 5.0) -> None:
        """End the processes: they are asked to, and killed after `join_s` seconds, at once if that is 0."""
        if not self._open:
            return
        self._open = False
        if _pools.get(self.world) is self:
            del _pools[self.world]
        deadline = time.monotonic() + join_s
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.join()
            process.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close(join_s=0.0)
            raise

    def _collect(self, timeout: float, grace: float) -> list[Outcome]:
        limit = deadline = time.monotonic() + timeout
        done: dict[int, Outcome] = {}
        while len(done) < self.world:
            handles: dict[Any, int] = {
                handle: rank
                for rank in range(self.world)
                if rank not in done
                for handle in (self._connections[rank], self._processes[rank].sentinel)
            }
            ready = wait(handles, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted({handles[handle] for handle in ready}):
                done[rank] = self._receive(rank)
                if not done[rank].ok:
                    deadline = min(deadline, time.monotonic() + grace)
        silent = [rank for rank in range(self.world) if rank not in done]
        outcomes = [*done.values(), *self._where(silent)]
        if silent and deadline == limit:
            raise RankTimeout(outcomes)
        return outcomes

    def _receive(self, rank: int) -> Outcome:
        connection, process = self._connections[rank], self._processes[rank]
        message = b""
        with contextlib.suppress(EOFError, OSError):  # it died in mid-message
            if connection.poll():
                message = connection.recv_bytes()
        if message:
            returned, value = pickle.loads(message)
            return Outcome(rank, value) if returned else Outcome(rank, error=value)
        process.join(5.0)
        process.kill()  # without it a rank that closed its pipe and lives on has no exit code
        process.join()
        return Outcome(rank, exitcode=process.exitcode)

    def _where(self, ranks: Sequence[int]) -> list[Outcome]:
        for rank in ranks:
            os.kill(self._processes[rank].ident or 0, signal.SIGUSR1)
        if ranks:
            time.sleep(0.2)  # the workers' signal handlers write their stacks in this time
        stacks = [self._folder / f"stack-{rank}" for rank in ranks]
        texts = [stack.read_text() if stack.exists() else "" for stack in stacks]
        return [Outcome(rank, error=f"no answer; it was at\n{text}") for rank, text in zip(ranks, texts, strict=True)]


class InProcess:
    """The pool of one rank: the test's own process, without a process group."""

    world = 1

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`[fn(0, 1, *args)]`; an exception is reported as `Pool.run` does. `timeout` is left to pytest."""
        try:
            return [_call(fn, 0, 1, args)]
        except Exception as error:
            raise RankError([Outcome(0, error=traceback.format_exc())]) from error


_pools: dict[int, Pool] = {}


def pool(world: int) -> Pool | InProcess:
    """The session's pool of `world` ranks, started when it is first asked for."""
    if world == 1:
        return InProcess()
    if world not in _pools:
        _pools[world] = Pool(world, one_device=True)
    return _pools[world]


def once(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Outcome]:
    """What `fn(rank, world, *args)` did on each of `world` fresh processes, by rank; for tests that kill ranks.

    Raises:
        RankTimeout: a rank neither answered nor died in `timeout` seconds. A rank that raises or dies raises nothing.
    """
    fresh = Pool(world)
    try:
        outcomes = fresh.outcomes(fn, *args, timeout=timeout, grace=timeout)
    finally:
        fresh.close(join_s=0.0)
    return sorted(outcomes, key=lambda outcome: outcome.rank)


@atexit.register
def close_all() -> None:
    """End all pools."""
    for each in list(_pools.values()):
        each.close()


def _raise_unless_ok(outcomes: Sequence[Outcome]) -> None:
    if not all(outcome.ok for outcome in outcomes):
        raise RankError(outcomes)


def _worker(rank: int, world: int, folder: str, connection: Connection, one_device: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent kills us; our traceback would only be noise
    faulthandler.register(signal.SIGUSR1, file=os.open(f"{folder}/stack-{rank}", os.O_CREAT | os.O_WRONLY))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if one_device:
        _share_gloo_device()
    if world > 1:
        rendezvous, limit = f"file://{folder}/rendezvous", timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=limit)
    connection.send_bytes(pickle.dumps((True, None)))
    with contextlib.suppress(EOFError):  # the parent closed its end, or is gone
        while True:
            connection.send_bytes(_answer(rank, world, connection.recv_bytes()))
    if dist.is_initialized():
        dist.destroy_process_group()


def _share_gloo_device() -> None:
    """One gloo device for all groups of this process.

    Each device has a thread that wakes up a hundred times a second. A pool sees hundreds of meshes with several groups
    each, and with a device for each group, as is usual, its idle processes would take half of the machine.
    """
    c10d = dist.distributed_c10d
    usual = c10d.ProcessGroupGloo
    device = usual.create_default_device()

    class OnOneDevice(usual):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
            options = usual._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnOneDevice


def _answer(rank: int, world: int, message: bytes) -> bytes:
    # Plain pickle writes tensors by value; Connection.send would pass file descriptors of shared memory.
    try:
        fn, args = pickle.loads(message)
        return pickle.dumps((True, _call(fn, rank, world, args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _call(fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...]) -> Any:
    # Without the seed a result would depend on what ran on these processes before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fn(rank, world, *args)
