"""An update by an optimizer's own transforms, all leaves at once or some at a time: see [Note: portions]."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from funzero.core import collectives
from funzero.core import tree as tree_lib
from funzero.executor.bus import Arrival
from funzero.executor.donate import make_writable
from funzero.executor.flat import FlatState
from funzero.executor.pieces import PartCaller
from funzero.executor.portions import Portion
from funzero.executor.regather import make_whole
from funzero.executor.selection import Selection
from funzero.executor.sound import spoilt
from funzero.executor.stores import Outbox, start_fetch
from funzero.transforms.storage import update_stored

Leaves = dict[int, torch.Tensor]


@dataclasses.dataclass
class Values:
    """A portion's leaves on the device. `params`, `grads`: by trained leaf, as far as these are updated here; `state`: by
    place in opt_state."""

    params: Leaves
    state: Leaves
    grads: Leaves = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Coming:
    """A portion on its way to the device."""

    params: dict[int, Arrival]
    state: dict[int, Arrival]
    grads: dict[int, Arrival]

    def wait(self) -> Values:
        """Returns when all of it is there."""
        return Values(*({i: x.wait() for i, x in part.items()} for part in (self.params, self.state, self.grads)))


@dataclasses.dataclass
class ComposedUpdate:
    """One update of a state.

    Attributes:
        grads: of the chosen leaves, where they are kept. scaled: gives gradients on the device divided and clipped.
        skip: 0-dim bool on the device that makes it a no-op, or None. donate: whether leaves may be written where they are.
    """

    selection: Selection
    flat: FlatState
    grads: list[torch.Tensor]
    scaled: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    skip: torch.Tensor | None
    donate: bool

    def __post_init__(self) -> None:
        self._outbox, self._params, self._state = Outbox(), Leaves(), Leaves()
        chosen = self.selection.chosen
        self._pieces = dict(zip(chosen, self.selection.pieces, strict=True))
        self._grads = dict(zip(chosen, self.grads, strict=True))
        self._layouts = dict(zip(chosen, self.selection.layouts, strict=True))
        self._places = {k: j for j, k in enumerate(chosen)}
        self._round_to = self.selection.rounder(self.flat)

    def run(self) -> torch.Tensor:
        """Replaces params and opt_state, unless something finite in them would cease to be.

        Nothing is written over before all has been looked at: while more is to come, new values go to new rooms.

        Returns: see `Selection.refuser`; equal on every rank.
        """
        todo, mesh = self.selection.portions, self.selection.plan.mesh
        lone = len(todo) == 1
        self.flat.spoilt |= self.donate and lone  # an update that has begun, by the contract
        found = torch.zeros((), dtype=torch.int64, device=mesh.device)
        coming = [self._start(todo[0])]
        for portion, following in itertools.zip_longest(todo, todo[1:]):
            here = coming.pop().wait()
            if following is not None:
                coming.append(self._start(following))
            new = self._compute(portion, here)
            found = torch.maximum(found, self._spoilt(here, new))
            if lone:
                found = collectives.all_max(found, mesh, mesh.names)
                if self.skip is None and int(found):
                    return found
            if self.skip is not None:
                new = _unless(self.skip | (found > 0), here, new)
            changed = Values(new.params, {i: x for i, x in new.state.items() if x is not here.state[i]})
            del here, new  # nobody else may hold the memory of what is written next
            self._put(changed, self.donate and lone)
            del changed
        self._outbox.settle()
        if not lone:
            found = collectives.all_max(found, mesh, mesh.names)
            if int(found):
                return found
        self._adopt()
        return found

    def _start(self, portion: Portion) -> Coming:
        """Starts to bring a portion."""
        pieces, layouts = self._pieces, self.selection.plan.specs.opt_state.layouts
        return Coming(
            {k: pieces[k].start(self.flat.params[pieces[k].at]) for k in portion.chosen},
            {i: start_fetch(self.flat.opt_state[i], layouts[i]) for i in portion.state},
            {k: start_fetch(self._grads[k], self._layouts[k]) for k in portion.chosen},
        )

    def _compute(self, portion: Portion, here: Values) -> Values:
        """Runs the optimizer as its transforms say, on trees in which leaves that took no part are `None`."""
        selection, trained = self.selection, self.selection.plan.specs.grads
        held: dict[int, Any] = {
            k: torch.empty(trained.layouts[k].local_shape, dtype=trained.layouts[k].dtype, device="meta")
            for k in portion.trained
        }
        grads = dict(zip(portion.chosen, self.scaled([here.grads.pop(k) for k in portion.chosen]), strict=True))
        trees = (
            tree_lib.unflatten(portion.trained_def, [grads.get(k) for k in portion.trained]),
            tree_lib.unflatten(portion.state_def, here.state.values()),
            tree_lib.unflatten(portion.trained_def, [here.params.get(k, held[k]) for k in portion.trained]),
        )
        caller = PartCaller(dict(zip(selection.names, trained.layouts, strict=True)))
        policy, owners = selection.plan.policy, selection.owners
        params, state = update_stored(selection.tx, policy, *trees, self._round_to, owners=owners, call=caller)
        after = dict(zip(*tree_lib.flatten_with_paths(params)[:2], strict=True))
        layouts = selection.plan.specs.opt_state.layouts
        written = {x.untyped_storage().data_ptr() for x in here.params.values()}

        def kept(i: int, x: torch.Tensor) -> torch.Tensor:
            x = x.to(layouts[i].dtype)  # a state may keep the params that were
            return x.clone() if x.untyped_storage().data_ptr() in written else x

        return Values(
            {k: after[selection.names[k]] for k in portion.chosen},
            {i: kept(i, x) for i, x in zip(portion.state, tree_lib.leaves(state), strict=True)},
        )

    def _spoilt(self, old: Values, new: Values) -> torch.Tensor:
        """What `first_spoilt` would find of these on this rank."""
        params, state = len(self.selection.chosen), len(self.flat.opt_state)
        rows = [(state + params - self._places[k], old.params[k], x) for k, x in new.params.items()]
        rows += [(state - i, old.state[i], x) for i, x in new.state.items()]
        return spoilt(rows, self.selection.plan.mesh.device)

    def _put(self, new: Values, donate: bool) -> None:
        """Starts to write what lives elsewhere, and holds the rest."""
        for k, value in new.params.items():
            x = self._pieces[k]
            if x.store is not None:
                leaf = x.store.writable(self.flat.params[x.at], donate)
                self._outbox.write(x.store, leaf, x.begin, value)
                value = leaf
            self._params[k] = value
        for i, value in new.state.items():
            layout = self.selection.plan.specs.opt_state.layouts[i]
            self._state[i] = self._outbox.put(value, layout, self.flat.opt_state[i], donate=donate)

    def _adopt(self) -> None:
        self.flat.spoilt |= self.donate
        make_writable(self.flat.params, self.selection.params_here, self.donate)
        for k, x in self._pieces.items():
            if x.store is None:
                x.here(self.flat.params[x.at]).copy_(self._params.pop(k))
            else:
                self.flat.params[x.at] = self._params.pop(k)
        for i, value in self._state.items():
            self.flat.opt_state[i] = value
        make_whole(self.selection, self.flat)


def _unless(skip: torch.Tensor, old: Values, new: Values) -> Values:
    def either(before: Leaves, after: Leaves) -> Leaves:
        return {i: torch.where(skip, before[i], x) for i, x in after.items()}

    return Values(either(old.params, new.params), either(old.state, new.state))
