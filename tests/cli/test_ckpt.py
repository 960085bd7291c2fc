"""`funzero ckpt` as a user would call it."""

import json
import os

import pytest
import torch

import funzero as fz
from funzero.checkpoint.dcp import export_dcp
from funzero.cli.main import main
from tests.checkpoint.common import batch, make


@pytest.fixture
def root(tmp_path):
    """Two steps of a run, with a left-over of a third."""
    manager = fz.CheckpointManager(tmp_path / "run", background=False)
    state, step, _ = make(0)
    for t in range(2):
        state, metrics = step(state, batch(state.specs.mesh, t))
        manager.save(state, metrics={"loss": float(metrics.loss)}, extra={"data": {"position": 8 * t}})
    (tmp_path / "run" / ".step-00000003.0123abcd.tmp").mkdir()
    return tmp_path / "run"


def call(capsys, *args):
    code = main(["ckpt", *map(str, args)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_ls_and_show(root, capsys):
    code, out, _ = call(capsys, "ls", root)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3 and "step-00000001  step 1" in lines[0] and "loss=" in lines[1]
    assert ".step-00000003.0123abcd.tmp" in lines[2] and "cut short" in lines[2]
    code, out, _ = call(capsys, "show", root / "step-00000002")
    assert code == 0 and "params/b " in out and "float64[5,3]" in out and "120 B" in out and "step 2, " in out
    _, out, _ = call(capsys, "show", root / "step-00000002", "--extra")
    assert json.loads(out) == {"data": {"position": 8}}
    assert call(capsys, "ls", root / "none")[1].endswith("holds no complete checkpoint\n")


def test_verify_names_everything_that_is_wrong(root, capsys):
    path = root / "step-00000001"
    assert call(capsys, "verify", path)[:2] == (0, f"{path}: every byte is as it was written\n")
    manifest = fz.read_manifest(path)
    raw = bytearray((path / "00000.safetensors").read_bytes())
    for name in ("params/a", "opt_state/scale_by_adam/nu/b"):
        raw[manifest.leaves[name].pieces[0].at + 3] ^= 16
    (path / "00000.safetensors").write_bytes(raw)
    (path / "stranger").write_text("")
    code, out, _ = call(capsys, "verify", path)
    assert code == 1 and len(out.splitlines()) == 3
    assert (
        "params/a, bytes" in out
        and "opt_state/scale_by_adam/nu/b, bytes" in out
        and "not part of the checkpoint" in out
    )
    (path / "manifest.json").write_text("{}")
    code, out, _ = call(capsys, "verify", path)
    assert code == 1 and "manifest.json: damaged" in out
    code, _, err = call(capsys, "show", path)
    assert code == 2 and "manifest.json: damaged" in err


def test_diff(root, capsys):
    assert call(capsys, "diff", root / "step-00000001", root / "step-00000001") == (
        0,
        "the same leaves, bit for bit\n",
        "",
    )
    code, out, _ = call(capsys, "diff", root / "step-00000001", root / "step-00000002")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 1 and "10 of 10 elements, by up to" in rows["params/a"] and "step" in rows
    assert "params/frozen" not in rows and "key" not in rows
    fz.save(root / "other", fz.init_state({"a": torch.ones(3), "new": torch.ones(1)}, fz.sgd(0.1)))
    rows = {r.split()[0]: r for r in call(capsys, "diff", root / "step-00000001", root / "other")[1].splitlines()}
    assert "only in the second" in rows["params/new"] and "only in the first" in rows["params/b"]
    assert "float64[10] and float32[3]" in rows["params/a"]


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_export_and_convert_back(root, tmp_path, capsys, kind):
    path = root / "step-00000002"
    assert call(capsys, "export", path, tmp_path / "out", "--format", kind)[0] == 0
    assert call(capsys, "convert", tmp_path / "out", tmp_path / "back", "--source-format", kind)[0] == 0
    base, _, _ = make(0, seed=1)
    found = fz.restore(tmp_path / "back", base, select="params/**")
    full = fz.restore(path, base)
    assert all(torch.equal(found.params[n], full.params[n]) for n in full.params)
    code, _, err = call(capsys, "export", path, tmp_path / "out", "--format", kind)
    assert code == 2 and "exists" in err
    code, _, err = call(capsys, "export", path, tmp_path / "more", "--format", kind, "--select", "nothing/**")
    assert code == 2 and "matches no leaf" in err and not (tmp_path / "more").exists()


def test_a_selection_is_exported_under_its_paths(root, tmp_path, capsys):
    glob = "opt_state/**/mu/*"
    assert call(capsys, "export", root / "step-00000002", tmp_path / "out", "--format", "hf", "--select", glob)[0] == 0
    names = fz.checkpoint.hf.import_hf(tmp_path / "out")
    assert set(names) == {f"opt_state/scale_by_adam/mu/{n}" for n in "abcd"}


def test_convert_refuses_what_it_cannot_read(tmp_path, capsys):
    export_dcp(tmp_path / "dcp", {"w": torch.ones(2)})
    code, _, err = call(capsys, "convert", tmp_path / "dcp", tmp_path / "out", "--source-format", "hf")
    assert code == 2 and str(tmp_path / "dcp") in err and not (tmp_path / "out").exists()


def test_a_deepspeed_checkpoint_becomes_a_state_of_adamw(tmp_path, capsys):
    from tests.compat.test_deepspeed_checkpoint import DATA

    folder = sorted(DATA.glob("zero3*"))[0]
    code, _, err = call(capsys, "convert", folder, tmp_path / "out", "--source-format", "deepspeed")
    assert code == 0, err
    names = fz.read_manifest(tmp_path / "out").leaves
    assert any(n.startswith("params/") for n in names) and any("/mu/" in n for n in names)


def test_prune(root, capsys):
    code, out, _ = call(capsys, "prune", root, "--keep", 1, "--dry-run")
    assert code == 0 and "would remove" in out and len(os.listdir(root)) == 3
    assert "removed" in call(capsys, "prune", root, "--keep", 1)[1]
    assert fz.CheckpointManager(root).steps() == [2]
    assert call(capsys, "prune", root, "--keep", 1)[1] == "nothing to remove\n"
