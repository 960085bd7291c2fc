"""Cases of `trajectories` for optimizers that need a norm of a leaf, or whole leaves."""

import functools
from typing import Any
from unittest import mock

import torch

import funzero as fz
from funzero.transforms import block
from funzero.transforms.optim.adafactor import adafactor, scale_by_factored_rms
from funzero.transforms.optim.lamb import lamb
from funzero.transforms.optim.lars import lars
from funzero.transforms.optim.muon import muon
from tests.numerics.trajectories import Case


def only_a(params: Any) -> Any:
    """A mask."""
    return {k: k == "a" for k in params}


def after(lib: Any, transform: Any) -> Any:
    """A direction as an optimizer."""
    return lib.chain(transform, lib.scale(-0.1))


def decay(i: Any, exponent: Any) -> Any:
    """Adafactor's decay in float64: Optax's own works it out in float32, whatever the params are."""
    return 1.0 - (i + 1.0) ** (-exponent)


def optax_adafactor(optax: Any, *args: Any, **kwargs: Any) -> Any:
    """`optax.adafactor` with the decay in float64."""
    module = optax._src.factorized
    exact = functools.partial(module.scale_by_factored_rms, decay_rate_fn=decay)
    with mock.patch.object(module, "scale_by_factored_rms", exact):
        return optax.adafactor(*args, **kwargs)


def both(name: str, ours: Any, *args: Any, **kwargs: Any) -> Case:
    """The optimizer `name` of Optax and ours, with the same arguments."""
    return Case(lambda o: functools.reduce(getattr, name.split("."), o)(*args, **kwargs), lambda: ours(*args, **kwargs))


def direction(name: str, ours: Any, *args: Any, **kwargs: Any) -> Case:
    """The transform `name` of Optax and ours, with the same arguments, followed by a rate."""
    return Case(
        lambda o: after(o, getattr(o, name)(*args, **kwargs)),
        lambda: after(fz, ours(*args, **kwargs)),
    )


def factored(*args: Any, wide: bool = False, **kwargs: Any) -> Case:
    """Adafactor in both; `wide`: with its momentum in float64."""
    theirs = {**kwargs, "dtype_momentum": "float64"} if wide else kwargs
    ours = {**kwargs, "dtype_momentum": torch.float64} if wide else kwargs
    return Case(lambda o: optax_adafactor(o, *args, **theirs), lambda: adafactor(*args, **ours))


SMALL = {"min_dim_size_to_factor": 2}

CASES: dict[str, Case] = {
    "clip_by_block_rms": direction("clip_by_block_rms", block.clip_by_block_rms, 0.5),
    "centralize": direction("centralize", block.centralize),
    "trust_ratio": direction("scale_by_trust_ratio", block.scale_by_trust_ratio, 0.0, 0.3, 1e-2),
    "trust_ratio_min_norm": direction("scale_by_trust_ratio", block.scale_by_trust_ratio, min_norm=1.5),
    "param_block_rms": direction("scale_by_param_block_rms", block.scale_by_param_block_rms, 0.7),
    "lamb": both("lamb", lamb, 1e-2),
    "lamb_decay": both("lamb", lamb, 1e-2, eps_root=1e-3, weight_decay=0.1),
    "lamb_masked": both("lamb", lamb, 1e-2, weight_decay=0.1, mask=only_a),
    "lars": both("lars", lars, 0.1),
    "lars_decay": both("lars", lars, 0.1, weight_decay=0.1, trust_coefficient=0.5, eps=1e-2, nesterov=True),
    "lars_masked": both("lars", lars, 0.1, weight_decay=0.1, weight_decay_mask=only_a, trust_ratio_mask=only_a),
    "factored_rms": Case(
        lambda o: after(o, o.scale_by_factored_rms(min_dim_size_to_factor=2, decay_rate_fn=decay)),
        lambda: after(fz, scale_by_factored_rms(min_dim_size_to_factor=2)),
    ),
    "adafactor": factored(0.1, **SMALL),
    "adafactor_default": factored(0.1),
    "adafactor_decay": factored(0.1, weight_decay_rate=0.01, momentum=0.9, wide=True, **SMALL),
    "adafactor_masked": factored(0.1, weight_decay_rate=0.01, weight_decay_mask=only_a, **SMALL),
    "adafactor_plain": factored(
        None,
        decay_rate=0.7,
        decay_offset=-5,
        multiply_by_parameter_scale=False,
        clipping_threshold=None,
        factored=False,
    ),
    "muon": both("contrib.muon", muon, 0.05),
    "muon_decay": both("contrib.muon", muon, 0.05, weight_decay=0.1, adam_weight_decay=0.2, adam_learning_rate=1e-2),
    "muon_masked": both("contrib.muon", muon, 0.05, weight_decay=0.1, weight_decay_mask=only_a, ns_coeffs="dion"),
    "muon_plain": both("contrib.muon", muon, 0.05, nesterov=False, adam_eps_root=1e-3, ns_steps=3, beta=0.8, eps=1e-3),
    "muon_adaptive": both("contrib.muon", muon, 1e-3, adaptive=True, consistent_rms=0.2),
}
