"""purestep: a pure training core for PyTorch, in the style of JAX.

The names below stand in the order in which data flows through an update.
"""

from purestep import checkpoint, losses, optim, random, testing, tree
from purestep.axis import (
    Axis,
    LocalAxis,
    MeshAxis,
    RankError,
    VmapAxis,
    all_gather,
    pmean,
    psum,
    psum_scatter,
    pvary,
)
from purestep.batching import (
    BatchPlan,
    DataExhausted,
    balance,
    group,
    merge,
    pack,
    pack_documents,
    plan,
    prefetch,
    segment_mask,
    shift_labels,
    split,
)
from purestep.compiler import compile
from purestep.evaluation import make_eval_step
from purestep.gradient_noise import NoiseScale, SquaredNorms, noise_scale, with_squared_norms
from purestep.grads import accumulate
from purestep.modules import from_module, to_module
from purestep.pieces import Shard
from purestep.privacy import per_example
from purestep.rematerialisation import remat
from purestep.reverse_mode import grad_and_value
from purestep.shard import from_dtensor, shard, to_dtensor, unshard, unshard_each
from purestep.state import load_state_dict, state_dict
from purestep.step import make_update_step
from purestep.tokens import count, count_tokens, label_weights
from purestep.types import (
    Count,
    EvalMetrics,
    GradAndValue,
    LossFn,
    LossTerms,
    ReverseMode,
    StepMetrics,
    Sums,
    Tally,
    UpdateStep,
    WeightFn,
)

__all__ = [
    "tree",
    "random",
    "from_module",
    "shift_labels",
    "BatchPlan",
    "plan",
    "balance",
    "pack",
    "pack_documents",
    "segment_mask",
    "split",
    "merge",
    "group",
    "DataExhausted",
    "prefetch",
    "WeightFn",
    "label_weights",
    "Count",
    "count",
    "count_tokens",
    "LossFn",
    "LossTerms",
    "losses",
    "GradAndValue",
    "grad_and_value",
    "remat",
    "Tally",
    "ReverseMode",
    "per_example",
    "with_squared_norms",
    "Sums",
    "accumulate",
    "Axis",
    "LocalAxis",
    "VmapAxis",
    "MeshAxis",
    "RankError",
    "psum",
    "pmean",
    "pvary",
    "all_gather",
    "psum_scatter",
    "Shard",
    "shard",
    "unshard",
    "unshard_each",
    "to_dtensor",
    "from_dtensor",
    "optim",
    "UpdateStep",
    "make_update_step",
    "StepMetrics",
    "SquaredNorms",
    "NoiseScale",
    "noise_scale",
    "make_eval_step",
    "compile",
    "EvalMetrics",
    "to_module",
    "state_dict",
    "load_state_dict",
    "checkpoint",
    "testing",
]
