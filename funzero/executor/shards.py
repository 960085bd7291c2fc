"""The local data of lazy params on their way to the gather cache, from wherever they are kept.

A cut leaf that is kept elsewhere is read ahead of its gather; the gather is posted in the order of the list whatever the
reading takes, since ranks must post alike. A leaf that is not cut has nothing to gather: reading it is all.
"""

from collections.abc import Sequence

import torch

from funzero.core.collectives import Pending, post_gather
from funzero.core.spec import Layout
from funzero.executor.bus import Arrival
from funzero.executor.forms import Forms
from funzero.executor.stores import store_of


class Shards:
    """Local data by leaf.

    Args:
        leaves: the lazy leaves of the state. layouts: of all params.
    """

    def __init__(self, leaves: dict[int, torch.Tensor], forms: Forms, layouts: Sequence[Layout]):
        self._leaves, self._forms, self._layouts = leaves, forms, layouts
        self._coming: dict[int, Arrival] = {}

    def ahead(self, form: int) -> None:
        """Begins to read what a gather that is not yet posted will send."""
        leaf = self._forms.leaf(form)
        if self._layouts[leaf].is_flat and leaf not in self._coming:
            found = self._start(leaf)
            if found is not None:
                self._coming[leaf] = found

    def post(self, form: int) -> Pending:
        """Begins to bring a whole piece."""
        leaf, layout = self._forms.leaf(form), self._forms[form]
        arrival = self._coming.pop(leaf, None) or self._start(leaf)
        if layout.is_flat:
            local = self._leaves[leaf] if arrival is None else arrival.wait()
            return post_gather(local.to(layout.dtype), layout)
        assert arrival is not None, "a lazy leaf is cut, or kept elsewhere"
        return Pending([], lambda: arrival.wait().to(layout.dtype))

    def _start(self, leaf: int) -> Arrival | None:
        store = store_of(self._layouts[leaf])
        return None if store is None else store.start_fetch(self._leaves[leaf], self._layouts[leaf])
