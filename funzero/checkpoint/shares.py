"""Who writes what: each element of each leaf once, copies shared among the ranks that hold them."""

import dataclasses
import functools
import math
from collections import Counter

from funzero.core.mesh import Mesh
from funzero.core.spec import Layout

SHARE = 8 << 20  # bytes below which a copied leaf is not divided among its holders


@dataclasses.dataclass(frozen=True)
class Share:
    """A range of elements, in row-major order of a box, that this rank writes of leaf number `leaf`."""

    leaf: int
    box: tuple[tuple[int, int], ...]
    range: tuple[int, int]


def shares(layouts: list[Layout]) -> list[Share]:
    """What the rank of the layouts' mesh writes. All ranks come to the same division; no collective."""
    loads: Counter[int] = Counter()
    out = []
    sizes = [x.n * x.dtype.itemsize for x in layouts]
    for i in sorted(range(len(layouts)), key=lambda i: -sizes[i]):
        layout = layouts[i]
        rank = layout.mesh.rank
        for group in _holders(layout.mesh, layout.spec.cut_axes):
            if len(group) == 1 and group[0] != rank:
                continue
            lo, hi = layout.bounds(layout.mesh.index(layout.spec.flat, group[0]))
            for writer, part in _divided(lo, hi, layout.dtype.itemsize, group, loads):
                if writer == rank:
                    box = tuple((s.start, s.stop) for s in layout.box_of(group[0]))
                    out.append(Share(i, box, part))
    return out


def _divided(
    lo: int, hi: int, itemsize: int, group: tuple[int, ...], loads: Counter[int]
) -> list[tuple[int, tuple[int, int]]]:
    """(writer, range) of a part that all of `group` hold; the least loaded take it."""
    count = min(len(group), math.ceil((hi - lo) * itemsize / SHARE))
    if count <= 0:
        return []
    step = math.ceil((hi - lo) / count)
    writers = sorted(group, key=lambda r: (loads[r], r))[:count] if len(group) > 1 else group
    out = [(w, (lo + k * step, min(lo + (k + 1) * step, hi))) for k, w in enumerate(writers) if lo + k * step < hi]
    if len(group) > 1:  # what a rank holds alone is left out of the loads: only that rank knows of it
        for writer, (a, b) in out:
            loads[writer] += (b - a) * itemsize
    return out


@functools.lru_cache(maxsize=64)
def _holders(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks in groups that hold the same part of a leaf which is cut over `axes`."""
    groups: dict[int, list[int]] = {}
    for rank in range(mesh.world):
        groups.setdefault(mesh.index(axes, rank), []).append(rank)
    return tuple(tuple(g) for g in groups.values())
