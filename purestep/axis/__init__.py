"""Axes, whose ranks hold the tokens of a batch, and their collectives."""

from purestep.axis.base import Axis, RankError
from purestep.axis.collectives import (  # fmt: skip
    all_gather,
    check_axis,
    is_subaxis,
    pmean,
    psum,
    psum_scatter,
    pvary,
    shares_ranks,
)
from purestep.axis.local import LocalAxis
from purestep.axis.mesh import MeshAxis
from purestep.axis.process import ProcessAxis
from purestep.axis.vmap import VmapAxis

__all__ = [
    "Axis", "LocalAxis", "VmapAxis", "ProcessAxis", "MeshAxis", "RankError",
    "check_axis", "shares_ranks", "is_subaxis",
    "psum", "pmean", "pvary", "all_gather", "psum_scatter",
]  # fmt: skip
