"""What is damaged or malicious is refused by name: nothing of it is loaded, executed or written."""

import json
import os
import pickle
import random
import shutil
import zlib

import pytest
import torch

import funzero as fz
from funzero.checkpoint import inspect
from funzero.checkpoint.manifest import BLOCK
from funzero.cli.main import main
from tests.checkpoint.common import batch, make
from tests.ranks import pool


def write(rank, world, path):
    state, step, _ = make(3)
    state, _ = step(state, batch(state.specs.mesh))
    fz.save(path, state, extra={"note": "x" * 100})


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "s"
    pool(2).run(write, str(path))
    return path


def refused(path, error=fz.CheckpointError):
    """The text of the error that `restore` ends with."""
    with pytest.raises(error) as found:
        fz.restore(path, make(0)[2])
    return str(found.value)


def leaf_at(manifest, file, at):
    """The leaf that has byte `at` of a file, or None in a header."""
    for name, leaf in manifest.leaves.items():
        for piece in leaf.pieces:
            if piece.file == file and piece.at <= at < piece.at + piece.count * leaf.torch_dtype.itemsize:
                return name
    return None


def test_one_flipped_bit_anywhere_is_reported_with_file_and_leaf(good, tmp_path):
    """The same number of places in the manifest, in headers, and in data; each byte of a file belongs to one of these."""
    manifest, draw = fz.read_manifest(good), random.Random(0)
    places = []
    for name, file in manifest.files.items():
        places += [(name, draw.randrange(file.start)) for _ in range(34)]
        places += [(name, draw.randrange(file.start, file.bytes)) for _ in range(34)]
    places += [("manifest.json", draw.randrange((good / "manifest.json").stat().st_size)) for _ in range(68)]
    assert len(places) > 200
    for file, at in places:
        copy = tmp_path / "s"
        shutil.copytree(good, copy)
        raw = bytearray((copy / file).read_bytes())
        raw[at] ^= 1 << draw.randrange(8)
        (copy / file).write_bytes(raw)
        text = refused(copy)
        assert file in text, f"{file} at {at}: {text}"
        name = None if file == "manifest.json" else leaf_at(manifest, file, at)
        assert name is None or f" {name}," in text, f"{file} at {at}, in {name}: {text}"
        assert name is not None or file == "manifest.json" or at < manifest.files[file].start
        shutil.rmtree(copy)


def test_a_flip_beyond_the_first_block_is_found_in_parts_too(tmp_path):
    """A reader that needs a range reads and checks whole blocks."""
    n = 3 * BLOCK // 4
    state = fz.init_state({"w": torch.zeros(n)}, fz.sgd(0.1))
    fz.save(tmp_path / "s", state)
    piece = fz.read_manifest(tmp_path / "s").leaves["params/w"].pieces[0]
    assert len(piece.crc32) == 8 * 3
    for at in (0, BLOCK - 1, BLOCK, 3 * BLOCK - 1):
        raw = bytearray((tmp_path / "s" / piece.file).read_bytes())
        raw[piece.at + at] ^= 4
        (tmp_path / "s" / piece.file).write_bytes(raw)
        begin = piece.at + at // BLOCK * BLOCK
        assert f"params/w, bytes {begin} to {begin + BLOCK}" in refused_with(tmp_path / "s", state)
        raw[piece.at + at] ^= 4
        (tmp_path / "s" / piece.file).write_bytes(raw)


def refused_with(path, like):
    with pytest.raises(fz.CheckpointError) as found:
        fz.restore(path, like)
    return str(found.value)


def forge(good, path, change):
    """A copy whose manifest says something else, under a checksum that holds."""
    shutil.copytree(good, path)
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    body = change(body) or body
    text = b'"manifest":' + json.dumps(body).encode() + b"}\n"
    (path / "manifest.json").write_bytes(b'{"crc32":"%08x",\n' % zlib.crc32(text) + text)
    return path


def piece_of(body, name="params/b"):
    return body["leaves"][name]["pieces"][0]


LIES = {
    "a path upwards": (lambda b: piece_of(b).update(file="../00000.safetensors"), "is not among the files"),
    "an absolute path": (lambda b: piece_of(b).update(file="/etc/00000.safetensors"), "is not among the files"),
    "a path downwards": (lambda b: piece_of(b).update(file="x/00000.safetensors"), "is not among the files"),
    "an unknown file": (lambda b: piece_of(b).update(file="00009.safetensors"), "is not among the files"),
    "bytes beyond the end": (lambda b: piece_of(b).update(at=10**9), "are outside of"),
    "bytes in the header": (lambda b: piece_of(b).update(at=0), "are outside of"),
    "a negative offset": (lambda b: piece_of(b).update(at=-1), "not a manifest"),
    "a longer file": (lambda b: b["files"]["00000.safetensors"].update(bytes=10**12), "bytes, the manifest says"),
    "a shape that overflows": (lambda b: b["leaves"]["params/b"].update(shape=[2**40, 2**40]), "overflows"),
    "a shape beyond int64": (lambda b: b["leaves"]["params/b"].update(shape=[2**70]), "not a manifest"),
    "a negative shape": (lambda b: b["leaves"]["params/b"].update(shape=[-5, 3]), "not a manifest"),
    "a fractional shape": (lambda b: b["leaves"]["params/b"].update(shape=[5.5, 3]), "not a manifest"),
    "a shape of text": (lambda b: b["leaves"]["params/b"].update(shape="53"), "not a manifest"),
    "a shape of nothing and too much": (lambda b: b["leaves"]["params/d"].update(shape=[0, 2**62, 2**62]), "overflows"),
    "a file outside": (
        lambda b: b["files"].update({"../x": b["files"]["00000.safetensors"]}),
        "not the name of a file",
    ),
    "a checksum of a header": (lambda b: b["files"]["00000.safetensors"].update(crc32="x"), "not a manifest"),
    "a dtype that safetensors lacks": (lambda b: b["leaves"]["params/b"].update(dtype="quint8"), "unknown dtype"),
    "a hole": (lambda b: b["leaves"]["params/b"]["pieces"].pop() and None, "do not make up the leaf"),
    "an element twice": (lambda b: b["leaves"]["params/b"]["pieces"].append(piece_of(b)), "do not make up the leaf"),
    "a range outside": (lambda b: piece_of(b).update(range=[0, 16]), "outside of its box"),
    "an empty range": (lambda b: piece_of(b).update(range=[3, 3]), "outside of its box"),
    "a box outside": (lambda b: piece_of(b).update(box=[[0, 6], [0, 3]]), "is outside"),
    "a box of other dims": (lambda b: piece_of(b).update(box=[[0, 15]]), "does not fit the shape"),
    "checksums cut": (lambda b: piece_of(b).update(crc32=""), "checksums are malformed"),
    "checksums of text": (lambda b: piece_of(b).update(crc32="zzzzzzzz"), "checksums are malformed"),
    "an unknown dtype": (lambda b: b["leaves"]["params/b"].update(dtype="object"), "unknown dtype"),
    "a field more": (lambda b: b.update(pickle="gASV"), "not a manifest"),
    "a field less": (lambda b: {k: v for k, v in b.items() if k != "leaves"}, "not a manifest"),
    "another format": (lambda b: b.update(format=3), "format 3, this version of funzero reads 2"),
    "a list": (lambda b: [b], "not a manifest"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies(good, tmp_path, name):
    change, text = LIES[name]
    found = refused(forge(good, tmp_path / "s", change))
    assert text in found, found
    assert sorted(os.listdir(tmp_path)) == ["s"]


def test_a_manifest_of_endless_depth(good, tmp_path):
    shutil.copytree(good, tmp_path / "s")
    text = b'"manifest":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    (tmp_path / "s" / "manifest.json").write_bytes(b'{"crc32":"%08x",\n' % zlib.crc32(text) + text)
    assert "not a manifest" in refused(tmp_path / "s")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("file", ["manifest.json", "00000.safetensors"])
def test_pickles_are_not_opened(good, tmp_path, file):
    shutil.copytree(good, tmp_path / "s")
    bomb = pickle.dumps(Bomb(str(tmp_path / "boom")))
    size = (tmp_path / "s" / file).stat().st_size
    for raw in (bomb, bomb.ljust(size, b"\0")):
        (tmp_path / "s" / file).write_bytes(raw)
        assert file in refused(tmp_path / "s")
    torch.save(Bomb(str(tmp_path / "boom")), tmp_path / "s" / file)
    assert file in refused(tmp_path / "s")
    assert not (tmp_path / "boom").exists()


def test_links_pipes_and_folders_in_place_of_a_file(good, tmp_path):
    for make_it, text in (
        (lambda p: p.symlink_to(good / p.name), "a link, not a file"),
        (os.mkfifo, "not an ordinary file"),
        (lambda p: p.mkdir(), "not an ordinary file"),
        (lambda p: None, "missing"),
        (lambda p: p.write_bytes((good / p.name).read_bytes()[:-8]), "bytes, the manifest says"),
    ):
        path = tmp_path / "s"
        shutil.copytree(good, path)
        (path / "00001.safetensors").unlink()
        make_it(path / "00001.safetensors")
        found = refused(path)
        assert "00001.safetensors" in found and text in found, found
        shutil.rmtree(path)


def test_links_and_pipes_in_place_of_the_manifest(good, tmp_path):
    for make_it, text in (
        (lambda p: p.symlink_to(good / "manifest.json"), "a link, not a file"),
        (os.mkfifo, "not an ordinary file"),
    ):
        path = tmp_path / "s"
        shutil.copytree(good, path)
        (path / "manifest.json").unlink()
        make_it(path / "manifest.json")
        assert text in refused(path)
        assert any(text in line for line in inspect.damage(path))
        shutil.rmtree(path)


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies_does_not_harm_those_who_look_at_it(good, tmp_path, name, capsys):
    path = forge(good, tmp_path / "s", LIES[name][0])
    for command in (["show", path], ["verify", path], ["diff", path, good], ["ls", tmp_path]):
        assert main(["ckpt", *map(str, command)]) in (0, 1, 2)
    assert LIES[name][1] in capsys.readouterr().out


def test_no_checkpoint_there(tmp_path):
    refused(tmp_path / "nothing", FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", FileNotFoundError)
