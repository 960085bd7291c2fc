"""How params and the optimizer's state are kept between updates: low precision, a master copy, rounding.

The optimizer itself works in float32 (or wider) and knows none of this. `stored` gives it the state that a policy asks
for; `update_stored` widens what is kept, runs the optimizer, and rounds its results back.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import abstract
from funzero.core import tree as tree_lib
from funzero.transforms.base import Transform
from funzero.transforms.chain import call_directly
from funzero.transforms.counter import Words
from funzero.transforms.precision import LOW, Policy, wide_dtype
from funzero.transforms.random import random_bits16
from funzero.transforms.rng import fold_in
from funzero.transforms.rounding import stochastic_round

MASTER, COMPENSATION, INNER = "master", "compensation", "inner"
ROUNDING_STREAM = -2

Index = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Rounder:
    """Rounds float32 values to what a policy keeps.

    Attributes:
        rounding: see `Policy`. key: of this update, for stochastic rounding. index: by path of a param, the global
            indices of the elements that a local leaf holds: a range or an int64 tensor.
    """

    rounding: str
    key: torch.Tensor
    index: Index

    def __call__(self, path: str, what: str, wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`wide` in `dtype`; `path`: of the param that it belongs to; `what`: which of its values it is."""
        if self.rounding != "stochastic" or dtype != torch.bfloat16 or wide.dtype == dtype:
            return wide.to(dtype)
        bits = random_bits16(self._stream(path, what), self.index(path), device=wide.device).view(wide.shape)
        return stochastic_round(wide.float(), bits=bits, dtype=dtype)

    def _stream(self, path: str, what: str) -> torch.Tensor:
        return fold_in(self.key, zlib.crc32(path.encode()), zlib.crc32(what.encode()))

    def words(self, path: str, what: str) -> tuple[int, int, int]:
        """What a kernel that rounds by itself makes the same bits from; see `counter.Words`."""
        return Words(self._stream(path, what), 0).parts


NEAREST = Rounder("nearest", torch.zeros(2, dtype=torch.int64), lambda path: range(0))


def rounder(policy: Policy, key: torch.Tensor, step: torch.Tensor, index: Index) -> Rounder:
    """The rounder of one update. key: the state's. step: its count of applied updates, 0-dim."""
    draws = policy.rounding == "stochastic"
    return Rounder(policy.rounding, fold_in(key, ROUNDING_STREAM, int(step)) if draws else key, index)


def whole_index(params: Any) -> Index:
    """The indices of leaves that are whole."""
    sizes = {p: x.numel() for p, x in zip(*tree_lib.flatten_with_paths(params)[:2], strict=True)}
    return lambda path: range(sizes[path])


def stored(tx: Transform, policy: Policy) -> Transform:
    """`tx` with the state that a policy keeps: `init` takes params in any dtype."""
    if policy.master is None and policy.moments is None and policy.params is None and policy.rounding != "kahan":
        return tx

    def init(params: Any) -> Any:
        work = tree_lib.map(lambda p: p.to(wide_dtype(policy.params_dtype(p.dtype))), params)
        state = tx.init(work)
        if policy.moments is not None:
            kept = moments(tx, work)
            state = tree_lib.map_with_path(lambda n, x: _in(policy.moments, x) if n in kept else x, state)
        extra: dict[str, Any] = {}
        if policy.master is not None:
            extra[MASTER] = tree_lib.map(lambda p: _in(policy.master, p).clone(), params)
        if policy.rounding == "kahan":
            extra[COMPENSATION] = tree_lib.map(
                lambda p: torch.zeros_like(p, dtype=policy.params_dtype(p.dtype)), params
            )
        return _joined(state, extra)

    return dataclasses.replace(tx, init=init)


def _in(dtype: torch.dtype | None, x: torch.Tensor) -> torch.Tensor:
    return x.to(dtype) if x.dtype.is_floating_point else x


def moments(tx: Transform, params: Any) -> dict[str, str]:
    """{path of a floating state leaf that mirrors a param: path of that param}."""
    made, origin = abstract.sources(tx.init, params)
    shapes = {p: tuple(x.shape) for p, x in zip(*tree_lib.flatten_with_paths(params)[:2], strict=True)}
    rows = zip(*tree_lib.flatten_with_paths(made)[:2], origin, strict=True)
    own = [(n, x, s.path) for n, x, s in rows if s is not None and not s.block and x.dtype.is_floating_point]
    return {n: path for n, x, path in own if abstract.mirrors(x, shapes[path])}


def _joined(state: Any, extra: dict[str, Any]) -> Any:
    if not extra:
        return state
    inner = state if isinstance(state, dict) else {INNER: state}
    clash = sorted(inner.keys() & extra.keys())
    if clash:
        raise ValueError(f"opt_state/{clash[0]}: the precision policy keeps its own leaves there; rename the transform")
    return {**inner, **extra}


def split_stored(state: Any, policy: Policy) -> tuple[Any, dict[str, Any]]:
    """The optimizer's own state, and what the policy keeps beside it."""
    names = [n for n, kept in ((MASTER, policy.master), (COMPENSATION, policy.rounding == "kahan")) if kept]
    if not names:
        return state, {}
    inner = {k: v for k, v in state.items() if k not in names}
    return inner[INNER] if inner.keys() == {INNER} else inner, {n: state[n] for n in names}


def update_stored(
    tx: Transform,
    policy: Policy,
    grads: Any,
    opt_state: Any,
    params: Any,
    round_to: Rounder,
    *,
    owners: dict[str, str] | None = None,
    call: Any = call_directly,
) -> tuple[Any, Any]:
    """One update of leaves that are kept as `policy` says.

    Args:
        tx: the optimizer, not wrapped. grads: `None` where a leaf took no part: what belongs to it stays as it is.
        opt_state: as `stored(tx, policy).init` gives it. params: as they are kept.
        owners: what `moments` gives for `tx` and these params, if it is known.
        call: how to run `tx` on local leaves, see `Transform.parts`.

    Returns: (params, opt_state) in the dtypes that came in.
    """
    inner, extra = split_stored(opt_state, policy)
    base = tree_lib.map(lambda p: p.to(wide_dtype(p.dtype)), extra.get(MASTER, params))
    wide = tree_lib.map(lambda g: g.to(wide_dtype(g.dtype)), grads)
    open_state = tree_lib.map(lambda x: x.to(wide_dtype(x.dtype)), inner) if policy.moments in LOW else inner
    updates, new = tx.update(wide, open_state, base, call=call) if tx.parts else call(tx, wide, open_state, base)
    given = dict(zip(*tree_lib.flatten_with_paths(updates)[:2], strict=True))
    if policy.moments in LOW:
        of = owners or moments(tx, base)
        old = dict(zip(*tree_lib.flatten_with_paths(inner)[:2], strict=True))

        def kept(n: str, x: torch.Tensor) -> torch.Tensor:
            return round_to(of[n], n, x, old[n].dtype) if of.get(n) in given else x.to(old[n].dtype)

        new = tree_lib.map_with_path(kept, new)
    return _applied(policy, params, base, given, new, extra, round_to)


def _applied(
    policy: Policy, params: Any, base: Any, given: dict[str, Any], new: Any, extra: dict[str, Any], round_to: Rounder
) -> tuple[Any, Any]:
    """params + updates, rounded, and the state with what the policy keeps beside it."""
    sums = tree_lib.map_with_path(lambda path, b: b + given[path] if path in given else b, base)
    if policy.rounding == "kahan":
        lost = dict(zip(*tree_lib.flatten_with_paths(extra[COMPENSATION])[:2], strict=True))
        sums = tree_lib.map_with_path(lambda n, x: x + lost[n].to(x.dtype) if n in given else x, sums)
    by_path = dict(zip(*tree_lib.flatten_with_paths(sums)[:2], strict=True))
    nearest = policy.master is not None

    def kept(path: str, p: torch.Tensor) -> torch.Tensor:
        if path not in given:
            return p
        return by_path[path].to(p.dtype) if nearest else round_to(path, "params", by_path[path], p.dtype)

    out = tree_lib.map_with_path(kept, params)
    more: dict[str, Any] = {}
    if MASTER in extra:
        more[MASTER] = tree_lib.map(lambda s, m: s.to(m.dtype), sums, extra[MASTER])
    if COMPENSATION in extra:
        after = dict(zip(*tree_lib.flatten_with_paths(out)[:2], strict=True))
        more[COMPENSATION] = tree_lib.map_with_path(
            lambda n, c: (by_path[n] - after[n].to(by_path[n].dtype)).to(c.dtype) if n in given else c,
            extra[COMPENSATION],
        )
    return out, _joined(new, more)
