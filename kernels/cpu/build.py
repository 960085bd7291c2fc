"""Builds the C++ of this folder into one shared library: into the wheel by setup.py, else into a cache at first use.

Needs only the standard library, since setup.py runs it where there is no torch. A library's name tells what it was made
from and what it contains, so that a stale or damaged one is never loaded:

    funzero_cpu-<digest of sources, flags, machine, compiler>-<digest of its own bytes>.so
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Without contraction and with exact functions, so that every operation rounds as torch's does. The last two allow
# vectors where errno or a trap of the float unit could otherwise be seen; they change no value.
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
OPENMP = ["-fopenmp"], []  # the first that this compiler knows
LEVELS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):  # api.cpp asks the processor for just these features
    LEVELS["avx2"] = ["-mavx2"]
    LEVELS["avx512"] = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512".split()


class BuildError(Exception):
    """The library cannot be built here; the message says why in one line."""


def compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, else the first of g++, c++ and clang++ on the path.

    Raises: BuildError: there is none, or this platform is not supported.
    """
    if os.name != "posix" or sys.maxsize < 1 << 32:
        raise BuildError("only 64-bit Linux and macOS are supported")
    wanted = shlex.split(os.environ.get("CXX", "")) or ["g++", "c++", "clang++"]
    for name in wanted[:1] if "CXX" in os.environ else wanted:
        if shutil.which(name):
            return wanted if "CXX" in os.environ else [name]
    raise BuildError(f"no C++ compiler ({', '.join(wanted)}) is on the path")


def digest(command: list[str] | None = None) -> str:
    """Of all that decides the library's contents; `command` is a compiler whose version counts too."""
    parts = [repr((FLAGS, OPENMP, LEVELS, sys.platform, platform.machine()))]
    parts += [f"{path.name}\n{path.read_text()}" for path in sorted(HERE.glob("*.cpp")) + sorted(HERE.glob("*.h"))]
    if command:
        parts += [repr(command), _output([*command, "--version"])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def find(folder: Path, key: str) -> Path | None:
    """An undamaged library with this digest; damaged ones are removed where that is allowed."""
    for path in sorted(folder.glob(f"funzero_cpu-{key}-*.so")):
        if path.stem.rsplit("-", 1)[1] == _digest_of(path):
            return path
        try:
            path.unlink()
        except OSError:
            continue
    return None


def build(folder: Path, key: str, command: list[str]) -> Path:
    """Compiles into a folder, which is made. Safe for several processes at once: the library appears complete.

    Raises: BuildError: the compiler fails, or the folder cannot be written.
    """
    folder = folder.absolute()  # the compiler runs beside the sources
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
            made = _compile(Path(work), command)
            path = folder / f"funzero_cpu-{key}-{_digest_of(made)}.so"
            os.replace(made, path)
            return path
    except OSError as error:
        raise BuildError(f"cannot build in {folder}: {error}") from error


def library() -> Path:
    """The library for this machine: the wheel's, else the cache's, else built now.

    Raises: BuildError.
    """
    shipped = find(HERE, digest())
    if shipped:
        return shipped
    command = compiler()
    key, folder = digest(command), cache()
    return find(folder, key) or build(folder, key, command)


def cache() -> Path:
    """$FUNZERO_KERNELS_CACHE, else funzero_kernels in $XDG_CACHE_HOME, else in ~/.cache."""
    chosen = os.environ.get("FUNZERO_KERNELS_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "funzero_kernels"
    except RuntimeError as error:
        raise BuildError(f"no folder for the cache: {error}") from error


def _compile(work: Path, command: list[str]) -> Path:
    openmp = next(x for x in OPENMP if not x or _links(work, [*command, *x]))
    sources = {name: [*flags, f"-DFZ_LEVEL=fz_{name}", "level.cpp"] for name, flags in LEVELS.items()}
    jobs = [[*command, *FLAGS, *rest, "-c", "-o", work / f"{name}.o"] for name, rest in sources.items()]
    jobs.append([*command, *FLAGS, *openmp, "api.cpp", "-c", "-o", work / "api.o"])
    running = [subprocess.Popen(job, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for job in jobs]
    said = [job.communicate()[0].decode(errors="replace") for job in running]
    for job, output in zip(running, said, strict=True):
        if job.returncode:
            raise BuildError(f"{command[0]} fails: {_first_error(output)}")
    made = work / "library.so"
    _output([*command, *openmp, "-shared", "-o", str(made), *(str(path) for path in sorted(work.glob("*.o")))])
    return made


def _links(work: Path, command: list[str]) -> bool:
    source = work / "empty.cpp"
    source.write_text("#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n")
    job = [*command, "-shared", "-fPIC", "-o", str(work / "empty.so"), str(source)]
    return subprocess.run(job, capture_output=True).returncode == 0


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise BuildError(f"{command[0]} fails: {_first_error(done.stdout + done.stderr)}")
    return done.stdout


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()] or ["it says nothing"]
    return next((line for line in lines if "error" in line), lines[0])[:300]


def _digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:20]
    except OSError:
        return ""
