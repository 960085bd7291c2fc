"""funzero: functional training of large models over PyTorch. The whole training state is one immutable tree."""

import torch as _torch

from funzero import _compat, data
from funzero.checkpoint.plain import restore, save
from funzero.core import tree
from funzero.core.abstract import eval_shape
from funzero.core.errors import DonatedError, LossScaleError, MeshError, SkipLimitError, SpentStateError
from funzero.core.mesh import Mesh, abstract_mesh, make_mesh
from funzero.core.spec import P, Spec, Specs
from funzero.core.state import Accumulator, Metrics, StateSpecs, TrainState
from funzero.core.tie import tie
from funzero.executor.evaluate import call, make_eval
from funzero.executor.init import abstract_state, init_state
from funzero.executor.place import gather, reshard, shard
from funzero.executor.reduce import reduce
from funzero.integrations.module import functional_call, init_module, load_module, split_module, trainable
from funzero.make_step import Step, make_step
from funzero.transforms import loss_scale, losses, precision, schedules
from funzero.transforms.accumulate import accumulate, finalize
from funzero.transforms.base import Transform
from funzero.transforms.basic import (
    add_decayed_weights,
    identity,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
)
from funzero.transforms.chain import chain, masked, partition
from funzero.transforms.grad import grad_fn
from funzero.transforms.losses import Loss, Sum
from funzero.transforms.norm import clip_by_global_norm, global_norm
from funzero.transforms.optim.adam import adam, adamw, scale_by_adam
from funzero.transforms.optim.sgd import sgd
from funzero.transforms.update import apply_update, apply_updates, with_hyperparams
from funzero.zero import zero_specs

_compat.check_torch_version(_torch.__version__)
__version__ = "0.1.0"

__all__ = [
    "Accumulator",
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
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_update",
    "apply_updates",
    "call",
    "chain",
    "clip_by_global_norm",
    "data",
    "eval_shape",
    "finalize",
    "functional_call",
    "gather",
    "global_norm",
    "grad_fn",
    "identity",
    "init_module",
    "init_state",
    "load_module",
    "loss_scale",
    "losses",
    "make_eval",
    "make_mesh",
    "make_step",
    "masked",
    "partition",
    "precision",
    "reduce",
    "reshard",
    "restore",
    "save",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "schedules",
    "sgd",
    "shard",
    "split_module",
    "tie",
    "trace",
    "trainable",
    "tree",
    "with_hyperparams",
    "zero_specs",
]
