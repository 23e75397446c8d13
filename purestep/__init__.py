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
from purestep.backward import make_backward
from purestep.compiling import compile
from purestep.counts import count_tokens, label_weights
from purestep.data import (
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
from purestep.evaluation import make_eval_step
from purestep.grads.accumulate import accumulate
from purestep.grads.grad_and_value import grad_and_value
from purestep.nn import from_module, reset_parameters, to_module
from purestep.remat import remat
from purestep.sharding import from_dtensor, shard, to_dtensor, unshard
from purestep.stacked import stack
from purestep.state import load_state_dict, state_dict
from purestep.step import make_update_step
from purestep.tree.shard import Shard
from purestep.types import GradSums, LossOutput, StepMetrics, TokenCounts

__all__ = [
    # Trees, keys and modules
    "tree", "random", "from_module", "to_module", "reset_parameters",
    # Data: examples to microbatches
    "shift_labels", "BatchPlan", "plan", "balance", "pack", "pack_documents", "segment_mask",
    "split", "merge", "stack", "group", "DataExhausted", "prefetch",
    # The loss and its weights
    "losses", "LossOutput", "label_weights", "count_tokens", "TokenCounts",
    # Gradients
    "grad_and_value", "remat", "accumulate", "GradSums", "make_backward",
    # Ranks, and tensors in pieces
    "Axis", "LocalAxis", "VmapAxis", "MeshAxis", "RankError", "psum", "pmean", "pvary",
    "all_gather", "psum_scatter", "Shard", "shard", "unshard", "to_dtensor", "from_dtensor",
    # The step
    "optim", "make_update_step", "StepMetrics", "make_eval_step", "compile",
    # What stays behind, and tests
    "state_dict", "load_state_dict", "checkpoint", "testing",
]  # fmt: skip

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
