"""Things that users do with params inside a loss, as (name, params, loss); values are small and float64."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import funzero as fz

Case = tuple[str, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]


class Product(torch.autograd.Function):
    """A user's own Function in the old style."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


@torch.library.custom_op("fztest::mm", mutates_args=())
def custom_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A user's custom op."""
    return a @ b


custom_mm.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def of_module(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Case:
    """A module called on params that are not its own."""
    module = module.double()
    params = {k: v + 0.01 for k, v in fz.split_module(module)[0].items()}

    def loss(p: Any) -> torch.Tensor:
        out = fz.functional_call(copy.deepcopy(module), p, *args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return name, params, loss


def modules() -> Iterator[Case]:
    """Modules that reach for their weights in odd ways."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    ids = torch.tensor([[1, 2, 2]])
    yield of_module("lstm", nn.LSTM(8, 8, 2, batch_first=True), x)
    yield of_module("gru", nn.GRU(8, 8), x)
    yield of_module("attention, training", nn.MultiheadAttention(8, 2, batch_first=True), x, x, x)
    yield of_module(
        "attention, eval", nn.MultiheadAttention(8, 2, batch_first=True).eval(), x, x, x, need_weights=False
    )
    yield of_module(
        "encoder layer, eval", nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval(), x
    )
    yield of_module("conv", nn.Conv2d(5, 4, 3, padding=1), torch.randn(2, 5, 6, 6, dtype=torch.float64))
    yield of_module("embedding", nn.Embedding(10, 8), ids)
    yield of_module("embedding bag", nn.EmbeddingBag(10, 8), ids)
    yield of_module("bilinear", nn.Bilinear(8, 8, 4), x, x)
    yield of_module("weight norm", parametrizations.weight_norm(nn.Linear(8, 4)), x)
    yield of_module("orthogonal", parametrizations.orthogonal(nn.Linear(8, 4)), x)
    yield of_module("group norm, prelu", nn.Sequential(nn.GroupNorm(1, 5), nn.PReLU()), x)


def expressions() -> Iterator[Case]:
    """Params used directly."""
    torch.manual_seed(1)
    w = {"w": torch.randn(8, 4, dtype=torch.float64), "b": torch.randn(4, dtype=torch.float64)}
    x = torch.randn(6, 8, dtype=torch.float64)

    def no_grad_first(p: Any) -> torch.Tensor:
        with torch.no_grad():
            norm = p["w"].norm()
        return (x @ p["w"]).square().sum() / (1 + norm) + p["b"].sum()

    def penalty(p: Any) -> torch.Tensor:
        z = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(torch.tanh(z @ p["w"] + p["b"]).sum(), z, create_graph=True)
        return g.square().sum() + (x @ p["w"]).sum()

    def inner_step(p: Any) -> torch.Tensor:
        (g,) = torch.autograd.grad(torch.tanh(x @ p["w"] + p["b"]).sum(), p["w"], create_graph=True)
        return (x @ (p["w"] - 0.1 * g)).square().sum() + p["b"].sum()

    def branch(p: Any) -> torch.Tensor:
        y = x @ p["w"] if p["w"].requires_grad and isinstance(p["w"], torch.Tensor) else x[:, :4]
        return (y + p["b"]).sum()

    def devices(p: Any) -> torch.Tensor:
        zeros = torch.zeros(4, device=p["w"].device, dtype=p["w"].dtype) + p["b"].new_zeros(4)
        return (x.to(p["w"].device) @ p["w"] + zeros + p["b"]).square().sum()

    def script(p: Any) -> torch.Tensor:
        return F.relu(x @ p["w"]).sum() + p["b"].sum() * len(p["b"]) + p["w"].numel() * p["b"].sum()

    def saved_region(p: Any) -> torch.Tensor:
        y = checkpoint(lambda a, q: torch.tanh(a @ q), x, p["w"], use_reentrant=False)
        return y.square().sum() + p["b"].sum()

    def views(p: Any) -> torch.Tensor:
        return (torch.einsum("bi,ij->bj", x, p["w"]) + p["w"].T.mT[0] + p["w"][-1, :] + p["b"]).square().sum()

    def casts(p: Any) -> torch.Tensor:
        low = p["w"].to(torch.float32)
        with torch.no_grad():
            scale = p["w"].float().abs().max()
        y = (x.float() @ low) / scale + p["b"].type(torch.float32) + p["b"].to(x.device, torch.float32)
        return y.double().square().sum() + (x @ low.double()).sum() + (x @ p["w"]).tanh().sum()

    def cast_penalty(p: Any) -> torch.Tensor:
        low = p["w"].float()
        (g,) = torch.autograd.grad(torch.tanh(x.float() @ low).sum(), low, create_graph=True)
        return g.double().square().sum() + (x @ p["w"]).sum() + p["b"].sum()

    yield "transposes, slices, einsum", w, views
    yield (
        "regulariser over the tree",
        w,
        lambda p: (x @ p["w"] + p["b"]).square().sum() + sum(v.square().sum() for v in fz.tree.leaves(p)),
    )
    yield "cat of flattened leaves", w, lambda p: torch.cat([v.flatten() for v in p.values()]).square().sum()
    yield (
        "to(dtype), detach",
        w,
        lambda p: (x.float() @ p["w"].to(torch.float32)).double().sum() + (x @ p["w"].detach()).sum() * p["b"].sum(),
    )
    yield "casts used in two ways", w, casts
    yield "penalty through a cast", w, cast_penalty
    yield "data", w, lambda p: (x @ p["w"].data).square().sum() * 0.1 + (p["w"] ** 2).sum() + p["b"].sum()
    yield "device, new_zeros", w, devices
    yield "custom op", w, lambda p: custom_mm(x, p["w"]).square().sum() + p["b"].sum()
    yield "torch.ops", w, lambda p: torch.ops.aten.mm(x, p["w"]).square().sum() + p["b"].sum()
    yield "own Function", w, lambda p: Product.apply(x, p["w"]).square().sum() + p["b"].sum()
    yield "checkpoint", w, saved_region
    yield "branch on the leaf", w, branch
    yield "float(leaf)", w, lambda p: (x @ p["w"]).sum() * float(p["b"][0]) + p["b"].sum()
    yield "clone", w, lambda p: (x @ p["w"].clone()).sum() + p["b"].sum()
    yield "sizes", w, script
    yield "first use without grad", w, no_grad_first
    yield "gradient penalty", w, penalty
    yield "inner step (MAML)", w, inner_step
    yield "stack of two leaves", w, lambda p: torch.stack([p["b"], p["b"] * 2, p["w"][0]]).square().sum() + p["w"].sum()
    yield (
        "used again after eviction",
        w,
        lambda p: ((x @ p["w"]).tanh() * p["b"]).sum() + (x @ p["w"]).square().sum() + p["b"].sum(),
    )


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "vmap": (lambda p, x: torch.vmap(lambda r: (r @ p["w"]).sum())(x).sum(), "params/w: torch.func"),
    "jvp": (lambda p, x: torch.func.jvp(lambda z: z @ p["w"], (x,), (x,))[1].sum(), "params/w: torch.func"),
    "grad": (lambda p, x: torch.func.grad(lambda z: (z @ p["w"]).sum())(x).sum(), "params/**: torch.func"),
    "add_": (lambda p, x: p["w"].add_(1).sum(), "params/w: loss_fn writes to this param in place"),
    "setitem": (lambda p, x: p["w"].__setitem__(0, 0.0) or (x @ p["w"]).sum(), "params/w: loss_fn writes"),
    "out=": (lambda p, x: torch.mul(x[:4], 2, out=p["w"]).sum(), "params/w: loss_fn writes"),
    "sparse": (
        lambda p, x: F.embedding(torch.tensor([0, 1]), p["w"], sparse=True).sum(),
        "params/w: a sparse gradient",
    ),
}
