"""Scopes: things that must stay as they are until the surrounding gradient has finished its backward.

[Note: params stay in the module] `functional_call` puts params into a module. Activation checkpointing runs parts of
the module again during the backward; with the params already taken out it would silently recompute with the module's
own. So what `functional_call` changed is undone at the end of the scope that a gradient opens, not at the end of the
call.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

_current: contextvars.ContextVar["Scope | None"] = contextvars.ContextVar("funzero_scope", default=None)


class Scope:
    """Callables to run, last first, when the scope ends.

    Attributes:
        in_backward: True once the loss is there. lazy: True if params may be stand-ins; scopes within inherit it.
        remat: (glob of module paths, policy) of the modules to recompute. rematted: the modules seen to.
        params: whole tensors of the params of a step, which no policy of recomputation moves to host memory.
    """

    def __init__(self, lazy: bool, remat: tuple[Any, ...]) -> None:
        self.in_backward, self.lazy, self.remat = False, lazy, remat
        self.rematted: set[int] = set()
        self.params: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def on_exit(self, undo: Callable[[], None]) -> None:
        """Runs `undo` at the end of the scope."""
        self._undo.append(undo)

    def close(self) -> None:
        """Runs everything, last first; also when one of them raises."""
        with contextlib.ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)
            self._undo, self.params = [], []


def current() -> Scope | None:
    """The innermost open scope, or None."""
    return _current.get()


@contextlib.contextmanager
def scope(lazy: bool = False, remat: tuple[Any, ...] = ()) -> Iterator[Scope]:
    """Opens a scope; it ends, whatever happens, at the end of the `with` block."""
    outer = _current.get()
    opened = Scope(lazy or (outer is not None and outer.lazy), remat or (outer.remat if outer is not None else ()))
    opened.params = outer.params if outer is not None else []
    token = _current.set(opened)
    try:
        yield opened
    finally:
        _current.reset(token)
        opened.close()
