"""The CPU kernels beside torch's fused AdamW: one process, in turn, medians of 7; elements a second.

All are at update 1000, where the bias corrections are 1 in float32, but for "float32, early", at update 10.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from kernels import ops
from kernels.ops import UNSCALED, Adam, Draw, Leaf, Moment, Scale

N, REPEATS, COUNT = 32 << 20, 7, 1000
RULE, DECAY = Adam(1e-3, 0.9, 0.95, 1e-8), 0.1
# Clip and unscale: a loss scale is a power of two. A weight need not be, and is a division.
SCALES = {"loss scale and clip": Scale(65536.0, 0.7), "weight 3 and clip": Scale(3.0, 0.7)}


def normal(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N], in memory that has been touched."""
    return torch.randn(N).mul_(1e-2).to(dtype)


def peer(grad: torch.Tensor, out: torch.Tensor | None = None) -> Callable[[], None]:
    """torch's fused step on float32; with `out`, the gradient is cast before it, and the param after it."""
    state = [normal(), torch.zeros(N), torch.zeros(N)]
    p, m, v = ([x] for x in state)
    steps = [torch.tensor(float(COUNT))]

    def step() -> None:
        torch._fused_adamw_(
            p, [grad.float()], m, v, [], steps,
            lr=RULE.learning_rate, beta1=RULE.b1, beta2=RULE.b2, weight_decay=DECAY, eps=RULE.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        if out is not None:
            out.copy_(p[0])

    return step


def own(leaf: Leaf, scale: Scale = UNSCALED) -> Callable[[], None]:
    """This library's step."""
    return lambda: ops.update([leaf], RULE, scale)


def seconds(systems: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Times of each, in turn, after one run that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in systems}
    for repeat in range(REPEATS + 1):
        for name, step in systems.items():
            start = time.perf_counter()
            step()
            if repeat:
                found[name].append(time.perf_counter() - start)
    return found


def line(what: str, found: dict[str, list[float]], base: str, name: str, target: str) -> None:
    """Prints how many times faster `name` is than `base`: the median over pairs."""
    speed = statistics.median(a / b for a, b in zip(found[base], found[name], strict=True))
    per_second = N / statistics.median(found[name]) / 1e6
    print(f"  {what}: {per_second:.0f} M elements/s, {speed:.2f} times {base} (target {target})", flush=True)


def leaf(param: torch.dtype, kept: torch.dtype, master: bool = False, drawn: bool = False) -> Leaf:
    """A leaf whose grad is in the param's dtype."""
    draws = tuple(Draw((i, 2, 3), range(N)) for i in range(3)) if drawn else ()
    moments = Moment(torch.zeros(N, dtype=kept)), Moment(torch.zeros(N, dtype=kept))
    return Leaf(normal(param), normal(param), moments, normal() if master else None, COUNT, DECAY, draws)


def compare() -> None:
    """Everything, on 1 and on 2 threads."""
    half, full = torch.bfloat16, torch.float32
    plain, mixed, pure = leaf(full, full), leaf(half, full, master=True), leaf(half, half, drawn=True)
    systems = {
        "torch float32": peer(normal()),
        "float32": own(plain),
        "float32, early": own(dataclasses.replace(plain, count=10)),
        "torch mixed": peer(normal(half), normal(half)),
        "mixed": own(mixed),
        "bfloat16": own(pure),
    }
    bare = {"float32": plain, "mixed": mixed, "bfloat16": pure}
    scaled = {f"{name}, {what}": own(x, scale) for name, x in bare.items() for what, scale in SCALES.items()}
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = seconds(systems | scaled)
        print(f"kernels: AdamW, {N >> 20} M elements, {threads} threads; medians of {REPEATS}")
        line("float32", found, "torch float32", "float32", "0.95")
        line("float32, early", found, "torch float32", "float32, early", "0.95")
        line("bfloat16 grad and output, float32 master and moments", found, "torch mixed", "mixed", "2.5")
        line("all bfloat16, stochastic", found, "torch float32", "bfloat16", "1.5")
        line("all bfloat16, stochastic", found, "float32", "bfloat16", "1.5")
        for name in scaled:
            line(name, found, name.split(",")[0], name, "1.0")
    torch.set_num_threads(before)


if __name__ == "__main__":
    compare()
