"""Random keys: (seed, stream) as int64 [2] in host memory, and keys derived from them by a counter-based hash."""

import contextlib
import dataclasses
import numbers
from collections.abc import Iterable, Iterator

import torch

_MASK = (1 << 64) - 1


def make_key(key: int | torch.Tensor) -> torch.Tensor:
    """A key from a seed, or a checked key."""
    if isinstance(key, torch.Tensor):
        if key.dtype != torch.int64 or tuple(key.shape) != (2,):
            raise ValueError(f"key: expected int64 [2], got {key.dtype} {list(key.shape)}")
        return key.detach().to("cpu", copy=True)
    if not isinstance(key, numbers.Integral):
        raise TypeError(f"key: expected a seed or an int64 tensor [2], got {type(key).__name__}")
    return torch.tensor([int(key), 0], dtype=torch.int64, device="cpu")


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def fold_in(key: torch.Tensor, *data: int) -> torch.Tensor:
    """A new key, a function of `key` and the numbers only.

    >>> torch.equal(fold_in(make_key(0), 1, 2), fold_in(fold_in(make_key(0), 1), 2))
    True
    """
    seed, stream = (int(v) & _MASK for v in key.tolist())
    for value in data:
        stream = _mix(stream ^ _mix(value & _MASK))
        seed = _mix(seed ^ stream)
    return torch.tensor([_signed(seed), _signed(stream)], dtype=torch.int64, device="cpu")


def seed_of(key: torch.Tensor) -> int:
    """A seed for a torch generator, within [0, 2^63)."""
    seed, stream = (int(v) & _MASK for v in key.tolist())
    return _mix(seed ^ _mix(stream)) >> 1


@dataclasses.dataclass(frozen=True)
class Draws:
    """Where torch's global generators stand, so that what is drawn next can be drawn again."""

    cpu: torch.Tensor
    others: tuple[tuple[torch.device, torch.Tensor], ...]

    @staticmethod
    def now(devices: Iterable[torch.device]) -> "Draws":
        """Of the CPU, and of these devices."""
        found = [d for d in dict.fromkeys(devices) if d.type not in ("cpu", "meta")]
        return Draws(torch.get_rng_state(), tuple((d, torch.get_device_module(d).get_rng_state(d)) for d in found))

    def _set(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.others:
            torch.get_device_module(device).set_rng_state(state, device)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within the block the generators go on from there; afterwards they are as they were found."""
        found = Draws.now(d for d, _ in self.others)
        self._set()
        try:
            yield
        finally:
            found._set()


@contextlib.contextmanager
def seeded(key: torch.Tensor, *devices: torch.device) -> Iterator[None]:
    """Within the block torch's global generators are seeded by `key`; afterwards they are as they were found.

    Args:
        devices: whose generators, beside the CPU's.
    """
    seed = seed_of(key)
    before = Draws.now(devices)
    with before.again():
        torch.default_generator.manual_seed(seed)
        for device, _ in before.others:
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        yield
