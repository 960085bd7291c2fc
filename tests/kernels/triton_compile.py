"""`python -m tests.kernels.triton_compile TARGET START EVERY`: compiles what the library launches; prints what is wrong.

Needs no GPU: the launches of `kernels.triton` are made with a stand-in for the driver, and each ends when its kernel is
compiled. So this sees each kernel with the arguments, flags and options that the library gives.
"""

import dataclasses
import itertools
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import funzero as fz
from kernels import triton
from kernels.reference import Adam, Draw, Scale
from kernels.triton import launch as library
from tests.kernels.triton_leaves import BF16, F16, F32, MOMENTS, RULES, Kind, leaf_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Loads and stores of the PTX of a leaf go by 16 bytes a thread where its dtypes let them.
NARROW = re.compile(r"(?:ld|st)\.global(?!\S*\.v[248]\.)\S*")
WIDE = {"cuda": re.compile(r"ld\.global\S*\.v[48]\.b32"), "hip": re.compile(r"(?:global|buffer)_load_(?:dwordx4|b128)")}
FLAGS = re.compile(r"= f(?:mul|add|sub|div) (?:fast|reassoc|nnan|ninf|nsz|arcp|contract|afn)")
HALF = fz.precision.Policy("fp16", params=F16, compute=F16, master=F32, loss_scale=fz.loss_scale.dynamic())


def policies() -> Iterator[tuple[Kind, bool]]:
    """The leaf of each preset, without its rule, and whether it is rounded stochastically."""
    presets = [x for x in vars(fz.precision).values() if isinstance(x, fz.precision.Policy)]
    for policy in (*presets, HALF):
        param = policy.params_dtype(F32)
        held = policy.moments or F32
        kind = Kind("", param, policy.accum_dtype(param), policy.master is not None, (held, held))
        yield kind, policy.rounding == "stochastic"


def variants() -> list[tuple[Kind, bool]]:
    """Each leaf that the library has for the kernel, and whether the update can be skipped; none twice."""
    found = {}
    for (kind, stochastic), rule, codes, decay, skip in itertools.product(
        policies(), RULES, (False, True), (None, 0.1), (False, True)
    ):
        moments = ((256, 256) if codes else kind.moments)[: MOMENTS[rule]]
        for draws in ("range", "odd", "index") if stochastic and BF16 in (kind.param, *moments) else ("none",):
            leaf = Kind(rule, kind.param, kind.grad, kind.master, moments, draws, decay)
            found[leaf, skip] = None
    return list(found)


def launches() -> list[tuple[str, Callable[[], Any]]]:
    """(name, launch) of everything that `kernels.triton` launches, shuffled, so that each part has some of all."""

    def updating(kind: Kind, n: int, skip: bool = False) -> tuple[str, Callable[[], Any]]:
        flag = torch.tensor(False) if skip else None
        return f"{kind}, n = {n}, skip = {skip}", lambda: triton.update([leaf_of(kind, n)], RULES[kind.rule], skip=flag)

    def summing(x: torch.Tensor) -> list[tuple[str, Callable[[], Any]]]:
        return [
            (f"square_sum of {x.dtype}", lambda: triton.square_sum(x, 1 << 10)),
            (f"square_sum in pieces of {x.dtype}", lambda: triton.square_sum(x, 1 << 15)),
            (f"accumulate of {x.dtype}", lambda: triton.accumulate(x.float(), x)),
        ]

    found = [updating(kind, 4096, skip) for kind, skip in variants()]
    found += [updating(dataclasses.replace(kind, rule="adam"), n) for kind, _ in policies() for n in (1, 1001)]
    found += [launch for dtype in (F32, BF16, F16) for launch in summing(torch.zeros(1 << 15, dtype=dtype))]
    random.Random(0).shuffle(found)
    return found


def faults(name: str, kernel: Any, backend: str) -> Iterator[str]:
    """What is wrong with a compiled kernel."""
    text = kernel.asm["ptx" if backend == "cuda" else "amdgcn"]
    if not kernel.asm["cubin" if backend == "cuda" else "hsaco"]:
        yield f"{name}: no binary"
    if kernel.metadata.enable_fp_fusion or FLAGS.search(kernel.asm["llir"]):
        yield f"{name}: arithmetic may be rearranged"
    if backend == "cuda" and re.search(r"\bfma\S*\.f32|\.ftz|\.approx|\.full", text):
        yield f"{name}: fused, flushed or approximate arithmetic"
    if backend == "hip" and (".amdhsa_float_denorm_mode_32 3" not in text or "cvt_pkrtz" in text):
        yield f"{name}: subnormal numbers are flushed, or digits cut off"
    # Without a division, which is made of fused operations, the machine code must have none.
    if name.startswith("accumulate") and re.search(
        r"FFMA|v_\w*(?:fma|mac)", kernel.asm["sass"] if backend == "cuda" else text
    ):
        yield f"{name}: the assembler fuses products and sums"
    yield from moves(name, text, backend)


def moves(name: str, text: str, backend: str) -> Iterator[str]:
    """Loads and stores that are narrower than they could be."""
    codes = "256" in name
    if "n = 1" in name or (codes and backend == "hip"):  # 64 lanes share a block there
        return
    if not WIDE[backend].search(text) and not name.startswith("square_sum in pieces"):
        yield f"{name}: nothing is loaded by 16 bytes"
    narrow = {x for x in NARROW.findall(text) if not x.endswith(".b8")}
    if narrow and not codes and not name.startswith("square_sum"):
        yield f"{name}: moves single elements by {narrow}"


def recompiled(made: list[Any]) -> Iterator[str]:
    """New hyper-parameters, keys, counts and even first indices of one kind of leaf compile nothing; draws need no exchange."""
    kind = Kind("adam", BF16, BF16, moments=(BF16, BF16), draws="range", decay=0.1)
    made.clear()
    for lr, words, first, decay in ((1e-3, (1, 2, 3), 0, 0.1), (1, (16, -1, 1), 2, 0), (0, (0, 0, 0), 1 << 40, 1.0)):
        leaf = leaf_of(kind, 4096)
        draws = tuple(Draw(words, range(first, first + 4096)) for _ in leaf.draws)
        leaf = dataclasses.replace(leaf, draws=draws, count=first + 1, weight_decay=decay)
        triton.update([leaf], Adam(lr, 0.5, 0, 1), Scale(1, 2))
    if len(set(map(id, made))) != 1:
        yield f"{len(set(map(id, made)))} kernels for one kind of leaf"
    if made[0].metadata.shared:
        yield "threads exchange the halves of hashes"


def main(target: str, start: int, every: int) -> list[str]:
    """Compiles each of `every` launches for a target; the faults."""
    made: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(run(self, *args, **(kwargs | {"warmup": True})))

    JITFunction.run = compile_only
    stand_in = {
        "get_current_target": lambda: TARGETS[target],
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
    }
    library.LANES = TARGETS[target].warp_size
    driver.set_active(types.SimpleNamespace(**stand_in))
    found = []
    for name, launch in launches()[start::every]:
        made.clear()
        launch()
        assert made, name
        for kernel in made:
            found += faults(name, kernel, TARGETS[target].backend)
    return [*found, *recompiled(made)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit("\n".join(main(sys.argv[1], *map(int, sys.argv[2:]))) or 0)
