"""The Triton backend compiles for every target, unfused and with wide loads; it needs no GPU for that."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install '.[triton]'")

ROOT = Path(__file__).resolve().parents[2]


def compile_for(target, start, every, folder):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.kernels.triton_compile", target, str(start), str(every)]
    out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)
    assert out.returncode == 0, out.stderr[-3000:]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_sample(target, tmp_path):
    compile_for(target, 0, 20, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "start", "every"),
    [("sm_80", 0, 3), ("sm_90", 1, 3), ("sm_100", 2, 3), ("gfx942", 0, 2), ("gfx950", 1, 2)],
)
def test_each_kernel_for_one_target_of_each_vendor(target, start, every, tmp_path):
    compile_for(target, start, every, tmp_path)
