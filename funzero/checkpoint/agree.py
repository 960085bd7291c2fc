"""What one rank meets, all ranks hear of."""

import builtins
from collections.abc import Callable
from typing import TypeVar

from funzero.core.errors import CheckpointError
from funzero.core.mesh import Mesh

T = TypeVar("T")


def agree(mesh: Mesh, error: Exception | None) -> None:
    """Raises an error that any rank met on all of them: on that rank as it is, on the others as one of the same kind."""
    texts = mesh.exchange_text("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise _error_of(text.partition(":")[0], f"rank {rank}: {text}")


def _error_of(name: str, text: str) -> Exception:
    """An error of the kind of that name, if there is one that takes a text."""
    kind = CheckpointError if name == CheckpointError.__name__ else getattr(builtins, name, RuntimeError)
    if issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(text)
    return RuntimeError(text)


def on_all(mesh: Mesh, make: Callable[[], T]) -> T:
    """What `make` gives; if it raises on one rank, all raise. A collective call."""
    error: Exception | None = None
    try:
        made = make()
    except Exception as found:
        error = found
    agree(mesh, error)
    return made
