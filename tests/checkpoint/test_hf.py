"""Hugging Face folders: what transformers writes and reads, and folders that lie or attack."""

import json
import os
import weakref

import numpy as np
import pytest
import safetensors.torch
import torch

import funzero as fz
from funzero.checkpoint import files, manifest
from funzero.checkpoint.hf import INDEX, SINGLE, export_hf, import_hf

LEAVES = {
    f"{name}.{dtype}": torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    for name in "a"
    for dtype in manifest.DTYPES.values()
}
LEAVES |= {"nan": torch.tensor([float("nan"), -0.0]), "scalar": torch.tensor(3.5, dtype=torch.bfloat16)}
LEAVES |= {"empty": torch.zeros(0, 4), "slashed/100%": torch.arange(7), "cut": torch.arange(12.0).view(3, 4).t()[1:]}


def assert_same(found, expected):
    assert set(found) == set(expected) and len(found) == len(expected)
    for name, leaf in expected.items():
        assert files.same_bits(found[name], leaf), name
        assert found.shapes[name].shape == leaf.shape and found.shapes[name].dtype == leaf.dtype
        assert found.shapes[name].device.type == "meta"


def write_sharded(folder, change=None):
    """Two files and an index, which `change` may change."""
    folder.mkdir()
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "one.safetensors")
    safetensors.torch.save_file({"c": torch.zeros(2)}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    if change:
        change(weight_map)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": weight_map}))


@pytest.mark.parametrize("max_shard_bytes", [2**30, 40])
def test_every_dtype_and_shape_comes_back(tmp_path, max_shard_bytes):
    export_hf(tmp_path / "m", LEAVES, max_shard_bytes=max_shard_bytes)
    assert_same(import_hf(tmp_path / "m"), LEAVES)
    assert [x.name for x in tmp_path.iterdir()] == ["m"], "no temporary folder stays"


def test_shards_hold_what_fits_and_the_index_says_where(tmp_path):
    leaves = {"c": torch.zeros(100), "a": torch.zeros(4), "b": torch.zeros(4), "d": torch.zeros(1)}
    export_hf(tmp_path / "m", leaves, max_shard_bytes=32, metadata={"by": "test"})
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["weight_map"] == {"c": names[0], "a": names[1], "b": names[1], "d": names[2]}
    assert index["metadata"]["total_size"] == 109 * 4
    assert sorted(x.name for x in (tmp_path / "m").iterdir()) == [*names, INDEX]
    with safetensors.safe_open(tmp_path / "m" / names[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "test"}


def test_one_leaf_is_read_at_a_time(tmp_path):
    alive, most = set(), 0

    def read(name):
        nonlocal most
        leaf = np.zeros(1000, dtype=np.float32)  # lives as long as the tensor's memory
        alive.add(name)
        most = max(most, len(alive))
        weakref.finalize(leaf, alive.discard, name)
        return torch.from_numpy(leaf)

    lazy = files.LazyTensors({str(i): files.meta((1000,), torch.float32) for i in range(9)}, read)
    export_hf(tmp_path / "m", lazy, max_shard_bytes=4000)
    assert len(list((tmp_path / "m").iterdir())) == 10 and not alive
    assert most <= 2


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    export_hf(tmp_path / "m", {"a": torch.ones(5000)})
    leaf = import_hf(tmp_path / "m")["a"]
    with (tmp_path / "m" / SINGLE).open("r+b") as file:
        file.write(bytes(20000))
    assert torch.equal(leaf, torch.ones(5000))


def test_an_alias_is_written_once_and_asked_for(tmp_path):
    tied = {"head": "tok"}
    export_hf(tmp_path / "m", {"tok": torch.ones(2), "head": torch.ones(2)}, tied=tied)
    assert list(import_hf(tmp_path / "m")) == ["tok"]
    found = import_hf(tmp_path / "m", tied=tied)
    assert list(found) == ["tok", "head"] and torch.equal(found["head"], torch.ones(2))
    with pytest.raises(ValueError, match="'head' is tied to 'tok', but they differ"):
        export_hf(tmp_path / "n", {"tok": torch.ones(2), "head": torch.zeros(2)}, tied=tied)
    with pytest.raises(ValueError, match="'head' is tied to 'top', which is not there"):
        import_hf(tmp_path / "m", tied={"head": "top"})
    export_hf(tmp_path / "both", {"tok": torch.ones(2), "head": torch.zeros(2)})
    with pytest.raises(ValueError, match="they differ"):
        import_hf(tmp_path / "both", tied=tied)


def test_an_existing_folder_stays_unless_overwritten(tmp_path):
    export_hf(tmp_path / "m", {"a": torch.ones(1)})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_hf(tmp_path / "m", {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"z: safetensors has no torch.complex128"):
        export_hf(tmp_path / "m", {"z": torch.ones(1, dtype=torch.complex128)}, overwrite=True)
    assert import_hf(tmp_path / "m")["a"].item() == 1
    export_hf(tmp_path / "m", {"a": torch.zeros(1)}, overwrite=True, extra_files={"config.json": "{}"})
    assert import_hf(tmp_path / "m")["a"].item() == 0
    assert [x.name for x in tmp_path.iterdir()] == ["m"]
    assert sorted(x.name for x in (tmp_path / "m").iterdir()) == ["config.json", SINGLE]
    for name in ("../x", "", "..", SINGLE, INDEX):
        with pytest.raises(ValueError, match="without a path"):
            export_hf(tmp_path / "n", {}, extra_files={name: ""})


def test_values_must_be_tensors_with_values(tmp_path):
    with pytest.raises(TypeError, match="a: expected a tensor, got float"):
        export_hf(tmp_path / "m", {"a": 1.0})
    with pytest.raises(ValueError, match="a: expected values, got a meta tensor"):
        export_hf(tmp_path / "m", {"a": torch.ones(1, device="meta")})
    with pytest.raises(ValueError, match="rename the leaf"):
        export_hf(tmp_path / "m", {"__metadata__": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_split_params_and_lazy_initialisation(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    params, _ = fz.split_module(model)
    export_hf(tmp_path / "m", params, max_shard_bytes=50)
    found = import_hf(tmp_path / "m")
    assert_same(found, model.state_dict())
    tx = fz.sgd(0.1)
    specs = fz.zero_specs(found.shapes, tx, fz.make_mesh(dp=-1), stage=3)
    state = fz.init_state({n: lambda key, n=n: found[n] for n in found}, tx, key=0, specs=specs)
    for name, leaf in fz.gather(state.params, specs.params).items():
        assert torch.equal(leaf, params[name])


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "", "a\\b", "a\0"]
)
def test_an_index_cannot_point_elsewhere(tmp_path, name):
    safetensors.torch.save_file({"c": torch.ones(1)}, tmp_path / "x.safetensors")
    write_sharded(tmp_path / "m", lambda index: index.update(c=name))
    with pytest.raises(ValueError, match="must be the name of a file in this folder"):
        import_hf(tmp_path / "m")


@pytest.mark.parametrize("name", ["two.safetensors", INDEX, SINGLE])
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
    write_sharded(tmp_path / "m")
    write_sharded(tmp_path / "secret")
    (tmp_path / "m" / name).unlink(missing_ok=True)
    (tmp_path / "m" / name).symlink_to(tmp_path / "secret" / name.replace(SINGLE, "one.safetensors"))
    with pytest.raises(ValueError, match="is a link out of its folder"):
        import_hf(tmp_path / "m")


def test_links_inside_and_in_a_hub_cache_are_followed(tmp_path):
    write_sharded(tmp_path / "m")
    (tmp_path / "m" / "two.safetensors").rename(tmp_path / "m" / "real")
    (tmp_path / "m" / "two.safetensors").symlink_to("real")
    assert import_hf(tmp_path / "m")["c"].tolist() == [0, 0]
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs").mkdir()
    write_sharded(tmp_path / "snapshots" / "0a1b")
    for file in list((tmp_path / "snapshots" / "0a1b").iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(os.path.join("..", "..", "blobs", file.name))
    assert set(import_hf(tmp_path / "snapshots" / "0a1b")) == {"a", "b", "c"}


def test_rings_of_links_and_files_that_are_not_there(tmp_path):
    write_sharded(tmp_path / "m", lambda index: index.update(d="three.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"three\.safetensors is not there"):
        import_hf(tmp_path / "m")
    (tmp_path / "m" / "three.safetensors").symlink_to("three.safetensors")
    with pytest.raises(FileNotFoundError, match=r"three\.safetensors is not there"):
        import_hf(tmp_path / "m")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        import_hf(tmp_path / "none")
    (tmp_path / "void").mkdir()
    with pytest.raises(FileNotFoundError, match="has neither"):
        import_hf(tmp_path / "void")


def test_an_index_that_lies_lists_every_name(tmp_path):
    def lie(index):
        index.update(b="two.safetensors", d="one.safetensors")

    write_sharded(tmp_path / "m", lie)
    with pytest.raises(ValueError) as error:
        import_hf(tmp_path / "m")
    assert sorted(str(error.value).splitlines()[1:]) == [
        "extra: b in one.safetensors",
        "missing: b, which the index puts in two.safetensors",
        "missing: d, which the index puts in one.safetensors",
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "\x80"])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=INDEX):
        import_hf(tmp_path)


def test_pickles_are_refused_by_name(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/executed",)

    torch.save(Evil(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"'pytorch_model.bin'.*run any code"):
        import_hf(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    with pytest.raises(ValueError, match=r"names pytorch_model.bin: a pickle"):
        import_hf(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "pytorch_model.bin").rename(tmp_path / SINGLE)
    with pytest.raises(OSError, match="no safetensors file"):
        import_hf(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("left", [0, 4, 60, -1])
def test_a_cut_shard_is_named(tmp_path, left):
    write_sharded(tmp_path / "m")
    file = tmp_path / "m" / "one.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(OSError, match=r"one\.safetensors is damaged"):
        import_hf(tmp_path / "m")


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def llama(transformers, tie, dtype):
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tie,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
def test_what_transformers_saves_is_imported(tmp_path, transformers, tie, dtype, shard):
    model = llama(transformers, tie, dtype)
    model.save_pretrained(tmp_path / "m", max_shard_size=shard)
    assert (tmp_path / "m" / INDEX).exists() == (shard == "4KB")
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if tie else {}
    assert_same(import_hf(tmp_path / "m", tied=tied), model.state_dict())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [2**30, 4096])
def test_what_is_exported_transformers_loads(tmp_path, transformers, tie, dtype, max_shard_bytes):
    model = llama(transformers, tie, dtype)
    params, _ = fz.split_module(model)
    assert ("lm_head.weight" in params) == (not tie)
    config = {"config.json": model.config.to_json_string()}
    export_hf(tmp_path / "m", params, max_shard_bytes=max_shard_bytes, extra_files=config)
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
