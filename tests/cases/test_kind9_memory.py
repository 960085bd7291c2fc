"""Things that stay alive."""

import functools
import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import funzero as fz
from tests.cases.training import OPTIMIZERS, flat, mesh_of
from tests.ranks import pool

DP = (("dp", -1),)
STAGES = (0, 1, 2, 3)
LEAF = 100_003  # elements of a large leaf: no other tensor has so many


def live() -> list[torch.Tensor]:
    """All tensors with memory that Python objects hold. `type`, since `isinstance` asks proxies of all kinds."""
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return [x for x in found if x.device.type != "meta"]


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage: views of one memory count once."""
    with torch._C.DisableTorchFunctionSubclass():
        return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}


def settled(measure: Callable[[list[torch.Tensor]], Any]) -> Any:
    """The least that `measure` finds of the live tensors, while the threads of the backend let go of theirs."""
    samples = [measure(live())]
    for _ in range(4):
        time.sleep(0.02)
        samples.append(measure(live()))
        if samples[-1] == samples[-2]:
            break
    return min(samples)


def count_and_bytes(tensors: list[torch.Tensor]) -> tuple[int, int]:
    return len(tensors), sum(storages(tensors).values())


def bytes_beyond(others: dict[int, int], tensors: list[torch.Tensor]) -> int:
    return sum(n for key, n in storages(tensors).items() if key not in others)


def groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map) if torch.distributed.is_initialized() else 0


class Net(nn.Module):
    """A tied weight, BatchNorm buffers, an activation with a second derivative, a leaf that is gathered on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.b.weight = self.a.weight
        self.norm, self.large = nn.BatchNorm1d(6), nn.Parameter(torch.zeros(20_011))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(self.norm(x)))))) + self.large.mean()


def second_order(params: Any, batch: torch.Tensor, buffers: Any) -> fz.Loss:
    """The output and the square of its slope at the input, through a module on meta."""
    x = batch.clone().requires_grad_()
    y, new = fz.functional_call(MODULE, params, x, buffers=buffers, training=True)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return fz.Loss((y**2).sum() + (slope**2).sum(), weight=len(batch), buffers=new, aux={"y": y.detach().mean()})


def first_order(params: Any, batch: torch.Tensor, buffers: Any) -> fz.Loss:
    y, new = fz.functional_call(MODULE, params, batch, buffers=buffers, training=True)
    return fz.Loss((y**2).sum(), weight=len(batch), buffers=new)


with torch.device("meta"):
    MODULE = Net()


def init(mesh: fz.Mesh, tx: fz.Transform, stage: int) -> fz.TrainState:
    torch.manual_seed(0)
    params, buffers = fz.split_module(Net())
    specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage, buffers=buffers)
    return fz.init_state(params, tx, specs=specs, buffers=buffers)


LOSSES = {"plain": first_order, "second order": second_order}


def fifty_steps(rank: int, world: int, stage: int, name: str, donate: bool) -> dict[str, Any]:
    """What is alive at steps 10 and 50; what is left of all leaves once the state is dropped."""
    mesh = mesh_of(DP)
    gc.collect()
    files = len(os.listdir("/proc/self/fd")), groups()
    tx = fz.adamw(fz.schedules.warmup_cosine(1e-2, warmup=5, total=50), weight_decay=0.1)
    state = init(mesh, tx, stage)
    options = {"accumulate": 2 if name != "plain" else 1, "max_norm": 1.0, "donate": donate}
    step, seen, refs = fz.make_step(LOSSES[name], tx, **options), {}, []
    if name == "plain":
        gc.disable()
    try:
        for t in range(1, 51):
            state, metrics = step(state, torch.full((4, 6), 0.1 * t) + torch.arange(6) * 0.1)
            refs += [weakref.ref(x) for x in fz.tree.leaves(state)]
            if t in (10, 50):
                if name != "plain":
                    gc.collect()
                seen[t] = settled(count_and_bytes)
        ended = int(state.step)
        del state, metrics
        if name != "plain":
            gc.collect()
        alive = sum(r() is not None for r in refs)
    finally:
        gc.enable()
    return {"seen": seen, "alive": alive, "step": ended, "files": (files, (len(os.listdir("/proc/self/fd")), groups()))}


CELLS = [
    (1, 0, "plain", True),
    (1, 0, "second order", False),
    (2, 0, "plain", True),
    (2, 2, "plain", False),
    (2, 3, "plain", True),
    (2, 1, "second order", True),
    (2, 3, "second order", True),
    (2, 3, "second order", False),
]


@pytest.mark.parametrize("world, stage, name, donate", CELLS)
def test_br45_nothing_stays_alive(world, stage, name, donate):
    """The plain step leaves no cycle: there the collector is off."""
    for rank, found in enumerate(pool(world).run(fifty_steps, stage, name, donate)):
        assert found["step"] == 50
        assert found["seen"][10] == found["seen"][50], f"rank {rank}: (tensors, bytes) {found['seen']}"
        assert found["alive"] == 0, f"rank {rank}: {found['alive']} leaves outlive their state"
        assert found["files"][0] == found["files"][1], f"rank {rank}: (files, groups) {found['files']}"


def leaf_sized() -> int:
    """How many buffers of the size of a leaf there are."""
    return settled(lambda tensors: sum(n >= LEAF // 3 * 4 for n in storages(tensors).values()))


def probe(seen: list[int], others: int) -> fz.Transform:
    """A transform that counts the leaf-sized buffers there are when the optimizer runs, beside those that were there before:
    modules of examples stay in a process."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        seen.append(leaf_sized() - others)
        return updates, state

    return fz.Transform(lambda params: {}, update, needs="element", name="probe")


def buffers_at_update(rank: int, world: int) -> dict[str, Any]:
    gc.collect()  # what earlier tests have left in this process
    mesh, out, others = mesh_of(DP), {}, leaf_sized()
    for stage, k in itertools.product(STAGES, (1, 2)):
        seen: list[int] = []
        tx, params = fz.chain(probe(seen, others), fz.scale(-0.1)), {"w": torch.zeros(LEAF)}
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state = fz.init_state(params, tx, specs=specs)
        del params
        step = fz.make_step(lambda p, b: (p["w"] * b.sum()).sum(), tx, specs=specs, accumulate=k)
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
        out[f"stage {stage}, accumulate={k}"] = seen, len(fz.tree.leaves(state.accum))
        del state
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_br45_accumulate_1_adds_no_leaf_sized_buffer(world):
    """The param and its gradient, which the optimizer is about to use, and nothing else (half a leaf on 2 ranks)."""
    for rank, found in enumerate(pool(world).run(buffers_at_update)):
        for where, (seen, left) in found.items():
            assert seen == [2, 2], f"{where}, rank {rank} of {world}: {seen} buffers"
            assert left == 0, f"{where}, rank {rank} of {world}: the window is closed"


def state_bytes(rank: int, world: int, sizes: list[tuple[int, ...]]) -> list[tuple[str, int, int, int]]:
    """Bytes of all storages that came to life, and what the specs say, between steps."""
    mesh, out = mesh_of(DP), []
    for stage, name in itertools.product(STAGES, ("adamw", "momentum")):
        tx = OPTIMIZERS[name][0]()
        gc.collect()
        others = storages(live())
        params = {f"w{i}": torch.ones(s) for i, s in enumerate(sizes)}
        specs = fz.zero_specs(fz.eval_shape(params), tx, mesh, stage=stage)
        state, step = fz.init_state(params, tx, specs=specs), fz.make_step(quadratic, tx, accumulate=2)
        del params
        for t in (0, 2):
            for _ in range(t):
                state = step(state, torch.ones(4))[0]
            gc.collect()
            there = settled(functools.partial(bytes_beyond, others))
            scalars = sum(x.nbytes for x in (state.step, state.skips, state.key))
            out.append(
                (f"stage {stage}, {name}", t, there, specs.params.local_bytes + specs.opt_state.local_bytes + scalars)
            )
        del state, step
    return out


def quadratic(params: Any, x: torch.Tensor) -> fz.Loss:
    return fz.Loss(sum((w**2).sum() for w in params.values()) * x.sum(), weight=len(x))


@pytest.mark.parametrize("sizes", [[(LEAF,), (50_000, 2)], [(7, 3), (100,), (), (999,)]], ids=["large", "small"])
def test_bytes_of_state_are_what_the_specs_say(sizes):
    for rank, found in enumerate(pool(2).run(state_bytes, sizes)):
        for where, t, there, right in found:
            assert there == right, f"{where}, after {t} steps, rank {rank}: {there} bytes, specs {right}"


def test_br45_plans_for_other_sets_of_used_leaves_do_not_pile_up():
    """Experts: each step uses another set of leaves. What is kept for each set must not grow with their number."""
    params = {f"expert{i}": torch.ones(50) for i in range(7)}
    tx, seen = fz.adam(0.1), {}
    state = fz.init_state(params, tx)

    def loss_fn(p: Any, chosen: Any) -> torch.Tensor:
        return sum((w**2).sum() for i, w in enumerate(p.values()) if chosen["set"] >> i & 1)

    step = fz.make_step(loss_fn, tx)
    for t in range(1, 128):
        state = step(state, {"set": t})[0]
        if t in (80, 127):
            gc.collect()
            seen[t] = settled(count_and_bytes)[0]
    assert seen[80] == seen[127], f"tensors alive after so many sets: {seen}"


def module_on_meta(rank: int, world: int) -> list[tuple[str, dict[str, int], dict[str, int], int]]:
    """A rank's bytes of each field of a state that was trained through a module on meta."""
    mesh, out = mesh_of(DP), []
    for stage in STAGES:
        tx = fz.adam(0.1)
        state = init(mesh, tx, stage)
        state, _ = fz.make_step(first_order, tx)(state, torch.arange(24.0).view(4, 6))
        specs = state.specs
        sizes = {
            f: sum(storages(fz.tree.leaves(getattr(state, f))).values()) for f in ("params", "opt_state", "buffers")
        }
        right = {f: getattr(specs, f).local_bytes for f in sizes}
        on_meta = all(p.device.type == "meta" for p in [*MODULE.parameters(), *MODULE.buffers()])
        out.append((f"stage {stage}", sizes, right, on_meta))
    return out


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_by_field_with_the_module_on_meta(world):
    results = pool(world).run(module_on_meta)
    for rank, found in enumerate(results):
        for where, sizes, right, on_meta in found:
            assert sizes == right, f"{where}, rank {rank} of {world}"
            assert on_meta, f"{where}: the module got memory"
    total = sum(found[3][1]["params"] for found in results)
    assert total == 4 * sum(p.numel() for p in MODULE.parameters()), "at stage 3 the ranks' pieces add up to one copy"
    assert flat(fz.eval_shape(fz.split_module(MODULE)[0])).keys() == dict(MODULE.named_parameters()).keys()
