"""Hidden states and a weight, whose product is logits."""

import torch

from proofs.logits import Case


def problem(
    tokens: int,
    features: int,
    classes: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Hidden states, a weight, labels, cotangents of both signs."""
    generator = torch.Generator().manual_seed(seed)
    return Case(
        torch.randn(tokens, features, generator=generator, dtype=torch.float64).to(
            dtype
        ),
        torch.randn(classes, features, generator=generator, dtype=torch.float64).to(
            dtype
        ),
        torch.randint(classes, (tokens,), generator=generator),
        torch.randn(tokens, generator=generator, dtype=torch.float64),
    )
