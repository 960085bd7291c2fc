"""Messages between two ranks of a job, found by a handle and not by the order in which they came.

[Note: handles] What one rank sends to another arrives in the order in which it was sent. A receiver takes messages from the
sender until the one with its handle comes, and keeps the others. So two sides need not agree on an order, and neither waits
for the other to ask. Messages go through host memory.
"""

from collections import deque

import torch

from funzero.core import comm
from funzero.core.errors import MeshError


class Post:
    """The messages that came to this process too early."""

    def __init__(self) -> None:
        self._came: dict[tuple[int, int], deque[torch.Tensor]] = {}

    def send(self, to: int, handle: int, data: torch.Tensor) -> None:
        """Begins to send bytes, uint8 [n] in host memory, to a rank of the job; they must stay as they are."""
        if to == comm.own_rank():
            self._came.setdefault((to, handle), deque()).append(data)
            return
        comm.post_send(torch.tensor([handle, data.numel()]), to)
        comm.post_send(data, to)

    def receive(self, source: int, handle: int, what: str) -> torch.Tensor:
        """The next bytes from a rank with this handle. Raises MeshError if it is gone. what: for the message."""
        waiting = self._came.get((source, handle))
        if not waiting and source == comm.own_rank():
            raise MeshError(
                f"transfer: {what} would come from this rank itself, which has sent nothing with handle {handle}"
            )
        while not waiting:
            head = torch.empty(2, dtype=torch.int64)
            self._take(head, source, what)
            data = torch.empty(int(head[1]), dtype=torch.uint8)
            self._take(data, source, what)
            self._came.setdefault((source, int(head[0])), deque()).append(data)
            waiting = self._came.get((source, handle))
        data = waiting.popleft()
        if not waiting:
            del self._came[source, handle]
        return data

    def _take(self, out: torch.Tensor, source: int, what: str) -> None:
        try:
            comm.receive(out, source)
        except RuntimeError as error:
            raise MeshError(
                f"transfer: {what} does not come: rank {source} of the job is gone or stalled ({error})"
            ) from error


POST = Post()
