"""What threads alone show of uneven ranks: replicas along a second axis, and that the order in which they arrive is no matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_threads
from tests.uneven import SGD, Batch, alone, batch, cut, sound, step

pytestmark = pytest.mark.timeout(60)


def test_replicas_along_another_axis_are_not_counted() -> None:
    world = ps.testing.ThreadAxis(4)
    dp, tp = world.split(2, 2)
    places = world.map(lambda: (dp.rank, tp.rank, int(dp.index), int(tp.index)))()
    assert places == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]
    assert (dp.size, tp.size) == (2, 2)
    groups = cut(batch(), [[3, 2], [8, 1, 1, 1]])
    results = world.map(lambda: step(dp, {**sound(0), "microbatches": groups[dp.rank]}))()
    for result in results:
        assert_same(result, alone())


def test_thirty_runs_are_one() -> None:
    """With numbers that round: in which order threads arrive does not matter."""
    numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    groups = cut({"x": numbers[:, :3], "y": numbers[:, 3]})

    def program(axis: ps.Axis, group: list[Batch]) -> Any:
        state = {"b": torch.tensor(0.1), "w": torch.tensor([0.2, 0.3, 0.4])}
        return step(
            axis,
            {**sound(0), "params": state, "opt_state": SGD.init(state), "microbatches": group},
        )

    first, *runs = (on_threads(Ranks(4, 8), program, groups) for _ in range(30))
    for run in [first, *runs]:
        assert_same(run, [first[0]] * 4)
