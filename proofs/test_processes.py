"""Tests T2, T3, T4, T11, T12 and T15 on real ranks: ``MeshAxis`` over gloo processes, which stay up for the module.

The claims are those that the same files make of threads: state and metrics to the bit.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from proofs.test_t02_ranks import GRID
from proofs.test_t11_collectives import LAWS, blocks, check_separate_ranks
from proofs.test_t12_shard import layers_case
from proofs.test_t15_random import Loss, by_hand, keyed_case
from purestep.testing.processes import World
from support.ranks import (
    Run,
    check_context_parallel,
    check_metrics,
    check_step,
    check_tensor_parallel,
)
from support.strategies import GATHERS, StepCase, builds, steps
from support.theorem import PURESTEP
from support.worlds import NUM_PROCESSES, on_processes

RANKS: dict[str, Any] = {
    "axes": ["threads"],
    "dtypes": [torch.float64],
    "grids": [(0, 1), (1, NUM_PROCESSES), (2, NUM_PROCESSES)],
}
"""Steps on threads, which processes can take too; a grid is one of all processes."""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Returns a function that runs a program on processes that stay up."""
    with World(NUM_PROCESSES) as world:
        yield partial(on_processes, world)


@given(drawn=steps(**RANKS, ranks=[2, 3, 4], gathers=[""]))
def test_t02_t03_t04(run: Run, drawn: StepCase) -> None:
    """Any share of the sequences, in any order, of which some are ignored."""
    check_metrics(PURESTEP, drawn, run=run)


@given(name=st.sampled_from([*LAWS]), drawn=builds(blocks))
def test_t11_collectives(run: Run, name: str, drawn: tuple[Tensor, int]) -> None:
    """Laws and transposes, with ensembles passing by."""
    x, variant = drawn
    check_separate_ranks(run, name, x, variant)


@given(drawn=steps(**RANKS, gathers=GATHERS))
def test_t12_sharded_params(run: Run, drawn: StepCase) -> None:
    """Params and state cut over the ranks that split the tokens, or one dimension of them."""
    check_metrics(PURESTEP, drawn, run=run)


@given(drawn=builds(layers_case, 2))
def test_t12_sharded_layers(run: Run, drawn: tuple[StepCase, int]) -> None:
    """Layers cut over a second dimension of the mesh, whose norms are those of full layers."""
    case, columns = drawn
    check_tensor_parallel(run, case, columns)


@given(drawn=builds(keyed_case, **RANKS))
def test_t15_ranks(run: Run, drawn: tuple[StepCase, Loss]) -> None:
    """Dropout draws what it draws in the one big batch, whichever process holds the example."""
    (case, setup, groups), loss_fn = drawn
    check_step(PURESTEP, setup, case, groups, loss_fn, by_hand, run=run)


@given(drawn=steps(**GRID, dtypes=[torch.float64]))
def test_context_parallel(run: Run, drawn: StepCase) -> None:
    """Sequences split over a second dimension of the mesh."""
    check_context_parallel(run, drawn)
