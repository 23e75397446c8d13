"""T2, T3, T4, T11, T12 and T15 on real ranks: ``MeshAxis`` over gloo processes, of one group that stays up for the module.

The claims are those that the same files make of threads: state and metrics to the bit.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from torch import Tensor

from proofs.ranks import (
    Run,
    ShareCase,
    check_context_parallel,
    check_pieces,
    check_ranks,
    check_tensor_parallel,
    share_cases,
)
from proofs.strategies import Batch, cut
from proofs.test_t11_collectives import LAWS, check_separate_ranks, ranks, ways
from proofs.test_t12_shard import LayersCase, PiecesCase, layers_cases, pieces_cases
from proofs.test_t15_random import integer_loss, keyed_case, module_loss
from proofs.theorem import PURESTEP
from proofs.worlds import LARGEST, on_processes
from purestep.testing.processes import World


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """What runs a program on processes that stay up."""
    with World(LARGEST) as world:
        yield partial(on_processes, world)


@given(drawn=share_cases())
def test_t02_t03_t04(run: Run, drawn: ShareCase) -> None:
    """Any share of the sequences, in any order, of which some are ignored."""
    case, share, *_ = drawn
    check_ranks(run, PURESTEP, case, [cut(case.batch, rank) for rank in share], *drawn[2:])


@pytest.mark.parametrize("name", LAWS)
@given(x=ranks(), way=ways())
def test_t11_collectives(run: Run, name: str, x: Tensor, way: int) -> None:
    """Laws and transposes, with ensembles passing by."""
    check_separate_ranks(run, name, x, way)


@given(drawn=pieces_cases((0, 1), (1, LARGEST), (2, LARGEST)))
def test_t12_params_in_pieces(run: Run, drawn: PiecesCase) -> None:
    """Params and state spread over the ranks that split the tokens, or one dimension of them."""
    check_pieces(run, PURESTEP, *drawn)


@given(drawn=layers_cases(2))
def test_t12_layers_in_pieces(run: Run, drawn: LayersCase) -> None:
    """Layers spread over a second dimension of the mesh, whose norms are those of the whole."""
    check_tensor_parallel(run, PURESTEP, *drawn)


OF_MODULE = module_loss(PURESTEP.from_module)


def by_hand(params: Any, batch: Batch) -> Tensor:
    """At the top of the module, where processes find it."""
    return integer_loss(PURESTEP.random)(params, batch)


def by_module(params: Any, batch: Batch) -> Tensor:
    """The same."""
    return OF_MODULE(params, batch)


@pytest.mark.parametrize("loss_fn", [by_hand, by_module])
@given(drawn=share_cases())
def test_t15_ranks(run: Run, loss_fn: Any, drawn: ShareCase) -> None:
    """Dropout draws what it draws in the one big batch, whichever process holds the example."""
    case, groups = keyed_case(PURESTEP, drawn)
    check_ranks(run, PURESTEP, case, groups, *drawn[2:], loss_fn=loss_fn)


@given(drawn=share_cases())
def test_context_parallel(run: Run, drawn: ShareCase) -> None:
    """Sequences split over a second dimension of the mesh."""
    check_context_parallel(run, PURESTEP, drawn)
