"""A look at each leaf of a state that somebody else has put together, before a step works on its memory."""

from collections.abc import Sequence

import torch

from funzero.core import tree as tree_lib
from funzero.core.spec import Layout
from funzero.executor.disk import DiskLeaf


def check_leaves(leaves: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
    """Raises ValueError that names the first leaf that is not what its layout says."""
    if len(leaves) != len(layouts):
        raise ValueError(f"the state has {len(leaves)} leaves in params and opt_state, its specs {len(layouts)}")
    for leaf, layout in zip(leaves, layouts, strict=True):
        kind = layout.spec.memory
        device = torch.device("cpu") if kind == "host" else layout.mesh.device
        if leaf.shape == layout.local_shape and leaf.dtype == layout.dtype and leaf.device == device:
            right = isinstance(leaf, DiskLeaf) if kind == "disk" else leaf.is_contiguous()
            if right and (kind == "disk" or not isinstance(leaf, DiskLeaf)):
                continue
        shape = tuple(leaf.shape)
        here = tree_lib.dtype_and_shape(layout.dtype, layout.local_shape)
        found = tree_lib.dtype_and_shape(leaf.dtype, shape)
        how = "" if leaf.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{layout.path}: the layout says {here} in {kind} memory on {device} here, got {found} on {leaf.device}{how} "
            f"({type(leaf).__name__}); make states with fz.init_state, fz.restore or fz.reshard"
        )
