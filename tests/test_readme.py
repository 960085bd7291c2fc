"""The script of the README runs as it reads."""

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_script_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32))
    rows = {"tokens": torch.arange(40).view(8, 5) % 32, "labels": torch.arange(1, 41).view(8, 5) % 32}
    names = {"model": model, "data": [rows] * 3}
    exec(script, names)
    assert int(names["state"].step) == 3
    assert (tmp_path / "run" / "final" / "manifest.json").exists()
