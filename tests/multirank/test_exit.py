"""The end of a script that never says that it ends."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, os, sys

def say(when):
    names = (open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task"))
    os.write(1, f"{when} {sum('gloo' in name for name in names) > 0}\\n".encode())

atexit.register(say, "after")  # runs after all that is registered later
import torch
import funzero as fz

mesh = fz.make_mesh(dp=-1)
mesh.gather_host(torch.ones(2))
say("before")
if (child := os.fork()) == 0:
    sys.exit()  # it shares the connections, and must not close them
os.waitpid(child, 0)
mesh.gather_host(torch.ones(2))
"""


def said_by(script, folder):
    """What a script prints on two ranks of torchrun."""
    (folder / "script.py").write_text(script)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *launcher, str(folder / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_the_threads_of_gloo_are_gone_before_the_interpreter_is(tmp_path):
    # "after" comes from two ranks and the child of each.
    assert sorted(said_by(SCRIPT, tmp_path).split("\n")) == ["", *["after False"] * 4, *["before True"] * 2]


SENDER = """
import time
import torch
import funzero as fz

fz.make_mesh(dp=-1)
shape = torch.empty(4 << 20, device="meta")
here, there = (fz.Specs.bind(fz.make_mesh(ranks=(r,), dp=1), fz.Spec(), shape) for r in (0, 1))
if there.mesh.here:
    time.sleep(1)  # by now the other has come to the end of its script
    print(int(fz.transfer(None, here, there).sum()))
else:
    fz.transfer(torch.ones(4 << 20), here, there)
"""


def test_what_was_sent_arrives_although_the_sender_s_script_has_ended(tmp_path):
    assert said_by(SENDER, tmp_path).strip() == str(4 << 20)
