"""A GPT as two plain functions of a dict of tensors: ``init`` and ``apply``."""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

import purestep as ps


@dataclass(frozen=True)
class Config:
    """The sizes of the model."""

    vocabulary: int = 256
    context: int = 256
    layers: int = 2
    heads: int = 4
    width: int = 64


def init(
    config: Config, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Normal, narrower where residual branches end; the embedding is the output layer too."""

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        return (std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(
            dtype
        )

    width, branch = config.width, 0.02 / (2 * config.layers) ** 0.5
    return {
        "embedding": normal(config.vocabulary, width),
        "position": normal(config.context, width),
        "layers": [
            {
                "norms": torch.ones(2, width, dtype=dtype),
                "qkv": normal(width, 3 * width),
                "out": normal(width, width, std=branch),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width, std=branch),
            }
            for _ in range(config.layers)
        ],
        "norm": torch.ones(width, dtype=dtype),
    }


def apply(
    config: Config, params: dict[str, Any], tokens: Tensor, *, remat: bool = False
) -> Tensor:
    """Logits for the token after each of ``tokens``, ``(batch, time)``; ``remat`` saves memory."""
    x = (
        functional.embedding(tokens, params["embedding"])
        + params["position"][: tokens.shape[1]]
    )
    layer = ps.remat(block) if remat else block
    for layer_params in params["layers"]:
        x = layer(config, layer_params, x)
    embedding: Tensor = params["embedding"]
    return _norm(x, params["norm"]) @ embedding.T


def block(config: Config, params: dict[str, Any], x: Tensor) -> Tensor:
    """Attention and a network of two layers, each added to what it was given."""
    qkv = _norm(x, params["norms"][0]) @ params["qkv"]
    query, key, value = rearrange(
        qkv,
        "batch time (three head d) -> three batch head time d",
        three=3,
        head=config.heads,
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + rearrange(mixed, "batch head time d -> batch time (head d)") @ params["out"]
    made: Tensor = (
        x
        + functional.gelu(_norm(x, params["norms"][1]) @ params["up"]) @ params["down"]
    )
    return made


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:]) * scale
