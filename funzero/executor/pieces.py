"""Transforms on cut leaves: each part of an optimizer is handed what its `needs` says."""

import dataclasses
from typing import Any

import torch

from funzero.core import abstract, collectives
from funzero.core import tree as tree_lib
from funzero.core.spec import Layout
from funzero.executor import place
from funzero.transforms.base import Transform


@dataclasses.dataclass(frozen=True)
class PartCaller:
    """Runs the parts of a composite on local leaves. `layouts`: of the updates, by path below params."""

    layouts: dict[str, Layout]

    def __call__(self, part: Transform, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """`part.update` as if the leaves were whole; everything in and out is local."""
        if part.parts:
            return part.update(updates, state, params, call=self)
        if part.needs == "norm":  # also where only a partition cuts
            return part.update(updates, state, params, reduce=self.reduce)
        if part.needs == "element" or not any(x.ranks > 1 for x in self.layouts.values()):
            return part.update(updates, state, params)
        return self._on_whole_leaves(part, updates, state, params)

    def reduce(self, path: str, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks that share the leaf at `path`."""
        layout = self.layouts[path]
        return collectives.all_sum(x, layout.mesh, layout.spec.cut_axes)

    def _on_whole_leaves(self, part: Transform, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        def whole(path: str, x: torch.Tensor) -> torch.Tensor:
            if x.device.type == "meta":  # stands for the param of a leaf that took no part
                return torch.empty(self.layouts[path].piece_shape, dtype=x.dtype, device="meta")
            return place.whole_piece(x, self.layouts[path])

        def cut(path: str, x: torch.Tensor) -> torch.Tensor:
            return place.cut_flat(x, self.layouts[path]).clone()

        shapes = tree_lib.map_with_path(
            lambda path, x: torch.empty(self.layouts[path].piece_shape, dtype=x.dtype, device="meta"), params
        )
        made, origin = abstract.sources(part.init, shapes)
        mirrors = {
            path: source
            for path, leaf, source in zip(tree_lib.paths(made), tree_lib.leaves(made), origin, strict=True)
            if source is not None and abstract.mirrors(leaf, self.layouts[source].piece_shape)
        }
        full_state = tree_lib.map_with_path(lambda p, x: whole(mirrors[p], x) if p in mirrors else x, state)
        full_params = tree_lib.map_with_path(whole, params)
        out, new = part.update(tree_lib.map_with_path(whole, updates), full_state, full_params)
        cut_state = tree_lib.map_with_path(lambda p, x: cut(mirrors[p], x) if p in mirrors else x, new)
        return tree_lib.map_with_path(cut, out), cut_state
