"""A look at each leaf that somebody else has put together, before a step or a pull works on its memory."""

import functools
from collections.abc import Sequence

import torch

from funzero.core import tree as tree_lib
from funzero.core.spec import Layout
from funzero.executor.disk import DiskLeaf


class Looks:
    """What the local leaves of some layouts look like."""

    def __init__(self, layouts: Sequence[Layout]):
        self._layouts = tuple(layouts)

    @functools.cached_property
    def _expected(self) -> list[tuple[tuple[int, ...], torch.dtype, torch.device, bool]]:
        return [(x.local_shape, x.dtype, _device(x), x.spec.memory == "disk") for x in self._layouts]

    @functools.cached_property
    def _on_disk(self) -> list[int]:
        return [i for i, x in enumerate(self._layouts) if x.spec.memory == "disk"]

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Raises ValueError that names the first leaf that is not what its layout says, DonatedError for one on disk that
        has been written since."""
        try:
            found = [(x.shape, x.dtype, x.device, type(x) is DiskLeaf) for x in leaves]
        except AttributeError:
            pairs = zip(leaves, self._layouts, strict=False)
            path, kind = next((y.path, type(x).__name__) for x, y in pairs if not isinstance(x, torch.Tensor))
            raise ValueError(f"{path}: expected a tensor, got {kind}") from None
        if found == self._expected and all(x[3] or leaf.is_contiguous() for x, leaf in zip(found, leaves, strict=True)):
            for i in self._on_disk:
                leaf = leaves[i]
                assert isinstance(leaf, DiskLeaf), "the layout says disk"
                leaf.check()
            return
        if len(leaves) != len(self._layouts):
            raise ValueError(
                f"the state has {len(leaves)} leaves in params and opt_state, its specs {len(self._layouts)}"
            )
        rows = zip(leaves, self._layouts, found, self._expected, strict=True)
        leaf, layout = next((x, y) for x, y, a, b in rows if a != b or not (a[3] or x.is_contiguous()))
        here = tree_lib.dtype_and_shape(layout.dtype, layout.local_shape)
        there = tree_lib.dtype_and_shape(leaf.dtype, tuple(leaf.shape))
        how = "" if isinstance(leaf, DiskLeaf) or leaf.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{layout.path}: the layout says {here} in {layout.spec.memory} memory on {_device(layout)} here, got {there} "
            f"on {leaf.device}{how} ({type(leaf).__name__}); make states with fz.init_state, fz.restore or fz.reshard"
        )


def _device(layout: Layout) -> torch.device:
    return torch.device("cpu") if layout.spec.memory == "host" else layout.mesh.device
