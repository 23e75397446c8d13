"""Threads that hold different amounts of data take the step of one rank that has it all.

``tests/test_uneven_processes.py`` says the same of processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from tests.faults import SGD, Batch, alone, batch, cut, params, same, sound, step
from tests.programs import (
    ACCUM_DTYPES,
    LIFETIMES,
    OPTIMIZERS,
    backward_through_two_steps,
    check_counted,
    check_differentiated_by_data,
    check_history,
    check_laid_out,
    counted_in,
    differentiated_by_data,
    evaluated,
    groups_of_two_steps,
    laid_out_step,
    on_few,
    threads,
    until_the_end,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("bucket_bytes", [8, 64, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_order_is_nobodys_business(name: str, bucket_bytes: int) -> None:
    """The same values lie otherwise on each rank: transposed, in steps, as images, or on themselves."""
    check_laid_out(name, threads(4, laid_out_step, range(4), [name] * 4, bucket_bytes=bucket_bytes))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("bucket_bytes", [1, 8, 16, 1 << 20])
def test_uneven_ranks_take_the_step_of_one(bucket_bytes: int, normalize: str) -> None:
    def program(axis: ps.Axis, rank: int) -> Any:
        return step(axis, {**sound(rank), "normalize": normalize})

    for result in threads(4, program, range(4), bucket_bytes=bucket_bytes):
        assert same(result, alone())


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_an_empty_rank_reports_what_the_others_do(normalize: str) -> None:
    expected = on_few(ps.LocalAxis(), -1, normalize)
    assert expected[2].loss.dtype == torch.float32
    assert expected[2].num_tokens.dtype == torch.float64
    for result in threads(4, on_few, range(4), [normalize] * 4):
        assert same(result, expected)


def test_evaluation_with_empty_ranks() -> None:
    expected = evaluated(ps.LocalAxis(), -1)
    for result in threads(4, evaluated, range(4)):
        assert same(result, expected)


def test_no_data_anywhere_is_the_identity() -> None:
    def program(axis: ps.Axis) -> Any:
        return step(axis, {**sound(0), "microbatches": []})

    expected = program(ps.LocalAxis())
    assert same(expected[:2], (params(), SGD.init(params())))
    for result in threads(2, program):
        assert same(result, expected)


def test_data_that_runs_out_at_different_steps() -> None:
    groups = [[group] for group in cut(batch(7), LIFETIMES)]
    check_history(threads(4, until_the_end, groups))


@pytest.mark.parametrize("dtype", ACCUM_DTYPES)
def test_counts_and_losses_are_exact_in_any_dtype_of_gradients(dtype: torch.dtype) -> None:
    check_counted(threads(4, counted_in, range(4), [dtype] * 4))


def test_replicas_along_another_axis_are_not_counted() -> None:
    world = ps.testing.ThreadAxis(4)
    dp, tp = world.split(2, 2)
    places = world.map(lambda: (dp.rank, tp.rank, int(dp.index), int(tp.index)))()
    assert places == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]
    assert (dp.size, tp.size) == (2, 2)
    groups = cut(batch(), [[3, 2], [8, 1, 1, 1]])
    results = world.map(lambda: step(dp, {**sound(0), "microbatches": groups[dp.rank]}))()
    for result in results:
        assert same(result, alone())


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

    first, *runs = (threads(4, program, groups, bucket_bytes=8) for _ in range(30))
    assert all(same(rank, first[0]) for run in [first, *runs] for rank in run)


def test_backward_through_steps() -> None:
    """Where parameters require grad, every rank gets the whole derivative."""
    expected = backward_through_two_steps(ps.LocalAxis(), [[batch(8)], [batch(8, 1)]])
    assert expected["w"].all()
    for result in threads(4, backward_through_two_steps, groups_of_two_steps()):
        assert same(result, expected)


def test_derivatives_by_the_data() -> None:
    groups = cut(batch(8), [[2, 1], [1], [2], [1, 1]])
    check_differentiated_by_data(threads(4, differentiated_by_data, groups))
