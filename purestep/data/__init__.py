"""From examples to groups of microbatches: label, plan, group, split, pack, balance, prefetch."""

from purestep.data.balance import balance, balancing
from purestep.data.cut import merge, split
from purestep.data.documents import document_rows, pack_documents, segment_mask
from purestep.data.group import DataExhausted, group
from purestep.data.labels import shift_labels
from purestep.data.pack import PAD, pack, packing, stack
from purestep.data.plan import BatchPlan, plan
from purestep.data.prefetch import PrefetchedGroup, prefetch

__all__ = [
    "shift_labels", "BatchPlan", "plan", "group", "DataExhausted", "split", "merge",
    "balance", "balancing", "pack", "packing", "stack", "PAD",
    "pack_documents", "document_rows", "segment_mask", "prefetch", "PrefetchedGroup",
]  # fmt: skip
