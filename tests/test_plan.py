"""``plan``: sizes that multiply up, and the nearest ones where they do not."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

import purestep as ps


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_plan_multiplies_up(local: int, size: int, steps: int) -> None:
    total = local * size * steps
    for how in (
        {"global_batch_size": total, "local_batch_size": local},
        {"global_tokens": total, "local_tokens": local},
    ):
        assert ps.plan(**how, axis_size=size) == ps.BatchPlan(total, local, size, steps)


def test_plan_names_the_numbers_and_the_nearest_that_work() -> None:
    with pytest.raises(
        ValueError,
        match=r"global_batch_size=100 .* 8 \* 5 = 40\. .*global_batch_size=80 or 120; local_batch_size=5 or 10",
    ):
        ps.plan(global_batch_size=100, local_batch_size=8, axis_size=5)
    with pytest.raises(
        ValueError, match=r"global_tokens=100 .*Nearest that work: global_tokens=96 or 128$"
    ):
        ps.plan(global_tokens=100, local_tokens=4, axis_size=8)
    with pytest.raises(ValueError, match="global_batch_size=40; local_batch_size=1 or 2"):
        ps.plan(global_batch_size=20, local_batch_size=4, axis_size=10)


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 4))
def test_plan_offers_the_nearest_that_work(total: int, local: int, ranks: int) -> None:
    """Of either size, and all that it offers works; the nearest is the first or the second."""

    def works(total: int, local: int) -> bool:
        try:
            return bool(ps.plan(global_tokens=total, local_tokens=local, axis_size=ranks))
        except ValueError:
            return False

    try:
        ps.plan(global_tokens=total, local_tokens=local, axis_size=ranks)
    except ValueError as error:
        offers = dict(offer.split("=") for offer in str(error).split("work: ")[1].split("; "))
        sizes = {name: list(map(int, text.split(" or "))) for name, text in offers.items()}
        assert all(works(size, local) for size in sizes["global_tokens"])
        assert min(abs(size - total) for size in sizes["global_tokens"]) == min(
            abs(size - total) for size in range(1, 400) if works(size, local)
        )
        locals_ = [size for size in range(1, 201) if works(total, size)]
        closest = sorted(locals_, key=lambda size: abs(size - local))[:2]
        assert sizes.get("local_tokens", []) == sorted(closest)


def test_plan_knows_large_sizes() -> None:
    with pytest.raises(ValueError, match=r"local_tokens=2 or 3000017$"):
        ps.plan(global_tokens=6_000_034, local_tokens=3_000_000)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "given neither"),
        ({"global_batch_size": 4}, r"given \['global_batch_size'\]"),
        ({"global_batch_size": 4, "local_tokens": 2}, "given"),
        ({"global_batch_size": 4, "local_batch_size": 0}, "local_batch_size=0 must be at least 1"),
        ({"global_tokens": 4, "local_tokens": 2, "axis_size": 0}, "axis_size=0 must be at least 1"),
    ],
)
def test_plan_refuses(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ps.plan(**sizes)
