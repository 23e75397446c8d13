"""Turns examples into groups of microbatches, by one function for each step of the way."""

from purestep.data.balance import balance, balance_indices
from purestep.data.documents import pack_document_indices, pack_documents, segment_mask
from purestep.data.group import DataExhausted, Groups, group
from purestep.data.labels import shift_labels
from purestep.data.pack import DEFAULT_PAD, pack, pack_indices, stack_examples
from purestep.data.plan import BatchPlan, plan
from purestep.data.prefetch import PrefetchedGroup, PrefetchedGroups, prefetch
from purestep.data.split import merge, split

__all__ = [
    # Groups of microbatches
    "BatchPlan", "plan", "group", "Groups", "DataExhausted", "split", "merge", "prefetch",
    "PrefetchedGroup", "PrefetchedGroups",
    # Examples of different lengths
    "shift_labels", "balance", "balance_indices", "pack", "pack_indices", "stack_examples",
    "DEFAULT_PAD", "pack_documents", "pack_document_indices", "segment_mask",
]  # fmt: skip
