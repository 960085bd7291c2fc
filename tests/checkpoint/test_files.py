"""What lies on disk: each element once, divided among the ranks, in files that any safetensors reader opens."""

import json
import math
import os

import pytest
import safetensors.torch
import torch

import funzero as fz
from funzero.checkpoint import disk, shares
from funzero.checkpoint import save as saving
from tests.cases.common import difference, whole
from tests.checkpoint.common import batch, everything, make
from tests.ranks import pool

RULES = {
    "rows": {"b": fz.P("tp", None)},
    "columns": {"b": fz.P(None, "tp")},
    "both": {"b": fz.P("dp", "tp")},
    "none": {},
}
SHAPES = {"b": (8, 12), "odd": (7,), "big": (40, 30)}


def grid(rank, world, root, cells, load):
    """Saves (or loads) a state under each of the cells (sizes of the mesh, rules, stage)."""
    out = {}
    for sizes, rules, stage in cells:
        mesh = fz.make_mesh(**sizes)
        params = {n: torch.arange(math.prod(s), dtype=torch.float32).view(s) for n, s in SHAPES.items()}
        tx = fz.sgd(0.1, momentum=0.9)
        specs = fz.zero_specs(params, tx, mesh, stage=stage, rules=RULES[rules])
        name = "x".join(f"{a}{n}" for a, n in sizes.items()) + f"-{rules}-{stage}"
        if not load:
            fz.save(f"{root}/{name}", fz.init_state(params, tx, specs=specs))
            out[name] = [(x, params[x]) for x in SHAPES]
            continue
        for found in sorted(os.listdir(root)):
            state = fz.restore(f"{root}/{found}", fz.abstract_state(params, tx, specs=specs))
            got = whole(state)
            assert all(torch.equal(got[f"params/{n}"], x) for n, x in params.items()), f"{found} to {name}"
    return out


def test_partitions_are_read_into_other_partitions(tmp_path):
    saves = [({"dp": 2, "tp": 2}, r, s) for r, s in (("rows", 0), ("columns", 3), ("none", 3), ("both", 1))]
    saves += [({"replicate": 2, "dp": 2}, "none", 3)]
    pool(4).run(grid, str(tmp_path), saves, False)
    for world, cells in (
        (4, [({"dp": 1, "tp": 4}, "columns", 0), ({"dp": 2, "tp": 2}, "both", 3), ({"dp": 2, "tp": 2}, "rows", 3)]),
        (2, [({"dp": 2, "tp": 1}, "none", 3), ({"dp": 1, "tp": 2}, "rows", 1)]),
        (1, [({"dp": 1}, "none", 0)]),
    ):
        pool(world).run(grid, str(tmp_path), cells, True)


def stored(path):
    """{name of a file: {key: tensor}} by the reference reader."""
    return {p.name: safetensors.torch.load_file(p) for p in sorted(path.glob("*.safetensors"))}


def write(rank, world, path, stage, sizes):
    tx = fz.adamw(0.1)
    params = {n: torch.randn(s, generator=torch.Generator().manual_seed(len(n))) for n, s in sizes.items()}
    specs = fz.zero_specs(params, tx, fz.make_mesh(dp=-1), stage=stage)
    state = fz.init_state(params, tx, specs=specs)
    fz.save(path, state)
    return whole(state)


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_every_element_is_stored_once_without_padding(tmp_path, stage):
    sizes = {"uneven": (131,), "m": (37, 5), "s": (), "e": (0, 3)}
    right = pool(3).run(write, str(tmp_path / "s"), stage, sizes)[0]
    files = stored(tmp_path / "s")
    manifest = fz.read_manifest(tmp_path / "s")
    for name, x in right.items():
        leaf = manifest.leaves[name]
        assert leaf.shape == tuple(x.shape) and sum(p.count for p in leaf.pieces) == x.numel(), name
    held = sum(x.numel() * x.element_size() for f in files.values() for x in f.values())
    expected = sum(x.numel() * x.element_size() for x in right.values())
    assert held == expected + 4 + 16, "step is in `right`; skips (4 bytes) and key (16) are not"
    assert sum(f.bytes - f.start for f in manifest.files.values()) == held
    if stage == 0:
        by_key = {k: x for f in files.values() for k, x in f.items()}
        assert all(torch.equal(by_key[n], x) for n, x in right.items() if x.numel()), "whole leaves keep their names"


def test_copies_are_shared_among_the_ranks_by_size(tmp_path, monkeypatch):
    sizes = {"one": (3_000_000,), **{f"w{i}": (50_000 + i,) for i in range(9)}}
    pool(3).run(write, str(tmp_path / "s"), 0, sizes)
    data = [f.bytes - f.start for f in fz.read_manifest(tmp_path / "s").files.values()]
    assert len(data) == 3 and max(data) < 1.2 * min(data), data
    pieces = fz.read_manifest(tmp_path / "s").leaves["params/one"].pieces
    assert len(pieces) == math.ceil(12e6 / shares.SHARE) == 2


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(tmp_path, dtype):
    values = torch.arange(-3, 4).to(torch.float32)
    buffers = {
        "v": values.to(dtype),
        "scalar": values[1].to(dtype),
        "empty": values[:0].to(dtype),
        "m": values.to(dtype).view(1, 7),
    }
    state = fz.init_state({"w": torch.ones(2)}, fz.sgd(0.1), buffers=buffers)
    fz.save(tmp_path / "s", state)
    other = fz.init_state({"w": torch.ones(2)}, fz.sgd(0.1), buffers=fz.tree.map(torch.zeros_like, buffers))
    back = fz.restore(tmp_path / "s", other).buffers
    for n, x in buffers.items():
        raw = [t.reshape(-1).view(torch.uint8) for t in (back[n], x)]
        assert back[n].dtype == x.dtype and back[n].shape == x.shape and torch.equal(*raw), n
    if dtype not in (torch.complex64, torch.complex128):
        assert stored(tmp_path / "s")["00000.safetensors"]["buffers/v"].dtype == dtype


def test_leaves_larger_than_a_buffer_and_odd_sizes(tmp_path):
    """Blocks, buffers and pages begin and end within leaves."""
    params = {f"w{i}": torch.randn(n) for i, n in enumerate((1_500_001, 7, 262_144, 1_048_577, 1))}
    state = fz.init_state(params, fz.sgd(0.1))
    fz.save(tmp_path / "s", state)
    assert not difference(everything(fz.restore(tmp_path / "s", state)), everything(state))
    held = stored(tmp_path / "s")["00000.safetensors"]
    assert all(torch.equal(held[f"params/{n}"], x) for n, x in params.items())


def test_where_the_file_system_refuses_direct_writes(tmp_path, monkeypatch):
    state = fz.init_state({"w": torch.randn(300_000)}, fz.sgd(0.1))
    real, refused = os.pwrite, []

    def pwrite(handle, data, at):
        if not refused:
            refused.append(handle)
            raise OSError(22, "Invalid argument")
        return real(handle, data, at)

    monkeypatch.setattr(disk.os, "pwrite", pwrite)
    fz.save(tmp_path / "s", state)
    assert refused and not difference(everything(fz.restore(tmp_path / "s", state)), everything(state))


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    state = fz.init_state({"w": torch.ones(3)}, fz.sgd(0.1))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.disk, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        fz.save(tmp_path / "s", state)
    assert list(tmp_path.iterdir()) == []


def test_modes_follow_the_umask(tmp_path):
    fz.save(tmp_path / "s", fz.init_state({"w": torch.ones(3)}, fz.sgd(0.1)))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain.txt").write_text("")
    assert (tmp_path / "s").stat().st_mode == (tmp_path / "plain").stat().st_mode
    for file in (tmp_path / "s").iterdir():
        assert file.stat().st_mode == (tmp_path / "plain.txt").stat().st_mode, file


def test_extra_is_json_and_comes_back(tmp_path):
    state = fz.init_state({"w": torch.ones(3)}, fz.sgd(0.1))
    extra = {"data": {"epoch": 1, "position": 2**40}, "text": "ü", "list": [1.5, None, True]}
    fz.save(tmp_path / "s", state, extra=extra)
    manifest = fz.read_manifest(tmp_path / "s")
    assert manifest.extra == extra and manifest.step == 0
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["manifest"]["leaves"]["params/w"]["shape"] == [3]
    for bad in ({"x": torch.ones(1)}, float("nan"), {1, 2}):
        with pytest.raises(TypeError, match=r"extra: .* give what JSON can say"):
            fz.save(tmp_path / "t", state, extra=bad)
    assert sorted(os.listdir(tmp_path)) == ["s"]


def test_windows_are_saved_with_a_glob_or_without(tmp_path):
    state, step, like = make(2)
    opened = step.accumulate(state, batch(state.specs.mesh))
    fz.save(tmp_path / "s", opened)
    assert fz.restore(tmp_path / "s", like).accum != ()
    assert fz.restore(tmp_path / "s", state, select="params/**").accum == ()
