"""The networks that sections train, and their data."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.entries import Run

Batch = dict[str, Tensor]

PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 operations in a second."""


class Sizes(NamedTuple):
    """Sizes of a GPT, and how many rows a microbatch has."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    rows: int


GPT2 = Sizes(50304, 1024, 12, 12, 768, rows=8)
TINY = Sizes(128, 16, 2, 2, 32, rows=2)


def gpt_sizes(run: Run) -> Sizes:
    """Returns the sizes of the smallest GPT-2, or tiny ones."""
    return TINY if run.tiny else GPT2


class Block(nn.Module):
    """A block of GPT-2, without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the next hidden states."""
        rows, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden = functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + self.down(hidden)


class GPT(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.ModuleList(
            Block(sizes.width, sizes.heads) for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(sizes.width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def build_gpt(run: Run, dtype: torch.dtype = torch.float32) -> GPT:
    """Returns the network, with the same numbers each time."""
    torch.manual_seed(0)
    with torch.device(run.device):
        return GPT(gpt_sizes(run)).to(dtype)


def make_text(run: Run, number: int) -> list[Batch]:
    """Returns microbatches of random text, of which a twentieth has no label."""
    sizes = gpt_sizes(run)
    generator = torch.Generator().manual_seed(number)
    shape = (sizes.rows, sizes.context)
    group = []
    for _ in range(number):
        tokens = torch.randint(sizes.vocabulary, shape, generator=generator)
        labels = torch.randint(sizes.vocabulary, shape, generator=generator)
        labels[torch.rand(shape, generator=generator) < 0.05] = -100
        group.append({"tokens": tokens.to(run.device), "labels": labels.to(run.device)})
    return group


def flops_per_token(sizes: Sizes, parameters: int) -> int:
    """Returns operations of a forward and backward pass, with attention to all positions.

    >>> flops_per_token(GPT2, 124_475_904) // 10**6
    860
    """
    return 6 * parameters + 12 * sizes.layers * sizes.width * sizes.context


def find_peak(name: str) -> float | None:
    """Returns the card's bf16 operations in a second, if they are in the list.

    >>> find_peak("NVIDIA H100 PCIe") == 756e12, find_peak("CPU")
    (True, None)
    """
    return next((rate for card, rate in PEAKS.items() if card in name), None)


def build_mlp(widths: list[int], device: str) -> nn.Sequential:
    """Returns a small network, with the same numbers each time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1]).to(device)


def make_regression(rows: list[int], widths: list[int], device: str) -> list[Batch]:
    """Returns one microbatch of inputs and targets for each number of rows."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(number, widths[0], generator=generator).to(device),
            "y": torch.randn(number, widths[-1], generator=generator).to(device),
        }
        for number in rows
    ]


def count_rows(microbatch: Batch) -> Tensor:
    """Weighs every row of a microbatch equally."""
    targets: Any = microbatch["y"]
    return torch.ones(len(targets), dtype=torch.bool, device=targets.device)
