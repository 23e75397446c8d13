"""The quantile of the normal distribution in whole numbers, which every device computes alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from purestep.torch_internals import asked_once

_PARTS = 32
"""Of each octave, in each of which a cubic polynomial stands for the quantile."""

_DIGITS = 40
"""Binary, after the point."""


def normal_quantile(word: Tensor) -> Tensor:
    """Φ⁻¹((word + ½) / 2³²) in float64, to within 2⁻²⁸; ``word`` from 0 to 2³² − 1.

    >>> normal_quantile(torch.tensor([0, 2**30, 2**32 - 1]))
    tensor([-6.3380, -0.6745,  6.3380], dtype=torch.float64)
    """
    upper = word >> 31 == 1
    # Twice the distance from the nearer end, and 1: odd, so that it lies within an octave.
    distance = 2 * torch.where(upper, 2**32 - 1 - word, word) + 1
    # A float64 holds it exactly, and which octave it is stands in its exponent.
    octave = (distance.to(torch.float64).view(torch.int64) >> 52) - 1023
    # From 0 to 1 along the octave: of its 32 digits the first five choose the part, and 27 are the place within it.
    along = (distance << (32 - octave)) & (2**32 - 1)
    part, place = along >> 27, along & (2**27 - 1)
    table = torch.tensor(_table()).to(word.device, non_blocking=True)
    row = octave * _PARTS + part
    value = table[3][row]
    for power in (2, 1, 0):
        value = table[power][row] + ((value >> 10) * place >> 17)
    return torch.where(upper, -value, value).to(torch.float64) * 2.0**-_DIGITS


@asked_once
def _table() -> list[list[int]]:
    return _coefficients()


@functools.cache
def _coefficients() -> list[list[int]]:
    """Of each power, those of all parts: of the polynomial that meets the quantile at Chebyshev's four points."""
    from statistics import NormalDist  # Brings decimals and fractions with it.

    points = [0.5 - math.cos((2 * i + 1) * math.pi / 8) / 2 for i in range(4)]
    quantile, columns = NormalDist().inv_cdf, []
    for octave in range(32):
        for part in range(_PARTS):
            values = [quantile((1 + (part + t) / _PARTS) * 2.0 ** (octave - 33)) for t in points]
            columns.append([round(c * 2**_DIGITS) for c in _interpolated(points, values)])
    return [list(row) for row in zip(*columns, strict=True)]


def _interpolated(points: Sequence[float], values: Sequence[float]) -> list[float]:
    """The coefficients of the polynomial through these, the constant first: Newton's, multiplied out."""
    divided = [*values]
    for order in range(1, len(points)):
        for i in range(len(points) - 1, order - 1, -1):
            divided[i] = (divided[i] - divided[i - 1]) / (points[i] - points[i - order])
    polynomial = [0.0] * len(points)
    for point, difference in zip(points[::-1], divided[::-1], strict=True):
        shifted = [0.0, *polynomial[:-1]]
        polynomial = [up - point * down for up, down in zip(shifted, polynomial, strict=True)]
        polynomial[0] += difference
    return polynomial
