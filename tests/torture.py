"""Saves that are killed at a random moment, and disks that are full: what is left is a complete checkpoint, every time.

`python -m tests.torture` (what `make torture` runs): 100 kills, with and without background, and a full disk.
"""

import argparse
import contextlib
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import funzero as fz
from funzero.checkpoint import disk

SIZES = {"large": (1_500_000,), "matrix": (700, 900), "odd": (12_345,), "scalar": ()}
IDLE, WRITING = 0, 1


def tx():
    return fz.adam(0.1)


def filled(step: int) -> fz.TrainState:
    """A state whose every element is a function of its step."""
    state = fz.init_state({n: torch.zeros(s) for n, s in SIZES.items()}, tx())

    def fill(path: str, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or "hyperparams" in path:
            return x
        return (torch.arange(x.numel(), dtype=torch.float32) * 0.5 + step * 1000 + len(path)).view(x.shape)

    state = fz.tree.map_with_path(fill, state)
    return fz.tree.map_with_path(lambda p, x: torch.tensor(step, dtype=x.dtype) if p == "step" else x, state)


def check(manager: fz.CheckpointManager) -> int:
    """The step of the latest checkpoint, which must be there, whole and right."""
    step = manager.latest()
    assert step is not None, "no checkpoint is left"
    state = manager.restore(fz.abstract_state({n: torch.zeros(s) for n, s in SIZES.items()}, tx()))
    for path, found, right in zip(
        fz.tree.paths(state), fz.tree.leaves(state), fz.tree.leaves(filled(step)), strict=True
    ):
        assert torch.equal(found, right), f"step {step}: {path} is wrong"
    return step


def victim(root: Path, background: bool, phase: mmap.mmap) -> None:
    """Saves one step after another until it is killed; tells when it is between its first write and the rename."""
    real_write, real_rename = disk.write_file, os.rename

    def write_file(path, items):
        phase[0] = WRITING
        return real_write(path, items)

    def rename(a, b):
        real_rename(a, b)
        if Path(b).name.startswith("step-"):
            phase[0] = IDLE

    disk.write_file, os.rename = write_file, rename
    manager = fz.CheckpointManager(root, keep=2, background=background)
    step = manager.latest() or 0
    while True:
        step += 1
        manager.save(filled(step))
        if background:
            time.sleep(0.005)  # a step of training


def kill_one(root: Path, background: bool, draw: random.Random, save_time: float | None) -> bool:
    """Kills a run of saves; whether it was between the first write and the rename.

    With `save_time` (seconds) it waits for a first write and kills within half of such a time of it; without, at any
    moment.
    """
    phase = mmap.mmap(-1, 1)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            victim(root, background, phase)
        os._exit(1)
    time.sleep(draw.uniform(0, 0.3))
    until = time.monotonic() + 10
    while save_time is not None and phase[0] != WRITING and time.monotonic() < until:
        pass
    time.sleep(draw.uniform(0, 0.05 if save_time is None else save_time / 2))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the victim ended by itself: {status}"
    return phase[0] == WRITING


def kills(count: int, until_hits: int | None = None, seed: int = 0) -> tuple[int, int]:
    """(kills, how many of them hit a save between its first write and the rename), at most `count` kills.

    With `until_hits` it ends after so many hits: how many kills that takes depends on the disk.
    """
    draw, hits, saved = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        manager = fz.CheckpointManager(root, keep=2, background=False)
        manager.save(filled(0))
        for done in range(count):
            begin = time.monotonic()
            manager.save(filled(saved + 1))
            took = time.monotonic() - begin
            saved += 1
            hits += kill_one(root, done % 2 == 0, draw, None if done % 10 == 9 else took)
            step = check(manager)
            assert step >= saved, f"the latest went back from {saved} to {step}"
            manager.save(filled(step + 1))
            saved = check(manager)
            assert saved == step + 1
            left = sorted(x.name for x in root.iterdir())
            assert left == [f"step-{s:08d}" for s in manager.steps()] and len(left) == 2, f"left-overs: {left}"
            if hits == until_hits:
                return done + 1, hits
    return count, hits


def full(root: Path) -> str:
    """A save onto a full disk: the text of its error; the checkpoint before it is still the latest."""
    manager = fz.CheckpointManager(root)
    manager.save(filled(1))
    manager.wait()
    try:
        manager.save(filled(2))
        manager.wait()
        return "nothing raised"
    except OSError as error:
        assert check(manager) == 1
        assert [x.name for x in root.iterdir()] == ["step-00000001"], "left-overs"
        return str(error)


def file_limit() -> str:
    """A limit on the size of a file that the second save exceeds."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        fz.CheckpointManager(root, background=False).save(filled(1))
        shutil.rmtree(root)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        real = disk.write_file

        def second(path, items):
            if int(path.parent.name.split(".")[1].removeprefix("step-")) == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            return real(path, items)

        disk.write_file = second
        try:
            return full(root)
        finally:
            disk.write_file = real
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(size: str) -> Iterator[Path | None]:
    """A mounted file system of this size, or None where this user may not mount."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
        )
        if done.returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def small_disk_case() -> str:
    """A disk with room for one checkpoint and a half."""
    with small_disk("40m") as root:
        return "not run: no right to mount" if root is None else full(root / "run")


def main(argv: list[str] | None = None) -> int:
    """Runs all and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    begin = time.monotonic()
    print(f"file limit: {file_limit()}\nsmall disk: {small_disk_case()}", flush=True)
    count, hits = kills(args.kills)
    print(
        f"{count} kills, {hits} between first write and rename; latest was complete and right every time, "
        f"and the next save left nothing over; {time.monotonic() - begin:.0f} s"
    )
    return 0 if hits >= 0.6 * count else 1


if __name__ == "__main__":
    sys.exit(main())
