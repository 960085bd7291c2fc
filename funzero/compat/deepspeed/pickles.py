"""Reading DeepSpeed's pickled files without running anything that stands in them.

DeepSpeed pickles a few objects of its own beside the tensors. Here these names stand for classes that do nothing: the
fields of such an object can be read, and no code of DeepSpeed is imported or run.
"""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import serialization


class Fields:
    """The fields of an object of DeepSpeed's."""


class Number(int):
    """A member of an int enumeration of DeepSpeed's."""


KNOWN: list[Any] = [
    (Fields, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Fields, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Fields, "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig"),
    (Fields, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Fields, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def load(path: Path) -> Any:
    """What `torch.save` wrote, as tensors on the CPU that are mapped from the file, and plain Python values.

    Raises ValueError for a file that wants any class or function which is neither known here nor allowed by the caller
    with `torch.serialization.safe_globals`; nothing of it is run. FileNotFoundError, OSError as usual.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; was the checkpoint copied completely?")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a file of torch.save, or cut short")
    with serialization.safe_globals(KNOWN):
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path}: {_reason(path, error)}") from None
        except RuntimeError as error:
            raise ValueError(f"{path}: {error}") from None


def _reason(path: Path, error: Exception) -> str:
    wanted = [x for x in serialization.get_unsafe_globals_in_checkpoint(path) if x not in {name for _, name in KNOWN}]
    if not wanted:
        return f"refused: {str(error).splitlines()[0]}"
    return (
        f"refused, since it wants {', '.join(sorted(wanted))}: only tensors, plain values and a few classes of DeepSpeed "
        "are read; if you trust such a class, load inside torch.serialization.safe_globals([...])"
    )
