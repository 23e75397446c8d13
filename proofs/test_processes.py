"""T2, T3, T4, T11, T12 and T15 on real ranks: ``MeshAxis`` over gloo processes, of one group that stays up for the module.

The claims are those that the same files make of threads: state and metrics to the bit.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from proofs.ranks import (
    Run,
    check_context_parallel,
    check_metrics,
    check_step,
    check_tensor_parallel,
)
from proofs.strategies import GATHERS, Drawn, drawn, steps
from proofs.test_t02_ranks import GRID
from proofs.test_t11_collectives import LAWS, blocks, check_separate_ranks
from proofs.test_t12_shard import layers_case
from proofs.test_t15_random import Loss, by_hand, keyed_case
from proofs.theorem import PURESTEP
from proofs.worlds import LARGEST, on_processes
from purestep.testing.processes import World

RANKS: dict[str, Any] = {
    "axes": ["threads"], "dtypes": [torch.float64], "grids": [(0, 1), (1, LARGEST), (2, LARGEST)],
}  # fmt: skip
"""What threads can do, processes can; a grid is one of all of them."""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """What runs a program on processes that stay up."""
    with World(LARGEST) as world:
        yield partial(on_processes, world)


@given(drawn=steps(**RANKS, ranks=[2, 3, 4], gathers=[""]))
def test_t02_t03_t04(run: Run, drawn: Drawn) -> None:
    """Any share of the sequences, in any order, of which some are ignored."""
    check_metrics(PURESTEP, drawn, run=run)


@given(name=st.sampled_from([*LAWS]), drawn=drawn(blocks))
def test_t11_collectives(run: Run, name: str, drawn: tuple[Tensor, int]) -> None:
    """Laws and transposes, with ensembles passing by."""
    check_separate_ranks(run, name, *drawn)


@given(drawn=steps(**RANKS, gathers=GATHERS))
def test_t12_params_in_pieces(run: Run, drawn: Drawn) -> None:
    """Params and state spread over the ranks that split the tokens, or one dimension of them."""
    check_metrics(PURESTEP, drawn, run=run)


@given(drawn=drawn(layers_case, 2))
def test_t12_layers_in_pieces(run: Run, drawn: tuple[Drawn, int]) -> None:
    """Layers spread over a second dimension of the mesh, whose norms are those of the whole."""
    check_tensor_parallel(run, *drawn)


@given(drawn=drawn(keyed_case, **RANKS))
def test_t15_ranks(run: Run, drawn: tuple[Drawn, Loss]) -> None:
    """Dropout draws what it draws in the one big batch, whichever process holds the example."""
    (case, how, groups), loss_fn = drawn
    check_step(PURESTEP, how, case, groups, loss_fn, by_hand, run=run)


@given(drawn=steps(**GRID, dtypes=[torch.float64]))
def test_context_parallel(run: Run, drawn: Drawn) -> None:
    """Sequences split over a second dimension of the mesh."""
    check_context_parallel(run, drawn)
