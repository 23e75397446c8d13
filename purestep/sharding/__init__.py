"""Tensors that are sharded over an axis: cut, gathered, and exchanged with DTensor."""

from purestep.sharding.dtensor import from_dtensor, to_dtensor
from purestep.sharding.shard import shard, unshard
from purestep.tree.shard import Shard

__all__ = ["Shard", "shard", "unshard", "to_dtensor", "from_dtensor"]
