"""Restoring a state: from the manifest each rank knows which bytes it needs, and reads only those."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, overload

import torch

from funzero.checkpoint import contents, disk
from funzero.checkpoint.agree import agree
from funzero.checkpoint.manifest import Leaf, Manifest, Piece, Span, read_manifest
from funzero.core import tree as tree_lib
from funzero.core.spec import Layout, Spec
from funzero.core.state import StateSpecs, TrainState
from funzero.executor.stores import keep

CHECKERS = 2  # threads
OPEN_FILES = 64  # at most, at a time


@dataclasses.dataclass(frozen=True)
class Report:
    """Where a checkpoint and `like` differ, by path: what `restore(strict=False)` left as it was in `like`.

    Attributes:
        missing: not in the checkpoint. unexpected: only there. mismatched: {path: what was expected and found}, for
            leaves of another shape or dtype. nodes: the same for containers of another kind, whose leaves are restored.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line for each difference."""
        return [
            *(f"missing: {n}" for n in self.missing),
            *(f"unexpected: {n}" for n in self.unexpected),
            *(f"{n}: {text}" for n, text in sorted({**self.mismatched, **self.nodes}.items())),
        ]


@overload
def restore(
    path: str | Path, like: TrainState, *, strict: Literal[True] = True, select: Any = None, cast: Any = ()
) -> TrainState: ...
@overload
def restore(
    path: str | Path, like: TrainState, *, strict: Literal[False], select: Any = None, cast: Any = ()
) -> tuple[TrainState, Report]: ...
def restore(path: str | Path, like: TrainState, *, strict: bool = True, select: Any = None, cast: Any = ()) -> Any:
    """Reads a checkpoint into a layout. A collective call.

    Args:
        path: what `save` made, on any number of ranks, in any layout.
        like: a state, or what `abstract_state` gives: says which leaves there are and where they go. Its window does
            not matter: `accum` comes as the file has it.
        strict: every leaf must be there, with its shape, dtype and kind of container, and no other. False: what does not
            fit stays as it is in `like`, and a `Report` says what.
        select: globs over paths, such as "params/**"; only these leaves are read, the others stay as in `like`. A window
            comes only if all of it is selected.
        cast: globs over paths whose floating leaves may have another dtype in the checkpoint; they are rounded.

    Returns: a new state, or with strict=False (state, Report). Beyond it a rank holds at most one leaf at a time.

    Raises, on every rank: ValueError with every path that does not fit; CheckpointError that names the damaged file and
    leaf; OSError. Nothing is changed.

    >>> import tempfile, funzero as fz
    >>> state = fz.init_state({"w": torch.ones(3)}, fz.sgd(0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fz.save(f"{folder}/first", state)
    ...     new = fz.restore(f"{folder}/first", fz.abstract_state({"w": torch.ones(3)}, fz.sgd(0.1)))
    >>> new.params["w"].tolist()
    [1.0, 1.0, 1.0]
    """
    error: Exception | None = None
    try:
        manifest = read_manifest(path)
        plan = Plan.of(manifest, like, _globs(select), _globs(cast) or ())
        plan.check(Path(path), strict)
        state = _read(Path(path), plan, like)
    except Exception as found:  # whatever it is, the peers wait to hear of it
        error = found
    agree(contents.specs_of(like).mesh, error)
    return state if strict else (state, plan.report)


def _globs(given: Any) -> tuple[str, ...] | None:
    return given if given is None else (given,) if isinstance(given, str) else tuple(given)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is read into which layout, and what stays.

    Attributes:
        read: leaves to read, by path. kept: what stays as in `like`. in_window: whether the result is in mid-window.
    """

    manifest: Manifest
    read: dict[str, Layout]
    kept: dict[str, torch.Tensor]
    in_window: bool
    report: Report

    @staticmethod
    def of(manifest: Manifest, like: TrainState, select: Iterable[str] | None, cast: Iterable[str]) -> "Plan":
        """Compares a manifest with `like`."""
        there = manifest.leaves
        own = {n for n in there if n.startswith("accum/aux/")}  # only the loss function knows these
        expected = contents.expected(like, contents.WINDOW in there)
        expected |= {n: _replicated(n, there[n], contents.specs_of(like)) for n in own}
        names = sorted({*expected, *there})
        chosen = set(names) if select is None else _matching(select, names, "select")
        window = {n for n in names if n.startswith("accum/")}
        in_window = contents.WINDOW in there and window <= chosen
        if not in_window:
            chosen -= window
        may_cast = _matching(cast, names, "cast")
        both = expected.keys() & there.keys() & chosen
        found = {n: _difference(expected[n], there[n], n in may_cast) for n in both}
        read = {n: expected[n] for n in expected if n in both and not found[n]}
        if not window <= read.keys():  # a window is restored as a whole, or not
            in_window, read = False, {n: x for n, x in read.items() if n not in window}
        report = Report(
            tuple(sorted((expected.keys() & chosen) - there.keys() - set(manifest.left_out))),
            tuple(sorted((there.keys() & chosen) - expected.keys())),
            {n: text for n, text in found.items() if text},
            {n: t for n, t in _kinds(like, manifest).items() if select is None or _holds(n, chosen)},
        )
        kept = {n: x for n, x in contents.leaves_of(like).items() if n not in read}
        return Plan(manifest, read, kept, in_window, report)

    def check(self, path: Path, strict: bool) -> None:
        """Raises ValueError if the checkpoint does not fit, or a leaf that should stay has no value."""
        lines = self.report.lines() if strict else []
        told = {*self.report.missing, *self.report.mismatched} if strict else set()
        without = [n for n, x in self.kept.items() if x.is_meta and n not in told]
        lines += [f"{n}: not read, and abstract in `like`; restore into a state that has it" for n in without]
        if lines:
            raise ValueError(f"{path} does not fit `like`:\n" + "\n".join(lines))


def _matching(globs: Iterable[str], names: list[str], what: str) -> set[str]:
    hits = tree_lib.match_globs(globs, names, f"restore({what}=)")
    return {n for n, hit in zip(names, hits, strict=True) if hit is not None}


def _replicated(name: str, leaf: Leaf, specs: StateSpecs) -> Layout:
    return Layout(name, leaf.shape, leaf.torch_dtype, Spec(), specs.mesh)


def _difference(layout: Layout, leaf: Leaf, may_cast: bool) -> str:
    """What is wrong with a leaf, or nothing."""
    floats = layout.dtype.is_floating_point and leaf.torch_dtype.is_floating_point
    if layout.shape == leaf.shape and (layout.dtype == leaf.torch_dtype or (may_cast and floats)):
        return ""
    want = tree_lib.dtype_and_shape(layout.dtype, layout.shape)
    return f"expected {want}, the checkpoint has {tree_lib.dtype_and_shape(leaf.torch_dtype, leaf.shape)}"


def _holds(node: str, chosen: set[str]) -> bool:
    return any(x.startswith(f"{node}/") for x in chosen)


def _kinds(like: TrainState, manifest: Manifest) -> dict[str, str]:
    """{path: what is wrong} of the containers that are of another kind."""
    want, have = contents.nodes(like), manifest.nodes
    return {
        n: f"expected a {want[n]}, the checkpoint has a {have[n]}"
        for n in sorted(want.keys() & have.keys())
        if want[n] != have[n]
    }


def _read(path: Path, plan: Plan, like: TrainState) -> TrainState:
    local = {n: x.detach() for n, x in plan.kept.items()}
    with Source(path, plan.manifest) as source:
        for name in sorted(plan.read, key=lambda n: source.place(n)):
            local[name] = source.local(name, plan.read[name])
    window = {n: x for n, x in local.items() if n.startswith("accum/")} if plan.in_window else {}
    return contents.assembled(like, local, window)


class Source:
    """The files of a checkpoint. Use in `with`, at whose end all that was asked for is there.

    One thread reads, in the order in which it was asked, which suits a disk; others check what it has read.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._manifest = path, manifest
        self._readers: dict[str, disk.Reader] = {}
        self._reading, self._checking = ThreadPoolExecutor(1), ThreadPoolExecutor(CHECKERS)
        self._pending: list[Future[Future[None]]] = []

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._reading.shutdown(cancel_futures=True)
            self._checking.shutdown(cancel_futures=True)
            self._close()

    def _close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for check in [read.result() for read in pending]:
            check.result()

    def place(self, name: str) -> tuple[str, int]:
        """Where a leaf begins: to read leaves in the order of their files."""
        return min(((p.file, p.at) for p in self._manifest.leaves[name].pieces), default=("", 0))

    def local(self, name: str, layout: Layout) -> torch.Tensor:
        """What this rank holds of a leaf under a layout; its values are there when the block ends."""
        if layout.spec.unreduced and layout.mesh.index(layout.spec.unreduced):
            return keep(torch.zeros(layout.local_shape, dtype=layout.dtype), layout)
        lo, hi = layout.bounds(layout.index) if layout.is_flat else (0, layout.n)
        box = tuple((s.start, s.stop) for s in layout.box)
        read = self._range(name, box, lo, hi).view(layout.local_shape)
        if read.dtype == layout.dtype and layout.mesh.device.type == "cpu" and layout.spec.memory == "device":
            return read
        self._wait()
        return keep(read.to(layout.dtype), layout)

    def whole(self, name: str) -> torch.Tensor:
        """A whole leaf in host memory."""
        leaf = self._manifest.leaves[name]
        out = self._range(name, tuple((0, n) for n in leaf.shape), 0, leaf.numel).view(leaf.shape)
        self._wait()
        return out

    def _range(self, name: str, box: tuple[Span, ...], lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a box of a leaf, in row-major order: 1-D, in host memory."""
        leaf = self._manifest.leaves[name]
        if hi == lo or any(p.box == box for p in leaf.pieces):
            return self._stored(name, leaf, box, lo, hi)
        inner = math.prod(b - a for a, b in box[1:])
        first, end = lo // inner, math.ceil(hi / inner)
        wanted = ((box[0][0] + first, box[0][0] + end), *box[1:])  # the rows of the box that have these elements
        out = torch.empty([b - a for a, b in wanted], dtype=leaf.torch_dtype)
        for stored in dict.fromkeys(p.box for p in leaf.pieces):
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, stored, strict=True)]
            if all(a < b for a, b in common):
                self._copy(out, wanted, stored, common, name, leaf)
        part = out.view(-1)[lo - first * inner : hi - first * inner]
        return part if len(part) == out.numel() else part.clone()  # a view would keep all of it alive

    def _copy(
        self,
        out: torch.Tensor,
        wanted: tuple[Span, ...],
        stored: tuple[Span, ...],
        common: list[Span],
        name: str,
        leaf: Leaf,
    ) -> None:
        """Fills what `out`, the box `wanted`, has in common with a stored box."""
        inner = math.prod(b - a for a, b in stored[1:])
        rows = slice(common[0][0] - stored[0][0], common[0][1] - stored[0][0])
        part = self._stored(name, leaf, stored, rows.start * inner, rows.stop * inner)
        self._wait()
        part = part.view(-1, *(b - a for a, b in stored[1:]))
        held = ((common[0][0], common[0][1]), *stored[1:])
        out[_within(common, wanted)] = part[_within(common, held)]

    def _stored(self, name: str, leaf: Leaf, box: tuple[Span, ...], lo: int, hi: int) -> torch.Tensor:
        """Elements [lo, hi) of a box that is stored."""
        out = torch.empty(hi - lo, dtype=leaf.torch_dtype)
        size, memory = out.element_size(), disk.bytes_of(out)
        for piece in leaf.pieces:
            a, b = max(lo, piece.range[0]), min(hi, piece.range[1])
            if piece.box == box and a < b:
                begin = (a - piece.range[0]) * size
                self._submit(name, piece, begin, size, memory[(a - lo) * size : (b - lo) * size])
        return out

    def _submit(self, name: str, piece: Piece, begin: int, itemsize: int, out: memoryview) -> None:
        if piece.file not in self._readers:
            if len(self._readers) == OPEN_FILES:
                self._wait()
                self._close()
            self._readers[piece.file] = disk.Reader(self._path / piece.file, self._manifest.files[piece.file])
        reader, size = self._readers[piece.file], piece.count * itemsize
        for lo, hi in disk.spans(begin, begin + len(out)):
            part = out[lo - begin : hi - begin]
            self._pending.append(self._reading.submit(self._read, reader, (name, piece, size, lo, part)))

    def _read(self, reader: disk.Reader, what: tuple[str, Piece, int, int, memoryview]) -> Future[None]:
        return self._checking.submit(reader.read(*what))


def _within(box: Iterable[Span], outer: Iterable[Span]) -> tuple[slice, ...]:
    """Where a box lies in another."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
