"""What a step needs to know that does not change from call to call, worked out once for each layout."""

import dataclasses
import functools

import torch

from funzero.core import tree as tree_lib
from funzero.core.mesh import Mesh
from funzero.core.spec import Layout
from funzero.core.state import StateSpecs
from funzero.transforms.base import Transform
from funzero.transforms.chain import resolved
from funzero.transforms.precision import Policy


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout seen from the step. Lists of trained leaves are in the order of `specs.grads`."""

    specs: StateSpecs
    policy: Policy

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.specs.mesh

    @functools.cached_property
    def trained(self) -> list[int]:
        """The places of the trained leaves among the params."""
        place = {path: i for i, path in enumerate(tree_lib.paths(self.specs.params.tree))}
        return [place[path] for path in tree_lib.paths(self.specs.grads.tree)]

    @functools.cached_property
    def place_of_trained(self) -> dict[int, int]:
        """{place among the params: place among the trained leaves}, in the order of the latter."""
        return {i: k for k, i in enumerate(self.trained)}

    @functools.cached_property
    def compute_dtypes(self) -> list[torch.dtype]:
        """The dtype in which each param is handed to the loss function."""
        return [self.policy.compute_dtype(x.dtype) for x in self.specs.params.layouts]

    @functools.cached_property
    def micro_grads(self) -> tuple[Layout, ...]:
        """Gradients as one micro-batch leaves them: whole pieces, not yet summed over the batch axes."""
        return tuple(
            x.with_spec(flat=(), unreduced=tuple(a for a in self.mesh.batch if a not in x.spec.partition.axes))
            for x in self.specs.accum.layouts
        )

    def travelling(self, layout: Layout) -> Layout:
        """A gradient's layout in the dtype in which it goes between ranks."""
        return dataclasses.replace(layout, dtype=self.policy.reduce_dtype(layout.dtype))

    @functools.cached_property
    def batch_ranks(self) -> int:
        """Ranks that hold different samples."""
        return self.mesh.size(self.mesh.batch)

    @functools.cached_property
    def batch_index(self) -> int:
        """This rank among them."""
        return self.mesh.index(self.mesh.batch)

    def resolved(self, tx: Transform) -> Transform:
        """The optimizer with its masks evaluated on the global shapes."""
        return resolved(tx, self.specs.grads.abstract())
