"""Lazy leaves of one micro-batch: stand-ins and anchors on top of the gather cache."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from funzero import _compat
from funzero.executor.anchors import Attach, Recast, anchored, memoryless, new_source
from funzero.executor.cache import GatherCache
from funzero.executor.forms import Forms
from funzero.executor.standin import NO_FUNCTORCH, Born, StandIn, bare


class LazyLeaves:
    """The stand-ins of one micro-batch.

    Data in the cache are kept apart from what autograd tracks: a tracked tensor is a child of the leaf's anchor, made
    anew when its data were evicted. Saved tensors that are gathered data are packed as (leaf, view) and asked for again
    in the backward.
    """

    def __init__(self, cache: GatherCache, forms: Forms):
        self._cache, self._forms = cache, forms
        self._anchors: dict[int, torch.Tensor] = {}
        self._tracked: dict[int, torch.Tensor] = {}
        cache.on_drop = lambda leaf: self._tracked.pop(leaf, None)

    def stand_in(
        self, leaf: int, on_grad: Callable[[torch.Tensor], None] | None
    ) -> tuple[StandIn, torch.Tensor | None]:
        """What the loss function sees, and the source to differentiate with respect to (None if it does not train)."""
        layout = self._forms[leaf]
        shape, dtype, device = layout.piece_shape, layout.dtype, layout.mesh.device
        source = None
        if on_grad is None:
            made: Any = bare(shape, dtype, device)
            made.anchor = None
        else:
            source = new_source(device, dtype)
            anchor = self._anchors[leaf] = anchored(source, memoryless(shape, dtype, device), on_grad)
            made = Born.apply(anchor)
            made.anchor = anchor
        return self._named(made, leaf), source

    def _named(self, made: Any, form: int) -> StandIn:
        fetch = functools.partial(self._fetch, form, made.anchor)
        made.path, made.fetch = self._forms[form].path, fetch
        made.child = functools.partial(self._child, form, made.anchor)
        if form == self._forms.leaf(form):
            made.cast = functools.partial(self._cast, form)
        else:  # a cast of a cast has lost bits that the leaf still has
            made.cast = lambda dtype: fetch().to(dtype)
        return cast(StandIn, made)

    def _cast(self, leaf: int, dtype: torch.dtype) -> StandIn:
        """The stand-in of a leaf in another dtype; its gradient is cast back on its way to the leaf's anchor."""
        other, anchor = self._forms.of(leaf, dtype), self._anchors.get(leaf)
        if anchor is None or not torch.is_grad_enabled():
            layout = self._forms[other]
            made = bare(layout.piece_shape, dtype, layout.mesh.device)
            made.anchor = None
            return self._named(made, other)
        if other not in self._anchors:
            self._anchors[other] = Recast.apply(anchor, dtype)
        made = Born.apply(self._anchors[other])
        made.anchor = self._anchors[other]
        return self._named(made, other)

    def _child(self, form: int, anchor: torch.Tensor | None) -> StandIn:
        """A stand-in below another: the data that it gives are not shared with that one."""
        layout = self._forms[form]
        if anchor is None or not torch.is_grad_enabled():
            made: Any = bare(layout.piece_shape, layout.dtype, layout.mesh.device)
            made.anchor = None
            return self._named(made, form)
        below = Recast.apply(anchor, layout.dtype)
        made = Born.apply(below)
        made.anchor = below
        named = self._named(made, form)
        named.fetch = lambda: (
            Attach.apply(below, self._raw(form)) if torch.is_grad_enabled() else self._raw(form).detach()
        )
        named.cast = lambda dtype: named.fetch().to(dtype)
        return named

    def _raw(self, form: int) -> torch.Tensor:
        with _compat.uncounted():
            return self._cache.get(form)

    def _fetch(self, leaf: int, anchor: torch.Tensor | None) -> torch.Tensor:
        with _compat.uncounted():  # a recomputation may find the leaf here, or gone
            raw = self._cache.get(leaf)
            if anchor is None or not torch.is_grad_enabled():
                return raw.detach()
            tracked = self._tracked.get(leaf)
            if tracked is None:
                tracked = self._tracked[leaf] = Attach.apply(anchor, raw)
            return tracked

    @contextlib.contextmanager
    def saved_by_name(self) -> Iterator[None]:
        """Within the block, gathered data that autograd saves are saved by name."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):  # torch.func.grad and vjp stop at our hooks
                raise RuntimeError(f"params/**: {NO_FUNCTORCH}") from error
            raise

    def _pack(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, StandIn):
            return tensor
        leaf = self._cache.leaf_of_storage.get(tensor.untyped_storage().data_ptr())
        if leaf is None or tensor.dtype != self._forms[leaf].dtype:
            return tensor
        return leaf, tensor.shape, tensor.stride(), tensor.storage_offset() - self._cache.offset(leaf)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        leaf, shape, stride, offset = packed
        with torch.no_grad(), _compat.uncounted():
            whole = self._cache.get(leaf)
            return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def close(self) -> None:
        """Lets go of the graph and of the cache's interest in it."""
        self._cache.on_drop = lambda leaf: None
        self._anchors.clear()
        self._tracked.clear()
