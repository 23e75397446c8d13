"""Ranks that go wrong, as processes: every rank hears what happened, and the next step is sound.

``tests/test_thread_faults.py`` says the same of threads. Only tests that kill a rank start processes of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep.testing.processes import DeadRankError, World
from tests.faults import (
    BAD,
    COMPUTED,
    FAULTS,
    Aftermath,
    Batch,
    alone,
    batch,
    check_fault,
    check_faulty_derivative,
    cut,
    faulty_derivative,
    faulty_step,
    loss_fn,
    loss_with_aux,
    same,
    sound,
    step,
)
from tests.processes import SIZE, mesh, processes
from tests.programs import (
    OVERFLOWS,
    aux_without_zeros,
    check_aux_without_zeros,
    evaluated,
    overflowing,
    settings_step,
    with_aux_of_its_own,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_on_every_rank(world: World, name: str, bucket_bytes: int) -> None:
    """And the same process group goes on. Nothing waits for its timeout, which is longer than the world's."""
    aftermaths: list[Aftermath] = processes(
        world, faulty_step, range(SIZE), [name] * SIZE, [False] * SIZE, bucket_bytes=bucket_bytes
    )
    check_fault(name, aftermaths, "MeshAxis('dp', 4 ranks)")


def faulty_step_in_pieces(axis: ps.Axis, rank: int, name: str, gather: str) -> Aftermath:
    """The same, of params and state in pieces."""
    return faulty_step(axis, rank, name, True, gather=gather)


@pytest.mark.parametrize("gather", ["step", "microbatch"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_params_are_in_pieces(world: World, name: str, gather: str) -> None:
    """The others go on with their gathers, and the rank that failed joins them."""
    aftermaths: list[Aftermath] = processes(
        world, faulty_step_in_pieces, range(SIZE), [name] * SIZE, [gather] * SIZE
    )
    check_fault(name, aftermaths, "MeshAxis('dp', 4 ranks)")


@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_somebody_differentiates(world: World, name: str) -> None:
    check_faulty_derivative(name, processes(world, faulty_derivative, range(SIZE), [name] * SIZE))


def test_aux_that_an_empty_rank_cannot_be_told(world: World) -> None:
    for text in processes(world, with_aux_of_its_own, cut(batch())):
        assert "make it of containers that can be pickled" in text


def test_aux_that_an_empty_rank_cannot_make(world: World) -> None:
    check_aux_without_zeros(processes(world, aux_without_zeros, range(SIZE)))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", OVERFLOWS.values(), ids=list(OVERFLOWS))
def test_counts_that_overflow_together(
    world: World, held: list[tuple[float, int]], normalize: str
) -> None:
    for untouched, count in processes(world, overflowing, held, [normalize] * SIZE):
        assert untouched
        assert count == SIZE


def evaluates_while_others_train(axis: ps.Axis, rank: int) -> tuple[str, Any]:
    """Another function altogether on rank 1, with the same params."""
    with pytest.raises(ValueError, match="disagree") as info:
        _ = evaluated(axis, rank) if rank == 1 else step(axis, sound(rank))
    return str(info.value), step(axis, sound(rank))


def test_a_rank_that_evaluates_while_others_train(world: World) -> None:
    for text, next_step in processes(world, evaluates_while_others_train, range(SIZE)):
        assert "ranks 0, 2, 3 with " in text
        assert "against rank 1 with " in text
        assert same(next_step, alone())


def dies(rank: int, where: str) -> None:
    """A step in which rank 1 is killed."""

    def killed(function: Callable[..., Any]) -> Callable[..., Any]:
        def kills(*args: Any) -> Any:
            if rank == 1 and len(args[-1]["y"]) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return kills

    arguments = {**sound(0), "microbatches": [batch(1), batch(2), batch(1)]}
    step(ps.MeshAxis(mesh(), "dp"), {**arguments, where: killed(arguments[where])})


def last_words(world: World, program: Callable[..., Any], *args: Any) -> list[Any]:
    """What comes of a program that ends a world which has taken a step."""
    processes(world, settings_step, [0] * world.size, [{}] * world.size)
    return world.run(program, *([arg] * world.size for arg in args))


@pytest.mark.parametrize("where", ["weight_fn", "loss_fn"])
def test_a_rank_that_is_killed(where: str) -> None:
    """Before the first collective, and between the microbatches: the others end long before the group's timeout."""
    with World(3, timeout=30) as world:
        first, killed, last = last_words(world, dies, where)
    assert isinstance(killed, DeadRankError)
    assert killed.args == (-signal.SIGKILL,)
    for error in (first, last):
        assert type(error) is ps.RankError
        assert "over MeshAxis('dp', 3 ranks) failed: most likely another rank has died" in str(
            error
        )
        assert "start again from the last checkpoint" in str(error)


def impatient() -> list[ps.MeshAxis]:
    """Two axes over all ranks, whose process groups wait for two seconds."""
    ranks = list(range(dist.get_world_size()))
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=2)) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)) for group in groups]
    return [ps.MeshAxis(mesh, "dp") for mesh in meshes]


def fails_before_its_peer(rank: int) -> None:
    """Rank 0 raises where rank 1 waits for it, inside the loss, in a different process group."""
    axis, other = impatient()

    def loss(params: Any, microbatch: Batch) -> Tensor:
        if rank == 0:
            raise ArithmeticError("too soon")
        ps.all_gather(microbatch["x"], other)
        return loss_fn(params, microbatch)

    step(axis, {**sound(0), "loss_fn": loss, "microbatches": [batch(4)]})


def test_a_rank_that_fails_while_a_peer_waits_for_it_elsewhere() -> None:
    """It waits for as long as its group allows, and raises its own error; the peer learns that it waits in vain."""
    with World(2, timeout=30) as world:
        first, peer = last_words(world, fails_before_its_peer)
    assert (type(first), str(first)) == (ArithmeticError, "too soon")
    assert type(peer) is ps.RankError
    assert str(peer).startswith("a collective over MeshAxis('dp', 2 ranks) failed")


def fails_early(axis: ps.Axis, rank: int) -> tuple[str, Any]:
    """A rank fails long before the others come to their loss; what each hears, and a sound step."""

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        if rank == BAD:
            raise ArithmeticError("a bad sample")
        time.sleep(1.5)
        return loss_with_aux(params, microbatch)

    with pytest.raises((ArithmeticError, ps.RankError)) as info:
        step(axis, {**sound(rank), "loss_fn": loss, "microbatches": [batch(2)]})
    return str(info.value), step(axis, sound(rank))


def test_a_rank_that_fails_early(world: World) -> None:
    """It waits, all learn why, and the group goes on."""
    for text, next_step in processes(world, fails_early, range(SIZE)):
        assert "a bad sample" in text
        assert same(next_step, alone())
