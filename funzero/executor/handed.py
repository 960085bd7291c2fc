"""Whole params as a loss function gets them: constants, and a write to one is found.

[Note: writes to params] Autograd refuses most in-place writes to a param, but not those under no_grad or through
`.data`. The first micro-batch of a layout gets copy-on-write clones, so such a write does not reach the state. Later ones
get the leaves themselves, since a kernel that asks for writable memory (compiled code does) would copy its params each
time; there a write under no_grad is still found, and the leaf is spent.
"""

from collections.abc import Container

import torch

from funzero import _compat
from funzero.core.spec import Layout
from funzero.executor.donate import poison


class Handed:
    """The whole params of one call of a loss function.

    Args:
        own: all params; those whose places are in `lazy` stay as they are.

    Attributes:
        leaves: the others detached, in the order of the params.
    """

    def __init__(self, own: list[torch.Tensor], lazy: Container[int], *, copy_on_write: bool):
        self._own, self._copied = own, copy_on_write
        take = _compat.lazy_clone if copy_on_write else torch.Tensor.detach
        self.leaves = [x if i in lazy else take(x) for i, x in enumerate(own)] if lazy else [take(x) for x in own]
        self._versions = [x._version for x in self.leaves]

    def check(self, layouts: tuple[Layout, ...]) -> None:
        """Raises if one was written to; `layouts` are those of the params."""
        written = [x._version for x in self.leaves] != self._versions
        if not written and not (self._copied and any(map(_differ, self.leaves, self._own))):
            return
        rows = zip(self.leaves, self._own, self._versions, strict=True)
        changed = [i for i, (x, own, v) in enumerate(rows) if x._version != v or (self._copied and _differ(x, own))]
        if not self._copied:
            poison([self._own[i] for i in changed], spent=True)
        raise RuntimeError(
            f"{layouts[changed[0]].path}: loss_fn wrote to this param in place; params are constants, return new values"
        )


def _differ(x: torch.Tensor, own: torch.Tensor) -> bool:
    if x is own or _compat.is_lazy_clone(x):
        return False
    a, b = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (x, own))
    return not torch.equal(a, b)
