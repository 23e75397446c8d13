"""What processes alone can do to each other: die, wait in vain, and fail long before the others.

Only tests that end a world start processes of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from purestep.testing.processes import DeadRankError, World, values
from tests.uneven import BAD, Batch, alone, batch, loss_fn, sound, step

pytestmark = pytest.mark.timeout(120)


@cache
def over_all() -> ps.MeshAxis:
    """The axis over all ranks of a world."""
    ranks = list(range(dist.get_world_size()))
    return ps.MeshAxis(DeviceMesh("cpu", ranks, mesh_dim_names=("dp",)), "dp")


def takes_a_step(rank: int) -> None:
    """The sound step of one rank."""
    step(over_all(), sound(0))


def dies(rank: int, where: str) -> None:
    """A step in which rank 1 is killed."""

    def killed(function: Callable[..., Any]) -> Callable[..., Any]:
        def kills(*args: Any) -> Any:
            if rank == 1 and len(args[-1]["y"]) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return kills

    arguments = {**sound(0), "microbatches": [batch(1), batch(2), batch(1)]}
    step(over_all(), {**arguments, where: killed(arguments[where])})


def last_words(world: World, program: Callable[..., Any], *args: Any) -> list[Any]:
    """What comes of a program that ends a world which has taken a step."""
    values(world.run(takes_a_step))
    return world.run(program, *([arg] * world.size for arg in args))


@pytest.mark.parametrize("where", ["weight_fn", "loss_fn"])
def test_a_rank_that_is_killed(where: str) -> None:
    """Before the first collective, and between microbatches: the others end before the timeout."""
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


def impatient() -> ps.MeshAxis:
    """An axis over all ranks, whose process group waits for two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    return ps.MeshAxis(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)), "dp")


def fails_before_its_peer(rank: int) -> None:
    """Rank 0 raises where rank 1 waits for it, inside the loss, in a different process group."""
    axis, other = impatient(), impatient()

    def loss(params: Any, microbatch: Batch) -> Tensor:
        if rank == 0:
            raise ArithmeticError("too soon")
        ps.all_gather(microbatch["x"], other)
        return loss_fn(params, microbatch)

    step(axis, {**sound(0), "loss_fn": loss, "microbatches": [batch(4)]})


def test_a_rank_that_fails_while_a_peer_waits_for_it_elsewhere() -> None:
    """It waits for as long as its group allows, and raises its own error, as the peer does."""
    with World(2, timeout=30) as world:
        first, peer = last_words(world, fails_before_its_peer)
    assert (type(first), str(first)) == (ArithmeticError, "too soon")
    assert type(peer) is ps.RankError
    assert str(peer).startswith("a collective over MeshAxis('dp', 2 ranks) failed")


def fails_early(axis: ps.Axis, rank: int) -> tuple[str, Any]:
    """A rank fails long before the others come to their loss; what each hears, and a sound step."""

    def loss(params: Any, microbatch: Batch) -> Tensor:
        if rank == BAD:
            raise ArithmeticError("a bad sample")
        time.sleep(1.5)
        return loss_fn(params, microbatch)

    with pytest.raises((ArithmeticError, ps.RankError)) as info:
        step(axis, {**sound(rank), "loss_fn": loss, "microbatches": [batch(2)]})
    return str(info.value), step(axis, sound(rank))


def test_a_rank_that_fails_early(processes: Run) -> None:
    """It waits, all learn why, and the group goes on."""
    for text, next_step in processes(fails_early, range(4)):
        assert "a bad sample" in text
        assert_same(next_step, alone())
