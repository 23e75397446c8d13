"""Losses and groups of microbatches, in half precision and beside it."""

from typing import Any

import torch
from torch import Tensor

from proofs.test_t08_optimizers import random_params

HALVES = [torch.bfloat16, torch.float16]


def weights_of(microbatch: Any) -> Tensor:
    """The weights stand in the batch."""
    found: Tensor = microbatch["w"]
    return found


def tokens(group: list[Any]) -> Tensor:
    """How many there are."""
    return torch.stack([batch["w"].sum() for batch in group]).sum()


def quadratic_loss(params: Any, microbatch: Any) -> Tensor:
    """Something of all parameters, for each row."""
    hidden = torch.tanh(microbatch["x"].to(params["up"].dtype) @ params["up"])
    return (hidden @ params["down"]).squeeze(-1).square()


def training(dtype: torch.dtype, groups: int = 3) -> tuple[Any, list[list[Any]]]:
    """Params and groups of microbatches."""
    generator = torch.Generator().manual_seed(3)
    params = random_params({"up": (4, 6), "down": (6, 1)}, dtype, generator)

    def batch(rows: int) -> Any:
        return {"x": torch.randn(rows, 4, generator=generator), "w": torch.ones(rows)}

    return params, [[batch(3), batch(1)] for _ in range(groups)]
