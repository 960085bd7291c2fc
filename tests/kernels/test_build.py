"""The library is built once, whole, and again when it is damaged or out of date; without a compiler torch does it."""

import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import backends, ops, reference
from kernels.cpu import build
from kernels.reference import Leaf, Momentum

FIRST_USE = """
import torch
from kernels import ops
from kernels.cpu import build
build.FLAGS = [*build.FLAGS, "-O0"]
print(ops.square_sum(torch.ones(5), 5).item())
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An empty cache, and a compiler that notes each call and writes its sources' names into what it makes."""
    script, calls = tmp_path / "c++", tmp_path / "calls"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec cat {tmp_path}/version\necho x >> {calls}\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\necho "$out" | sed "s=.*/==" > "$out"\n'
    )
    script.chmod(0o755)
    (tmp_path / "version").write_text("1.0")
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("FUNZERO_KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def runs(folder) -> int:
    """How often the compiler ran."""
    return len((folder / "calls").read_text().split())


def test_a_library_is_built_once(fake):
    path = build.library()
    assert path.parent == fake / "cache" and os.listdir(path.parent) == [path.name]
    before = runs(fake)
    assert build.library() == path and runs(fake) == before


def test_a_relative_folder_is_the_caller_s(fake, monkeypatch):
    monkeypatch.chdir(fake)
    monkeypatch.setenv("FUNZERO_KERNELS_CACHE", "here")
    assert build.library().parent == fake / "here"


def test_a_damaged_library_is_built_again(fake):
    path = build.library()
    whole = path.read_bytes()
    for damage in (whole[:-1], b"", whole + b"x"):
        path.write_bytes(damage)
        assert build.library().read_bytes() == whole
        assert os.listdir(path.parent) == [path.name]


def test_a_library_follows_sources_and_compiler(fake, monkeypatch):
    first = build.library()
    (fake / "version").write_text("1.1")
    second = build.library()
    copied = fake / "sources"
    copied.mkdir()
    for source in (*build.HERE.glob("*.cpp"), *build.HERE.glob("*.h")):
        (copied / source.name).write_text(source.read_text())
    (copied / "rules.h").write_text((copied / "rules.h").read_text() + "\n")
    monkeypatch.setattr(build, "HERE", copied)
    assert len({first.name, second.name, build.library().name}) == 3


def test_a_library_in_the_package_is_taken_without_a_compiler(fake, monkeypatch):
    shipped = build.build(fake / "package", build.digest(), build.compiler())
    monkeypatch.setattr(build, "find", lambda folder, key, find=build.find: find(fake / "package", key))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library() == shipped


def test_a_compiler_without_openmp_builds_a_library_too(fake, monkeypatch):
    plain, jobs = (fake / "c++").read_text(), []
    (fake / "c++").write_text(plain.replace("echo x", 'case "$*" in *-fopenmp*) exit 1;; esac; echo x'))
    assert build.library().exists()
    (fake / "c++").write_text(plain)
    monkeypatch.setattr(build, "_output", lambda job, run=build._output: jobs.append(job) or run(job))
    build.build(fake / "with", "key", build.compiler())
    assert "-fopenmp" in jobs[-1]


THREADS = """
import torch
from kernels import ops
ops.accumulate(torch.zeros(1), torch.zeros(1))
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if ".so" in line}
(library,) = (name for name in files if "funzero_cpu" in name)
with open(library, "rb") as file:
    print(b"GOMP_parallel" in file.read(), sum("gomp" in name for name in files))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_are_those_of_torch():
    """In a process of its own: other packages bring runtimes of theirs."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True 1\n", done.stderr


@pytest.mark.parametrize("reason", ["no C++ compiler (no-such-compiler)", "false fails", "cannot build in"])
def test_without_a_library_torch_runs_after_one_warning(reason, fake, monkeypatch):
    if reason.startswith("cannot"):
        (fake / "cache").write_text("a file")
    else:
        monkeypatch.setenv("CXX", "no-such-compiler" if "such" in reason else "false")
    monkeypatch.setattr(backends, "_made", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = Leaf(torch.ones(3), torch.ones(3))
        ops.update([x, x], Momentum(0.5))
        ops.accumulate(x.param, x.grad)
    assert [w.category for w in caught] == [RuntimeWarning]
    assert reason in str(caught[0].message) and x.param.tolist() == [1, 1, 1]


def test_a_library_that_cannot_be_loaded_is_a_reason(fake, monkeypatch):
    monkeypatch.setattr(backends, "_made", {})
    with pytest.warns(RuntimeWarning, match="cannot load"):
        assert ops.square_sum(torch.ones(5), 5).item() == 5


def test_threads_make_one_backend(fake, monkeypatch):
    made, start = [], threading.Barrier(4)
    monkeypatch.setattr(backends, "_made", {})
    monkeypatch.setitem(backends.MAKERS, "cpu", lambda: made.append(1) or backends.Plain())

    def use(_: int) -> object:
        start.wait()
        return backends.backend("cpu")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(use, range(4)))) == 1
    assert made == [1]


def test_two_processes_at_once(tmp_path):
    env = os.environ | {"FUNZERO_KERNELS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", "-c", FIRST_USE]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=90) for process in running] == [(b"5.0\n", b"")] * 2
    assert all(name.endswith(".so") for name in os.listdir(tmp_path / "cache"))


def test_reference_and_library_take_the_same_arguments():
    for name in ("update", "square_sum", "accumulate"):
        assert callable(getattr(reference, name)) and callable(getattr(ops, name))
