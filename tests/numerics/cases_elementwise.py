"""Cases of `trajectories` for optimizers that work element by element."""

import funzero as fz
from tests.numerics.trajectories import Case

CASES: dict[str, Case] = {
    "sgd": Case(lambda o: o.sgd(0.1), lambda: fz.sgd(0.1)),
    "sgd_momentum": Case(lambda o: o.sgd(0.1, momentum=0.9), lambda: fz.sgd(0.1, momentum=0.9)),
    "sgd_nesterov": Case(
        lambda o: o.sgd(0.1, momentum=0.9, nesterov=True), lambda: fz.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "adam": Case(lambda o: o.adam(1e-2), lambda: fz.adam(1e-2)),
    "adamw": Case(lambda o: o.adamw(1e-2, weight_decay=0.1), lambda: fz.adamw(1e-2, weight_decay=0.1)),
    "adamw_default": Case(lambda o: o.adamw(1e-2), lambda: fz.adamw(1e-2)),
}
