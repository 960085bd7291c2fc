"""The Triton backend gives the reference's bits, in Triton's interpreter; it is chosen when triton is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install '.[triton]'")

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ["floats", "codes", "patterns borders sizes skips several unequal_blocks square_sums accumulations"]


@pytest.mark.parametrize("groups", GROUPS)
def test_same_bits(groups, tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.triton_equality", *groups.split()]
    out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)
    assert out.returncode == 0, out.stderr[-3000:]
