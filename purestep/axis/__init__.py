"""Where the tokens are spread: axes, and the sums over them."""

from purestep.axis.collectives import (
    Axis,
    all_gather,
    check_axis,
    over_tree,
    overlap,
    pmean,
    psum,
    psum_scatter,
    pvary,
    within,
)
from purestep.axis.local import LocalAxis
from purestep.axis.mesh import MeshAxis
from purestep.axis.ranks import RankError, Ranks
from purestep.axis.vmap import VmapAxis

__all__ = [
    "Axis",
    "LocalAxis",
    "VmapAxis",
    "Ranks",
    "MeshAxis",
    "RankError",
    "check_axis",
    "over_tree",
    "overlap",
    "within",
    "psum",
    "pmean",
    "pvary",
    "all_gather",
    "psum_scatter",
]
