"""A stop that all ranks agree on: Ctrl-C ends a run between two steps, never within one."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from funzero.core.mesh import Mesh

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that a signal ended."""


class Interrupt:
    """Takes over SIGINT and SIGTERM: the first asks for a stop, a second SIGINT ends this process at once.

    A rank that left its loop alone would leave its peers waiting in a collective, so a signal sets a flag only and
    `agreed`, called by every rank between two steps, says when all of them stop.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._asked = mesh, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def agreed(self, asked: bool = False) -> bool:
        """Whether any rank was asked to stop, by a signal or by `asked`. A collective call."""
        flag = torch.tensor([self._asked or asked], dtype=torch.uint8)
        return bool(self._mesh.gather_host(flag).any())
