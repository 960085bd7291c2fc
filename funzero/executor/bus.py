"""Bytes on their way between host memory and the device.

[Note: side streams] With an accelerator, copies to it run on one stream and copies back on another, beside the stream that
computes, and none waits for the host. What comes is waited for by the stream that asks for it; what goes is copied after
all that was asked of its stream before. The host waits only where it needs host memory again: a `Room` is pinned, and is
given out when no copy uses it any more. Without an accelerator the device is host memory, and nothing is copied here.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from funzero.core.direct import aligned_empty


class Transfer(Protocol):
    """Bytes under way."""

    def wait(self) -> None:
        """Returns when they have arrived; raises what went wrong."""


class Arrival(Protocol):
    """Values on their way to the device."""

    def wait(self) -> torch.Tensor:
        """Returns them when they are there; raises what went wrong."""


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclasses.dataclass(frozen=True)
class Arrived:
    """Values that are there."""

    values: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The values."""
        return self.values


@dataclasses.dataclass(frozen=True)
class Viewed:
    """Values that are given a shape."""

    arrival: Arrival
    shape: torch.Size

    def wait(self) -> torch.Tensor:
        """The values."""
        return self.arrival.wait().view(self.shape)


def settle(waits: Iterable[Callable[[], object]]) -> None:
    """Waits for all; raises the first OSError when nothing is under way any more."""
    errors = []
    for each in waits:
        try:
            each()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class Room:
    """Host memory for transfers, uint8, grown as needed; pinned if `device` is an accelerator.

    Attributes:
        busy: a copy that reads from it or writes to it.
    """

    def __init__(self, device: torch.device):
        self._pinned = device.type != "cpu"
        self._raw = torch.empty(0, dtype=torch.uint8)
        self.busy: Transfer = Done()

    def bytes(self, nbytes: int) -> torch.Tensor:
        """So many of it, from its beginning, when the copy has ended."""
        self.busy.wait()
        if self._raw.numel() < nbytes:
            self._raw = aligned_empty(nbytes, pinned=self._pinned)
        return self._raw[:nbytes]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy on a side stream, of either direction."""

    event: torch.Event
    made: torch.Tensor

    def wait(self) -> None:
        """Holds up the host until it has ended."""
        self.event.synchronize()


@dataclasses.dataclass(frozen=True)
class _Coming:
    copy: Copy

    def wait(self) -> torch.Tensor:
        """The values, for work that is asked of the current stream from now on."""
        made = self.copy.made
        stream = torch.accelerator.current_stream(made.device)
        stream.wait_event(self.copy.event)
        made.record_stream(stream)
        return made


@functools.cache
def _streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """To the device, and back."""
    return torch.Stream(device), torch.Stream(device)


def bring(values: torch.Tensor, device: torch.device, room: Room | None = None) -> Arrival:
    """Starts to copy from host memory to the device; on a CPU these are the values themselves.

    Args:
        room: the memory that they lie in, if it is one: it is busy meanwhile. Other memory must stay as it is until work
            that uses the copy has been done.
    """
    if device.type == "cpu":
        return Arrived(values)
    side = _streams(device)[0]
    with side:  # so that the memory of the copy waits for no work under way
        copy = Copy(torch.Event(device), values.to(device, non_blocking=True))
        copy.event.record(side)
    if room is not None:
        room.busy = copy
    return _Coming(copy)


def send(values: torch.Tensor, out: torch.Tensor) -> Transfer:
    """Starts to copy from the device to host memory; on a CPU it is done when this returns."""
    if values.device.type == "cpu":
        out.copy_(values)
        return Done()
    side = _streams(values.device)[1]
    side.wait_stream(torch.accelerator.current_stream(values.device))
    with side:
        out.copy_(values, non_blocking=True)
        copy = Copy(torch.Event(values.device), values)
        copy.event.record(side)
    values.record_stream(side)
    return copy
