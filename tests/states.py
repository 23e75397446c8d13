"""States of every dtype and in every memory order, of any bits at all, and that two are equal to the bit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import tree

COMPLEX = [torch.complex128, torch.complex32]
"""The dtypes that safetensors does not hold."""

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip
"""Those that it does."""


class Moments(NamedTuple):
    """A container whose entries have names."""

    mu: Any
    nu: Any


def bits(tensor: Tensor) -> list[int]:
    """All that a tensor holds: a NaN's payload, and the sign of a zero."""
    return (
        tensor.resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .tolist()
    )


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Trees of one structure, equal to the bit."""
    ours, structure = tree.flatten(actual)
    for one, two in zip(ours, tree.leaves_matching(structure, expected), strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert bits(one) == bits(two)


def noise(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits at all: NaNs of every payload, subnormal numbers, negative zeros."""
    generator = torch.Generator().manual_seed(len(str(dtype)) + len(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(shape, dtype=dtype).nbytes
    return (
        torch.randint(0, 256, (size,), generator=generator)
        .byte()
        .view(dtype)
        .view(shape)
    )


def anything(dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, Any]:
    """Each of these dtypes, in each way to lie in memory."""
    by_dtype = {
        dtype: [
            noise(dtype), noise(dtype, 0), noise(dtype, 2, 0, 3), noise(dtype, 3, 2), noise(dtype, 3, 4).T,
            noise(dtype, 6, 5)[1::2, ::3], noise(dtype, 1).expand(4), noise(dtype, 10)[3:],
        ]
        for dtype in dtypes
    }  # fmt: skip
    one, z = noise(torch.float32, 3), noise(torch.complex64, 3)
    special = [-0.0, 5e-324, float("inf"), float("nan")]
    return {
        "by dtype": by_dtype,
        "tied": (one, {"again": one, "transposed": one.view(3, 1).T}),
        "lazy": Moments(z.conj(), z.conj().imag),
        "special": [torch.tensor(special, dtype=torch.float64), None, ()],
        "recorded": torch.nn.Parameter(torch.ones(2)),
        "images": noise(torch.float32, 2, 3, 4, 5).to(
            memory_format=torch.channels_last
        ),
    }


def zeros(state: Any) -> Any:
    """A tree like this one that holds none of it."""
    return tree.map(torch.zeros_like, state)
