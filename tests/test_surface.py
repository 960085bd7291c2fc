"""The public surface: names and signatures are agreed; a change here is a decision."""

import inspect

import pytest

import funzero as fz

NAMES = set(
    """
    Accumulator DonatedError Loss MeshError Mesh Metrics P SkipLimitError Spec Specs SpentStateError StateSpecs Step Sum
    TrainState Transform abstract_mesh abstract_state accumulate adam adamw add_decayed_weights apply_update apply_updates
    call chain clip_by_global_norm data eval_shape finalize functional_call gather global_norm grad_fn identity init_module
    init_state load_module losses make_eval make_mesh make_step masked partition precision reduce reshard restore save scale
    scale_by_adam scale_by_learning_rate scale_by_schedule schedules sgd shard split_module tie trace trainable tree
    zero_specs
    """.split()
)

SIGNATURES = {
    "make_step": "loss_fn tx specs accumulate max_norm reduction precision trainable gather_budget leaf_use max_skips donate",
    "init_state": "params tx key specs buffers trainable donate",
    "abstract_state": "params tx specs buffers trainable",
    "zero_specs": "shapes tx mesh stage axis rules replicate persist_below trainable buffers",
    "make_mesh": "batch timeout_s axes",
    "make_eval": "loss_fn specs precision",
    "functional_call": "module params args buffers training kwargs",
    "clip_by_global_norm": "grads max_norm specs expert_aware",
    "global_norm": "grads specs",
    "save": "path state overwrite",
    "restore": "path like",
    "adamw": "learning_rate b1 b2 eps weight_decay mask",
    "sgd": "learning_rate momentum nesterov",
}


def test_names():
    assert set(fz.__all__) == NAMES
    assert all(hasattr(fz, name) for name in NAMES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments(name):
    assert list(inspect.signature(getattr(fz, name)).parameters) == SIGNATURES[name].split()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_has_a_docstring(name):
    thing = getattr(fz, name)
    assert (inspect.getdoc(thing) or "").strip(), name
