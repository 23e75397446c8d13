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

from purestep.tree.norms import all_finite, global_norm
from purestep.tree.ops import (  # fmt: skip
    SUM_DTYPES,
    accumulation_dtype,
    brought as brought,
    cut_off as cut_off,
    detached,
    difference,
    kind as kind,
    laid_out_like as laid_out_like,
    overwrite,
    select,
    zeros_like,
)
from purestep.tree.shard import NAMESPACE
from purestep.tree.spec import (  # fmt: skip
    Structure,
    broadcast_prefix,
    describe,
    flatten,
    is_empty as is_empty,
    is_same_structure as is_same_structure,
    leaves_like as leaves_like,
    leaves_of,
    map,
    part as part,
    paths,
    plain,
    spread as spread,
    unflatten,
)
from purestep.tree.tracing import (  # fmt: skip
    any_requires_grad as any_requires_grad,
    at_hand as at_hand,
    differentiated as differentiated,
    eager as eager,
    known_to_compilers as known_to_compilers,
    number_at_hand as number_at_hand,
    requires_grad,
    untransformed as untransformed,
)

__all__ = [
    "NAMESPACE", "Structure", "flatten", "unflatten", "leaves_of", "map", "broadcast_prefix",
    "plain", "paths", "describe", "requires_grad", "detached", "SUM_DTYPES", "accumulation_dtype",
    "difference", "zeros_like", "select", "overwrite", "global_norm", "all_finite",
]  # fmt: skip
