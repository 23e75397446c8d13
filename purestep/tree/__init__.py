"""Trees of tensors: the one optree namespace, and arithmetic on trees.

Containers that optree knows (dict, list, tuple, NamedTuple, ...) are nodes. ``None`` is an empty
subtree. Everything else is a leaf. Your own classes become nodes when they are registered in
``NAMESPACE`` (or globally):

>>> import optree
>>> @optree.dataclasses.dataclass(namespace=NAMESPACE)
... class Weights:
...     w: float
>>> map(lambda x: x + 1, {"layer": Weights(w=1.0), "nothing": None})
{'layer': Weights(w=2.0), 'nothing': None}
"""

from purestep.tree.norms import (
    accumulation_dtype,
    all_finite,
    global_norm,
    widen as widen,
)
from purestep.tree.ops import (
    FLOAT_DTYPES,
    copy_,
    describe_mismatch,
    detach,
    detach_leaves as detach_leaves,
    format_leaf as format_leaf,
    match_strides as match_strides,
    to_device as to_device,
    where,
    zeros_like,
)
from purestep.tree.shard import NAMESPACE
from purestep.tree.spec import (
    TreeSpec,
    broadcast_prefix,
    flatten,
    format_spec,
    is_empty as is_empty,
    is_same_spec as is_same_spec,
    leaves,
    leaves_matching as leaves_matching,
    map,
    mappings_to_dicts,
    paths,
    shard_specs as shard_specs,
    subset as subset,
    tensors_matching as tensors_matching,
    unflatten,
)
from purestep.tree.tracing import (
    any_requires_grad,
    can_write as can_write,
    concrete as concrete,
    concrete_scalar as concrete_scalar,
    is_plain_eager as is_plain_eager,
    leaves_require_grad as leaves_require_grad,
    may_be_differentiated as may_be_differentiated,
    views_for_dynamo as views_for_dynamo,
)

__all__ = [
    # Containers
    "NAMESPACE", "TreeSpec", "flatten", "unflatten", "leaves", "map", "broadcast_prefix",
    "mappings_to_dicts", "paths", "format_spec",
    # Leaves
    "FLOAT_DTYPES", "accumulation_dtype", "any_requires_grad", "detach", "describe_mismatch",
    "zeros_like", "where", "copy_", "global_norm", "all_finite",
]  # fmt: skip
