"""The forms in which a cut leaf can be gathered: in its own dtype, or cast before it travels.

[Note: casts of cut leaves] `p.to(dtype)` of a stand-in is a stand-in of another form. A form is an index like a leaf's,
so lists of gathers, budgets and saved tensors treat both alike: the shard is cast, half the bytes travel, and what
autograd saves is the form's name. A cast after the gather would keep a whole copy alive until the backward.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from funzero.core.spec import Layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Forms(Mapping[int, Layout]):
    """Layouts of all forms of some leaves. A form is leaf + stride * code; code 0 is the leaf as it is.

    Args:
        leaves: layouts of the lazy leaves, by index.
    """

    def __init__(self, leaves: Mapping[int, Layout]):
        self._leaves, self._stride = leaves, max(leaves, default=0) + 1

    def of(self, leaf: int, dtype: torch.dtype) -> int:
        """The form of a leaf in another dtype, out of `DTYPES`."""
        return leaf + self._stride * (1 + DTYPES.index(dtype))

    def leaf(self, form: int) -> int:
        """The leaf that a form is of."""
        return form % self._stride

    def bytes(self, form: int) -> int:
        """The size of a whole piece."""
        layout = self[form]
        return layout.n * layout.dtype.itemsize

    def __getitem__(self, form: int) -> Layout:
        code, leaf = divmod(form, self._stride)
        return dataclasses.replace(self._leaves[leaf], dtype=DTYPES[code - 1]) if code else self._leaves[leaf]

    def __iter__(self) -> Iterator[int]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)
