"""Process groups and raw collectives: the only file that imports torch.distributed.

[Note: a dead mesh] A rank that raises between collectives would leave its peers waiting. `Comm.fail` writes the cause to
the store and closes this rank's groups; the peers' pending operations then fail at once, and `Comm.cause` turns their
failure into the first cause. After that every use of the mesh raises.

[Note: the end of a process] A thread of gloo lets go of the tensors of a collective after whoever waited for it goes on.
If the interpreter is ending by then, the thread cannot have its lock, and the process aborts, in one of ten runs. So
groups are closed, which waits for their threads, before the interpreter ends.
"""

import atexit
import contextlib
import datetime
import os
import time
import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from funzero import _compat
from funzero.core.errors import MeshError

Work = Any
ANSWER_S = 5.0
_open: "weakref.WeakSet[Comm]" = weakref.WeakSet()
_sends: deque[tuple[Work, torch.Tensor]] = deque()
_all_gather = _compat.first_of(dist, "all_gather_single", "all_gather_into_tensor")


def is_initialized() -> bool:
    """True if the default process group exists."""
    return dist.is_available() and dist.is_initialized()


def local_device(index: int) -> torch.device:
    """The accelerator of this process, or the CPU."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        return torch.device(kind.type, index % torch.accelerator.device_count())  # type: ignore[union-attr]
    return torch.device("cpu")


def place() -> tuple[int, torch.device]:
    """This process's rank, and its device."""
    rank = dist.get_rank()
    return rank, local_device(int(os.environ.get("LOCAL_RANK", rank)))


def join(timeout_s: float) -> int:
    """Initialises the default process group from the launcher's environment, if nobody has; returns the world size."""
    if not dist.is_initialized():
        _init(timeout_s)
    return dist.get_world_size()


def open_store(host: str, port: int, world: int, timeout_s: float, *, first: bool) -> Any:
    """What the ranks of a job without a launcher meet at. first: it is kept here, at a free port if `port` is 0."""
    limit = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, world, first, timeout=limit, wait_for_workers=False)


def join_at(store: Any, rank: int, world: int, timeout_s: float) -> None:
    """Initialises the default process group at a store."""
    _init(timeout_s, store=store, rank=rank, world_size=world)


def _init(timeout_s: float, **where: Any) -> None:
    device = local_device(int(os.environ.get("LOCAL_RANK", 0)))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{_backend(device)}"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), **where)
    atexit.register(_finalize_in, os.getpid())


def _backend(device: torch.device) -> str:
    return dist.get_default_backend_for_device(device)


class Comm:
    """The process groups of a mesh: one for each set of axes, and one on the CPU for small agreements.

    Args:
        rows: for each set of axes the groups of ranks, in the mesh's own numbers. rank: this one's; -1 if it is not in the
            mesh: all ranks of the job make its groups, since torch counts groups to name them.
        members: of each of its ranks, the rank in the job.
    """

    def __init__(
        self,
        rows: "dict[frozenset[str], list[tuple[int, ...]]]",
        rank: int,
        members: tuple[int, ...],
        device: torch.device,
        timeout_s: float,
    ):
        self.rank, self.world, self.device, self.timeout_s = rank, len(members), device, timeout_s
        self.groups: dict[frozenset[str], Any] = {}
        self.control: Any = None
        self.dead: str | None = None
        limit = datetime.timedelta(seconds=timeout_s)
        for axes, groups in rows.items():
            for ranks in groups:
                group = dist.new_group([members[r] for r in ranks], timeout=limit)
                if rank in ranks:
                    self.groups[axes] = group
        if self.world > 1:
            self.control = dist.new_group(list(members), timeout=limit, backend="gloo")
            # The number of meshes made so far is the same on all ranks, so it names this one in the store.
            made = _compat.default_store(dist).add("funzero/meshes", 1)
            self.key = f"funzero/{(made - 1) // dist.get_world_size()}"
            if rank >= 0:
                _open.add(self)

    def gather_host(self, row: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, [world, len(row)], through the CPU group; `row` is 1-D on the CPU."""
        if self.world == 1:
            return row.unsqueeze(0)
        out = row.new_empty(self.world * row.numel())
        _wait(_all_gather(out, row, group=self.control, async_op=True))
        return out.view(self.world, -1)

    def exchange_text(self, text: str) -> list[str]:
        """All ranks' texts (up to 4,000 bytes each), through the CPU group; for messages."""
        raw = text.encode()[:4000]
        row = torch.zeros(4000, dtype=torch.uint8)
        row[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else row[:0]
        return [bytes(r.tolist()).rstrip(b"\0").decode(errors="replace") for r in self.gather_host(row)]

    def check_alive(self) -> None:
        """Raises the first cause if this mesh has failed."""
        if self.dead is not None:
            raise MeshError(f"the mesh is dead. First cause: {self.dead}")

    def failure(self, error: BaseException) -> BaseException:
        """Marks the mesh dead and makes the peers' pending collectives fail; returns what to raise here.

        That is `error` itself if it is the first cause, else a MeshError with the first cause.
        """
        if isinstance(error, MeshError):
            return error
        mine = f"rank {self.rank}: {type(error).__name__}: {error}"
        try:
            store = _compat.default_store(dist)
            key = f"{self.key}/cause"
            if not store.check([key]) and _is_of_communication(error):
                mine = self._roll_call(store, str(error))
            first = store.compare_set(key, "", mine).decode()
        except (RuntimeError, OSError):  # the store lived in a process that is gone
            first = f"a peer is gone; seen by {mine}"
        self.dead = first
        self._leave(abort=True)
        local = first == mine and not _is_of_communication(error)
        return error if local else MeshError(f"the mesh is dead. First cause: {first}")

    def close(self) -> None:
        """Closes the groups at the end of a run; collectives that wait for a peer on the CPU are given up."""
        self.dead = self.dead or "none: it was closed"
        self._leave(abort=self.device.type == "cpu")  # an accelerator may still be at work for a peer

    def _leave(self, abort: bool) -> None:
        """Closes this rank's connections, at which the peers' pending collectives fail; gloo knows no other way."""
        groups = {*self.groups.values(), self.control} - {None}
        self.groups, self.control = {}, None
        while groups:
            group = groups.pop()
            if abort:
                group.abort()
            dist.destroy_process_group(group)

    def _roll_call(self, store: Any, error: str) -> str:
        """Who is gone or stalled: the ranks that do not answer within a few seconds."""
        store.set(f"{self.key}/alive/{self.rank}", "1")
        end = time.monotonic() + ANSWER_S
        silent = [r for r in range(self.world) if r != self.rank]
        while silent and time.monotonic() < end:
            if store.check([f"{self.key}/cause"]):
                break
            silent = [r for r in silent if not store.check([f"{self.key}/alive/{r}"])]
            time.sleep(0.05)
        seen = f"seen by rank {self.rank}: {error.strip()[:200]}"
        if not silent:
            return f"a collective failed on all ranks ({seen})"
        names = ", ".join(f"rank {r}" for r in silent)
        return f"{names}: died or stalled in a collective that its peers had entered ({seen})"


def _is_of_communication(error: BaseException) -> bool:
    """True for the errors of a collective that a peer left."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    signs = ("gloo", "Connection closed", "Connection reset", "Timed out waiting", "Broken pipe")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def _wait(work: Work) -> None:
    work.wait()


def send_recv(sends: list[tuple[torch.Tensor, int]], recvs: list[tuple[torch.Tensor, int]], group: Any) -> list[Work]:
    """Posts sends and receives (tensor, global rank) at once; wait for every work that comes back."""
    ops = [dist.P2POp(dist.irecv, x, r, group=group) for x, r in recvs]
    ops += [dist.P2POp(dist.isend, x, r, group=group) for x, r in sends]
    return dist.batch_isend_irecv(ops) if ops else []


def own_rank() -> int:
    """This process's rank in the job; 0 without a launcher."""
    return dist.get_rank() if is_initialized() else 0


def post_send(x: torch.Tensor, to: int) -> None:
    """Begins to send to a rank of the job; messages to one rank arrive in order. `x` is kept until it is sent."""
    while _sends and _sends[0][0].is_completed():
        _sends.popleft()
    _sends.append((dist.isend(x, to), x))


def receive(out: torch.Tensor, source: int) -> None:
    """Takes the next message of a rank of the job."""
    dist.recv(out, source)


def all_to_all(out: torch.Tensor, x: torch.Tensor, recv: list[int], send: list[int], group: Any) -> Work:
    """Posts an uneven all-to-all of 1-D tensors; `recv` and `send` are element counts by rank of the group."""
    return dist.all_to_all_single(out, x, recv, send, group=group, async_op=True)


def all_reduce_sum(x: torch.Tensor, group: Any) -> None:
    """Adds `x` over the group in place; the order of the sum is the backend's."""
    dist.all_reduce(x, group=group)


def all_gather_equal(out: torch.Tensor, x: torch.Tensor, group: Any) -> Work:
    """Posts a gather of equally long 1-D tensors into `out`, ordered by rank of the group."""
    return _all_gather(out, x, group=group, async_op=True)


def group_ranks(group: Any) -> list[int]:
    """Global ranks of a group, in the group's own order."""
    return dist.get_process_group_ranks(group)


def finalize() -> None:
    """Waits for what is being sent, closes all meshes and leaves the default process group."""
    while _sends:
        with contextlib.suppress(RuntimeError):  # who should get it is gone
            _sends.popleft()[0].wait()
    for comm in list(_open):
        comm.close()
    _open.clear()
    if is_initialized():
        dist.destroy_process_group()


def _finalize_in(pid: int) -> None:
    if os.getpid() == pid:  # a forked child shares the connections
        finalize()
