"""Processes that hold different amounts of data take the step of one rank that has it all.

``tests/test_uneven_threads.py`` says the same of threads.
"""

from __future__ import annotations

import pytest
import torch

import purestep as ps
from purestep.testing.processes import World
from tests.faults import SGD, alone, batch, cut, params, same
from tests.processes import SIZE, processes
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
    settings_step,
    until_the_end,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 20])
def test_uneven_ranks_take_the_step_of_one(world: World, bucket_bytes: int, normalize: str) -> None:
    settings = [{"normalize": normalize}] * SIZE
    for result in processes(world, settings_step, range(SIZE), settings, bucket_bytes=bucket_bytes):
        assert same(result, alone())


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_an_empty_rank_reports_what_the_others_do(world: World, normalize: str) -> None:
    expected = on_few(ps.LocalAxis(), -1, normalize)
    for result in processes(world, on_few, range(SIZE), [normalize] * SIZE):
        assert same(result, expected)


def test_evaluation_with_empty_ranks(world: World) -> None:
    expected = evaluated(ps.LocalAxis(), -1)
    for result in processes(world, evaluated, range(SIZE)):
        assert same(result, expected)


def test_no_data_anywhere_is_the_identity(world: World) -> None:
    for result in processes(world, settings_step, range(SIZE), [{"microbatches": []}] * SIZE):
        assert same(result[:2], (params(), SGD.init(params())))
        assert not result[2].applied


def test_data_that_runs_out_at_different_steps(world: World) -> None:
    groups = [[group] for group in cut(batch(7), LIFETIMES)]
    check_history(processes(world, until_the_end, groups))


@pytest.mark.parametrize("dtype", ACCUM_DTYPES)
def test_counts_and_losses_are_exact_in_any_dtype_of_gradients(
    world: World, dtype: torch.dtype
) -> None:
    check_counted(processes(world, counted_in, range(SIZE), [dtype] * SIZE))


@pytest.mark.parametrize("bucket_bytes", [8, 64, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_order_is_nobodys_business(world: World, name: str, bucket_bytes: int) -> None:
    results = processes(world, laid_out_step, range(SIZE), [name] * SIZE, bucket_bytes=bucket_bytes)
    check_laid_out(name, results)


def test_backward_through_steps(world: World) -> None:
    expected = backward_through_two_steps(ps.LocalAxis(), [[batch(8)], [batch(8, 1)]])
    for result in processes(world, backward_through_two_steps, groups_of_two_steps()):
        assert same(result, expected)


def test_derivatives_by_the_data(world: World) -> None:
    groups = cut(batch(8), [[2, 1], [1], [2], [1, 1]])
    check_differentiated_by_data(processes(world, differentiated_by_data, groups))
