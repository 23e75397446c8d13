"""The ranks that hold the tokens of a batch, and their collectives."""

from purestep.axis.base import Axis, RankError
from purestep.axis.collectives import (
    all_gather,
    check_axis,
    overlap,
    pmean,
    psum,
    psum_scatter,
    pvary,
    within,
)  # fmt: skip
from purestep.axis.local import LocalAxis
from purestep.axis.mesh import MeshAxis
from purestep.axis.process import Ranks
from purestep.axis.vmap import VmapAxis

__all__ = [
    "Axis", "LocalAxis", "VmapAxis", "Ranks", "MeshAxis", "RankError",
    "check_axis", "overlap", "within",
    "psum", "pmean", "pvary", "all_gather", "psum_scatter",
]  # fmt: skip
