"""Precision policies: which dtype each part of a step has."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of a step.

    Attributes:
        name: for messages.
        compute: floating params (and floating batch leaves) are cast to it for the loss function; None: as they are.
            The cast is made from the shard, before the gather, and never stored.
    """

    name: str
    compute: torch.dtype | None = None

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a leaf of `dtype` is handed to the loss function."""
        return self.compute if self.compute is not None and dtype.is_floating_point else dtype


float32 = Policy("float32")
bf16_mixed = Policy("bf16_mixed", compute=torch.bfloat16)


def checked(policy: Policy | None) -> Policy:
    """The policy, or the default one."""
    if policy is None:
        return float32
    if not isinstance(policy, Policy):
        raise TypeError(f"precision: expected one of fz.precision.float32 or bf16_mixed, got {policy!r}")
    return policy
