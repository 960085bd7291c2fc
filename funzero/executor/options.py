"""What a step was told."""

import dataclasses
from typing import Any

from funzero.transforms.precision import Policy


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What `make_step` was told, checked; see there."""

    accumulate: int
    max_norm: float | None
    reduction: str
    precision: Policy
    gather_budget: int | None
    leaf_use: str
    max_skips: int
    donate: bool
    remat: tuple[Any, ...] = ()
