"""Precision policies: which dtype each part of a step has, and how values are rounded to it."""

import dataclasses
import warnings

import torch

from funzero.transforms import loss_scale as scales

ROUNDINGS = ("nearest", "stochastic", "kahan")
CASTS = ("params", "autocast")
LOW = (torch.float16, torch.bfloat16)
FLOATS = (*LOW, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of a step. `None` leaves a part as it comes.

    Attributes:
        name: for messages.
        params: floating params are kept in it.
        compute: floating params (and floating batch leaves) are cast to it for the loss function. The cast is made from
            the shard, before the gather, and never stored.
        accum: gradients are summed and handed to the optimizer in it; None: float32 or the leaf's, whichever is wider.
        reduce: gradients travel between ranks in it, and are summed there in it; None: as `accum`.
        moments: the optimizer's floating state that mirrors params is kept in it; None: as the optimizer makes it.
        master: a copy of the params in it is kept in `opt_state/master`, and the params are that, rounded.
        norm: of squares and their sums; float64, since float32 overflows at gradients of 1e20.
        rounding: how params and moments are rounded to a dtype that is narrower than the update. "nearest";
            "stochastic": up or down at random, right on average, drawn for each element of the global leaf, so that it
            does not depend on the layout; "kahan": nearest, and what was lost is kept in `opt_state/compensation` and
            added to the next update.
        cast: "params", or "autocast": the loss function runs under torch.autocast in `compute`, and gets its params as
            they are kept.
        loss_scale: what `init_state` puts into the state unless told otherwise.

    Raises ValueError for a policy that cannot work.

    References: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015 (stochastic rounding); Zamirai et
    al., "Revisiting BFloat16 Training", 2020 (Kahan summation).
    """

    name: str
    params: torch.dtype | None = None
    compute: torch.dtype | None = None
    accum: torch.dtype | None = None
    reduce: torch.dtype | None = None
    moments: torch.dtype | None = None
    master: torch.dtype | None = None
    norm: torch.dtype = torch.float64
    rounding: str = "nearest"
    cast: str = "params"
    loss_scale: scales.Scaling | None = None

    def __post_init__(self) -> None:
        for field in ("params", "compute", "accum", "reduce", "moments", "master"):
            if getattr(self, field) not in (None, *FLOATS):
                raise ValueError(f"Policy({field}={getattr(self, field)}): expected None or one of {FLOATS}")
        if self.norm != torch.float64:
            raise ValueError(
                f"Policy(norm={self.norm}): squares of gradients overflow or vanish in less than float64; leave it out"
            )
        if torch.float16 in (self.compute, self.accum, self.reduce) and self.loss_scale is None:
            raise ValueError(
                "Policy: float16 gradients below 6e-8 vanish without a loss scale; "
                "give loss_scale=fz.loss_scale.dynamic(), or use bfloat16"
            )
        if self.rounding not in ROUNDINGS or self.cast not in CASTS:
            raise ValueError(
                f"Policy: rounding is one of {ROUNDINGS} and cast one of {CASTS}, got {self.rounding!r}, {self.cast!r}"
            )
        if self.master is not None and self.rounding == "kahan":
            raise ValueError(
                "Policy: a master copy loses nothing, so it needs no Kahan summation; choose one of the two"
            )
        if self.rounding != "nearest" and torch.bfloat16 not in (self.params, self.moments):
            raise ValueError(f"Policy(rounding={self.rounding!r}): neither params nor moments are kept in bfloat16")
        if self.rounding == "nearest" and self.params in LOW and self.master is None:
            warnings.warn(
                f"precision {self.name}: params in {self.params} rounded to nearest lose every update below half a unit "
                'in the last place; use rounding="stochastic" or "kahan", or master=torch.float32',
                stacklevel=4,
            )
        if self.cast == "autocast" and self.compute not in LOW:
            raise ValueError(f"Policy(cast='autocast'): compute is one of {LOW}, got {self.compute}")

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a leaf of `dtype` is handed to the loss function."""
        return _float_to(self.compute if self.cast == "params" else None, dtype)

    def params_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a param of `dtype` is kept."""
        return _float_to(self.params, dtype)

    def accum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the summed gradient of a param that is kept in `dtype`."""
        return _float_to(self.accum, dtype if self.accum is not None else wide_dtype(dtype))

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient that is summed in `dtype` travels."""
        return _float_to(self.reduce, dtype)


def _float_to(wanted: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic on a leaf: float32 for the low floats, else its own."""
    return torch.float32 if dtype in LOW else dtype


float32 = Policy("float32")
bf16_mixed = Policy("bf16_mixed", compute=torch.bfloat16)
bf16_master = Policy("bf16_master", params=torch.bfloat16, compute=torch.bfloat16, master=torch.float32)
fp16_mixed = Policy("fp16_mixed", compute=torch.float16, loss_scale=scales.dynamic())
bf16_pure = Policy(
    "bf16_pure",
    params=torch.bfloat16,
    compute=torch.bfloat16,
    accum=torch.bfloat16,
    reduce=torch.float32,
    moments=torch.bfloat16,
    rounding="stochastic",
)


def checked(policy: Policy | None) -> Policy:
    """The policy, or the default one."""
    if policy is None:
        return float32
    if not isinstance(policy, Policy):
        raise TypeError(
            f"precision: expected one of fz.precision (float32, bf16_mixed, ...) or a Policy, got {policy!r}"
        )
    return policy
