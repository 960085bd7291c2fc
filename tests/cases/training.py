"""Cells: a short training run on ranks, and the same run in one process by plain torch autograd and torch.optim."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

import funzero as fz

OPTIMIZERS = {
    "sgd": (lambda: fz.sgd(0.1), lambda leaves: torch.optim.SGD(leaves, lr=0.1)),
    "momentum": (lambda: fz.sgd(0.1, momentum=0.9), lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9)),
    "adam": (lambda: fz.adam(0.1), lambda leaves: torch.optim.Adam(leaves, lr=0.1)),
    "adamw": (
        lambda: fz.adamw(0.1, weight_decay=0.1),
        lambda leaves: torch.optim.AdamW(leaves, lr=0.1, weight_decay=0.1),
    ),
    # no fused kernel knows this chain, so that the transforms themselves run
    "composed_adam": (
        lambda: fz.chain(fz.scale_by_adam(), fz.scale(-0.1)),
        lambda leaves: torch.optim.Adam(leaves, lr=0.1),
    ),
}


@dataclass(frozen=True)
class Cell:
    """One run. `params`: whole leaves. `rows`: of the global batch; `axes` and `axis` as in make_mesh and zero_specs."""

    name: str
    params: dict[str, torch.Tensor]
    stage: int = 3
    tx: str = "adam"
    accumulate: int = 1
    max_norm: float | None = None
    steps: int = 3
    rows: int = 24
    axes: dict[str, int] = field(default_factory=lambda: {"dp": -1})
    axis: Any = None


@dataclass(frozen=True)
class Result:
    """What came out of a run: whole leaves, by path."""

    params: dict[str, torch.Tensor]
    opt_state: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    local: dict[str, tuple[int, ...]] = field(default_factory=dict)
    recorded: dict[str, tuple[int, ...]] = field(default_factory=dict)


def quadratic(params: Any, batch: Any) -> fz.Loss:
    """The sum over samples x and all elements w of (w x - 1)^2; every element of every leaf has its own gradient."""
    total = sum(((w.reshape(-1, 1) * batch["x"] - 1) ** 2).sum() for w in params.values())
    return fz.Loss(total, weight=len(batch["x"]))


def batch_of(cell: Cell, t: int) -> dict[str, torch.Tensor]:
    """The global batch of step t."""
    return {"x": torch.linspace(0.5, 1.5, cell.rows, dtype=torch.float64) * (1 + 0.25 * t)}


def flat(tree: Any) -> dict[str, torch.Tensor]:
    """A tree as a dict by path."""
    return dict(zip(fz.tree.paths(tree), fz.tree.leaves(tree), strict=True))


@functools.cache
def mesh_of(axes: tuple[tuple[str, int], ...]) -> fz.Mesh:
    """The mesh with these axes, made once on each process: a mesh opens sockets."""
    return fz.make_mesh(**dict(axes))


def run_cell(cell: Cell) -> Result:
    """A cell on this rank."""
    mesh = mesh_of(tuple(cell.axes.items()))
    tx = OPTIMIZERS[cell.tx][0]()
    specs = fz.zero_specs(fz.eval_shape(cell.params), tx, mesh, stage=cell.stage, axis=cell.axis)
    state = fz.init_state(cell.params, tx, specs=specs)
    step = fz.make_step(quadratic, tx, specs=specs, accumulate=cell.accumulate, max_norm=cell.max_norm)
    losses, norms = [], []
    for t in range(cell.steps):
        state, metrics = step(state, fz.data.local(batch_of(cell, t), mesh, cell.accumulate))
        losses.append(metrics.loss.item())
        norms.append(metrics.grad_norm.item())
    return Result(
        flat(fz.gather(state.params, specs.params)),
        flat(fz.gather(state.opt_state, specs.opt_state)),
        losses,
        norms,
        {path: tuple(x.shape) for path, x in flat(state.params).items()},
        {layout.path: layout.shape for layout in specs.params.layouts},
    )


def run_cells(rank: int, world: int, cells: list[Cell]) -> list[Result]:
    """Many cells, for one call of the pool."""
    return [run_cell(cell) for cell in cells]


def reference(cell: Cell) -> Result:
    """The same run in one process, whole leaves and the whole batch at once."""
    leaves = {name: x.clone().requires_grad_() for name, x in cell.params.items()}
    optimizer = OPTIMIZERS[cell.tx][1](list(leaves.values()))
    losses, norms = [], []
    for t in range(cell.steps):
        optimizer.zero_grad()
        loss = quadratic(leaves, batch_of(cell, t))
        (loss.total / loss.weight).backward()
        norms.append(math.sqrt(sum(x.grad.square().sum().item() for x in leaves.values())))
        if cell.max_norm is not None:
            for x in leaves.values():
                x.grad *= min(1.0, cell.max_norm / norms[-1])
        optimizer.step()
        losses.append(loss.total.item() / loss.weight)
    return Result({name: x.detach() for name, x in leaves.items()}, {}, losses, norms)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def assert_close(found: torch.Tensor, expected: torch.Tensor, where: str, tolerance: float = 1e-12) -> None:
    """Equal shape and dtype, and values to `tolerance` of the largest."""
    assert found.shape == expected.shape, f"{where}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{where}: {found.dtype}, expected {expected.dtype}"
    if expected.numel():
        gap = (found.double() - expected.double()).abs().max().item()
        limit = tolerance * max(1.0, expected.double().abs().max().item())
        assert gap <= limit, f"{where}: differs by {gap:.3g}, at most {limit:.3g}"


def assert_cell(cell: Cell, results: list[Result], tolerance: float = 1e-12) -> None:
    """All ranks hold what one process gives, the same bits on each."""
    expected = reference(cell)
    for rank, found in enumerate(results):
        where = f"{cell.name}, stage {cell.stage}, rank {rank} of {len(results)}"
        assert found.params.keys() == expected.params.keys(), where
        for name, x in expected.params.items():
            assert_close(found.params[name], x, f"{where}, {name}", tolerance)
            assert torch.equal(found.params[name], results[0].params[name]), f"{where}, {name}: not as on rank 0"
        for kind in ("losses", "norms"):
            a, b = (torch.tensor(getattr(r, kind), dtype=torch.float64) for r in (found, expected))
            assert_close(a, b, f"{where}, {kind}", tolerance)
