"""Saving a state: every rank writes its share into a temporary folder, which is renamed when all of it is on disk.

[Note: a name means complete] The steps are: a temporary folder beside the name; each rank's file, synced; a small file in
which the rank says what it wrote; when all ranks have, the manifest by the first rank, synced; the rename, synced. A
crash before the rename leaves a folder that no reader looks at, and the next save to that name removes it. Ranks tell
each other through these files and not through collectives, so the same steps serve a save in the background.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from funzero.checkpoint import contents, disk
from funzero.checkpoint.agree import agree
from funzero.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    File,
    Leaf,
    Manifest,
    Part,
    Piece,
    dtype_name,
    encode,
    read_part,
)
from funzero.checkpoint.shares import Share, shares
from funzero.core.mesh import Mesh
from funzero.core.spec import Layout
from funzero.core.state import Accumulator, TrainState
from funzero.core.version import __version__
from funzero.executor.disk import DiskLeaf

_PART, _FAILED = ".part", ".failed"
AFTER_THE_END_S = 60.0  # how long a save in the background outlives a script that has ended


@dataclasses.dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written. `folder`: the temporary one. `path`: its name to be."""

    folder: Path
    path: Path
    mesh: Mesh

    @property
    def rank(self) -> int:
        """This rank."""
        return self.mesh.rank


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What this rank writes, in host memory or mapped; and the manifest without pieces."""

    manifest: Manifest
    items: list[tuple[str, Share, torch.Tensor]]


def save(
    path: str | Path,
    state: TrainState,
    *,
    extra: Any = None,
    overwrite: bool = False,
    trainable_only: bool = False,
) -> None:
    """Writes a state as global leaves, and returns when all of it is on disk. A collective call.

    Args:
        path: the folder to make. state: any layout, also in mid-window.
        extra: anything JSON can say, such as {"data": loader.state_dict()}; `read_manifest(path).extra` has it.
        overwrite: replace a checkpoint of that name; the old one stays until the new is complete.
        trainable_only: leave out frozen params; `restore` then takes them from `like`.

    Raises on every rank, with the first cause: FileExistsError, OSError, TypeError for an `extra` that is not JSON.
    """
    draft = begin(Path(path), contents.specs_of(state).mesh, extra, overwrite)
    job = Job(draft, overwrite)
    job.start(lambda: take(state, extra, trainable_only=trainable_only))
    job.wait()


class Job:
    """One save under way, in a thread of its own: this rank's part, and on the first rank what makes it complete.

    Args:
        after: to be run on the first rank when the checkpoint is complete.
    """

    def __init__(self, draft: Draft, overwrite: bool, after: Callable[[], object] = lambda: None):
        self._draft, self._overwrite, self._after = draft, overwrite, after
        self._written, self._cancelled = threading.Event(), threading.Event()
        self._part_error: Exception | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, take: Callable[[], Snapshot]) -> None:
        """Takes the snapshot now, and writes it in the thread."""
        try:
            snapshot = take()
        except Exception as error:
            self._fail(error)
            return
        except BaseException as error:
            self._fail(RuntimeError(f"interrupted by {type(error).__name__}"))
            raise
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="funzero-save")
        self._thread.start()

    def _fail(self, error: Exception) -> None:
        self._part_error = error
        with contextlib.suppress(OSError):
            report_failure(self._draft, error)
        self._written.set()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            write_part(self._draft, snapshot)
        except Exception as error:  # raised by `wait`
            self._fail(error)
            return
        self._written.set()
        if self._draft.rank:
            return
        try:
            await_parts(self._draft, self._cancelled)
            commit(self._draft, snapshot.manifest, self._overwrite)
        except Exception as error:
            self._error = error
            return
        try:
            self._after()
        except Exception as error:
            self._error = OSError(f"{self._draft.path} is complete, but older ones could not be removed: {error}")

    def wait(self) -> None:
        """Returns when the checkpoint is complete; raises the first cause on all ranks. A collective call."""
        mesh = self._draft.mesh
        try:
            self._written.wait()
            agree(mesh, self._part_error)  # a rank that was killed is found here
            if self._thread is not None:
                self._thread.join()
            agree(mesh, self._error)
        except BaseException:
            self._cancelled.set()
            if self._thread is not None:
                self._thread.join()
            if self._draft.rank == 0:
                shutil.rmtree(self._draft.folder, ignore_errors=True)
            raise


def begin(path: Path, mesh: Mesh, extra: Any, overwrite: bool, clean: Callable[[], None] | None = None) -> Draft:
    """Makes the temporary folder. A collective call.

    Args:
        clean: what removes left-overs, on the first rank; default: of this name.
    """
    error: Exception | None = None
    token = uuid.uuid4().hex[:8] if mesh.rank == 0 else ""
    try:
        json.dumps(extra, allow_nan=False, ensure_ascii=False).encode()
        if mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            clean() if clean is not None else clean_up(path)
            if path.is_symlink():
                raise FileExistsError(f"{path} is a link; give a name of its own")
            if not overwrite and path.exists():
                raise FileExistsError(f"{path} exists; give another name or overwrite=True")
            _draft_folder(path, token).mkdir()
    except (OSError, TypeError, ValueError) as found:
        error = found if isinstance(found, OSError) else TypeError(f"extra: {found}; give what JSON can say")
    agree(mesh, error)
    token = mesh.exchange_text(token)[0]
    return Draft(_draft_folder(path, token), path, mesh)


def _draft_folder(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token}.tmp")


def clean_up(path: Path) -> None:
    """Removes what saves to this name left behind when they were cut short."""
    names = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp(\.old)?")
    found = [x for x in path.parent.iterdir() if names.fullmatch(x.name)]
    for left in sorted(found, key=lambda x: x.name, reverse=True):
        if left.name.endswith(".old") and not path.exists():
            os.rename(left, path)  # an exchange in two steps was cut short between them
        else:
            shutil.rmtree(left)


def take(
    state: TrainState,
    extra: Any,
    *,
    metrics: Mapping[str, float] | None = None,
    trainable_only: bool = False,
    copy: bool = False,
) -> Snapshot:
    """This rank's share of a state. A collective call in mid-window.

    Args:
        metrics: go into the manifest, as `extra` does.
        copy: also copy what is in host memory already, so that the state may change.
    """
    specs = contents.specs_of(state)
    left_out = contents.frozen(specs) if trainable_only else frozenset()
    with specs.mesh.guard() if isinstance(state.accum, Accumulator) else contextlib.nullcontext():
        leaves = [(layout, get) for layout, get in contents.local_leaves(state) if layout.path not in left_out]
        layouts = [layout for layout, _ in leaves]
        _check_names(layouts)
        own: dict[int, list[Share]] = {}
        for share in shares(layouts):
            own.setdefault(share.leaf, []).append(share)
        items = []
        for i, (layout, get) in enumerate(leaves):
            x = get().detach()  # a sum over ranks goes as soon as this rank's share of it is cut
            if isinstance(x, DiskLeaf) and not copy:
                x = x.mapped()
            items += [
                (layout.path, share, _part(layout, x, share, copy or _summed(layout))) for share in own.get(i, ())
            ]
    manifest = Manifest(
        format=FORMAT,
        funzero=__version__,
        mesh=specs.mesh.describe(),
        step=int(state.step),
        saved=time.time(),
        leaves={x.path: Leaf(dtype=dtype_name(x.dtype), shape=x.shape, layout=x.columns()[2]) for x in layouts},
        nodes=contents.nodes(state),
        left_out=tuple(sorted(left_out)),
        files={},
        extra=json.loads(json.dumps(extra)),
        metrics=dict(metrics or {}),
    )
    return Snapshot(manifest, items)


def _check_names(layouts: list[Layout]) -> None:
    for layout in layouts:
        try:
            layout.path.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{layout.path!r}: a name that is no text cannot be saved; rename the leaf") from None


def _summed(layout: Layout) -> bool:
    return layout.path.startswith("accum/")


def _part(layout: Layout, local: torch.Tensor, share: Share, copy: bool) -> torch.Tensor:
    begin = layout.bounds(layout.index)[0] if layout.is_flat else 0
    lo, hi = share.range
    part = local.reshape(-1)[lo - begin : hi - begin]
    if hi - lo == layout.n:
        part = part.view(layout.piece_shape)
    return part.resolve_conj().resolve_neg().to("cpu", copy=copy).contiguous()


def write_part(draft: Draft, snapshot: Snapshot) -> None:
    """Writes this rank's file, and says so."""
    name = f"{draft.rank:05d}.safetensors"
    keys: dict[str, None] = {}
    for path, share, _ in snapshot.items:
        key = _key(path, share, snapshot.manifest.leaves[path])
        while key in keys:  # a leaf may be called like a part of another
            key += "'"
        keys[key] = None
    pieces: dict[str, tuple[Piece, ...]] = {}
    files = {}
    if keys:
        items = [disk.Item(key, x) for key, (_, _, x) in zip(keys, snapshot.items, strict=True)]
        files[name], places = disk.write_file(draft.folder / name, items)
        for (path, share, _), (at, crc) in zip(snapshot.items, places, strict=True):
            piece = Piece(file=name, at=at, box=share.box, range=share.range, crc32=crc)
            pieces[path] = (*pieces.get(path, ()), piece)
    disk.write_small(draft.folder / f"{draft.rank:05d}{_PART}", encode(Part(pieces=pieces, files=files)))


def _key(path: str, share: Share, leaf: Leaf) -> str:
    """The name of a piece within its file: the leaf's path, and which part of it."""
    whole = all(b - a == n for (a, b), n in zip(share.box, leaf.shape, strict=True))
    box = "" if whole else "[" + ",".join(f"{a}:{b}" for a, b in share.box) + "]"
    size = 1
    for a, b in share.box:
        size *= b - a
    part = "" if share.range == (0, size) else f"[{share.range[0]}:{share.range[1]}]"
    return path + box + part


def report_failure(draft: Draft, error: BaseException) -> None:
    """Tells the first rank that this one's part will not come."""
    disk.write_small(draft.folder / f"{draft.rank:05d}{_FAILED}", f"{type(error).__name__}: {error}".encode())


def await_parts(draft: Draft, cancelled: threading.Event) -> None:
    """Waits until every rank has written its part; raises OSError with the first cause, or when a rank is gone."""
    ended: float | None = None
    while True:
        names = {x.name for x in os.scandir(draft.folder)}
        for name in sorted(names):
            if name.endswith(_FAILED) and not name.startswith("."):
                raise OSError(f"rank {int(name.split('.')[0])}: {(draft.folder / name).read_text()}")
        if all(f"{r:05d}{_PART}" in names for r in range(draft.mesh.world)):
            return
        ended = None if threading.main_thread().is_alive() else ended or time.monotonic()
        late = ended is not None and time.monotonic() - ended > AFTER_THE_END_S
        if late or _is_dead(draft.mesh) or cancelled.wait(0.01):
            raise OSError(f"{draft.path}: the save was given up")


def _is_dead(mesh: Mesh) -> bool:
    return mesh.comm is not None and mesh.comm.dead is not None


def commit(draft: Draft, manifest: Manifest, overwrite: bool) -> None:
    """Puts the parts together and gives the folder its name; on the first rank, when all parts are there."""
    pieces: dict[str, tuple[Piece, ...]] = {}
    files: dict[str, File] = {}
    for rank in range(draft.mesh.world):
        path = draft.folder / f"{rank:05d}{_PART}"
        part = read_part(path)
        files |= part.files
        for name, found in part.pieces.items():
            pieces[name] = (*pieces.get(name, ()), *found)
        path.unlink()
    leaves = {n: x.model_copy(update={"pieces": pieces.get(n, ())}) for n, x in manifest.leaves.items()}
    disk.write_small(draft.folder / MANIFEST, encode(manifest.model_copy(update={"leaves": leaves, "files": files})))
    disk.sync(draft.folder)
    if overwrite and draft.path.exists():
        disk.swap(draft.folder, draft.path)
        disk.sync(draft.path.parent)
        shutil.rmtree(draft.folder)
    else:
        os.rename(draft.folder, draft.path)  # fails if somebody has made a folder of that name with files in it
        disk.sync(draft.path.parent)
