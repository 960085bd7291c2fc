"""The public surface: names and signatures are agreed; a change here is a decision."""

import inspect

import pytest

import funzero as fz

NAMES = set(
    """
    Accumulator CheckpointError CheckpointManager read_manifest
    DonatedError Loss LossScaleError Mesh MeshError Metrics P SkipLimitError Spec Specs SpentStateError
    StateSpecs Step Sum TrainState Transform abstract_mesh abstract_state accumulate accumulate_into adafactor adagrad adam adamw
    adamw_4bit adamw_8bit adan add_decayed_weights amsgrad apply_update apply_updates averaged_params call centralize
    chain clip clip_by_block_rms clip_by_global_norm data ema eval_shape finalize functional_call gather global_norm
    grad_fn identity init_module init_state inject_hyperparams keep lamb lars lion load_module lookahead loss_scale losses
    make_eval make_mesh make_step masked muon nadam nadamw partition plan polyak_averaging precision random reduce remat reshard
    restore rmsprop save scale scale_by_adam scale_by_adam_4bit scale_by_adam_8bit scale_by_adan scale_by_amsgrad
    scale_by_factored_rms scale_by_learning_rate scale_by_lion scale_by_muon scale_by_param_block_rms scale_by_rms
    scale_by_rss scale_by_schedule scale_by_stddev scale_by_trust_ratio schedule_free schedule_free_adamw
    schedule_free_eval_params schedule_free_sgd schedules sgd shard skip_nonfinite split_module tie trace trainable
    transfer vjp with_memory tree with_hyperparams zero_specs
    """.split()
)

SIGNATURES = {
    "make_step": "loss_fn tx specs accumulate max_norm reduction precision trainable remat gather_budget leaf_use max_skips "
    "donate",
    "init_state": "params tx key specs buffers precision loss_scale trainable donate",
    "abstract_state": "params tx specs buffers precision loss_scale trainable",
    "zero_specs": "shapes tx mesh stage axis rules replicate persist_below trainable buffers precision",
    "with_memory": "specs kinds folder",
    "vjp": "fn params inputs specs batch precision gather_budget replay",
    "accumulate_into": "state grads weight precision",
    "plan": "loss_fn abstract_state batch accumulate remat gather_budget tx precision donate",
    "make_mesh": "batch ranks timeout_s axes",
    "transfer": "x from_specs to_specs handle",
    "make_eval": "loss_fn specs precision",
    "functional_call": "module params args buffers rng training kwargs",
    "clip_by_global_norm": "grads max_norm specs expert_aware",
    "global_norm": "grads specs",
    "remat": "fn policy",
    "save": "path state extra overwrite trainable_only",
    "restore": "path like strict select cast",
    "CheckpointManager": "root keep keep_every best background every_steps every_s",
    "adamw": "learning_rate b1 b2 eps weight_decay mask eps_root nesterov",
    "apply_update": "tx state grads precision",
    "with_hyperparams": "state values",
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
