"""Optax's trajectories on random trees, stored as small files so that parity is tested without JAX.

`python -m tests.numerics.trajectories [NAME ...]` writes them (needs `optax`; float64). A case is a name, a function of
the module `optax` that makes its optimizer, and one that makes funzero's. Trees and gradients come from numpy's generator
by seed, so a file holds only the params that Optax reached after some of the steps.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "data"
SEEDS, STEPS, KEPT = range(5), 10, (1, 10)
SHAPES = [
    {"a": (5, 3), "b": (7,), "c": ()},
    {"a": (2, 3, 4), "b": (1,)},
    {"a": (8, 8), "b": (8,), "c": (3, 5)},
    {"a": (6,), "b": (4, 1), "c": (1, 4)},
    {"a": (9, 2), "b": (2, 9), "c": (1, 1), "d": (3,)},
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer in both libraries.

    Attributes:
        optax: takes the module `optax`. funzero: makes the same from funzero. follow: what is compared, given the params
            and the optimizer's state after a step (default: the params); each library has its own.
    """

    optax: Callable[[Any], Any]
    funzero: Callable[[], Any]
    follow_optax: Callable[[Any, Any, Any], Any] = lambda optax, params, state: params
    follow: Callable[[Any, Any], Any] = lambda params, state: params


def problem(seed: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Params and the gradients of every step, float64; some gradients are exactly zero."""
    random = np.random.default_rng(seed)
    params = {k: random.normal(size=s) for k, s in SHAPES[seed].items()}
    grads = []
    for _ in range(STEPS):
        grads.append({k: random.normal(size=s) * (random.random(size=s) > 0.1) for k, s in SHAPES[seed].items()})
    return params, grads


def all_cases() -> dict[str, Case]:
    """Every case by name; the tables live in the modules `cases_*`."""
    from tests.numerics import cases_elementwise, cases_leafwise

    return {**cases_elementwise.CASES, **cases_leafwise.CASES}


def run_optax(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """(key of an array in the file, array)."""
    import jax
    import optax

    jax.config.update("jax_enable_x64", True)
    for seed in SEEDS:
        params, grads = problem(seed)
        params = {k: jax.numpy.asarray(v) for k, v in params.items()}
        tx = case.optax(optax)
        state = tx.init(params)
        for step, g in enumerate(grads, start=1):
            updates, state = tx.update({k: jax.numpy.asarray(v) for k, v in g.items()}, state, params)
            params = optax.apply_updates(params, updates)
            if step in KEPT:
                for k, v in case.follow_optax(optax, params, state).items():
                    yield f"{seed}/{step}/{k}", np.asarray(v)


def run_funzero(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """The same of funzero."""
    import torch

    import funzero as fz

    for seed in SEEDS:
        arrays, grads = problem(seed)
        params = {k: torch.tensor(v, dtype=torch.float64) for k, v in arrays.items()}
        tx = case.funzero()
        state = tx.init(params)
        for step, g in enumerate(grads, start=1):
            given = {k: torch.tensor(v, dtype=torch.float64) for k, v in g.items()}
            updates, state = tx.update(given, state, params)
            params = fz.apply_updates(params, updates)
            if step in KEPT:
                for k, v in case.follow(params, state).items():
                    yield f"{seed}/{step}/{k}", v.numpy()


def stored(name: str) -> dict[str, np.ndarray]:
    """What Optax reached, by key."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return {k: file[k] for k in file.files}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for wanted in sys.argv[1:] or all_cases():
        np.savez_compressed(FOLDER / f"{wanted}.npz", **dict(run_optax(all_cases()[wanted])))
        print(wanted)
