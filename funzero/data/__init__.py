"""`funzero.data`: batches cut over ranks and time, and loaders whose position can be saved."""

from funzero.data.adapters import from_grain, from_torchdata
from funzero.data.batches import EMPTY, Empty, each_rank, local, split
from funzero.data.loader import ArrayLoader, Stateful, TokenLoader

__all__ = [
    "EMPTY",
    "ArrayLoader",
    "Empty",
    "Stateful",
    "TokenLoader",
    "each_rank",
    "from_grain",
    "from_torchdata",
    "local",
    "split",
]
