"""Where the tokens are spread: axes, the sums over them, and the sessions of an update."""

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
from purestep.axis.protocol import Axis, Gather, RankError, Session
from purestep.axis.ranks import Ranks
from purestep.axis.vmap import VmapAxis

__all__ = [
    "Axis", "Session", "Gather", "LocalAxis", "VmapAxis", "Ranks", "MeshAxis", "RankError",
    "check_axis", "overlap", "within",
    "psum", "pmean", "pvary", "all_gather", "psum_scatter",
]  # fmt: skip
