"""Element-wise kernels with the same bits wherever a leaf is cut.

[Note: same bits wherever a leaf is cut] A CPU kernel works through a tensor in whole vectors of 64 bytes and treats the
few elements left over by other instructions, which round differently. Which elements are left over depends on where a
leaf is cut. So leftovers of all leaves are laid end to end, padded to whole vectors, and go through the same kernel.
"""

from collections.abc import Callable

import torch

VECTOR_BYTES = 64
Kernel = Callable[[list[list[torch.Tensor]], list[torch.Tensor]], None]


def run_in_vectors(
    columns: list[list[torch.Tensor]], counts: list[torch.Tensor], kernel: Kernel, written: list[int]
) -> None:
    """Runs `kernel(columns, counts)`, which updates in place, such that each element goes through whole vectors.

    Args:
        columns: lists of contiguous tensors, one list for each operand; the i-th of each have equal size and dtype.
        counts: one 0-dim tensor for each i. written: the columns that the kernel writes to.
    """
    first = columns[0]
    lanes = VECTOR_BYTES // first[0].element_size() if first else 1
    rests = [x.numel() % lanes for x in first]
    if first and first[0].device.type == "cpu" and any(rests):
        flat = [[x.view(-1) for x in column] for column in columns]
        kernel([[x[: x.numel() - r] for x, r in zip(c, rests, strict=True)] for c in flat], counts)
        _leftovers(flat, rests, counts, kernel, written, lanes)
    else:
        kernel(columns, counts)


def _leftovers(
    flat: list[list[torch.Tensor]],
    rests: list[int],
    counts: list[torch.Tensor],
    kernel: Kernel,
    written: list[int],
    lanes: int,
) -> None:
    """The ends of all leaves in one padded tensor for each value of the count."""
    by_count: dict[int, list[int]] = {}
    for i, count in enumerate(torch.stack(counts).tolist()):
        if rests[i]:
            by_count.setdefault(count, []).append(i)
    for chosen in by_count.values():
        ends = [[column[i][column[i].numel() - rests[i] :] for i in chosen] for column in flat]
        sizes = [rests[i] for i in chosen]
        pad = -sum(sizes) % lanes
        joined = [torch.cat([*parts, parts[0].new_zeros(pad)]) for parts in ends]
        kernel([[x] for x in joined], [counts[chosen[0]]])
        for k in written:
            torch._foreach_copy_(ends[k], list(joined[k][: sum(sizes)].split(sizes)))
