"""DCP checkpoints: what torch writes and reads, on one rank and two, and checkpoints that lie or attack."""

import os
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from funzero.checkpoint import dcp as ours
from funzero.checkpoint import files, manifest
from funzero.checkpoint.dcp import export_dcp, import_dcp
from tests.ranks import pool

DTYPES = [*manifest.DTYPES.values(), torch.complex128]
LEAVES = {f"params/{dtype}": torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype) for dtype in DTYPES}
LEAVES |= {"nan": torch.tensor([float("nan"), -0.0]), "scalar": torch.tensor(3.5, dtype=torch.bfloat16)}
LEAVES |= {"empty": torch.zeros(0, 4), "a.b": torch.arange(7), "cut": torch.arange(12.0).view(3, 4).t()[1:]}


def assert_same(found, expected):
    assert set(found) == set(expected) and len(found) == len(expected)
    for name, leaf in expected.items():
        assert files.same_bits(found[name], leaf), name
        assert found[name].is_contiguous() and type(found[name]) is torch.Tensor
        assert found.shapes[name].shape == leaf.shape and found.shapes[name].dtype == leaf.dtype


def torch_saves(folder, state):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def torch_loads(folder, state):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def change(folder, how):
    """Rewrites `.metadata` after `how` has changed it."""
    file = folder / ".metadata"
    found = pickle.loads(file.read_bytes())
    how(found)
    file.write_bytes(pickle.dumps(found))


def test_every_dtype_and_shape_comes_back(tmp_path):
    export_dcp(tmp_path / "c", LEAVES)
    assert_same(import_dcp(tmp_path / "c"), LEAVES)
    assert [x.name for x in tmp_path.iterdir()] == ["c"], "no temporary folder stays"


def test_torch_reads_what_is_exported(tmp_path):
    export_dcp(tmp_path / "c", LEAVES)
    state = torch_loads(tmp_path / "c", {name: torch.full_like(leaf, 0) for name, leaf in LEAVES.items()})
    assert all(files.same_bits(state[name], leaf) for name, leaf in LEAVES.items())


def test_what_torch_saves_is_imported_under_its_flat_names(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    state = {"model": {"w": weight}, "optim": {"state": [torch.ones(2)], "lr": 0.1, "names": ["w"]}}
    torch_saves(tmp_path / "c", state)
    found = import_dcp(tmp_path / "c")
    assert_same(found, {"model.w": weight.detach(), "optim.state.0": torch.ones(2)})
    assert found.left_out == ("optim.lr", "optim.names")
    assert "optim.lr" not in found
    with pytest.raises(KeyError, match=r"optim\.lr"):
        found["optim.lr"]


def test_one_leaf_is_read_at_a_time(tmp_path):
    alive, most = set(), 0

    def read(name):
        nonlocal most
        leaf = np.full(1000, float(name), dtype=np.float32)  # lives as long as the tensor's memory
        alive.add(name)
        most = max(most, len(alive))
        weakref.finalize(leaf, alive.discard, name)
        return torch.from_numpy(leaf)

    lazy = files.LazyTensors({str(i): files.meta((1000,), torch.float32) for i in range(9)}, read)
    export_dcp(tmp_path / "c", lazy)
    assert most <= 2
    assert_same(import_dcp(tmp_path / "c"), {str(i): torch.full((1000,), float(i)) for i in range(9)})


def test_an_existing_folder_stays_unless_overwritten(tmp_path):
    export_dcp(tmp_path / "c", {"a": torch.ones(1)})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_dcp(tmp_path / "c", {"a": torch.zeros(1)})

    def broken(name):
        raise RuntimeError("cannot be read")

    with pytest.raises(OSError, match=r"/c: DCP cannot write it.*cannot be read"):
        lazy = files.LazyTensors({"a": files.meta((1,), torch.float32)}, broken)
        export_dcp(tmp_path / "c", lazy, overwrite=True)
    with pytest.raises(TypeError, match="a: expected a tensor, got float"):
        export_dcp(tmp_path / "c", {"a": 1.0}, overwrite=True)
    assert import_dcp(tmp_path / "c")["a"].item() == 1
    export_dcp(tmp_path / "c", {"b": torch.zeros(1)}, overwrite=True)
    assert list(import_dcp(tmp_path / "c")) == ["b"]
    assert [x.name for x in tmp_path.iterdir()] == ["c"]


def wholes():
    generator = torch.Generator().manual_seed(0)
    shapes = {"even": (4, 6), "odd": (5, 3), "few": (1, 3), "none": (0, 3), "flat": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def run_save(rank, world, path):
    mesh = init_device_mesh("cpu", (world,))
    state = {f"rows.{n}": distribute_tensor(x, mesh, [Shard(0)]) for n, x in wholes().items()}
    state |= {f"columns.{n}": distribute_tensor(x, mesh, [Shard(1)]) for n, x in wholes().items() if x.dim() > 1}
    state |= {f"same.{n}": distribute_tensor(x, mesh, [Replicate()]) for n, x in wholes().items()}
    state["half"] = distribute_tensor(wholes()["odd"].bfloat16(), mesh, [Shard(0)])
    state["step"] = torch.tensor(3)
    dcp.save(state, checkpoint_id=path)
    return len(os.listdir(path))


def test_pieces_of_two_ranks_are_put_together(tmp_path):
    assert pool(2).run(run_save, str(tmp_path / "c"))[0] == 3, "both ranks wrote a file"
    assert not dist.is_initialized()
    expected = {f"{kind}.{n}": x for kind in ("rows", "same") for n, x in wholes().items()}
    expected |= {f"columns.{n}": x for n, x in wholes().items() if x.dim() > 1}
    expected |= {"half": wholes()["odd"].bfloat16(), "step": torch.tensor(3)}
    found = import_dcp(tmp_path / "c")
    assert_same(found, expected)

    def overlap(m):
        chunks = m.state_dict_metadata["rows.even"].chunks
        key = next(k for k in m.storage_data if k.fqn == "rows.even" and k.offset == chunks[1].offsets)
        m.storage_data[metadata.MetadataIndex("rows.even", (1, 0))] = m.storage_data[key]
        chunks[1].offsets = torch.Size((1, 0))

    change(tmp_path / "c", overlap)
    with pytest.raises(ValueError, match=r"rows\.even: its pieces overlap"):
        import_dcp(tmp_path / "c")["rows.even"]


class Calls:
    def __init__(self, fn, *args):
        self.call = (fn, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["whole", "planner_data", "instead of metadata"])
def test_a_metadata_that_calls_is_refused_and_nothing_runs(tmp_path, place):
    export_dcp(tmp_path / "c", {"a": torch.ones(1)})
    call = Calls(os.system, f"touch {tmp_path}/executed")
    if place == "planner_data":
        change(tmp_path / "c", lambda m: setattr(m, "planner_data", call))
    else:
        content = call if place == "whole" else [metadata.Metadata({}), call]
        (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=r"\.metadata is refused: it holds posix\.system"):
        import_dcp(tmp_path / "c")
    assert not (tmp_path / "executed").exists()
    pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    assert (tmp_path / "executed").exists(), "the attack works on a plain pickle.load"


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n.",
        b"ctorch\nload\n.",
        b"ctorch\nos.system\n.",
        b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
        b"ctorch.distributed.checkpoint.filesystem\nos\n.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__\n.",
        b"ccopyreg\n_reconstructor\n.",
    ],
)
def test_other_names_are_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is refused: it holds"):
        import_dcp(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        pickle.dumps({"state_dict_metadata": {}}),
        pickle.dumps(7),
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n.",
        # sets an attribute of the class itself
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'state'\nI1\nstb.",
        pickle.dumps(metadata.Metadata(None)),
        pickle.dumps(metadata.Metadata({"a": 1}, storage_data={})),
        pickle.dumps(metadata.Metadata({"a": metadata.BytesStorageMetadata()}, storage_data={1: 2})),
    ],
)
def test_what_is_no_metadata_is_an_ordinary_error(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is (refused|not laid out)"):
        import_dcp(tmp_path)
    assert ours._Record.__setstate__.__name__ == "__setstate__" and not hasattr(metadata.Metadata, "state")


def set_info(**values):
    return lambda m: [vars(info).update(values) for info in m.storage_data.values()]


def set_entry(**values):
    return lambda m: [vars(entry).update(values) for entry in m.state_dict_metadata.values()]


def set_chunk(**values):
    return lambda m: [vars(c).update(values) for e in m.state_dict_metadata.values() for c in e.chunks]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (set_info(relative_path="../x"), "must be the name of a file in this folder"),
        (set_info(relative_path="/etc/passwd"), "must be the name of a file in this folder"),
        (set_info(relative_path=7), "must be the name of a file in this folder"),
        (set_info(relative_path="link"), "is a link out of its folder"),
        (set_info(transform_descriptors=["zstd"]), r"a: is stored with \['zstd'\]"),
        (set_info(length=3), "cannot lie in 3 bytes"),
        (set_info(length="3"), "not laid out"),
        (set_chunk(sizes=torch.Size((3,))), "lies outside"),
        (set_chunk(sizes=torch.Size((1,))), "has 2 elements, its pieces hold 1"),
        (set_chunk(sizes=torch.Size((2, 1))), "lies outside"),
        (set_chunk(offsets=torch.Size((1,))), "not laid out"),
        (set_chunk(sizes=("x",)), "not laid out"),
        (set_entry(size=torch.Size((-2,))), "not laid out"),
        (set_entry(size=(2**70,)), "not laid out"),
        (set_entry(size=torch.Size((2**40,)), chunks=[]), "has 1099511627776 elements, its pieces hold 0"),
        (lambda m: m.storage_data.clear(), "not laid out"),
    ],
)
def test_metadata_that_lies_about_places(tmp_path, how, message):
    export_dcp(tmp_path / "c", {"a": torch.ones(2)})
    torch.save(torch.ones(2), tmp_path / "x")
    (tmp_path / "c" / "link").symlink_to(tmp_path / "x")
    change(tmp_path / "c", how)
    with pytest.raises(ValueError, match=message):
        import_dcp(tmp_path / "c")


def test_payload_that_is_cut_damaged_or_of_another_kind(tmp_path):
    export_dcp(tmp_path / "c", {"a": torch.ones(200)})
    (file,) = (tmp_path / "c").glob("*.distcp")
    good = file.read_bytes()
    file.write_bytes(good[:-100])
    with pytest.raises(OSError, match=r"distcp is damaged: a lies at bytes 0 to"):
        import_dcp(tmp_path / "c")
    file.write_bytes(bytes(len(good)))
    with pytest.raises(OSError, match=r"distcp is damaged: a cannot be read"):
        import_dcp(tmp_path / "c")["a"]
    for content, message in (
        (Calls(os.system, f"touch {tmp_path}/executed"), "cannot be read"),
        ([torch.ones(200)], "expected a tensor, got list"),
        (torch.ones(200).double(), r"expected torch\.float32\[200\], got torch\.float64\[200\]"),
        (torch.ones(1).expand(2**40), r"got torch\.float32\[1099511627776\]"),
        (torch.ones(200).to_sparse(), "expected a tensor"),
    ):
        torch.save(content, file)
        file.write_bytes(file.read_bytes().ljust(len(good), b"\0"))
        size = file.stat().st_size
        change(tmp_path / "c", set_info(length=size))
        with pytest.raises(OSError, match=r"distcp is damaged: a.*" + message):
            import_dcp(tmp_path / "c")["a"]
    assert not (tmp_path / "executed").exists()
    file.unlink()
    with pytest.raises(FileNotFoundError, match="distcp is not there"):
        import_dcp(tmp_path / "c")


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"\.metadata is not there"):
        import_dcp(tmp_path)


def test_all_that_torch_may_write_is_admitted(tmp_path):
    """The classes that DCP's dataclasses are made of; a new one in torch would be refused, and show here."""
    made = metadata.Metadata(
        {"a": metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size(()), []), "b": None},
        planner_data={"a": ("a", 0)},
        storage_data={metadata.MetadataIndex("a", (0,), 1): filesystem._StorageInfo("f", 0, 1, ["zstd"])},
        storage_meta=metadata.StorageMeta(tmp_path, "x", "y", ["z"]),
        version="1.0.0",
    )
    made.state_dict_metadata["b"] = metadata.BytesStorageMetadata()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "m").write_bytes(pickle.dumps(made, protocol))
        assert set(ours._unpickled(tmp_path / "m")) == set(vars(made))
