"""The way in: refusals by name, choice of the backend, and capture."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kernels import backends, captured, ops, reference
from kernels.reference import UNSCALED, Adam, Draw, Leaf, Lion, Moment, Momentum
from tests.kernels.common import RULES, book, copy, draws, expected, floats, moment, same, written

N = 1030
GENERATOR = torch.Generator().manual_seed(0)


def good(**changes: object) -> Leaf:
    """A leaf of Lion."""
    x = Leaf(torch.zeros(N), torch.ones(N), (Moment(torch.zeros(N)),))
    return dataclasses.replace(x, **changes)


def coded(**changes: object) -> Leaf:
    """Its moment in codes."""
    kept = Moment(torch.zeros(N, dtype=torch.uint8), torch.zeros(17), book(True), 64)
    return good(moments=(kept._replace(**changes),))


BAD = {
    "leaves[0].grad has shape [1029], must be [1030]": good(grad=torch.ones(N - 1)),
    "leaves[0].grad has shape [1030, 1], must be [1030]": good(grad=torch.ones(N, 1)),
    "leaves[0].grad is not contiguous": good(grad=torch.ones(2 * N)[::2]),
    "leaves[0].grad is torch.float64, must be torch.float32 or torch.bfloat16 or torch.float16": good(
        grad=torch.ones(N, dtype=torch.float64)
    ),
    "leaves[0].grad is on meta, must be on cpu": good(grad=torch.ones(N, device="meta")),
    "leaves[0].param has shape [1, 1030], must be [1030]": good(param=torch.zeros(1, N)),
    "leaves[0].master is torch.bfloat16, must be torch.float32": good(master=torch.zeros(N).bfloat16()),
    "leaves[0].moments: 0, but Lion has 1": good(moments=()),
    "leaves[0].moments[0].values is torch.float16": good(moments=(Moment(torch.zeros(N).half()),)),
    "leaves[0].moments[0] has scales, but values in torch.float32": good(
        moments=(Moment(torch.zeros(N), torch.zeros(17), book(True), 64),)
    ),
    "leaves[0].moments[0] holds codes, so it needs": coded(block=0),
    "leaves[0].moments[0].scales has shape [16], must be [17]": coded(scales=torch.zeros(16)),
    "leaves[0].moments[0].book has 0 values": coded(book=torch.zeros(0)),
    "leaves[0].moments[0].book is torch.float64": coded(book=book(True).double()),
    "leaves[0].draws: 1, must be none, or 1 for the param and 1": good(draws=(Draw((1, 2, 3), range(N)),)),
    "leaves[0].draws[0].index is range(0, 3), must be 1030 long": good(draws=(Draw((1, 2, 3), range(3)),) * 2),
    "leaves[0].draws[1].index is torch.int32": good(
        draws=(Draw((1, 2, 3), range(N)), Draw((1, 2, 3), torch.arange(N, dtype=torch.int32)))
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_leaves_are_named(message):
    with pytest.raises(ValueError) as caught:
        ops.update([BAD[message]], Lion(0.1, 0.9, 0.99))
    assert str(caught.value).startswith(message)


def test_nothing_is_written_when_one_leaf_is_bad():
    first = good()
    with pytest.raises(ValueError, match=r"^leaves\[1\]\.grad"):
        ops.update([first, good(grad=torch.ones(3))], Lion(0.1, 0.9, 0.99))
    assert first.param.eq(0).all()


def test_bad_sums_are_named():
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        ops.square_sum(torch.ones(3, dtype=torch.float64), 2)
    with pytest.raises(ValueError, match="chunk is 0"):
        ops.square_sum(torch.ones(3), 0)
    with pytest.raises(ValueError, match=r"acc is torch\.bfloat16"):
        ops.accumulate(torch.ones(3).bfloat16(), torch.ones(3))
    with pytest.raises(ValueError, match=r"grad has shape \[4\], must be \[3\]"):
        ops.accumulate(torch.ones(3), torch.ones(4))


def test_in_place_writes_are_seen_by_autograd():
    x = good()
    versions = [t._version for t in written(x).values()]
    ops.update([x], Lion(0.1, 0.9, 0.99))
    assert all(t._version > v for t, v in zip(written(x).values(), versions, strict=True))
    with torch.inference_mode():
        ops.update([good()], Lion(0.1, 0.9, 0.99))


def test_devices_without_a_backend_run_the_reference():
    x = Leaf(torch.zeros(3, device="meta"), torch.zeros(3, device="meta"))
    ops.update([x], Momentum(0.1))
    assert isinstance(backends.backend("meta"), backends.Plain)
    assert ops.square_sum(x.param, 2).shape == (2,)


def samples() -> dict[str, tuple[Leaf, reference.Rule]]:
    """Leaves that between them fill every argument of the op."""
    g = torch.Generator().manual_seed(1)
    p, m = floats(N, torch.bfloat16, g, False), floats(N, torch.float32, g, False)
    found: dict[str, tuple[Leaf, reference.Rule]] = {}
    for name, rule in RULES.items():
        count = 2 if isinstance(rule, Adam) else 0 if name == "descent" else 1
        for kept, drawn in (("float32", "none"), ("codes64", "range"), ("bfloat16", "index")):
            moments = tuple(moment(kept, N, i == 1, g) for i in range(count))
            master = m if kept == "codes64" else None
            wd = 0.1 if master is None else None
            found[f"{name}-{kept}"] = Leaf(p, m, moments, master, 3, wd, draws(drawn, N, 1 + count)), rule
    return found


SAMPLES = samples()


@pytest.mark.parametrize("name", SAMPLES)
def test_captured_update_has_the_same_bits(name):
    leaf, rule = SAMPLES[name]
    wanted, got = expected([leaf], rule, reference.Scale(2.5, 0.7))[0], copy(leaf)
    captured.update(got, rule, reference.Scale(2.5, 0.7), 1)
    for key, x in written(wanted).items():
        same(written(got)[key], x, key)


@pytest.mark.parametrize("name", ["adam-codes64", "lion-bfloat16", "descent-float32"])
def test_opcheck_update(name, monkeypatch):
    calls = []
    op = torch.ops.funzero_kernels.update.default
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.funzero_kernels, "update", lambda *args: calls.append(args))
        captured.update(copy(SAMPLES[name][0]), SAMPLES[name][1], UNSCALED, 1)
    torch.library.opcheck(op, calls[0])


def test_opcheck_sums():
    torch.library.opcheck(torch.ops.funzero_kernels.square_sum.default, (torch.ones(5), 2, 1))
    torch.library.opcheck(torch.ops.funzero_kernels.accumulate.default, (torch.ones(5), torch.ones(5), 0.5, 1))


def both(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Two updates of the same leaf, and a norm."""
    for _ in range(2):
        ops.update([Leaf(p, g, (Moment(m),))], RULES["lion"])
    ops.accumulate(m, g, 0.5)
    return ops.square_sum(p, 100)


def test_make_fx_sees_every_call():
    inputs = floats(N, torch.float32, GENERATOR, False), torch.ones(N), torch.zeros(N)
    graph = make_fx(both)(*(x.clone() for x in inputs))
    names = [str(node.target) for node in graph.graph.nodes if "funzero_kernels" in str(node.target)]
    assert names == [f"funzero_kernels.{name}.default" for name in ("update", "update", "accumulate", "square_sum")]
    a, b = [x.clone() for x in inputs], [x.clone() for x in inputs]
    assert torch.equal(graph(*a), both(*b)) and all(map(torch.equal, a, b))


def test_torch_compile_sees_every_call():
    inputs = floats(N, torch.float32, GENERATOR, False), torch.ones(N), torch.zeros(N)
    a, b = [x.clone() for x in inputs], [x.clone() for x in inputs]
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*a), both(*b)) and all(map(torch.equal, a, b))


PROBE = """
import os, subprocess, sys
import torch
before, reads = set(sys.modules), []
get = os._Environ.__getitem__
os._Environ.__getitem__ = lambda self, key: reads.append((key, sys._getframe(1).f_code.co_filename)) or get(self, key)
subprocess.Popen.__init__ = None
import kernels.ops
print([r for r in reads if "kernels" in r[1]], [m for m in set(sys.modules) - before if m.startswith(("triton", "funzero"))])
"""


def test_import_is_lazy():
    out = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert out.stdout == "[] []\n", out.stdout + out.stderr
