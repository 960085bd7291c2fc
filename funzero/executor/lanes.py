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
    if not any(rests) or first[0].device.type != "cpu":
        kernel(columns, counts)
        return
    ends = [i for i, r in enumerate(rests) if r]
    flat = [[x if x.dim() == 1 else x.view(-1) for x in (column[i] for i in ends)] for column in columns]
    sizes = [rests[i] for i in ends]
    whole = [i for i, x in enumerate(first) if x.numel() >= lanes]
    if whole:
        kernel([[_without(column[i], rests[i]) for i in whole] for column in columns], [counts[i] for i in whole])
    _leftovers(flat, sizes, [counts[i] for i in ends], kernel, written, lanes)


def _without(x: torch.Tensor, rest: int) -> torch.Tensor:
    return x.view(-1)[: x.numel() - rest] if rest else x


def _leftovers(
    flat: list[list[torch.Tensor]],
    sizes: list[int],
    counts: list[torch.Tensor],
    kernel: Kernel,
    written: list[int],
    lanes: int,
) -> None:
    """The ends (`sizes` elements each) of flat leaves, in one padded tensor for each value of the count."""
    by_count: dict[int, list[int]] = {}
    for i, count in enumerate(torch.stack(counts).tolist()):
        by_count.setdefault(count, []).append(i)
    for chosen in by_count.values():
        parts = [
            [column[i] if column[i].numel() == sizes[i] else column[i][-sizes[i] :] for i in chosen] for column in flat
        ]
        lengths = [sizes[i] for i in chosen]
        total = sum(lengths)
        padding = parts[0][0].new_zeros(-total % lanes)
        joined = [torch.cat([*column, padding]) for column in parts]
        kernel([[x] for x in joined], [counts[chosen[0]]])
        for k in written:
            torch._foreach_copy_(parts[k], list(joined[k][:total].split(lengths)))
