"""torch modules as pure functions: their params and buffers taken out, and put in for a call."""

import contextlib
import copy
import dataclasses
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from funzero import _compat
from funzero.core import tree as tree_lib
from funzero.core.abstract import InitThunk
from funzero.core.scope import Scope, current, scope
from funzero.core.state import TrainState
from funzero.executor import place
from funzero.executor.standin import StandIn
from funzero.transforms.remat import remat
from funzero.transforms.rng import fold_in, make_key, seeded


def split_module(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The params and buffers of a module: flat dicts under torch's own names, detached, sharing its memory.

    A tied weight appears once, under its first name. Buffers include those that the state dict leaves out.

    >>> params, buffers = split_module(nn.BatchNorm1d(2))
    >>> sorted(params), sorted(buffers)
    (['bias', 'weight'], ['num_batches_tracked', 'running_mean', 'running_var'])
    """
    params = {n: p.detach() for n, p in module.named_parameters()}
    return params, {n: b.detach() for n, b in module.named_buffers()}


def trainable(module: nn.Module) -> dict[str, bool]:
    """The mask of `requires_grad`, in the structure of `split_module`'s params."""
    return {n: p.requires_grad for n, p in module.named_parameters()}


@dataclasses.dataclass
class _Sites:
    """Where a module looks up its params (or buffers): (name, container, key, own tensor); tied names have several."""

    slots: list[tuple[str, Any, Any, torch.Tensor]]
    installed: list[torch.Tensor] | None = None
    calls: int = 0  # of functional_call that are under way

    def __post_init__(self) -> None:
        self.own = {name: tensor for name, _, _, tensor in self.slots}
        self._sites = [(container, key, tensor) for _, container, key, tensor in self.slots]

    def stale(self) -> bool:
        """True if the module was changed since: a slot holds another tensor than it did."""
        return any(container[key] is not tensor for container, key, tensor in self._sites)

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Puts values into all slots."""
        for name, container, key, _ in self.slots:
            container[key] = values[name]

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls the module with what was put into its slots."""
        self.calls += 1
        try:
            return module(*args, **kwargs)
        finally:
            self.calls -= 1

    def exchange(self, values: list[torch.Tensor]) -> Callable[[], None]:
        """Puts in values in the order of `own`, for a while; gives what puts back those that were there."""
        before = self.installed
        self.put(dict(zip(self.own, values, strict=True)))
        self.installed = values
        return self.restore if before is None else lambda: self._put_back(before)

    def _put_back(self, values: list[torch.Tensor]) -> None:
        self.put(dict(zip(self.own, values, strict=True)))
        self.installed = values

    def restore(self) -> None:
        """Puts the module's own tensors back."""
        self.installed = None
        for container, key, tensor in self._sites:
            container[key] = tensor


def _param_sites(module: nn.Module) -> _Sites:
    names = {id(p): n for n, p in module.named_parameters()}
    slots = []
    for sub in module.modules():
        places: list[tuple[Any, Any, Any]] = [(sub._parameters, k, v) for k, v in sub._parameters.items()]
        if isinstance(sub, nn.RNNBase):  # it reads its weights from a list beside its parameters
            places += [(sub._flat_weights, i, v) for i, v in enumerate(sub._flat_weights)]
        slots += [(names[id(v)], container, key, v) for container, key, v in places if v is not None]
    return _Sites(slots)


def _buffer_sites(module: nn.Module) -> _Sites:
    names = {id(b): n for n, b in module.named_buffers()}
    places = [(sub._buffers, key, b) for sub in module.modules() for key, b in sub._buffers.items()]
    return _Sites([(names[id(b)], container, key, b) for container, key, b in places if b is not None])


_SITES: "weakref.WeakKeyDictionary[nn.Module, tuple[_Sites, _Sites]]" = weakref.WeakKeyDictionary()


def _sites_of(module: nn.Module) -> tuple[_Sites, _Sites]:
    found = _SITES.get(module)
    if found is None or any(s.installed is None and s.stale() for s in found):
        found = _SITES[module] = (_param_sites(module), _buffer_sites(module))
    return found


def _check_names(what: str, expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if expected.keys() != given.keys():
        missing, extra = sorted(expected.keys() - given.keys())[:3], sorted(given.keys() - expected.keys())[:3]
        raise ValueError(
            f"{what} do not fit the module: missing {missing}, unexpected {extra}; pass what fz.split_module gave, all of it"
        )


def functional_call(
    module: nn.Module,
    params: Mapping[str, torch.Tensor],
    *args: Any,
    buffers: Mapping[str, torch.Tensor] | None = None,
    rng: torch.Tensor | int | None = None,
    training: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a module with the given params in place of its own.

    Args:
        params: as from `split_module` (global shapes; of the local piece where a partition cuts the leaf).
        buffers: as from `split_module`; they are not written to. Without them the module's own are constants.
        rng: a key (int64 [2]) or a seed. Torch's global generators, from which dropout draws, are seeded from it for the
            call and afterwards are as they were; equal keys give equal masks. Parts that activation checkpointing runs
            again in the backward repeat theirs. Without it the module draws from the generators as they are.
        training: the mode for this call; default: the module's own.

    Returns: the module's output; with `buffers`, (output, new buffers).

    Within a gradient, vjp or step the params stay in the module until its backward is done, see [Note: params stay in
    the module]; everything of the module is as it was after that.

    Raises:
        ValueError: names that do not fit. RuntimeError: a buffer was written without `buffers=`, or one module with two
        trees in one graph was recomputed by activation checkpointing.
    """
    if rng is not None:
        with seeded(make_key(rng), *_devices(params, buffers, args, kwargs)):
            return functional_call(module, params, *args, buffers=buffers, training=training, **kwargs)
    outer = current()
    if outer is None:
        with scope():
            return functional_call(module, params, *args, buffers=buffers, training=training, **kwargs)
    param_sites, buffer_sites = _sites_of(module)
    _check_names("functional_call: params", param_sites.own, params)
    _install(module, param_sites, params, outer)
    if training is not None:
        _set_mode(module, training, outer)
    if outer.remat and id(module) not in outer.rematted:
        _rematerialise(module, outer)
    if not buffer_sites.slots:
        out = param_sites.call(module, args, kwargs)
        return out if buffers is None else (out, {})
    if buffers is not None:
        _check_names("functional_call: buffers", buffer_sites.own, buffers)
    before = buffers if buffers is not None else buffer_sites.own
    with _buffers_in(buffer_sites, before, outer) as held:
        out = param_sites.call(module, args, kwargs)
        after = {name: container[key] for name, container, key, _ in buffer_sites.slots}
    written = [n for n, (b, version) in held.items() if after[n] is not b or b._version != version]
    if buffers is not None:
        return out, {n: b.detach() for n, b in after.items()}
    if written:
        raise RuntimeError(
            f"functional_call: the module wrote to its buffer {written[0]!r}, which is a constant here; "
            "pass buffers=... and use the new ones that come back, or training=False"
        )
    return out


def _devices(*trees: Any) -> list[torch.device]:
    """Where a call with these trees may draw: where their tensors are, and where new ones are made."""
    found = [x.device for tree in trees for x in tree_lib.leaves(tree) if isinstance(x, torch.Tensor)]
    return list(dict.fromkeys([*found, torch.get_default_device()]))


def _install(module: nn.Module, sites: _Sites, params: Mapping[str, torch.Tensor], outer: Scope) -> None:
    values = [params[n] for n in sites.own]
    if sites.installed is not None:
        if all(a is b for a, b in zip(sites.installed, values, strict=True)):
            return
        _refuse_recomputation(module, sites, outer)
    outer.apply(functools.partial(sites.exchange, values))
    if outer.lazy:
        _feed_compiled(module, outer)


def _feed_compiled(module: nn.Module, outer: Scope) -> None:
    """Dynamo cannot trace a stand-in, so a compiled submodule gets the data of all its leaves when it is called."""

    def hook(sub: nn.Module, args: Any) -> None:
        for inner in sub.modules():
            for key, value in inner._parameters.items():
                if isinstance(value, StandIn):
                    inner._parameters[key] = value.fetch()  # type: ignore[assignment]

    for sub in module.modules():
        if _compat.is_compiled(sub):
            outer.apply(lambda sub=sub: sub.register_forward_pre_hook(hook).remove)  # type: ignore[misc]


def _refuse_recomputation(module: nn.Module, sites: _Sites, outer: Scope) -> None:
    """With two trees in one graph, a part of the module that runs again in the backward would take the wrong one."""

    def hook(sub: nn.Module, args: Any) -> None:
        if outer.in_backward and not sites.calls:
            raise RuntimeError(
                f"{type(module).__name__} was called with two trees of params in one graph and recomputes in the "
                "backward: it cannot know which tree; checkpoint the call with fz.remat instead of within the module"
            )

    for sub in module.modules():
        if sub._parameters:
            outer.apply(lambda sub=sub: sub.register_forward_pre_hook(hook).remove)  # type: ignore[misc]


def _rematerialise(module: nn.Module, outer: Scope) -> None:
    """Makes the submodules that the scope's rules name compute again in the backward; undone at the end of the scope."""
    outer.rematted.add(id(module))
    named = [(name, sub) for name, sub in module.named_modules() if name]
    rules = dict(outer.remat)
    for (_, sub), glob in zip(
        named, tree_lib.match_globs(rules, [n for n, _ in named], "remat", "module"), strict=True
    ):
        if glob is not None:
            outer.apply(functools.partial(_put_forward, sub, remat(sub.forward, rules[glob])))


def _put_forward(sub: nn.Module, forward: Any) -> Callable[[], None]:
    own = sub.__dict__.get("forward")
    sub.forward = forward  # type: ignore[method-assign]

    def undo() -> None:
        if own is None:
            del sub.__dict__["forward"]
        else:
            sub.forward = own  # type: ignore[method-assign]

    return undo


def _set_mode(module: nn.Module, training: bool, outer: Scope) -> None:
    modes = [(sub, sub.training) for sub in module.modules() if sub.training != training]

    def undo() -> None:
        for sub, mode in modes:
            sub.training = mode

    def change() -> Callable[[], None]:
        for sub, _ in modes:
            sub.training = training
        return undo

    outer.apply(change)


@contextlib.contextmanager
def _buffers_in(
    sites: _Sites, values: Mapping[str, torch.Tensor], outer: Scope
) -> Iterator[dict[str, tuple[torch.Tensor, int]]]:
    """Puts copies of buffers in for a call; later recomputation meets other copies, so that it cannot write to results."""

    def change() -> Callable[[], None]:
        sites.exchange([values[n].clone() for n in sites.own])
        return sites.restore

    outer.apply(change)
    copies = dict(zip(sites.own, sites.installed or (), strict=True))
    try:
        yield {n: (b, b._version) for n, b in copies.items()}
    finally:
        sites.put({n: b.clone() for n, b in values.items()} if torch.is_grad_enabled() else values)


def load_module(module: nn.Module, state: TrainState) -> None:
    """Writes a state's params and buffers back into a module, whole, leaf by leaf. A collective call.

    Args:
        module: that the params came from; it may be on the meta device, and then gets new parameters.

    Raises ValueError when its names are not those of the state.
    """
    if state.specs is None:
        raise ValueError("load_module: the state has no specs; make it with fz.init_state")
    params, buffers = split_module(module)
    with torch.no_grad():
        for kind, own, tree, specs in (
            ("params", params, state.params, state.specs.params),
            ("buffers", buffers, state.buffers, state.specs.buffers),
        ):
            local = dict(zip(*tree_lib.flatten_with_paths(tree)[:2], strict=True))
            if kind == "params" or local:
                _check_names(f"load_module: {kind}", own, local)
            for (name, leaf), layout in zip(local.items(), specs.layouts, strict=True):
                _write_back(module, name, place.whole(leaf, layout))


def _write_back(module: nn.Module, name: str, value: torch.Tensor) -> None:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}[name]
    if not own.is_meta:
        own.copy_(value)
        return
    made: Any = value.clone()
    if isinstance(own, nn.Parameter):
        made = nn.Parameter(made, requires_grad=own.requires_grad)
    for sub in module.modules():  # every place of a tied weight
        for table in (sub._parameters, sub._buffers):
            for key in [k for k, held in table.items() if held is own]:
                table[key] = made


def init_module(module: nn.Module) -> dict[str, InitThunk]:
    """How to make the params of a module that is on the meta device: what `init_state` takes in place of params.

    Each leaf comes from the `reset_parameters` of its submodule, under a seed of its own, so it has the same values on
    any number of ranks, and a rank holds the leaves of one submodule at a time.

    Raises ValueError for a submodule with params but without `reset_parameters`.
    """
    names = {id(p): n for n, p in module.named_parameters()}
    thunks: dict[str, InitThunk] = {}
    for prefix, sub in module.named_modules():
        own = {key: p for key, p in sub._parameters.items() if p is not None}
        if own and not callable(getattr(sub, "reset_parameters", None)):
            raise ValueError(f"init_module: {prefix or type(sub).__name__} has params but no reset_parameters; add one")
        for key, p in own.items():
            thunks.setdefault(names[id(p)], functools.partial(_init_leaf, sub, prefix, key))
    return thunks


def _init_leaf(sub: nn.Module, prefix: str, key: str, rng: torch.Tensor) -> torch.Tensor:
    """One leaf of a submodule, from a copy of it without its children."""
    twin: Any = copy.copy(sub)
    device = torch.get_default_device()
    twin._parameters = {
        k: p if p is None else nn.Parameter(torch.empty_like(p, device=device)) for k, p in sub._parameters.items()
    }
    twin._buffers = {k: b if b is None else torch.zeros_like(b, device=device) for k, b in sub._buffers.items()}
    if device.type != "meta":
        with seeded(fold_in(rng, zlib.crc32(prefix.encode())), device):
            twin.reset_parameters()
    leaf: torch.Tensor = twin._parameters[key].detach()
    return leaf
