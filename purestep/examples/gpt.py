"""Defines a GPT as two plain functions of a dict of tensors: ``init`` and ``apply``."""

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

import purestep as ps

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Holds the sizes of the model."""

    vocabulary: int = 256
    context: int = 256
    layers: int = 2
    heads: int = 4
    width: int = 64


def init(
    config: Config, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Params:
    """Draws normal weights, narrower where residual branches end; scales of norms are ones.

    The dict has tensors ``embedding``, ``position`` and ``norm``, and a list ``layers`` of dicts.
    The embedding is the output layer, too.
    """
    width = config.width
    branch_std = 0.02 / (2 * config.layers) ** 0.5

    def normal(*shape: int, std: float = 0.02) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (std * noise).to(dtype)

    return {
        "embedding": normal(config.vocabulary, width),
        "position": normal(config.context, width),
        "layers": [
            {
                "norms": torch.ones(2, width, dtype=dtype),
                "qkv": normal(width, 3 * width),
                "out": normal(width, width, std=branch_std),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width, std=branch_std),
            }
            for _ in range(config.layers)
        ],
        "norm": torch.ones(width, dtype=dtype),
    }


def apply(
    config: Config, params: Params, tokens: Tensor, *, remat: bool = False
) -> Tensor:
    """Computes logits, ``(batch, time, vocabulary)``, for the token after each of ``tokens``.

    ``tokens`` are ``(batch, time)``, at most ``config.context`` of them in a row. ``remat`` saves
    memory: the backward pass computes each layer again.
    """
    x = functional.embedding(tokens, params["embedding"])
    length = tokens.shape[1]
    x = x + params["position"][:length]
    run_block = ps.remat(block) if remat else block
    for layer in params["layers"]:
        x = run_block(config, layer, x)
    embedding: Tensor = params["embedding"]
    return _layer_norm(x, params["norm"]) @ embedding.T


def block(config: Config, params: Params, x: Tensor) -> Tensor:
    """Applies a layer: adds causal attention to ``x``, and to that sum a two-layer network.

    The attention reads ``x`` through a layer norm, and the network reads the sum through another.
    ``params`` are those of the layer, and ``x`` is ``(batch, time, width)``.
    """
    # Nested, so that memory is freed early: these inputs are large.
    qkv = _layer_norm(x, params["norms"][0]) @ params["qkv"]
    query, key, value = rearrange(
        qkv,
        "batch time (three head d) -> three batch head time d",
        three=3,
        head=config.heads,
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    mixed = rearrange(mixed, "batch head time d -> batch time (head d)")
    x = x + mixed @ params["out"]

    hidden = functional.gelu(_layer_norm(x, params["norms"][1]) @ params["up"])
    output: Tensor = x + hidden @ params["down"]
    return output


def _layer_norm(x: Tensor, scale: Tensor) -> Tensor:
    normalized = functional.layer_norm(x, x.shape[-1:])
    return normalized * scale
