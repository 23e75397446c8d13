"""One rank that counts its collectives."""

from typing import Any

from torch import Tensor

import purestep as ps
from purestep import tree


class CountingAxis(ps.LocalAxis):
    """One rank that counts the calls of each collective, with their sizes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def apply(self, op: str, x: Tensor) -> Tensor:
        """Records the collective with its size, unless it is ``pvary``, and applies it."""
        if op != "pvary":
            self.calls.append((op, x.numel()))
        return super().apply(op, x)

    def apply_tree(self, op: str, x: Any) -> Any:
        """Applies the collective to each leaf."""
        return tree.map(lambda leaf: self.apply(op, leaf), x)
