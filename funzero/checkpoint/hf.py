"""Folders of weights as Hugging Face's libraries write them: safetensors files, one or several with an index."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from funzero.checkpoint import files, manifest

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")


def export_hf(
    folder: str | Path,
    params: Mapping[str, torch.Tensor],
    *,
    tied: Mapping[str, str] | None = None,
    max_shard_bytes: int = 5 * 2**30,
    metadata: Mapping[str, str] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes weights as a folder that `from_pretrained` loads. The folder appears when all of it is on disk.

    No more than one output file's leaves are in memory at a time, and one leaf more.

    Args:
        folder: to make. params: {torch's own name: whole tensor}, on any device; read one by one, in this order.
        tied: {alias: name}; an alias is not written, as the model ties it again when it loads.
        max_shard_bytes: the leaves of one file add up to no more, except where a single leaf does.
        metadata: more text for the header of each file. extra_files: {file name: content}, such as `config.json`.
        overwrite: replace the folder of that name, with everything in it; it stays until the new one is complete.

    Raises FileExistsError, OSError, TypeError for what is no tensor, and ValueError for a dtype that safetensors lacks or
    an alias that differs from its leaf.

    >>> import tempfile
    >>> where = tempfile.mkdtemp() + "/model"
    >>> export_hf(where, {"tok.weight": torch.ones(3, 2)}, tied={"head.weight": "tok.weight"})
    >>> import_hf(where, tied={"head.weight": "tok.weight"})["head.weight"].shape
    torch.Size([3, 2])
    """
    tied, header = dict(tied or {}), {"format": "pt", **(metadata or {})}
    for name in extra_files or ():
        if name in ("", ".", "..", INDEX) or name != os.path.basename(name) or name.endswith(".safetensors"):
            raise ValueError(
                f"{folder}: {name!r} in extra_files: expected a file name that no weights have, without a path"
            )
    _check_tied(params, tied, f"{folder}: params")
    names = [name for name in params if name not in tied]
    with files.new_folder(folder, overwrite=overwrite) as new:
        shards = []
        for shard in _shards(params, names, max_shard_bytes):
            files.write_safetensors(new / f"shard-{len(shards)}", shard, header)
            shards.append({name: leaf.nbytes for name, leaf in shard.items()})
        _name_shards(new, shards)
        for name, content in (extra_files or {}).items():
            (new / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def _check_tied(tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], where: str) -> None:
    for alias, name in tied.items():
        if name not in tensors or name in tied:
            raise ValueError(
                f"{where}: {alias!r} is tied to {name!r}, which is not there; there are {list(tensors)[:6]}"
            )
        if alias in tensors and not files.same_bits(tensors[alias], tensors[name]):
            raise ValueError(f"{where}: {alias!r} is tied to {name!r}, but they differ; leave it out of `tied`")


def _shards(
    params: Mapping[str, torch.Tensor], names: list[str], max_shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Leaves in host memory, as many at a time as fit; at least one shard, if without leaves."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name in names:
        leaf = _host_copy(name, params[name])
        if shard and size + leaf.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = leaf
        size += leaf.nbytes
    yield shard


def _host_copy(name: str, leaf: torch.Tensor) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(leaf).__name__}")
    if name == "__metadata__":
        raise ValueError(f"{name}: safetensors keeps this name for itself; rename the leaf")
    if leaf.dtype not in manifest.DTYPES.values():
        raise ValueError(f"{name}: safetensors has no {leaf.dtype}; convert it to one of {list(manifest.DTYPES)}")
    if leaf.device.type == "meta":
        raise ValueError(f"{name}: expected values, got a meta tensor; give the params themselves")
    return leaf.detach().to("cpu", copy=True).contiguous()  # a copy, as leaves that share memory are refused


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """Gives the files their names, which say how many there are, and writes the index if there are several."""
    if len(shards) == 1:
        os.rename(folder / "shard-0", folder / SINGLE)
        return
    weight_map = {}
    for i, sizes in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"shard-{i}", folder / name)
        weight_map.update(dict.fromkeys(sizes, name))
    total = sum(sum(sizes.values()) for sizes in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def import_hf(folder: str | Path, *, tied: Mapping[str, str] | None = None) -> files.LazyTensors:
    """The weights of a folder that `save_pretrained` or `export_hf` made, each read when it is asked for.

    Names, shapes and files are checked first; no pickle is ever read. As in transformers, `model.safetensors` goes
    before an index. The index's `total_size` is not trusted, and wrong in some published models. Links may lead
    out of the folder only as in a Hugging Face cache, from `snapshots/<revision>` to `blobs`.

    Args:
        folder: with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names.
        tied: {alias: name} adds names for tensors that the folder has once.

    Returns: {torch's own name: tensor on the CPU, in its own dtype}; `.shapes` has them as meta tensors, for specs.

    Raises: FileNotFoundError; OSError for a damaged file; ValueError for pickles, files outside the folder, and an
    index that does not say what the files hold, with every name that is missing or extra.
    """
    folder = Path(folder)
    where: dict[str, Path] = {}
    shapes: dict[str, torch.Tensor] = {}
    lines = []
    for file, expected in _files(folder).items():
        found = files.safetensors_shapes(file)
        if expected is not None:
            lines += [f"missing: {name}, which the index puts in {file.name}" for name in expected if name not in found]
            lines += [f"extra: {name} in {file.name}" for name in sorted(found.keys() - expected)]
        shapes.update(found)
        where.update(dict.fromkeys(found, file))
    if lines:
        raise ValueError(f"{folder / INDEX} is not what the files hold:\n" + "\n".join(lines))
    names = {name: name for name in shapes}
    _check_tied(
        files.LazyTensors(shapes, lambda name: files.read_safetensors(where[name], name)), tied or {}, f"{folder}"
    )
    names.update(tied or {})
    return files.LazyTensors(
        {name: shapes[source] for name, source in names.items()},
        lambda name: files.read_safetensors(where[names[name]], names[name]),
    )


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """Each file to read, and the names that the index puts in it, if there is one."""
    # snapshots/<revision>/x is a link to ../../blobs/y in the cache of huggingface_hub
    real = folder.resolve()
    blobs = (real.parent.parent / "blobs",) if real.parent.name == "snapshots" else ()
    if os.path.lexists(folder / SINGLE):
        return {files.inside(folder, SINGLE, also=blobs): None}
    if not os.path.lexists(folder / INDEX):
        _raise_nothing_to_read(folder)
    index = files.inside(folder, INDEX, also=blobs)
    wanted: dict[str, set[str]] = {}
    for name, file in _weight_map(index).items():
        wanted.setdefault(file, set()).add(name)
    for file in wanted:
        if file.endswith(PICKLES):
            raise ValueError(f"{index} names {file}: a pickle, which can run any code; save it again as safetensors")
    return {files.inside(folder, file, also=blobs): names for file, names in wanted.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(index.read_text())
    except ValueError as error:
        raise ValueError(f"{index} is no JSON: {error}") from error
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise ValueError(f"{index}: expected a `weight_map` of names to files")
    return weight_map


def _raise_nothing_to_read(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    pickles = sorted(x.name for x in folder.iterdir() if x.name.endswith(PICKLES))
    if pickles:
        raise ValueError(
            f"{folder} has only {pickles}: pickles, which can run any code; save them again as safetensors"
        )
    raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")
