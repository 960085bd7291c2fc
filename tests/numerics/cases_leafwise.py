"""Cases of `trajectories` for optimizers that need a norm of a leaf, or whole leaves."""

from tests.numerics.trajectories import Case

CASES: dict[str, Case] = {}
