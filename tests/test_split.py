"""``split`` and ``merge``: equal microbatches of one batch, and one batch of them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps


@given(st.integers(1, 5), st.integers(0, 4))
def test_split_and_merge_are_inverse(k: int, size: int) -> None:
    batch: dict[str, Any] = {
        "x": torch.arange(k * size * 2).view(k * size, 2),
        "nested": [torch.arange(k * size)],
        "none": None,
    }
    parts = ps.split(batch, k)
    assert len(parts) == k
    assert {len(part["x"]) for part in parts} == {size}
    merged = ps.merge(parts)
    assert torch.equal(merged["x"], batch["x"])
    assert torch.equal(merged["nested"][0], batch["nested"][0])
    again = ps.split(merged, k)
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("k", [0, 4, 12])
def test_split_refuses_uneven_cuts(k: int) -> None:
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
def test_split_refuses_what_has_no_common_length(batch: object) -> None:
    with pytest.raises(ValueError, match="one common first dimension"):
        ps.split(batch, 2)


def test_merge_refuses() -> None:
    with pytest.raises(ValueError, match="no microbatches"):
        ps.merge([])
    with pytest.raises(ValueError, match=r"same length, but these have \[1, 2\]"):
        ps.merge([{"x": torch.ones(1)}, {"x": torch.ones(2)}])
