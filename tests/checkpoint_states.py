"""Makes states of every dtype and memory order, of any bits, and compares them to the bit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree

UNSUPPORTED_DTYPES = [torch.complex128, torch.complex32]
"""Dtypes that safetensors does not support."""

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]
"""Dtypes that it supports."""


class Moments(NamedTuple):
    """Holds two trees by name."""

    mu: Any
    nu: Any


def bits(tensor: Tensor) -> list[int]:
    """Lists the bytes of a tensor, which tell a NaN's payload and the sign of a zero."""
    resolved = tensor.resolve_conj().resolve_neg().contiguous()
    return resolved.reshape(-1).view(torch.uint8).tolist()


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Compares trees of one structure, to the bit."""
    actual_leaves, structure = tree.flatten(actual)
    expected_leaves = tree.leaves_matching(structure, expected)
    for leaf, expected_leaf in zip(actual_leaves, expected_leaves, strict=True):
        assert leaf.dtype == expected_leaf.dtype
        assert leaf.shape == expected_leaf.shape
        assert bits(leaf) == bits(expected_leaf)


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Draws any bits at all: NaNs of every payload, subnormal numbers, negative zeros."""
    generator = torch.Generator().manual_seed(len(str(dtype)) + len(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 256, (size,), generator=generator).byte()
    return raw.view(dtype).view(shape)


def state_of_all_dtypes(dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Any]:
    """Makes a state with each of these dtypes, in every memory order, and with tied and lazy leaves."""
    by_dtype = {
        dtype: [
            random_bits(dtype),
            random_bits(dtype, 0),
            random_bits(dtype, 2, 0, 3),
            random_bits(dtype, 3, 2),
            random_bits(dtype, 3, 4).T,
            random_bits(dtype, 6, 5)[1::2, ::3],
            random_bits(dtype, 1).expand(4),
            random_bits(dtype, 10)[3:],
        ]
        for dtype in dtypes
    }
    one = random_bits(torch.float32, 3)
    z = random_bits(torch.complex64, 3)
    special = [-0.0, 5e-324, float("inf"), float("nan")]
    return {
        "by dtype": by_dtype,
        "tied": (
            one,
            {"again": one, "transposed": one.view(3, 1).T},
        ),
        "lazy": Moments(z.conj(), z.conj().imag),
        "special": [torch.tensor(special, dtype=torch.float64), None, ()],
        "recorded": torch.nn.Parameter(torch.ones(2)),
        "images": random_bits(torch.float32, 2, 3, 4, 5).to(
            memory_format=torch.channels_last
        ),
    }


def zeros_like(state: Any) -> Any:
    """Makes a tree of zeros like this one."""
    return tree.map(torch.zeros_like, state)
