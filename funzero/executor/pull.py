"""`vjp` of params that are cut or kept elsewhere: gathered as a step gathers them, their gradients reduced as a step does.

[Note: layouts of a pull] A pull gives gradients cut like the params. Where the axes of a cut are among those that are
summed over, that is the layout in which they are reduced. Where they are not, as with `batch=()`, each rank has the sum
already, or makes it whole, and takes its range.

[Note: rounds] Nothing is remembered between calls, so ranks agree on each gather and on the order of reductions as the
first call of a step does: a message between hosts for each. Ranks may therefore use different params.
"""

import contextlib
import dataclasses
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from funzero.core import tree as tree_lib
from funzero.core.scope import Scope, scope
from funzero.core.spec import Layout, Spec, Specs
from funzero.core.state import EMPTY_NODE, StateSpecs
from funzero.executor import agree
from funzero.executor.cache import CacheOptions, Program
from funzero.executor.disk import DiskLeaf
from funzero.executor.foreign import Looks
from funzero.executor.micro import cast_batch
from funzero.executor.place import cut_flat
from funzero.executor.placement import Placement
from funzero.executor.plan import Plan
from funzero.executor.reduce import SmallReductions
from funzero.executor.selection import Selections
from funzero.executor.session import Graph, Session
from funzero.executor.window import Landing, Window
from funzero.transforms.basic import identity
from funzero.transforms.grad import differentiable
from funzero.transforms.precision import Policy
from funzero.transforms.rng import Draws
from funzero.transforms.storage import NEAREST
from funzero.transforms.vjp import NO_GRAPH, Outputs, entered, is_wanted, pulled


def pull_specs(specs: StateSpecs | Specs, batch: Sequence[str] | None, policy: Policy) -> StateSpecs:
    """The layout of params whose gradients are summed over `batch` (default: the mesh's batch axes), see [Note: layouts
    of a pull]. Of a `StateSpecs` the params that it trains are differentiated, else all."""
    params = specs.params if isinstance(specs, StateSpecs) else specs
    mesh = dataclasses.replace(params.mesh, batch=params.mesh.batch if batch is None else tuple(batch))
    unknown = [a for a in mesh.batch if a not in mesh.names]
    if unknown:
        raise ValueError(f"vjp: batch axes {unknown} are not among the axes {mesh.names}")
    here = Specs(mesh, params.treedef, tuple(dataclasses.replace(x, mesh=mesh) for x in params.layouts))
    names = tree_lib.paths(params.tree)
    if isinstance(specs, StateSpecs):
        trained = set(tree_lib.paths(specs.grads.tree))
    else:
        trained = {
            n for n, x in zip(names, params.layouts, strict=True) if differentiable(torch.empty(0, dtype=x.dtype))
        }
    tree = tree_lib.prune(tree_lib.unflatten(params.treedef, here.layouts), lambda path: path not in trained)
    layouts, treedef = tree_lib.flatten(tree)
    summed = {a for a in mesh.batch if mesh.axis_size(a) > 1}
    direct = all({a for a in x.spec.flat if mesh.axis_size(a) > 1} <= summed for x in layouts)

    def grads(x: Layout, path: str, reduced: bool) -> Layout:
        flat = x.spec.flat if direct else ()
        left = tuple(a for a in mesh.batch if a not in (*x.spec.partition.axes, *flat))
        spec = Spec(x.spec.partition, flat, quantum=x.spec.quantum, unreduced=() if reduced else left)
        return Layout(x.path.replace("params", path, 1), x.shape, policy.accum_dtype(x.dtype), spec, mesh)

    sums, final = (
        Specs(mesh, treedef, tuple(grads(x, p, r) for x in layouts))
        for p, r in (("accum/grads", False), ("grads", True))
    )
    nothing = Specs.bind(mesh, EMPTY_NODE, EMPTY_NODE)
    return StateSpecs(params=here, opt_state=nothing, accum=sums, grads=final, buffers=nothing)


@dataclasses.dataclass(frozen=True)
class Way:
    """How params come to a function and gradients leave it; kept, since calls with one layout are many."""

    placement: Placement
    small: SmallReductions
    signature: int

    @staticmethod
    def of(specs: StateSpecs | Specs, batch: tuple[str, ...] | None, policy: Policy, budget: int | None) -> "Way":
        """For the arguments of a `vjp`."""
        return Way.made(specs, batch, policy, budget, specs.mesh.comm)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def made(
        specs: StateSpecs | Specs, batch: tuple[str, ...] | None, policy: Policy, budget: int | None, comm: Any
    ) -> "Way":
        """The same. comm: of the mesh; a mesh that was made anew equals the one before."""
        placement = Placement(Plan(pull_specs(specs, batch, policy), policy), CacheOptions(budget, always_ask=True))
        text = f"{tree_lib.show(placement.plan.specs.params)} {policy} {budget} {placement.plan.mesh.batch}"
        small = SmallReductions(placement.plan, frozenset(placement.micro_routes))
        return Way(placement, small, zlib.crc32(text.encode()))

    @functools.cached_property
    def routes(self) -> frozenset[int]:
        """The trained leaves whose gradients are reduced as they come."""
        return frozenset([*self.placement.micro_routes, *self.placement.window_routes])

    @functools.cached_property
    def looks(self) -> Looks:
        """Of the params."""
        return Looks(self.plan.specs.params.layouts)

    @functools.cached_property
    def cuts(self) -> list[Layout | None]:
        """By trained leaf: how a gradient that was reduced whole is cut; None: it is as its param already."""
        pairs = zip(self.plan.specs.grads.layouts, self.plan.trained, strict=True)
        kept = self.plan.specs.params.layouts
        return [kept[i] if kept[i].is_flat and not g.is_flat else None for g, i in pairs]

    @functools.cached_property
    def tried(self) -> "weakref.WeakSet[Any]":
        """The code that has run once, see [Note: writes to params]."""
        return weakref.WeakSet()

    @functools.cached_property
    def selections(self) -> Selections:
        """By the leaves that were used."""
        return Selections(self.plan, identity())

    @property
    def plan(self) -> Plan:
        """The layout."""
        return self.placement.plan


@dataclasses.dataclass
class Started:
    """A forward with its graph. `inputs`: what to differentiate with respect to among them. `values`: of the output."""

    session: Session
    graph: Graph
    outputs: Outputs
    inputs: list[torch.Tensor]
    opened: Scope
    values: Any

    def end(self) -> None:
        """Lets go of it all. Ranks may come here at any time, so nothing is sent."""
        if self.graph.lazy is not None:
            self.graph.lazy.close()
        self.session.close(failed=True)


class Function:
    """A function at params and inputs: what its forwards and pulls have in common.

    A step that is given the params meanwhile finds others on their storage, and leaves it as it is.
    """

    def __init__(self, fn: Callable[..., Any], way: Way, params: list[torch.Tensor], inputs: tuple[Any, ...]):
        self.way, self._fn = way, fn
        self._params = [x.detach() if i in way.placement.lazy else x for i, x in enumerate(params)]
        self._inputs, self._treedef = tree_lib.flatten(inputs)
        self._code = getattr(fn, "__code__", None)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in self._inputs):
            raise ValueError("vjp: with specs the output has no graph, and an input here requires grad; detach it")

    def check_fresh(self) -> None:
        """Raises for params on disk that have been updated, if they are to be read again."""
        for x in self._params:
            if isinstance(x, DiskLeaf):
                x.check()

    def forget(self) -> None:
        """Lets go of the params."""
        self._params = []

    def _call(self, held: list[Any], params: Any) -> Any:
        return self._fn(params, *cast_batch(self.way.plan, tree_lib.unflatten(self._treedef, held)))

    def _session(self) -> Session:
        program = Program()
        program.tried = self._code in self.way.tried
        return Session(self.way.placement, self._params, program)

    def _check_writes(self, graph: Graph) -> None:
        graph.handed.check(self.way.plan.specs.params.layouts)
        if self._code is not None:
            self.way.tried.add(self._code)

    def values(self) -> Any:
        """The output, without a graph."""
        with self._session() as session:
            out = session.forward(lambda params: Outputs.of(self._call(self._inputs, params)).detached())
        self._params = [x.detach() for x in self._params]
        return out

    def start(self) -> Started:
        """The forward, with its graph."""
        session, plan = self._session(), self.way.plan
        try:
            held = [entered(x, False) for x in self._inputs]
            with scope(bool(self.way.placement.lazy)) as opened, torch.enable_grad():
                graph = session.begin(
                    functools.partial(self._call, held), plan.place_of_trained, self.way.routes, opened
                )
                opened.in_backward = True
            self._check_writes(graph)
            outputs = Outputs.of(graph.out)
            values = outputs.detached()  # a param that is returned is gathered here, while all ranks join
            session.rest()
        except BaseException:
            session.close(failed=True)
            raise
        return Started(session, graph, outputs, [x for x in held if is_wanted(x)], opened, values)

    def pull(self, started: Started, cotangent: Any, last: bool) -> tuple[Any, ...]:
        """Gradients of the params and of the inputs."""
        plan, graph = self.way.plan, started.graph
        count, zero = len(plan.trained), torch.zeros((), dtype=torch.float64, device=plan.mesh.device)
        window = Window([None] * count, [False] * count, zero, zero, EMPTY_NODE, 0, [])
        landing = Landing(window, self.way.placement, NEAREST, True)
        with started.session.receiving(landing, self.way.small) as done, torch.no_grad():
            with started.opened.again():
                wanted = [*graph.wanted.values(), *started.inputs]
                grads = pulled(started.outputs, cotangent, wanted, keep=not last, linked=False)
            done.take(graph, grads[: len(graph.wanted)])
        found = iter(grads[len(graph.wanted) :])
        inputs = [next(found) if is_wanted(x) else None for x in self._inputs]
        params = self._reduced(window)
        return tree_lib.unflatten(plan.specs.params.treedef, params), *tree_lib.unflatten(self._treedef, inputs)

    def _reduced(self, window: Window) -> list[torch.Tensor | None]:
        """The gradient of each param, None where no rank has one."""
        plan = self.way.plan
        used, *_ = agree.close_window(plan, window)
        selection = self.way.selections.of(used)
        params: list[torch.Tensor | None] = [None] * len(plan.specs.params.layouts)
        for k, grad in zip(selection.chosen, selection.reduce(window), strict=True):
            cut = self.way.cuts[k]
            params[plan.trained[k]] = grad if cut is None else cut_flat(grad, cut)
        return params


class CutPull:
    """Pulls cotangents back along a forward: see `funzero.vjp`. Collective calls."""

    def __init__(self, function: Function, outputs: Outputs, started: Started | None, draws: Draws | None):
        self._function, self._outputs, self._draws = function, outputs, draws
        self._started = started
        self._finalizer = None if started is None else weakref.finalize(self, started.end)

    def __call__(self, cotangent: Any, *, last: bool = False) -> tuple[Any, ...]:
        """Gradients of the params, summed and cut, then a cotangent for each input. last: the graph may be given up."""
        function = self._function
        with _agreed(function.way, agree.PULL, ()):
            if self._started is None and self._draws is None:
                raise RuntimeError(NO_GRAPH)
            self._outputs.cotangents(cotangent)
            if self._draws is not None or function.way.placement.options.budget is not None:
                function.check_fresh()
        with function.way.plan.mesh.guard():
            if self._draws is None:
                assert self._started is not None
                out = function.pull(self._started, cotangent, last)
            else:
                out = self._replayed(cotangent, self._draws)
        if last:
            self._started = self._draws = None
            function.forget()
            if self._finalizer is not None:
                self._finalizer()
        return out

    def _replayed(self, cotangent: Any, draws: Draws) -> tuple[Any, ...]:
        with draws.again():
            started = self._function.start()
        try:
            return self._function.pull(started, cotangent, True)
        finally:
            started.end()


@contextlib.contextmanager
def _agreed(way: Way, action: int, tree: Any) -> Iterator[None]:
    """All ranks call the same on the same layout, with trees of the same structure; what goes wrong within the block on one
    rank is raised on all."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    mesh = way.plan.mesh
    if mesh.world > 1:
        text = agree.describe_batch(tree) if error is None else ""
        agree.agree(mesh, agree.Header(action, True, text, way.signature, error))
    elif error is not None:
        raise error


def vjp_cut(
    fn: Callable[..., Any], params: Any, inputs: tuple[Any, ...], way: Way, replay: bool, error: Exception | None
) -> tuple[Any, CutPull]:
    """`funzero.vjp` of local params. error: what this rank has to say against it already."""
    specs = way.plan.specs
    with _agreed(way, agree.VJP, inputs):
        if error is not None:
            raise error
        leaves, treedef = tree_lib.flatten(params)
        if treedef != specs.params.treedef:
            differ = sorted(set(tree_lib.paths(params)) ^ set(tree_lib.paths(specs.params.tree)))[:3]
            raise ValueError(f"vjp: params have other leaves than their specs; they differ at {differ}")
        way.looks.check(leaves)
        function = Function(fn, way, leaves, inputs)
    with way.plan.mesh.guard():
        if replay:
            draws = Draws.now([way.plan.mesh.device])
            out = function.values()
            return out, CutPull(function, Outputs.of(out), None, draws)
        started = function.start()
    return started.values, CutPull(function, Outputs.of(started.values), started, None)
