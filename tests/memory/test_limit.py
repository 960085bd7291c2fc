"""Training under a limit that the state alone is far beyond."""

import json
import shutil
import subprocess
import sys

import pytest

# argv: what lives on disk, megabytes allowed above the imported process, folder, optimizer
SCRIPT = """
import json, resource, sys, threading
import torch
import funzero as fz

what, allowed, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
WIDTH, LAYERS = 1024, 20

def in_use(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind + ":"))

def loss_fn(p, batch):
    x = batch
    for name in sorted(p):
        x = torch.tanh(x @ p[name]) + x / 2
    return fz.Loss(x.square().sum(), x.shape[0])

def train(thunks, layers, folder):
    specs = fz.zero_specs(fz.eval_shape(thunks), tx, mesh, stage=3)
    if folder is not None:
        specs = fz.with_memory(specs, {what: "disk"}, folder=folder)
    state = fz.init_state(thunks, tx, key=0, specs=specs)
    step = fz.make_step(loss_fn, tx, specs=specs, max_norm=1.0, gather_budget=16 << 20)
    losses = []
    for i in range(2):
        state, metrics = step(state, torch.randn(8, layers, generator=torch.Generator().manual_seed(i)))
        losses.append(float(metrics.loss))
    if folder is not None:
        fz.save(folder + "/saved", state)
        back = fz.restore(folder + "/saved", fz.abstract_state(thunks, tx, specs=specs))
        for a, b in zip(fz.tree.leaves(back.params), fz.tree.leaves(state.params), strict=True):
            assert torch.equal(a, b)
    return losses, sum(x.local_bytes for x in specs.fields.values())

threading.stack_size(1 << 20)  # RLIMIT_DATA counts what stacks reserve, 8 MB each if nothing is said
torch.set_num_threads(1)
adam = fz.chain(fz.scale_by_adam(), fz.clip(1.0), fz.scale(-1e-3))  # no kernel runs it
tx, mesh = fz.adamw(1e-3) if sys.argv[4] == "adamw" else adam, fz.make_mesh()
train({"w": lambda key: fz.random.normal(key, (4, 4)) / 2}, 4, None)  # loads all that a first step loads
if allowed:
    most = in_use("VmData") + (allowed << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
thunks = {f"w{i:02}": lambda key: fz.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for i in range(LAYERS)}
losses, nbytes = train(thunks, WIDTH, folder if what != "none" else None)
print(json.dumps({"losses": losses, "state": nbytes}))
"""


def run(what, allowed, folder, optimizer):
    command = [sys.executable, "-c", SCRIPT, what, str(allowed), str(folder), optimizer]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("chain", marks=pytest.mark.slow)])
def test_a_state_of_three_times_the_memory_trains_from_disk(optimizer, tmp_path):
    right = json.loads(run("none", 0, tmp_path, optimizer).stdout)
    for what, times in (("**", 3), ("opt_state/**", 1.3))[: 2 if optimizer == "adamw" else 1]:
        allowed = int(right["state"] / times) >> 20
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
        done = run(what, allowed, tmp_path, optimizer)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == right
    if optimizer == "chain":
        return
    without = run("none", allowed, tmp_path, optimizer)
    assert "memory" in without.stderr and without.returncode != 0, "the limit must be felt"
    assert [x.name for x in tmp_path.iterdir()] == ["saved"]
