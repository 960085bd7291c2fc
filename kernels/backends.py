"""Which code runs the kernels on which device; made at first use, and plain torch where it cannot be made."""

import importlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from . import reference
from .cpu import build
from .cpu.library import Library


class Unavailable(Exception):
    """A backend cannot be made here; the message says why in one line."""


class Backend(Protocol):
    """The kernels for one type of device. Arguments are checked before they come here; outputs are on their device."""

    def update(
        self, leaves: Sequence[reference.Leaf], rule: reference.Rule, scale: reference.Scale, threads: int
    ) -> None: ...

    def square_sum(self, x: torch.Tensor, chunk: int, threads: int) -> torch.Tensor: ...

    def accumulate(self, acc: torch.Tensor, grad: torch.Tensor, weight: float, threads: int) -> None: ...


class Plain:
    """The reference as a backend; torch decides on threads."""

    def update(
        self, leaves: Sequence[reference.Leaf], rule: reference.Rule, scale: reference.Scale, threads: int
    ) -> None:
        """`reference.update`."""
        reference.update(leaves, rule, scale)

    def square_sum(self, x: torch.Tensor, chunk: int, threads: int) -> torch.Tensor:
        """`reference.square_sum`."""
        return reference.square_sum(x, chunk)

    def accumulate(self, acc: torch.Tensor, grad: torch.Tensor, weight: float, threads: int) -> None:
        """`reference.accumulate`."""
        reference.accumulate(acc, grad, weight)


def _cpu() -> Backend:
    try:
        return Library(build.library())
    except build.BuildError as error:
        raise Unavailable(str(error)) from error


class Triton:
    """The kernels of `triton`, for CUDA and ROCm."""

    def __init__(self) -> None:
        self._kernels: Any = importlib.import_module(".triton", __package__)  # it imports triton, which is an extra

    def update(
        self, leaves: Sequence[reference.Leaf], rule: reference.Rule, scale: reference.Scale, threads: int
    ) -> None:
        """`reference.update`."""
        self._kernels.update(leaves, rule, scale)

    def square_sum(self, x: torch.Tensor, chunk: int, threads: int) -> torch.Tensor:
        """`reference.square_sum`."""
        found: torch.Tensor = self._kernels.square_sum(x, chunk)
        return found

    def accumulate(self, acc: torch.Tensor, grad: torch.Tensor, weight: float, threads: int) -> None:
        """`reference.accumulate`."""
        self._kernels.accumulate(acc, grad, weight)


def _cuda() -> Backend:
    try:
        return Triton()
    except ImportError as error:
        raise Unavailable(f"{error}; install funzero[triton]") from error


# Makes the backend of a device type, or raises Unavailable. Types that are not listed run in plain torch, unwarned.
MAKERS: dict[str, Callable[[], Backend]] = {"cpu": _cpu, "cuda": _cuda}
_made: dict[str, Backend] = {}
_making = threading.RLock()


def backend(device_type: str) -> Backend:
    """The backend of a type of device; the first call may compile, which takes seconds, and warns if it cannot."""
    found = _made.get(device_type)
    if found is not None:
        return found
    with _making:
        if device_type not in _made:
            _made[device_type] = _make(device_type)
        return _made[device_type]


def _make(device_type: str) -> Backend:
    maker = MAKERS.get(device_type, Plain)
    try:
        return maker()
    except Unavailable as error:
        message = f"funzero_kernels: no kernels for {device_type}, so plain torch runs, which is slower: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return Plain()
