"""T2, T3, T4, T11, T12 and T15 on real ranks: ``MeshAxis`` over gloo processes, of one group that stays up for the module.

The claims are those that the same files make of threads, and each state is that of the threads, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import Tensor

from proofs.ranks import (
    GridCase,
    Run,
    ShareCase,
    check_context_parallel,
    check_ranks,
    check_tensor_parallel,
    grid_cases,
    padded,
    share_cases,
    shuffled,
)
from proofs.sharded import (
    HeldCase,
    ShardCase,
    check_sharded,
    check_sharded_params,
    held_cases,
    shard_cases,
)
from proofs.strategies import Batch, assert_same, cut
from proofs.test_t11_collectives import LAWS, check_separate_ranks, ranks, ways
from proofs.test_t15_random import integer_loss, keyed_case, module_loss
from proofs.theorem import PURESTEP
from proofs.worlds import LARGEST, on_processes, on_threads
from purestep.testing.processes import World


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """What runs a program on processes that stay up."""
    with World(LARGEST) as world:
        yield partial(on_processes, world)


@given(drawn=share_cases())
def test_t02_ranks(run: Run, drawn: ShareCase) -> None:
    """Any share of the sequences, uneven and empty ones included; and the state is that of threads."""
    case, share, bucket_bytes, settings = drawn
    groups = [cut(case.batch, rank) for rank in share]
    results = check_ranks(run, PURESTEP, case, groups, bucket_bytes, settings)
    threads = check_ranks(on_threads, PURESTEP, case, groups, bucket_bytes, settings)
    assert_same(results, threads)


@given(drawn=share_cases(), seed=st.integers(0, 99))
def test_t03_order(run: Run, drawn: ShareCase, seed: int) -> None:
    """Ranks, microbatches and rows in any order."""
    case, share, bucket_bytes, settings = drawn
    check_ranks(run, PURESTEP, case, shuffled(case, share, seed), bucket_bytes, settings)


@given(drawn=share_cases(), seed=st.integers(0, 99))
def test_t04_padding(run: Run, drawn: ShareCase, seed: int) -> None:
    """Ignored microbatches on some of the ranks."""
    case, share, bucket_bytes, settings = drawn
    check_ranks(run, PURESTEP, case, padded(case, share, seed), bucket_bytes, settings)


@pytest.mark.parametrize("name", LAWS)
@given(x=ranks(), way=ways())
def test_t11_collectives(run: Run, name: str, x: Tensor, way: int) -> None:
    """Laws and transposes, with ensembles passing by."""
    check_separate_ranks(run, name, x, way)


@given(drawn=held_cases())
def test_t12_params_in_pieces(run: Run, drawn: HeldCase) -> None:
    """Params and state spread over the ranks that split the tokens, wherever the gather stands."""
    check_sharded_params(run, PURESTEP, drawn)


@given(drawn=held_cases())
def test_t12_replicated_pieces(run: Run, drawn: HeldCase) -> None:
    """Spread over one of two dimensions that split the tokens."""
    check_sharded_params(run, PURESTEP, drawn, grid=True, size=LARGEST)


@given(drawn=shard_cases(columns=(2,)))
def test_t12_layers_in_pieces(run: Run, drawn: ShardCase) -> None:
    """Layers spread over a second dimension of the mesh, whose norms are those of the whole."""
    check_sharded(run, PURESTEP, drawn)


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
    results = check_ranks(run, PURESTEP, case, groups, *drawn[2:], loss_fn=loss_fn)
    threads = check_ranks(on_threads, PURESTEP, case, groups, *drawn[2:], loss_fn=loss_fn)
    assert_same(results, threads)


@given(drawn=grid_cases())
def test_context_parallel(run: Run, drawn: GridCase) -> None:
    """Sequences split over a second dimension of the mesh."""
    check_context_parallel(run, PURESTEP, drawn)


@given(drawn=grid_cases())
def test_tensor_parallel(run: Run, drawn: GridCase) -> None:
    """Layers split over a second dimension of the mesh."""
    check_tensor_parallel(run, PURESTEP, drawn)
