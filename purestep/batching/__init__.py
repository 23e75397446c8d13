"""From examples to groups of microbatches: label, plan, group, split, pack, balance, prefetch."""

from purestep.batching.cut import merge, split
from purestep.batching.group import DataExhausted, group
from purestep.batching.labels import shift_labels
from purestep.batching.pack import (
    PAD,
    balance,
    balancing,
    document_rows,
    pack,
    pack_documents,
    packing,
    segment_mask,
    stack,
)
from purestep.batching.plan import BatchPlan, plan
from purestep.batching.prefetch import PrefetchedGroup, prefetch

__all__ = [
    "shift_labels",
    "BatchPlan",
    "plan",
    "group",
    "DataExhausted",
    "split",
    "merge",
    "balance",
    "balancing",
    "pack",
    "packing",
    "stack",
    "PAD",
    "pack_documents",
    "document_rows",
    "segment_mask",
    "prefetch",
    "PrefetchedGroup",
]
