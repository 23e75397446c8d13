"""One rank, which holds all tokens; and the session of ranks that run one program."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purestep import tree
from purestep.axis.protocol import Axis, Gather
from purestep.axis.rows import by_law, sharded, sum_axes
from purestep.axis.whole import whole
from purestep.types import Count, Ready, Sums, Tree
from purestep.weights import check_count


class LocalAxis:
    """One rank, which holds all tokens.

    >>> from purestep import psum
    >>> psum(torch.tensor(3), LocalAxis())
    tensor(3)
    """

    size = 1
    own_programs = False
    members: frozenset[int] = frozenset()

    @property
    def index(self) -> Tensor:
        """Always 0."""
        return torch.zeros((), dtype=torch.int64)

    def apply(self, law: str, x: Tensor) -> Tensor:
        """The law over a single rank."""
        if law == "all_gather":
            return x.unsqueeze(0)
        return x.squeeze(0) if law == "psum_scatter" else x

    def apply_tree(self, law: str, x: Tree) -> Tree:
        """psum or pvary of every leaf: with a single rank, the tree itself."""
        return x

    def session(self, gather: Gather, settings: Mapping[str, str]) -> OneProgram:
        """A session whose sums are those of this rank."""
        return OneProgram(self, gather)

    def __repr__(self) -> str:
        return "LocalAxis()"


@dataclass
class OneProgram(AbstractContextManager["OneProgram"]):
    """The session of ranks that run one program, alone, simulated or compiled: they are alike."""

    axis: Axis
    gather: Gather
    rank = 0

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        pass

    def buckets(self, params: Tree, dtype: torch.dtype | None) -> Ready | None:
        """None: sums stay where they are."""
        return None

    def agree(
        self, here: Count, params: Tree, opt_state: Tree, microbatches: int
    ) -> Count:
        """The sum of all ranks' counts."""
        if self.axis.own_programs and not microbatches:
            raise ValueError(
                f"a rank of {self.axis} holds no microbatch, and a compiled step is one program "
                "for all ranks: give it a microbatch whose weights are zero"
            )
        total: Count = self.axis.apply_tree("psum", here)
        return total

    def whole(self, params: Tree) -> Tree:
        """The params as a loss sees them: each rank's own, gathered for the step."""
        if not tree.spread(tree.flatten(params)[1]):
            return self.axis.apply_tree("pvary", params)
        return whole(params, self.axis, self.gather)

    def rounds(self, microbatches: int) -> int:
        """The number itself."""
        return microbatches

    def sum(self, sums: Sums, params: Tree) -> Sums:
        """The sums of all ranks, by the laws, under any transform."""
        structure = tree.flatten(params)[1]
        places = tree.spread(structure)
        if not places:
            total: Sums = self.axis.apply_tree("psum", sums)
            check_count(total.counted)
            return total
        leaves = tree.leaves_of(sums.grads)
        for at, place in (
            sharded(places, self.axis).items() if self.gather == "step" else ()
        ):
            leaves[at] = by_law("psum_scatter", leaves[at], place)
        for at, over in enumerate(sum_axes(places, self.axis)):
            leaves[at] = leaves[at] if over is None else over.apply("psum", leaves[at])
        total = self.axis.apply_tree("psum", sums._replace(grads=()))
        check_count(total.counted)
        return total._replace(grads=tree.unflatten(structure, leaves))
