"""The scripts of the README and of the docs run as they read."""

import re
from pathlib import Path

import torch

import funzero as fz

README = Path(__file__).resolve().parents[1] / "README.md"
OFFLOAD = README.parent / "docs" / "offload.md"


def test_the_script_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32))
    rows = {"tokens": torch.arange(40).view(8, 5) % 32, "labels": torch.arange(1, 41).view(8, 5) % 32}
    names = {"model": model, "data": [rows] * 3}
    exec(script, names)
    assert int(names["state"].step) == 3
    assert (tmp_path / "run" / "final" / "manifest.json").exists()


def test_offload_as_its_page_says(tmp_path):
    (made, kept) = re.findall(r"```python\n(.*?)```", OFFLOAD.read_text(), re.DOTALL)
    params = {"blocks.0.w": torch.randn(200, 200), "blocks.1.w": torch.randn(200, 200), "head": torch.randn(200, 3)}

    def loss_fn(p, batch):
        return (torch.tanh(batch @ p["blocks.0.w"] @ p["blocks.1.w"]) @ p["head"]).square().mean()

    names = {"fz": fz, "tx": fz.adamw(1e-3), "mesh": fz.make_mesh(), "params": params, "loss_fn": loss_fn}
    names |= {"shapes": fz.eval_shape(params), "batch": torch.randn(4, 200)}
    exec(made.replace("/data/run", str(tmp_path)), names)
    memories = {x.path: x.spec.memory for x in names["specs"].params.layouts}
    assert memories == {"params/blocks.0.w": "disk", "params/blocks.1.w": "disk", "params/head": "device"}
    names["state"], _ = names["step"](names["state"], names["batch"])
    exec(kept, names)
    assert int(names["state"].step) == 2
