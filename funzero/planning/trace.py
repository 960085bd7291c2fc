"""An abstract run of a loss and its backward: what lives when, which param is used when, and when gradients land.

[Note: the abstract run] The loss runs on fake tensors, which have shapes and storages but no memory. A dispatch mode sees
every op: a storage that an op makes counts from then on until nothing refers to it, views count nothing, and what was
there before (params, batch, constants) never counts. So the figures are those of an eager run to the byte, but for what
kernels take within an op. The anchors are the executor's own, so gradients land when they do there.
"""

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from funzero.core import tree as tree_lib
from funzero.core.scope import scope
from funzero.data import split
from funzero.executor.anchors import anchored, new_source
from funzero.executor.micro import MicroBatch, call_loss
from funzero.executor.plan import Plan
from funzero.transforms.grad import Takes, gradients

CPU = torch.device("cpu")
DEVICE_OF = torch.ops.prim.device.default


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens to a param in a micro-batch.

    Attributes:
        kind: "use", "grad" (its complete gradient lands, once) or "end". leaf: its place among the params.
        backward: whether it comes after the loss. high: the most bytes that lived since the event before: activations,
        and gradients that have not landed. now: those at the event, a landing gradient no longer counted.
        held: bytes of the landing gradient's memory. dense: whether it is contiguous.
        waiting: of `high`, what gradients take that land at this event or later.
    """

    kind: str
    leaf: int
    backward: bool
    high: int
    now: int
    held: int = 0
    dense: bool = True
    waiting: int = 0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One micro-batch.

    Attributes:
        events: in order. batch_bytes: what casting the whole batch of the rank to the compute dtype takes.
    """

    events: tuple[Event, ...]
    batch_bytes: int

    @property
    def uses(self) -> list[int]:
        """The params in order of use."""
        return [e.leaf for e in self.events if e.kind == "use"]

    @property
    def activations(self) -> int:
        """The most bytes of activations at a time."""
        return max((e.high - e.waiting for e in self.events), default=0)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class Recorder(TorchDispatchMode):
    """Records the storages that ops make within its block, and uses of params.

    Args:
        params: whole pieces; their memory does not count.
    """

    def __init__(self, params: list[torch.Tensor]):
        super().__init__()
        self.events: list[Event] = []
        self.backward = False
        self._leaf_of = {x.untyped_storage()._cdata: i for i, x in enumerate(params)}
        self._others: dict[int, Any] = {}  # kept alive: a new storage could get the address of an old one
        self._live: dict[int, tuple[Any, int, int]] = {}  # a weak reference, bytes, how many events came before
        self._spans: list[tuple[int, int, int]] = []  # of gradients: first event at which they live, end, bytes
        self._now = self._high = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is DEVICE_OF:  # asked by autograd, more often than any op
            return args[0].fake_device
        kwargs = kwargs or {}
        for x in _tensors((args, kwargs)):
            key = x.untyped_storage()._cdata
            leaf = self._leaf_of.get(key)
            if leaf is not None:
                if not func.is_view:
                    self._use(leaf)
            elif key not in self._live and key not in self._others:
                self._others[key] = x.untyped_storage()
        out = func(*args, **kwargs)
        for x in _tensors(out):
            self._made(x)
        return out

    def _made(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._leaf_of or key in self._others:
            return
        nbytes = storage.nbytes()
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key)), nbytes, len(self.events)
        self._now += nbytes
        self._high = max(self._high, self._now)

    def _gone(self, key: int) -> None:
        found = self._live.pop(key, None)
        if found is not None:
            self._now -= found[1]

    def _use(self, leaf: int) -> None:
        last = self.events[-1] if self.events else None
        if last is None or (last.kind, last.leaf, last.backward) != ("use", leaf, self.backward):
            self._note("use", leaf)

    def _note(self, kind: str, leaf: int, **more: Any) -> None:
        self.events.append(Event(kind, leaf, self.backward, self._high, self._now, **more))
        self._high = self._now

    def grad(self, leaf: int, grad: torch.Tensor) -> None:
        """A complete gradient has come; from here on it is not an activation."""
        storage = grad.untyped_storage()
        _, held, born = self._live.get(storage._cdata, (None, 0, len(self.events)))
        self._gone(storage._cdata)
        self._note("grad", leaf, held=held, dense=grad.is_contiguous())
        self._spans.append((born + 1, len(self.events), held))

    def end(self) -> tuple[Event, ...]:
        """The end of the backward: all events."""
        self._note("end", -1)
        change = [0] * (len(self.events) + 1)
        for first, end, held in self._spans:
            if first < end:
                change[first] += held
                change[end] -= held
        sums = itertools.accumulate(change)
        return tuple(dataclasses.replace(e, waiting=n) for e, n in zip(self.events, sums, strict=False))


@contextlib.contextmanager
def _keys_without_values() -> Iterator[None]:
    """Within the block a random key, which has no value, reads as zeros: what draws take does not depend on it."""
    usual = FakeTensor.tolist

    def tolist(x: Any) -> Any:
        return [0, 0] if x.dtype == torch.int64 and tuple(x.shape) == (2,) else usual(x)

    with mock.patch.object(FakeTensor, "tolist", tolist):
        yield


def _like(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        dtype = leaf.dtype if isinstance(leaf.dtype, torch.dtype) else torch.from_numpy(leaf[:0]).dtype
        return torch.empty(tuple(leaf.shape), dtype=dtype, device=CPU)
    return leaf


def _abstract_batch(plan: Plan, batch: Any, accumulate: int) -> tuple[Any, int]:
    """The first micro-batch in the compute dtype, and the bytes that casting the whole batch takes."""
    leaves = tree_lib.map(_like, batch)
    if plan.policy.compute is None:
        return split(leaves, accumulate)[0], 0
    cast = tree_lib.map(
        lambda x: x.to(plan.policy.compute_dtype(x.dtype)) if isinstance(x, torch.Tensor) else x, leaves
    )
    pairs = zip(tree_lib.leaves(leaves), tree_lib.leaves(cast), strict=True)
    return split(cast, accumulate)[0], sum(b.nbytes for a, b in pairs if a is not b)


def trace(loss_fn: Callable[..., Any], plan: Plan, batch: Any, accumulate: int, remat: tuple[Any, ...]) -> Timeline:
    """The timeline of one micro-batch of a rank. It takes no memory that grows with the model.

    Args:
        batch: this rank's whole batch: tensors on any device (meta too), or what has a shape and a dtype.
        remat: checked rules, as in `StepOptions`.

    Raises ValueError when the loss looks at values, which there are none of.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _keys_without_values():
            return _trace(loss_fn, plan, batch, accumulate, remat)
    except DataDependentOutputException as error:
        raise ValueError(
            f"plan: loss_fn looks at the values of a tensor ({error.func}), and an abstract run has none; "
            "compute with tensors instead, or plan a loss that leaves this out"
        ) from error


def _trace(loss_fn: Callable[..., Any], plan: Plan, batch: Any, accumulate: int, remat: tuple[Any, ...]) -> Timeline:
    layouts = zip(plan.specs.params.layouts, plan.compute_dtypes, strict=True)
    leaves = [torch.empty(x.piece_shape, dtype=d, device=CPU) for x, d in layouts]
    given, cast_bytes = _abstract_batch(plan, batch, accumulate)
    buffers = tree_lib.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=CPU), plan.specs.buffers.abstract())
    micro = MicroBatch(given, torch.zeros(2, dtype=torch.int64), buffers)
    recorder, trained = Recorder(leaves), plan.place_of_trained
    recording = contextlib.ExitStack()
    with recording, scope(False, remat) as opened, torch.enable_grad():
        opened.params = leaves
        sources, held = [], []
        for i, x in enumerate(leaves):
            if i not in trained:
                held.append(x)
                continue
            sources.append(new_source(CPU, x.dtype))
            held.append(anchored(sources[-1], x, functools.partial(recorder.grad, i)))
        params = tree_lib.unflatten(plan.specs.params.treedef, held)
        recording.enter_context(recorder)  # not before: to make an anchor is no use
        with _casting(plan):
            loss = call_loss(loss_fn, Takes.of(loss_fn), params, micro)
        if remat and not opened.rematted:
            raise ValueError("remat: loss_fn called no module by fz.functional_call; wrap what it calls in fz.remat")
        opened.in_backward = recorder.backward = True
        gradients(loss.total, sources)
        return Timeline(recorder.end(), cast_bytes)


def _casting(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    if plan.policy.cast != "autocast":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=plan.policy.compute)
