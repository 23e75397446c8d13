"""Trees of tensors: the one optree namespace, and arithmetic on trees.

Containers that optree knows (dict, list, tuple, NamedTuple, ...) are nodes, ``None`` is an empty
subtree, everything else is a leaf. Your own classes become nodes when they are registered in
``NAMESPACE`` (or globally):

>>> import optree
>>> @optree.dataclasses.dataclass(namespace=NAMESPACE)
... class Weights:
...     w: float
>>> map(lambda x: x + 1, {"layer": Weights(w=1.0), "nothing": None})
{'layer': Weights(w=2.0), 'nothing': None}
"""

from purestep.tree.alike import (
    SUM_DTYPES,
    accumulation_dtype,
    difference,
    kind,
    overwrite,
    select,
    zeros_like,
)
from purestep.tree.memory import (
    Span,
    address,
    at_hand,
    brought,
    has_address,
    number_at_hand,
    span,
)
from purestep.tree.observers import (
    any_requires_grad,
    are_tensors,
    cut_off,
    detached,
    differentiated,
    eager,
    known_to_compilers,
    requires_grad,
    same,
    untransformed,
)
from purestep.tree.reductions import SMALL, all_finite, are_finite, global_norm, norm_of
from purestep.tree.structure import (
    NAMESPACE,
    Structure,
    broadcast_prefix,
    columns,
    describe,
    flatten,
    flatten_up_to,
    is_empty,
    leaves_of,
    map,
    part,
    paths,
    plain,
    unflatten,
)

__all__ = [
    "NAMESPACE",
    "Structure",
    "flatten",
    "unflatten",
    "leaves_of",
    "is_empty",
    "map",
    "columns",
    "flatten_up_to",
    "broadcast_prefix",
    "part",
    "plain",
    "paths",
    "describe",
    "eager",
    "known_to_compilers",
    "untransformed",
    "differentiated",
    "requires_grad",
    "any_requires_grad",
    "are_tensors",
    "same",
    "detached",
    "cut_off",
    "at_hand",
    "number_at_hand",
    "brought",
    "has_address",
    "address",
    "Span",
    "span",
    "SUM_DTYPES",
    "accumulation_dtype",
    "kind",
    "difference",
    "zeros_like",
    "select",
    "overwrite",
    "SMALL",
    "global_norm",
    "norm_of",
    "all_finite",
    "are_finite",
]
