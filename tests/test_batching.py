"""From examples to groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps


@given(st.integers(1, 5), st.integers(0, 4))
def test_split_keeps_every_row_in_order(k: int, size: int) -> None:
    batch: dict[str, Any] = {
        "x": torch.arange(k * size * 2).view(k * size, 2),
        "nested": [torch.arange(k * size)],
    }
    parts = ps.split(batch, k)
    assert len(parts) == k
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["nested"][0] for part in parts]), batch["nested"][0])


@pytest.mark.parametrize("k", [0, 4, 12])
def test_refuses_uneven_cuts(k: int) -> None:
    with pytest.raises(ValueError, match=rf"batch of 6 .* k={k} .*divisible by 1, 2, 3, 6"):
        ps.split({"x": torch.arange(6)}, k)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(4), "y": torch.ones(2)},
        {"x": torch.ones(4), "y": torch.tensor(1)},
        {"x": 3},
        {},
    ],
)
def test_refuses_what_has_no_common_length(batch: object) -> None:
    with pytest.raises(ValueError, match="one common first dimension"):
        ps.split(batch, 2)
