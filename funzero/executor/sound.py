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
    numbers = range(len(new), 0, -1)
    return collectives.all_max(spoilt(list(zip(numbers, old, new, strict=True)), mesh.device), mesh, mesh.names)


def spoilt(rows: list[tuple[int, torch.Tensor, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """The same of this rank's own leaves, which come with numbers: the largest number of a spoilt one, or 0."""
    pairs = [row for row in rows if row[1] is not row[2] and _has_floats(row[2])]
    if not pairs or (device.type == "cpu" and _surely_finite([new for _, _, new in pairs])):
        return torch.zeros((), dtype=torch.int64, device=device)
    flags = torch.stack([(old.isfinite() & ~new.isfinite()).any() for _, old, new in pairs])
    return (flags * torch.tensor([number for number, _, _ in pairs], device=device)).amax()


def _has_floats(x: torch.Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and x.numel() > 0


def _surely_finite(leaves: list[torch.Tensor]) -> bool:
    """True only if all are finite; a norm reads fast, and may overflow where no element has."""
    here = [x for x in leaves if type(x) is torch.Tensor]
    away = (x for x in leaves if type(x) is not torch.Tensor)  # read one at a time
    return all(bool(n.isfinite()) for n in (*torch._foreach_norm(here), *map(torch.linalg.vector_norm, away)))
