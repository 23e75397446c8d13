"""Draws hidden states and a weight, whose product is logits."""

import torch

from support.logits import LogitsCase


def draw_problem(
    tokens: int,
    features: int,
    classes: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> LogitsCase:
    """Draws hidden states, a weight, labels, and cotangents of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return LogitsCase(
        normal(tokens, features).to(dtype),
        normal(classes, features).to(dtype),
        torch.randint(classes, (tokens,), generator=generator),
        normal(tokens),
    )
