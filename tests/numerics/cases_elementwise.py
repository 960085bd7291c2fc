"""Cases of `trajectories` for optimizers that work element by element."""

from collections.abc import Callable
from typing import Any

import torch

import funzero as fz
from funzero.transforms.average import averaged_params, ema, polyak_averaging
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
from funzero.transforms.optim.schedule_free import (
    schedule_free,
    schedule_free_adamw,
    schedule_free_eval_params,
    schedule_free_sgd,
)
from tests.numerics.trajectories import Case

FUNZERO: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(adagrad, adam, adamw, adan, amsgrad, clip, ema, lion, nadam, nadamw, rmsprop, fz.sgd),
        *(scale_by_adam, scale_by_adan, scale_by_amsgrad, scale_by_lion, scale_by_rms, scale_by_rss, scale_by_stddev),
        *(schedule_free_adamw, schedule_free_sgd),
    )
}
DECAY = 0.1


def rate(count: Any) -> Any:
    """A learning rate that both libraries can evaluate."""
    return 0.1 / (1.0 + count)


def same(name: str, *args: Any, **kwargs: Any) -> Case:
    """The function of this name in both libraries, with the same arguments."""

    def in_optax(optax: Any) -> Any:
        return getattr(optax if hasattr(optax, name) else optax.contrib, name)(*args, **kwargs)

    return Case(in_optax, lambda: FUNZERO[name](*args, **kwargs))


def chained(name: str, *args: Any, **kwargs: Any) -> Case:
    """A direction, followed by a learning rate."""
    case = same(name, *args, **kwargs)
    return Case(
        lambda o: o.chain(case.optax(o), o.scale_by_learning_rate(0.1)),
        lambda: fz.chain(case.funzero(), fz.scale_by_learning_rate(0.1)),
    )


def decayed(case: Case) -> Case:
    """With coupled weight decay in front."""
    return Case(
        lambda o: o.chain(o.add_decayed_weights(DECAY), case.optax(o)),
        lambda: fz.chain(fz.add_decayed_weights(DECAY), case.funzero()),
    )


def masked(name: str, *args: Any, **kwargs: Any) -> Case:
    """With decoupled decay of the leaf `a` alone."""

    def only_a(params: Any) -> Any:
        return {k: k == "a" for k in params}

    return same(name, *args, weight_decay=DECAY, mask=only_a, **kwargs)


# Optimizers without weight decay of their own, each by itself and with coupled decay in front.
PLAIN = {
    "sgd": same("sgd", 0.1),
    "sgd_momentum": same("sgd", 0.1, momentum=0.9),
    "sgd_nesterov": same("sgd", 0.1, momentum=0.9, nesterov=True),
    "adam": same("adam", 1e-2),
    "adam_eps_root": same("adam", 1e-2, eps_root=1e-3),
    "adam_nesterov": same("adam", 1e-2, nesterov=True, eps_root=1e-3),
    "nadam": same("nadam", 1e-2, b1=0.8, b2=0.99),
    "amsgrad": same("amsgrad", 1e-2, b2=0.8),
    "amsgrad_biased": same("amsgrad", 1e-2, eps_root=1e-3, bias_correction_mu=False, bias_correction_nu=False),
    "rmsprop": same("rmsprop", 1e-2),
    "rmsprop_eps_outside": same("rmsprop", 1e-2, eps_in_sqrt=False, initial_scale=0.5),
    "rmsprop_momentum": same("rmsprop", 1e-2, decay=0.8, momentum=0.9, bias_correction=True),
    "rmsprop_nesterov": same("rmsprop", 1e-2, momentum=0.9, nesterov=True, centered=True, initial_scale=0.1),
    "rmsprop_centered": same("rmsprop", 1e-2, centered=True, eps_in_sqrt=False),
    # The first variance is only rounding, so eps must be far above it.
    "rmsprop_centered_unbiased": same("rmsprop", 1e-2, centered=True, bias_correction=True, eps=1e-2),
    "adagrad": same("adagrad", 0.1),
    "adagrad_from_0": same("adagrad", 0.1, initial_accumulator_value=0.0, eps=0.0),
    "schedule_free_sgd": same("schedule_free_sgd", 0.1),
}

CASES: dict[str, Case] = {
    **PLAIN,
    **{f"{name}_decayed": decayed(case) for name, case in PLAIN.items()},
    "adamw": same("adamw", 1e-2, weight_decay=0.1),
    "adamw_default": same("adamw", 1e-2),
    "adamw_options": masked("adamw", 1e-2, eps_root=1e-3, nesterov=True),
    "nadamw": same("nadamw", 1e-2),
    "nadamw_masked": masked("nadamw", 1e-2, eps_root=1e-3),
    "lion": same("lion", 1e-2, weight_decay=0.0),
    "lion_default": same("lion", 1e-2),
    "lion_masked": masked("lion", 1e-2, b1=0.8, b2=0.95),
    "lion_smooth": chained("scale_by_lion", mode="smooth", smooth_beta=2.0),
    "lion_refined": chained("scale_by_lion", mode="refined"),
    "adan": same("adan", 1e-2),
    "adan_masked": masked("adan", 1e-2, b1=0.9, b2=0.8, b3=0.95, eps_root=0.0),
    "adan_scale": chained("scale_by_adan"),
    "rms_scale": chained("scale_by_rms", bias_correction=True, eps_in_sqrt=False),
    "stddev_scale": chained("scale_by_stddev", initial_scale=0.2),
    "rss_scale": chained("scale_by_rss"),
    "amsgrad_scale": chained("scale_by_amsgrad"),
    "adam_scale": chained("scale_by_adam", eps_root=1e-3, nesterov=True),
    "clip": chained("clip", 0.5),
    "ema": chained("ema", 0.9),
    "ema_biased": chained("ema", 0.9, debias=False),
    "adam_scheduled": same("adam", rate),
    "rmsprop_scheduled": same("rmsprop", rate, momentum=0.9),
}


# Schedule-free learning: the params are trained, others are evaluated.
def evaluated(case: Case) -> Case:
    """Compares the params to evaluate at."""
    return Case(
        case.optax,
        case.funzero,
        lambda o, params, state: o.contrib.schedule_free_eval_params(state, params),
        lambda params, state: schedule_free_eval_params(state, params),
    )


def free(learning_rate: Any, **kwargs: Any) -> Case:
    """Around a base with momentum of its own."""
    return Case(
        lambda o: o.contrib.schedule_free(o.sgd(learning_rate, momentum=0.5), learning_rate, **kwargs),
        lambda: schedule_free(fz.sgd(learning_rate, momentum=0.5), learning_rate, **kwargs),
    )


FREE = {
    "schedule_free": free(0.1, b1=0.8, weight_lr_power=1.0),
    "schedule_free_scheduled": free(rate),
    "schedule_free_adamw": same("schedule_free_adamw"),
    # Optax evaluates its schedules in float32, so these rates have few digits.
    "schedule_free_adamw_warmup": same(
        "schedule_free_adamw", 2**-6, warmup_steps=4, weight_decay=0.1, b1=0.95, eps=1e-6
    ),
    "schedule_free_sgd_warmup": same("schedule_free_sgd", 0.125, warmup_steps=16, weight_decay=0.1),
}
CASES |= FREE
CASES |= {f"{name}_eval": evaluated(case) for name, case in FREE.items()}


# Lookahead: Optax's fast params. It wants both kinds of params, so its case starts the pair itself.
def look(period: int, alpha: float, **kwargs: Any) -> Case:
    """Around Adam, whose state may be reset."""

    def in_optax(o: Any) -> Any:
        tx = o.lookahead(o.adam(rate), period, alpha, **kwargs)

        def init(params: Any) -> Any:
            pair = o.LookaheadParams.init_synced(params)
            return pair, tx.init(pair)

        def update(grads: Any, state: Any, params: Any) -> Any:
            pair, inner = state
            changed, inner = tx.update(grads, inner, pair)
            return changed.fast, (o.apply_updates(pair, changed), inner)

        return o.GradientTransformation(init, update)

    return Case(in_optax, lambda: lookahead(adam(rate), period, alpha, **kwargs))


CASES |= {
    "lookahead": look(3, 0.5),
    "lookahead_every_step": look(1, 0.3),
    "lookahead_reset": look(2, 0.8, reset_state=True),
}


# Averages of the params: Optax's ema, run over the params.
def averaged(debias: bool) -> Case:
    """Without correction funzero's average starts at the initial params, as Optax's does when the state is put there."""

    def in_optax(o: Any) -> Any:
        tx, average = o.sgd(0.1), o.ema(0.8, debias)

        def init(params: Any) -> Any:
            start = average.init(params)
            return tx.init(params), start if debias else start._replace(ema=params), params

        def update(grads: Any, state: Any, params: Any) -> Any:
            updates, inner = tx.update(grads, state[0], params)
            mean, kept = average.update(o.apply_updates(params, updates), state[1])
            return updates, (inner, kept, mean)

        return o.GradientTransformation(init, update)

    return Case(
        in_optax,
        lambda: fz.chain(fz.sgd(0.1), polyak_averaging(0.8, debias)),
        lambda o, params, state: state[2],
        lambda params, state: averaged_params(state),
    )


CASES |= {"polyak_averaging": averaged(True), "polyak_averaging_biased": averaged(False)}


# Non-finite gradients: some steps of each tree are spoilt on the way in.
SPOILT = (2, 3, 4, 6, 8, 9)


def finite(limit: int) -> Case:
    """Around Adam; the limit lets the third in a row through, or none."""

    def in_optax(o: Any) -> Any:
        tx = o.apply_if_finite(o.adam(0.1), limit)

        def update(grads: Any, state: Any, params: Any) -> Any:
            spoilt = sum(state[1] == s - 1 for s in SPOILT) > 0
            grads = {**grads, "a": o.tree.where(spoilt, grads["a"].at[0].set(float("inf")), grads["a"])}
            updates, inner = tx.update(grads, state[0], params)
            return updates, (inner, state[1] + 1)

        return o.GradientTransformation(lambda params: (tx.init(params), 0), update)

    def in_funzero() -> Any:
        tx = skip_nonfinite(adam(0.1), limit)

        def update(grads: Any, state: Any, params: Any) -> Any:
            bad = grads["a"].clone()
            bad[0] = float("inf")
            grads = {**grads, "a": bad if int(state["step"]) + 1 in SPOILT else grads["a"]}
            updates, inner = tx.update(grads, state["inner"], params)
            return updates, {"inner": inner, "step": state["step"] + 1}

        return fz.Transform(lambda params: {"inner": tx.init(params), "step": torch.zeros(())}, update)

    return Case(in_optax, in_funzero)


CASES |= {"skip_nonfinite": finite(5)}


# Hyper-parameters of a user's factory.
def injected() -> Case:
    """A learning rate by a schedule and a number that the factory computes with."""

    def factory(library: Any) -> Callable[..., Any]:
        def make(learning_rate: Any, b1: Any, half_decay: Any, nesterov: bool = False) -> Any:
            return library.chain(
                library.scale_by_adam(b1, nesterov=nesterov),
                library.add_decayed_weights(2 * half_decay),
                library.scale_by_learning_rate(learning_rate),
            )

        return make

    def case(library: Any, inject: Callable[..., Any]) -> Any:
        return inject(factory(library))(rate, b1=0.8, half_decay=0.05, nesterov=True)

    return Case(lambda o: case(o, o.inject_hyperparams), lambda: case(fz, inject_hyperparams))


CASES |= {"inject_hyperparams": injected()}
