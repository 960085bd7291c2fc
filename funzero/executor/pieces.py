"""Transforms on cut leaves: each part of an optimizer is handed what its `needs` says."""

import dataclasses
import functools
from typing import Any

import torch

from funzero.core import abstract, collectives
from funzero.core import tree as tree_lib
from funzero.core.spec import Layout
from funzero.executor import place
from funzero.transforms.base import Transform, skip_missing


@dataclasses.dataclass(frozen=True)
class PartCaller:
    """Runs the parts of a composite on local leaves. `layouts`: of the updates, by path below params."""

    layouts: dict[str, Layout]

    def __call__(self, part: Transform, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """`part.update` as if the leaves were whole; everything in and out is local."""
        if part.parts:
            return part.update(updates, state, params, call=self)
        if part.needs == "element" or not any(_in_parts(x) for x in self.layouts.values()):
            return part.update(updates, state, params)
        if part.needs == "norm":
            return part.update(updates, state, params, reduce=self.reduce)
        # Leaves that took no part are left out here: what stands for them has no data to gather.
        return skip_missing(functools.partial(self._on_whole_leaves, part), part.init)(updates, state, params)

    def reduce(self, path: str, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks that share the leaf at `path`."""
        layout = self.layouts[path]
        return collectives.all_sum(x, layout.mesh, layout.spec.cut_axes)

    def _on_whole_leaves(self, part: Transform, updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        states = self._state_layouts(part, params)

        def whole(path: str, x: torch.Tensor) -> torch.Tensor:
            return place.whole(x, self.layouts[path])

        full = [tree_lib.map_with_path(whole, tree) for tree in (updates, params)]
        full_state = tree_lib.map_with_path(lambda path, x: place.whole(x, states[path]), state)
        out, new = part.update(full[0], full_state, full[1])
        return (
            tree_lib.map_with_path(lambda path, x: _cut(x, self.layouts[path]), out),
            tree_lib.map_with_path(lambda path, x: _cut(x, states[path]), new),
        )

    def _state_layouts(self, part: Transform, params: Any) -> dict[str, Layout]:
        """The layout of each leaf of a part's state, as `zero_specs` made them."""
        shapes = tree_lib.map_with_path(
            lambda path, x: torch.empty(self.layouts[path].shape, dtype=x.dtype, device="meta"), params
        )
        made, origin = abstract.sources(part.init, shapes)
        mesh = next(iter(self.layouts.values())).mesh
        layouts = {}
        for path, leaf, source in zip(tree_lib.paths(made), tree_lib.leaves(made), origin, strict=True):
            spec = abstract.state_spec(leaf, source, self.layouts[source.path] if source else None, path)
            layouts[path] = Layout(path, tuple(leaf.shape), leaf.dtype, spec, mesh)
        return layouts


def _in_parts(layout: Layout) -> bool:
    return layout.mesh.size(layout.spec.cut_axes) > 1


def _cut(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part, on memory of its own where it is less than the leaf."""
    return place.cut(whole, layout).clone() if _in_parts(layout) else whole
