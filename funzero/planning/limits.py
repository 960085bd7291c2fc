"""What memory this process may use, and who says so.

[Note: who limits] A container's limit is its cgroup's, not the host's total, and the smallest of the nested ones counts.
What a limit leaves is the limit less what is used under it; file pages that the kernel can drop do not count as used. A
limit above the host's memory, or one that cannot be read, is none.
"""

import dataclasses
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

UNLIMITED = 1 << 62  # cgroup v1 writes the largest multiple of a page below 2^63 for "no limit"


@dataclasses.dataclass(frozen=True)
class Limit:
    """Bytes. `source`: who sets it. `total`: the limit itself. `available`: what is left of it now, never below 0."""

    source: str
    total: int
    available: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a process may use.

    Attributes:
        total, host: the smallest limit of host memory, and the one that leaves least. device: of the accelerator; None: there is
            none, and leaves live in host memory. disk: of a folder, or None. found: all that bounds host memory.
    """

    total: Limit
    host: Limit
    device: Limit | None
    disk: Limit | None
    found: tuple[Limit, ...]


def read_limits(
    root: Path = Path("/"), *, folder: Path | None = None, device: int | None = None, of_process: bool = True
) -> Limits:
    """The limits of this process.

    Args:
        root: where /proc and /sys/fs/cgroup are looked for. folder: of leaves on disk. device: memory of the accelerator in
            bytes; default: that of the one here, if any.
        of_process: False leaves out this process's own RLIMITs.
    """
    found = [_of_machine(root), *_of_cgroups(root), *(_of_process(root) if of_process else ())]
    machine = found[0]
    found = [machine, *(x for x in found[1:] if x.total < machine.total)]
    return Limits(
        total=min(found, key=lambda x: x.total),
        host=min(found, key=lambda x: x.available),
        device=_of_device() if device is None else Limit("given", device, device),
        disk=None if folder is None else _of_folder(folder),
        found=tuple(found),
    )


def _of_machine(root: Path) -> Limit:
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE))
    total = 1024 * int(rows.get("MemTotal", 0))
    if not total:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limit("the machine", total, 1024 * int(rows["MemAvailable"]) if "MemAvailable" in rows else total)


def _of_cgroups(root: Path) -> Iterator[Limit]:
    """The limits of this process's cgroup and of all above it that can be seen."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        new = not controllers
        limit, usage, cold = (
            ("memory.max", "memory.current", "inactive_file")
            if new
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        for top, inner in _mounts(root, new, path):
            folder = top / inner
            for place in [folder, *folder.parents]:
                total = _number(place / limit)
                if total is not None and total < UNLIMITED:
                    used = (_number(place / usage) or 0) - _cold(place, cold)
                    yield Limit(f"cgroup {place / limit}", total, min(total, max(0, total - used)))
                if place == top:
                    break


def _mounts(root: Path, new: bool, path: str) -> Iterator[tuple[Path, Path]]:
    """Where cgroups are mounted, and this process's own below that."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        own, _, other = line.partition(" - ")
        fields, kind = own.split(), other.split()
        if len(fields) < 5 or len(kind) < 1:
            continue
        if new and kind[0] != "cgroup2":
            continue
        if not new and not (kind[0] == "cgroup" and "memory" in kind[-1].split(",")):
            continue
        mounted, at = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), x) for x in fields[3:5])
        inner = os.path.relpath(path, mounted)
        # With a namespace of its own, or another cgroup mounted, the path leads out of what can be seen.
        yield root / at.lstrip("/"), Path() if inner.startswith("..") else Path(inner)


def _cold(place: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", _text(place / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _of_process(root: Path) -> Iterator[Limit]:
    rows = dict(re.findall(r"^(Vm\w+):\s+(\d+) kB", _text(root / "proc/self/status"), re.MULTILINE))
    for name, used in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield Limit(name, soft, max(0, soft - 1024 * int(rows.get(used, 0))))


def _of_device() -> Limit | None:
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    free, total = module.mem_get_info()
    return Limit(f"{kind} {torch.accelerator.current_device_index()}", total, free)


def _of_folder(folder: Path) -> Limit:
    """Of the file system that a folder lies on, or will."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return Limit(f"disk {place}", found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """What a file says; None for "max", and where it cannot be read."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None
