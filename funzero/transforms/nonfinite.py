"""Updates that are not finite are left out.

[Note: one answer for all ranks] When leaves are cut, a rank sees only its pieces. So the elements that are not finite
are counted by a part of its own with needs="norm": each leaf's count is summed over the ranks that share the leaf. A
leaf is equal on all other ranks, so every rank then holds the same counts, and takes the same branch.
"""

from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.transforms.base import Reduce, Transform, leafwise, skip_missing, unshared
from funzero.transforms.chain import call_directly, resolved


def _is_finite() -> Transform:
    """Passes the updates on; its state says whether all elements of all leaves on all ranks were finite."""

    def init(params: Any) -> Any:
        device = next((x.device for x in tree_lib.leaves(params)), torch.device("cpu"))
        return {"last_finite": torch.ones((), dtype=torch.bool, device=device)}

    def update(updates: Any, state: Any, params: Any = None, *, reduce: Reduce = unshared) -> tuple[Any, Any]:
        bad = tree_lib.map_with_path(lambda path, u: reduce(path, (~torch.isfinite(u)).sum()), updates)
        finite = torch.ones_like(state["last_finite"])
        for count in tree_lib.leaves(bad):
            finite = finite & (count == 0)
        return updates, {"last_finite": finite}

    return leafwise("is_finite", init, update, needs="norm", separate=False)


def skip_nonfinite(inner: Transform, max_consecutive: int) -> Transform:
    """Runs `inner` only on finite updates: an inf or NaN anywhere gives zeros and leaves the state of `inner` as it is.

    After `max_consecutive` skips in a row the next updates go through, finite or not, until some are finite again. The
    state counts `notfinite_count` (in a row, those let through included) and `total_notfinite`. No waiting for the
    device.

    References: the meaning is that of `apply_if_finite` of Optax (DeepMind, 2020).

    >>> import funzero as fz
    >>> params, tx = {"w": torch.tensor(1.0)}, skip_nonfinite(fz.sgd(1.0), max_consecutive=3)
    >>> updates, state = tx.update({"w": torch.tensor(float("nan"))}, tx.init(params), params)
    >>> updates["w"], state["notfinite_count"]
    (tensor(0.), tensor(1, dtype=torch.int32))
    """
    detector = _is_finite()

    def init(params: Any) -> Any:
        seen = detector.init(params)
        zero = torch.zeros_like(seen["last_finite"], dtype=torch.int32)
        return {**seen, "notfinite_count": zero, "total_notfinite": zero.clone(), "inner": inner.init(params)}

    def update(updates: Any, state: Any, params: Any = None, *, call: Any = call_directly) -> tuple[Any, Any]:
        _, seen = call(detector, updates, {"last_finite": state["last_finite"]}, params)
        finite, row = seen["last_finite"], state["notfinite_count"]
        row = torch.where(finite, torch.zeros_like(row), row + 1)
        applied = finite | (row > max_consecutive)
        out, changed = call(inner, updates, state["inner"], params)
        new = tree_lib.map(lambda x, old: torch.where(applied, x.to(old.dtype), old), changed, state["inner"])
        total = state["total_notfinite"] + (~finite).to(torch.int32)
        out = tree_lib.map(lambda u: torch.where(applied, u, torch.zeros_like(u)), out)
        return out, {**seen, "notfinite_count": row, "total_notfinite": total, "inner": new}

    return Transform(
        init,
        skip_missing(update, init),
        needs="element",
        quantum=inner.quantum,
        name="skip_nonfinite",
        parts=(detector, inner),
        resolve=lambda shapes: skip_nonfinite(resolved(inner, shapes), max_consecutive),
    )
