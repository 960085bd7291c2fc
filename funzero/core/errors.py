"""Errors that carry a meaning of their own; everything else is a ValueError or TypeError."""


class DonatedError(RuntimeError):
    """A leaf of a state that was given away to `step` was used again."""


class SpentStateError(RuntimeError):
    """A step failed after its update had begun: the state holds a mixture and must not be used."""


class MeshError(RuntimeError):
    """A rank failed, and with it the mesh: names the rank and the first cause. Local leaves stay readable."""


class SkipLimitError(RuntimeError):
    """Too many steps in a row were skipped."""


class LossScaleError(RuntimeError):
    """Gradients overflowed at the smallest loss scale."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete or not what it says: names the file, and the leaf where there is one."""
