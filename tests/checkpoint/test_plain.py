"""The plain checkpoint: any layout to any layout, also in mid-window; complete or not there; errors on all ranks."""

import json

import pytest
import torch

import funzero as fz
from tests.ranks import pool

PARAMS = {
    "a": torch.arange(10.0, dtype=torch.float64),
    "b": torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "c": torch.tensor(2.0, dtype=torch.float64),
    "d": torch.zeros(0, 4, dtype=torch.float64),
}


def loss_fn(p, b):
    total = ((b["x"] @ p["b"]).sum() * p["c"] + p["a"].square().sum() + p["d"].sum()) * 0.1
    return fz.Loss(total * len(b["x"]), weight=len(b["x"]), aux={"rows": fz.Sum(float(len(b["x"]))), "one": 1.0})


def make(stage):
    tx = fz.adamw(0.1, weight_decay=0.1)
    specs = fz.zero_specs(PARAMS, tx, fz.make_mesh(dp=-1), stage=stage)
    return tx, specs, fz.make_step(loss_fn, tx, specs=specs, max_norm=1.0)


def batch(mesh):
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return fz.data.local({"x": x}, mesh)


def whole(state):
    return {
        field: dict(zip(fz.tree.paths(tree), fz.tree.leaves(fz.gather(tree, specs)), strict=True))
        for field, tree, specs in (
            ("params", state.params, state.specs.params),
            ("opt_state", state.opt_state, state.specs.opt_state),
        )
    }


def run_save(rank, world, path, stage):
    tx, specs, step = make(stage)
    state = fz.init_state(PARAMS, tx, key=3, specs=specs)
    data = batch(specs.mesh)
    state, _ = step(state, data)
    fz.save(f"{path}/closed", state)
    state = step.accumulate(state, data)
    fz.save(f"{path}/open", state)
    before = whole(state)
    state, metrics = step.update(state)
    return before, whole(state), float(metrics.loss), float(metrics.aux["rows"])


def run_restore(rank, world, path, stage):
    tx, specs, step = make(stage)
    like = fz.abstract_state(PARAMS, tx, specs=specs)
    closed = fz.restore(f"{path}/closed", like)
    state = fz.restore(f"{path}/open", like)
    before = whole(state)
    assert closed.accum == () and int(closed.step) == 1 and closed.key.tolist() == [3, 0]
    state, metrics = step.update(state)
    return before, whole(state), float(metrics.loss), float(metrics.aux["rows"])


def same(a, b):
    return all(torch.equal(a[f][k], b[f][k]) and a[f][k].dtype == b[f][k].dtype for f in a for k in a[f])


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (4, 3)])
def test_any_layout_to_any_layout(tmp_path, world, stage):
    before, after, loss, rows = pool(world).run(run_save, str(tmp_path), stage)[0]
    assert rows == 8.0
    for world2, stage2 in ((1, 3), (2, 0), (2, 2), (4, 1)):
        for got in pool(world2).run(run_restore, str(tmp_path), stage2):
            cell = f"{world} ranks stage {stage} to {world2} ranks stage {stage2}"
            assert same(before, got[0]), cell
            assert all(torch.allclose(after[f][k], got[1][f][k], rtol=1e-12) for f in after for k in after[f]), cell
            assert got[2] == pytest.approx(loss, rel=1e-12) and got[3] == rows, cell


def small_state():
    tx = fz.sgd(0.1)
    return fz.init_state({"w": torch.ones(3)}, tx), tx


def test_existing_name_and_overwrite(tmp_path):
    state, tx = small_state()
    fz.save(tmp_path / "s", state)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        fz.save(tmp_path / "s", state)
    other = fz.init_state({"w": torch.zeros(3)}, tx)
    fz.save(tmp_path / "s", other, overwrite=True)
    assert fz.restore(tmp_path / "s", state).params["w"].tolist() == [0.0, 0.0, 0.0]
    assert [p.name for p in tmp_path.iterdir()] == ["s"], "no temporary folder stays"


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    state, _ = small_state()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("funzero.checkpoint.files.safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        fz.save(tmp_path / "s", state)
    assert list(tmp_path.iterdir()) == []


def test_other_tree_is_one_error(tmp_path):
    state, tx = small_state()
    fz.save(tmp_path / "s", state)
    like = fz.abstract_state({"w": torch.ones(4), "more": torch.ones(1)}, tx)
    with pytest.raises(ValueError) as error:
        fz.restore(tmp_path / "s", like)
    assert "missing: params/more" in str(error.value)
    assert "params/w: expected float32[4], the checkpoint has float32[3]" in str(error.value)


def run_cut(rank, world, path):
    tx, specs, _ = make(3)
    try:
        fz.restore(path, fz.abstract_state(PARAMS, tx, specs=specs))
    except OSError as error:
        return str(error)
    return "no error"


def test_a_cut_file_names_itself_on_all_ranks(tmp_path):
    pool(1).run(run_save, str(tmp_path), 0)
    file = tmp_path / "closed" / "leaves.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert json.loads((tmp_path / "closed" / "manifest.json").read_text())["format"] == 1
    for message in pool(2).run(run_cut, str(tmp_path / "closed")):
        assert "leaves.safetensors" in message


def test_modes_follow_the_umask(tmp_path):
    state, _ = small_state()
    fz.save(tmp_path / "s", state)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain.txt").write_text("")
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "s" / "leaves.safetensors").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode
