"""Every public transform by name, as the laws of `test_transform_laws` run them; a new one is a line here."""

from collections.abc import Callable
from typing import Any

import funzero as fz
from funzero.transforms.average import ema, polyak_averaging
from funzero.transforms.basic import clip
from funzero.transforms.inject import inject_hyperparams
from funzero.transforms.lookahead import lookahead
from funzero.transforms.nonfinite import skip_nonfinite
from funzero.transforms.optim.adagrad import adagrad, scale_by_rss
from funzero.transforms.optim.adam import adam, adamw, scale_by_adam
from funzero.transforms.optim.adan import adan, scale_by_adan
from funzero.transforms.optim.amsgrad import amsgrad, scale_by_amsgrad
from funzero.transforms.optim.lion import lion, scale_by_lion
from funzero.transforms.optim.nadam import nadam, nadamw
from funzero.transforms.optim.rmsprop import rmsprop, scale_by_rms, scale_by_stddev
from funzero.transforms.optim.schedule_free import schedule_free, schedule_free_adamw, schedule_free_sgd


def only_c(params: Any) -> Any:
    """A mask by path, which fits any tree."""
    return fz.tree.map_with_path(lambda path, _: path == "c", params)


TABLE: dict[str, Callable[[], fz.Transform]] = {
    # transforms
    "identity": fz.identity,
    "scale": lambda: fz.scale(-0.1),
    "scale_by_learning_rate": lambda: fz.scale_by_learning_rate(0.1),
    "scale_by_schedule": lambda: fz.scale_by_schedule(lambda t: -0.1),
    "add_decayed_weights": lambda: fz.chain(fz.add_decayed_weights(0.1), fz.scale(-0.1)),
    "trace": lambda: fz.chain(fz.trace(0.9, nesterov=True), fz.scale(-0.1)),
    "clip": lambda: fz.chain(clip(0.7), fz.scale(-0.1)),
    "ema": lambda: fz.chain(ema(0.9), fz.scale(-0.1)),
    "ema_biased": lambda: fz.chain(ema(0.9, debias=False), fz.scale(-0.1)),
    "polyak_averaging": lambda: fz.chain(fz.sgd(0.1), polyak_averaging(0.9)),
    "polyak_averaging_biased": lambda: fz.chain(fz.sgd(0.1), polyak_averaging(0.9, debias=False)),
    "masked": lambda: fz.chain(fz.masked(fz.trace(0.9), only_c), fz.scale(-0.1)),
    "partition": lambda: fz.partition(
        {"w": fz.sgd(0.1), "v": fz.adam(0.1)},
        lambda p: fz.tree.map_with_path(lambda path, _: "v" if path == "c" else "w", p),
    ),
    "lookahead": lambda: lookahead(adam(0.1), 2, 0.5),
    "lookahead_reset": lambda: lookahead(adam(0.1), 2, 0.5, reset_state=True),
    "skip_nonfinite": lambda: skip_nonfinite(adam(0.1), 3),
    "inject_hyperparams": lambda: inject_hyperparams(adam)(0.1, b2=0.99),
    # directions
    "scale_by_adam": lambda: fz.chain(scale_by_adam(), fz.scale(-0.1)),
    "scale_by_amsgrad": lambda: fz.chain(scale_by_amsgrad(), fz.scale(-0.1)),
    "scale_by_rms": lambda: fz.chain(scale_by_rms(bias_correction=True), fz.scale(-0.1)),
    "scale_by_stddev": lambda: fz.chain(scale_by_stddev(initial_scale=0.1), fz.scale(-0.1)),
    "scale_by_lion": lambda: fz.chain(scale_by_lion(mode="smooth"), fz.scale(-0.1)),
    "scale_by_lion_refined": lambda: fz.chain(scale_by_lion(mode="refined"), fz.scale(-0.1)),
    "scale_by_rss": lambda: fz.chain(scale_by_rss(), fz.scale(-0.1)),
    "scale_by_adan": lambda: fz.chain(scale_by_adan(), fz.scale(-0.1)),
    # optimizers
    "sgd": lambda: fz.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: adam(0.1),
    "adam_options": lambda: adam(0.1, eps_root=1e-3, nesterov=True),
    "adamw": lambda: adamw(0.1, weight_decay=0.1, mask=only_c),
    "nadam": lambda: nadam(0.1),
    "nadamw": lambda: nadamw(0.1, weight_decay=0.1),
    "amsgrad": lambda: amsgrad(0.1),
    "rmsprop": lambda: rmsprop(0.1, momentum=0.9),
    "rmsprop_centered": lambda: rmsprop(0.1, centered=True, initial_scale=0.1, nesterov=True, momentum=0.5),
    "lion": lambda: lion(0.1),
    "adagrad": lambda: adagrad(0.1),
    "adan": lambda: adan(0.1, weight_decay=0.1),
    "schedule_free": lambda: schedule_free(fz.sgd(0.1), 0.1, b1=0.8),
    "schedule_free_sgd": lambda: schedule_free_sgd(0.1, weight_decay=0.1),
    "schedule_free_adamw": lambda: schedule_free_adamw(0.1, weight_decay=0.1),
}

# Every way of giving a schedule as a learning rate; with gradients of 1 the updates are -schedule(t).
SCHEDULED: dict[str, Callable[[Any], fz.Transform]] = {
    "sgd": fz.sgd,
    "sgd_momentum_0": lambda s: fz.sgd(s, momentum=0.0),
    "scale_by_learning_rate": fz.scale_by_learning_rate,
    "scale": lambda s: fz.scale(lambda t: -s(t)),
    "scale_by_schedule": lambda s: fz.scale_by_schedule(lambda t: -s(t)),
    "partition": lambda s: fz.partition({"x": fz.sgd(s)}, {"w": "x"}),
    "masked": lambda s: fz.masked(fz.sgd(s), {"w": True}),
    "lookahead": lambda s: lookahead(fz.sgd(s), 5, 0.5),
    "skip_nonfinite": lambda s: skip_nonfinite(fz.sgd(s), 5),
    "inject_hyperparams": lambda s: inject_hyperparams(lambda rate: fz.chain(fz.scale_by_learning_rate(rate)))(rate=s),
    "polyak_averaging": lambda s: fz.chain(fz.sgd(s), polyak_averaging(0.9)),
    "adam": lambda s: adam(s, eps=0.0),
    "adam_nesterov_0": lambda s: adam(s, b1=0.0, eps=0.0, nesterov=True),
    "adamw": lambda s: adamw(s, eps=0.0, weight_decay=0.0),
    "nadam_b1_0": lambda s: nadam(s, b1=0.0, eps=0.0),
    "nadamw_b1_0": lambda s: nadamw(s, b1=0.0, eps=0.0, weight_decay=0.0),
    "amsgrad": lambda s: amsgrad(s, eps=0.0),
    "rmsprop": lambda s: rmsprop(s, eps=0.0, bias_correction=True),
    "lion": lambda s: lion(s, weight_decay=0.0),
    "adagrad": lambda s: adagrad(lambda t: s(t) * (t + 1) ** 0.5, initial_accumulator_value=0.0, eps=0.0),
    "adan": lambda s: adan(s, eps=0.0, eps_root=0.0),
}
