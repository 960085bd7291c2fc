"""Whether what a step has computed may take the place of what it started from.

[Note: nothing finite becomes infinite] A finite loss and finite gradients do not make a finite update: an optimizer may
divide zero by zero, a rate may be infinite, the square of a gradient may overflow. So an element that was finite and
would not be any more refuses the whole update, on every rank. An infinity that was there before may stay.
"""

import torch

from funzero.core import collectives
from funzero.core.mesh import Mesh


def first_spoilt(old: list[torch.Tensor], new: list[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The first leaf with an element that was finite and is not any more, counted from the end; 0 if there is none.

    Args:
        old, new: local leaves in the same order on every rank.

    Returns: 0-dim int64 on the mesh's device, equal on every rank. A collective call.
    """
    found = torch.zeros((), dtype=torch.int64, device=mesh.device)
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b and _has_floats(b)]
    if pairs and not (mesh.device.type == "cpu" and _surely_finite([b for _, _, b in pairs])):
        flags = torch.stack([(a.isfinite() & ~b.isfinite()).any() for _, a, b in pairs])
        found = (flags * torch.tensor([len(new) - i for i, _, _ in pairs], device=mesh.device)).amax()
    return collectives.all_max(found, mesh, mesh.names)


def _has_floats(x: torch.Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and x.numel() > 0


def _surely_finite(leaves: list[torch.Tensor]) -> bool:
    """True only if all are finite; a norm reads fast, and may overflow where no element has."""
    here = [x for x in leaves if type(x) is torch.Tensor]
    away = (x for x in leaves if type(x) is not torch.Tensor)  # read one at a time
    return all(bool(n.isfinite()) for n in (*torch._foreach_norm(here), *map(torch.linalg.vector_norm, away)))
