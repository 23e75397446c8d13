"""Numbers to be cut into pieces, for three ranks."""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 3


def drawn(*shape: int) -> Tensor:
    """Numbers that are the same every time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)
