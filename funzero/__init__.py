"""funzero: functional training of large models over PyTorch. The whole training state is one immutable tree."""

import torch as _torch

from funzero import _compat, data
from funzero.checkpoint.manager import CheckpointManager
from funzero.checkpoint.manifest import read_manifest
from funzero.checkpoint.restore import restore
from funzero.checkpoint.save import save
from funzero.core import tree
from funzero.core.abstract import eval_shape
from funzero.core.errors import (
    CheckpointError,
    DonatedError,
    LossScaleError,
    MeshError,
    SkipLimitError,
    SpentStateError,
)
from funzero.core.mesh import Mesh, abstract_mesh, make_mesh
from funzero.core.spec import P, Spec, Specs
from funzero.core.state import Accumulator, Metrics, StateSpecs, TrainState
from funzero.core.tie import tie
from funzero.core.version import __version__ as __version__
from funzero.executor.evaluate import call, make_eval
from funzero.executor.init import abstract_state, init_state
from funzero.executor.into import accumulate_into
from funzero.executor.place import gather, reshard, shard
from funzero.executor.reduce import reduce
from funzero.executor.transfer import transfer
from funzero.executor.vjp import vjp
from funzero.integrations.module import functional_call, init_module, load_module, split_module, trainable
from funzero.make_step import Step, make_step
from funzero.planning.plan import plan
from funzero.transforms import loss_scale, losses, precision, random, schedules
from funzero.transforms.accumulate import accumulate, finalize
from funzero.transforms.average import averaged_params, ema, polyak_averaging
from funzero.transforms.base import Transform
from funzero.transforms.basic import (
    add_decayed_weights,
    clip,
    identity,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
)
from funzero.transforms.block import centralize, clip_by_block_rms, scale_by_param_block_rms, scale_by_trust_ratio
from funzero.transforms.chain import chain, masked, partition
from funzero.transforms.grad import grad_fn
from funzero.transforms.inject import inject_hyperparams
from funzero.transforms.lookahead import lookahead
from funzero.transforms.losses import Loss, Sum
from funzero.transforms.nonfinite import skip_nonfinite
from funzero.transforms.norm import clip_by_global_norm, global_norm
from funzero.transforms.optim.adafactor import adafactor, scale_by_factored_rms
from funzero.transforms.optim.adagrad import adagrad, scale_by_rss
from funzero.transforms.optim.adam import adam, adamw, scale_by_adam
from funzero.transforms.optim.adam_blockwise import adamw_4bit, adamw_8bit, scale_by_adam_4bit, scale_by_adam_8bit
from funzero.transforms.optim.adan import adan, scale_by_adan
from funzero.transforms.optim.amsgrad import amsgrad, scale_by_amsgrad
from funzero.transforms.optim.lamb import lamb
from funzero.transforms.optim.lars import lars
from funzero.transforms.optim.lion import lion, scale_by_lion
from funzero.transforms.optim.muon import muon, scale_by_muon
from funzero.transforms.optim.nadam import nadam, nadamw
from funzero.transforms.optim.rmsprop import rmsprop, scale_by_rms, scale_by_stddev
from funzero.transforms.optim.schedule_free import (
    schedule_free,
    schedule_free_adamw,
    schedule_free_eval_params,
    schedule_free_sgd,
)
from funzero.transforms.optim.sgd import sgd
from funzero.transforms.remat import keep, remat
from funzero.transforms.update import apply_update, apply_updates, with_hyperparams
from funzero.zero import with_memory, zero_specs

_compat.check_torch_version(_torch.__version__)

__all__ = [
    "Accumulator",
    "CheckpointError",
    "CheckpointManager",
    "DonatedError",
    "Loss",
    "LossScaleError",
    "Mesh",
    "MeshError",
    "Metrics",
    "P",
    "SkipLimitError",
    "Spec",
    "Specs",
    "SpentStateError",
    "StateSpecs",
    "Step",
    "Sum",
    "TrainState",
    "Transform",
    "abstract_mesh",
    "abstract_state",
    "accumulate",
    "accumulate_into",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "adamw_4bit",
    "adamw_8bit",
    "adan",
    "add_decayed_weights",
    "amsgrad",
    "apply_update",
    "apply_updates",
    "averaged_params",
    "call",
    "centralize",
    "chain",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "data",
    "ema",
    "eval_shape",
    "finalize",
    "functional_call",
    "gather",
    "global_norm",
    "grad_fn",
    "identity",
    "init_module",
    "init_state",
    "inject_hyperparams",
    "keep",
    "lamb",
    "lars",
    "lion",
    "load_module",
    "lookahead",
    "loss_scale",
    "losses",
    "make_eval",
    "make_mesh",
    "make_step",
    "masked",
    "muon",
    "nadam",
    "nadamw",
    "partition",
    "plan",
    "polyak_averaging",
    "precision",
    "random",
    "read_manifest",
    "reduce",
    "remat",
    "reshard",
    "restore",
    "rmsprop",
    "save",
    "scale",
    "scale_by_adam",
    "scale_by_adam_4bit",
    "scale_by_adam_8bit",
    "scale_by_adan",
    "scale_by_amsgrad",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_param_block_rms",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_stddev",
    "scale_by_trust_ratio",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_eval_params",
    "schedule_free_sgd",
    "schedules",
    "sgd",
    "shard",
    "skip_nonfinite",
    "split_module",
    "tie",
    "trace",
    "trainable",
    "transfer",
    "tree",
    "vjp",
    "with_hyperparams",
    "with_memory",
    "zero_specs",
]
