"""Vector-Jacobian products: a forward now, and cotangents pulled back along it as often as wanted."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from funzero import _compat
from funzero.core import tree as tree_lib
from funzero.core.scope import current, scope
from funzero.transforms.grad import differentiable
from funzero.transforms.rng import Draws

Pull = Callable[..., tuple[Any, ...]]
NO_GRAPH = "pull: its graph was given up by last=True; leave that out of all calls but the last"


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a function returned: its leaves by path, and how they stand in a tree."""

    names: list[str]
    leaves: list[Any]
    treedef: Any

    @staticmethod
    def of(out: Any) -> "Outputs":
        """Of any tree; what is no floating-point tensor takes no cotangent."""
        return Outputs(*tree_lib.flatten_with_paths(out))

    def detached(self) -> Any:
        """The same values, out of the autograd graph."""
        values = [x.detach() if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return tree_lib.unflatten(self.treedef, values)

    def cotangents(self, tree: Any) -> list[torch.Tensor | None]:
        """A cotangent for each leaf, None for zero. Raises ValueError by path for one that does not fit."""
        given = dict(zip(*tree_lib.flatten_with_none(tree), strict=True))
        if given.keys() != set(self.names):  # the output may have None too, which is no leaf there
            empty = set(tree_lib.flatten_with_none(tree_lib.unflatten(self.treedef, self.leaves))[0]) - set(self.names)
            given = {n: v for n, v in given.items() if v is not None or n not in empty}
        if given.keys() != set(self.names):
            missing, extra = sorted(set(self.names) - given.keys())[:3], sorted(given.keys() - set(self.names))[:3]
            raise ValueError(
                f"pull: the cotangent has not the structure of the output: missing {missing}, unexpected {extra}; "
                "give None for a leaf whose cotangent is zero"
            )
        return [_fitting(n, x, given[n]) for n, x in zip(self.names, self.leaves, strict=True)]


def _fitting(name: str, out: Any, given: Any) -> torch.Tensor | None:
    where = f"pull: cotangent{'/' if name else ''}{name}"
    if given is None:
        return None
    if not isinstance(out, torch.Tensor) or not differentiable(out):
        kind = tree_lib.describe(out)
        raise ValueError(f"{where}: the output there ({kind}) has no gradient; give None")
    if isinstance(given, int | float) and out.dim() == 0:
        return torch.full_like(out, given)
    if not isinstance(given, torch.Tensor) or given.shape != out.shape or given.dtype != out.dtype:
        raise ValueError(f"{where}: expected {tree_lib.describe(out)}, got {tree_lib.describe(given)}")
    if given.device != out.device:
        raise ValueError(f"{where}: is on {given.device}, the output is on {out.device}; move it there with .to")
    return given


def is_wanted(leaf: Any) -> bool:
    """Whether a leaf of params or inputs gets a gradient."""
    return isinstance(leaf, torch.Tensor) and differentiable(leaf)


def entered(leaf: Any, linked: bool) -> Any:
    """A leaf as the function sees it: one to differentiate with respect to. linked: a child of it, if it has a graph."""
    if not is_wanted(leaf):
        return leaf
    return leaf.view_as(leaf) if linked and leaf.requires_grad else leaf.detach().requires_grad_()


def pulled(
    outputs: Outputs, cotangent: Any, wanted: Sequence[torch.Tensor], *, keep: bool, linked: bool
) -> list[torch.Tensor | None]:
    """Gradients of the outputs times a cotangent; None where there is no dependence.

    Args:
        keep: the graph stays. linked: the gradients have a graph of their own, if gradients are on.
    """
    pairs = zip(outputs.leaves, outputs.cotangents(cotangent), strict=True)
    seeds = [(x, c) for x, c in pairs if c is not None and x.requires_grad]
    if not seeds or not wanted:
        return [None] * len(wanted)
    outs, given = zip(*seeds, strict=True)
    again = torch.is_grad_enabled() and (linked or any(c.requires_grad for c in given))
    return list(
        torch.autograd.grad(outs, wanted, given, allow_unused=True, retain_graph=keep or again, create_graph=again)
    )


def vjp_whole(fn: Callable[..., Any], params: Any, inputs: tuple[Any, ...], replay: bool) -> tuple[Any, Pull]:
    """`funzero.vjp` of whole params, on this process alone."""
    if _compat.inside_functorch():
        return _by_functorch(fn, params, inputs)
    leaves, treedef = tree_lib.flatten((params, inputs))
    linked = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
    if linked and replay:
        raise ValueError("vjp: replay=True gives no graph, which a gradient around it needs; wrap fn in fz.remat")
    if replay:
        return _replayed(fn, leaves, treedef)
    outer = current()
    held = [entered(x, linked) for x in leaves]
    with scope() if outer is None else contextlib.nullcontext(outer) as opened, torch.enable_grad():
        outputs = Outputs.of(_called(fn, treedef, held))
        if outer is None:
            opened.in_backward = True
    graph: tuple[Outputs, list[torch.Tensor]] | None = outputs, [x for x in held if is_wanted(x)]
    wanted = [is_wanted(x) for x in leaves]

    def pull(cotangent: Any, *, last: bool = False) -> tuple[Any, ...]:
        nonlocal graph
        if graph is None:
            raise RuntimeError(NO_GRAPH)
        with opened.again():
            grads = pulled(graph[0], cotangent, graph[1], keep=not last, linked=linked)
        graph = None if last else graph
        return _as_trees(treedef, wanted, grads)

    return tree_lib.unflatten(outputs.treedef, outputs.leaves) if linked else outputs.detached(), pull


def _called(fn: Callable[..., Any], treedef: Any, leaves: Sequence[Any]) -> Any:
    params, inputs = tree_lib.unflatten(treedef, leaves)
    return fn(params, *inputs)


def _as_trees(treedef: Any, wanted: Sequence[bool], grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    found = iter(grads)
    made: tuple[Any, tuple[Any, ...]] = tree_lib.unflatten(treedef, [next(found) if w else None for w in wanted])
    return made[0], *made[1]


def _replayed(fn: Callable[..., Any], leaves: list[Any], treedef: Any) -> tuple[Any, Pull]:
    """Each pull runs the forward again, with the same draws of torch's generators."""
    constants = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
    draws = Draws.now(x.device for x in constants if isinstance(x, torch.Tensor))
    with scope(), torch.no_grad():
        out = Outputs.of(_called(fn, treedef, constants)).detached()

    def pull(cotangent: Any, *, last: bool = False) -> tuple[Any, ...]:
        held = [entered(x, False) for x in constants]
        with scope() as opened, torch.enable_grad():
            with draws.again():
                outputs = Outputs.of(_called(fn, treedef, held))
            opened.in_backward = True
            wanted = [is_wanted(x) for x in held]
            leaves = [x for x, w in zip(held, wanted, strict=True) if w]
            grads = pulled(outputs, cotangent, leaves, keep=False, linked=False)
        return _as_trees(treedef, wanted, grads)

    return out, pull


def _by_functorch(fn: Callable[..., Any], params: Any, inputs: tuple[Any, ...]) -> tuple[Any, Pull]:
    """Within vmap, jacrev and the like, where torch.autograd.grad is refused; what is not reached gets zeros there."""
    leaves, treedef = tree_lib.flatten((params, inputs))
    at = [i for i, x in enumerate(leaves) if is_wanted(x)]

    def of_wanted(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = list(leaves)
        for i, x in zip(at, chosen, strict=True):
            held[i] = x
        with scope():
            found = Outputs.of(_called(fn, treedef, held))
        kept.append(found)
        return tuple(x for x in found.leaves if is_wanted(x))

    kept: list[Outputs] = []
    values, back, *_ = torch.func.vjp(of_wanted, *(leaves[i] for i in at))
    found = iter(values)
    outputs = dataclasses.replace(kept[0], leaves=[next(found) if is_wanted(x) else x for x in kept[0].leaves])

    def pull(cotangent: Any, *, last: bool = False) -> tuple[Any, ...]:
        pairs = zip(outputs.leaves, outputs.cotangents(cotangent), strict=True)
        given = tuple(torch.zeros_like(x) if c is None else c for x, c in pairs if is_wanted(x))
        return _as_trees(treedef, [is_wanted(x) for x in leaves], back(given))

    return tree_lib.unflatten(outputs.treedef, outputs.leaves), pull
