"""What the tests share: a small GPT, and the bytes that a real step has alive at most, seen op by op."""

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funzero as fz
from funzero.executor.stores import DISK
from tests.benchmarks.work import GPT

SMALL = {"vocab": 512, "context": 64, "width": 128, "heads": 4, "layers": 3}
LENGTH = 64


class Living(TorchDispatchMode):
    """Bytes of the storages that ops have made within the block: now, and at most."""

    def __init__(self, before: Any = ()):
        super().__init__()
        self.now = self.peak = 0
        self._seen = {x.untyped_storage()._cdata: x.untyped_storage() for x in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is not torch.Tensor for t in types):  # stand-ins and leaves on disk see to it themselves
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._lazy_clone.default:  # it has no memory until somebody writes to it
            self._seen[out.untyped_storage()._cdata] = out.untyped_storage()
            return out
        for x in torch.utils._pytree.tree_leaves(out):
            if type(x) is torch.Tensor and x.device.type == "cpu":
                self._made(x.untyped_storage())
        return out

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, nbytes: int) -> None:
        del self._seen[key]
        self.now -= nbytes


def model_and_batch(rows: int = 4) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    """The model, and a batch of tokens and labels."""
    torch.manual_seed(0)
    tokens = torch.randint(0, SMALL["vocab"], (rows, LENGTH))
    return GPT(**SMALL), (tokens, tokens.roll(1, 1))


def setup(mesh: fz.Mesh, stage: int, tx: fz.Transform, memory: Any = None, folder: str | None = None, **options: Any):
    """Params, specs, loss, batch and the plan of a step with these options of `make_step`."""
    model, batch = model_and_batch(4 * options.get("accumulate", 1))
    params = fz.split_module(model)[0]
    precision = options.get("precision")
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, precision=precision)
    if memory:
        specs = fz.with_memory(specs, memory, folder=folder)

    def loss_fn(p: Any, b: Any) -> torch.Tensor:
        return fz.functional_call(model, p, *b)

    abstract = fz.abstract_state(params, tx, specs=specs, precision=precision)
    return params, specs, loss_fn, batch, fz.plan(loss_fn, abstract, batch, tx=tx, **options)


def grown(mesh: fz.Mesh, stage: int, tx: fz.Transform, memory: Any = None, folder: str | None = None, **options: Any):
    """The plan, the most bytes beside the state over three steps of a real run, and what the last one read and wrote."""
    params, specs, loss_fn, batch, made = setup(mesh, stage, tx, memory, folder, **options)
    store = DISK.in_folder(folder) if folder else None
    state = fz.init_state(params, tx, specs=specs, precision=options.get("precision"))
    step = fz.make_step(loss_fn, tx, specs=specs, **options)
    seen, moved = [], []
    for _ in range(3):
        gc.collect()
        before = counted(store)
        leaves = [x for x in fz.tree.leaves(state) if type(x) is torch.Tensor]
        with Living([*leaves, *batch]) as living:
            state, _ = step(state, batch)
        seen.append(living.peak)
        moved.append(tuple(b - a for a, b in zip(before, counted(store), strict=True)))
        assert bool(torch.isfinite(fz.tree.leaves(state.params)[0]).all())
    return made, max(seen), moved[-1]


def counted(store: Any) -> tuple[int, int]:
    """Bytes that a `DiskStore` has read and written so far."""
    return (store.bytes_read, store.bytes_written) if store else (0, 0)
