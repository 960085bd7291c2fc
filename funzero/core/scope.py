"""Scopes: things that must stay as they are until the surrounding gradient has finished its backward.

[Note: params stay in the module] `functional_call` puts params into a module. Activation checkpointing runs parts of
the module again during the backward; with the params already taken out it would silently recompute with the module's
own. So what `functional_call` changed is undone at the end of the scope that a gradient opens, not at the end of the
call. A scope can be opened again for a backward that comes later: all is changed once more, in the same order.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

Change = Callable[[], Callable[[], object]]  # changes something, and gives what undoes it

_current: contextvars.ContextVar["Scope | None"] = contextvars.ContextVar("funzero_scope", default=None)


class Scope:
    """Changes that are undone, last first, when the scope ends.

    Attributes:
        open: whether its changes are made. in_backward: True once the loss is there.
        lazy: True if params may be stand-ins; scopes within inherit it.
        remat: (glob of module paths, policy) of the modules to recompute. rematted: the modules seen to.
        params: whole tensors of the params of a step, which no policy of recomputation moves to host memory.
    """

    def __init__(self, lazy: bool, remat: tuple[Any, ...]) -> None:
        self.open, self.in_backward, self.lazy, self.remat = True, False, lazy, remat
        self.rematted: set[int] = set()
        self.params: list[Any] = []
        self._changes: list[Change] = []
        self._undo: list[Callable[[], object]] = []

    def apply(self, change: Change) -> None:
        """Makes a change that lasts as long as the scope."""
        self._undo.append(change())
        self._changes.append(change)

    def close(self) -> None:
        """Undoes everything, last first; also when one of them raises."""
        with contextlib.ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)
            self._undo, self.params, self.open = [], [], False

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within the block all changes are made, for the backward of what ran in this scope: once more if it has ended."""
        if self.open:
            yield
            return
        token = _current.set(self)
        self.open = True
        try:
            for change in self._changes:
                self._undo.append(change())
            yield
        finally:
            _current.reset(token)
            self.close()


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
