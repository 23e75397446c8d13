"""Compiled steps and collectives of several processes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.testing.processes import World
from purestep.types import Gather
from support.strategies import assert_same
from support.worlds import Grid, Ranks, on_processes
from tests.uneven_ranks import (
    SGD,
    Batch,
    cut_batch,
    loss_with_aux,
    make_arguments,
    make_batch,
    make_params,
    run_step,
    weigh_by_one,
)

pytestmark = pytest.mark.timeout(120)
AOT = partial(ps.compile, backend="aot_eager", fullgraph=True)


def step_compiled_and_eager(axis: ps.Axis, group: list[Batch]) -> Any:
    """Runs the step compiled whole, and as it is."""
    eager = ps.make_update_step(loss_with_aux, SGD, weight_fn=weigh_by_one, axis=axis)
    compiled = AOT(eager)
    return [
        compiled(make_params(), SGD.init(make_params()), group),
        eager(make_params(), SGD.init(make_params()), group),
    ]


def test_compiled_step(world: World) -> None:
    groups = cut_batch(make_batch(8), [[5], [2, 1]])
    whole_batch = make_arguments(0)
    whole_batch["loss_fn"] = loss_with_aux
    whole_batch["microbatches"] = cut_batch(make_batch(8), [[5, 2, 1]])[0]
    expected = run_step(ps.LocalAxis(), whole_batch)

    for results in on_processes(world, Ranks(2), step_compiled_and_eager, groups):
        assert_same(results, [expected] * 2)


def step_stacked_and_eager(axis: ps.Axis, group: list[Batch]) -> Any:
    """Runs the step compiled with a stacked group, and eagerly with the list."""
    eager = ps.make_update_step(loss_with_aux, SGD, weight_fn=weigh_by_one, axis=axis)
    compiled = ps.compile(eager, backend="eager", fullgraph=True)
    return [
        compiled(make_params(), SGD.init(make_params()), ps.stack(group)),
        eager(make_params(), SGD.init(make_params()), group),
    ]


def test_compiled_step_of_stacked_groups(world: World) -> None:
    """T2: each rank has a loop over its microbatches, as many as it holds."""
    groups = cut_batch(make_batch(8), [[2, 2, 2], [1, 1]])
    whole_batch = make_arguments(0)
    whole_batch["loss_fn"] = loss_with_aux
    whole_batch["microbatches"] = cut_batch(make_batch(8), [[2, 2, 2, 1, 1]])[0]
    expected = run_step(ps.LocalAxis(), whole_batch)

    for results in on_processes(world, Ranks(2), step_stacked_and_eager, groups):
        assert_same(results, [expected] * 2)


def sum_squares(params: Any, x: Tensor) -> Tensor:
    full = ps.unshard(params)
    return (x @ full["w"] + full["b"]).square().sum(-1)


def gather_compiled_and_eager(
    ranks: Any, rank: int, gather: Gather, fullgraph: bool
) -> Any:
    """Steps over shards, compiled and eagerly; on a grid, shards lie along the second dimension.

    ``fullgraph`` compiles all of the step, else its microbatches are compiled.
    """
    if isinstance(ranks, Grid):
        axis = ranks.both
        shard_axis = ranks.second
    else:
        axis = ranks
        shard_axis = ranks
    w = torch.arange(12.0).view(6, 2).double() - 5
    sharded = ps.shard({"w": w, "b": torch.ones(2).double()}, shard_axis)
    group = [torch.eye(6).double()[rank : rank + 1]]
    make_step = partial(
        ps.make_update_step,
        sum_squares,
        SGD,
        weight_fn=lambda x: torch.ones(len(x)),
        axis=axis,
        gather=gather,
    )
    eager = make_step()
    compiled = AOT(eager) if fullgraph else make_step(compile=AOT)

    # Eager first: what it remembers of params is none of the graph's business.
    of_eager, of_compiled = (
        ps.unshard(step(sharded, SGD.init(sharded), group))
        for step in (eager, compiled)
    )
    return [of_compiled, of_eager]


@pytest.mark.parametrize("gather", ["step", "loss"])
def test_compiled_gathers(world: World, gather: Gather) -> None:
    args: Any = (range(2), [gather] * 2, [False] * 2)

    results = on_processes(world, Ranks(2), gather_compiled_and_eager, *args)

    for compiled, eager in results:
        assert_same(compiled[:2], eager[:2])
        assert torch.equal(compiled[2].loss, eager[2].loss)


def step_by_inductor_and_eager(axis: ps.Axis) -> Any:
    """Runs a small step: inductor compiles each of its loops for two seconds."""
    w = ps.shard(torch.arange(3.0).double(), axis)
    optimizer = ps.optim.sgd(0.5)
    eager = ps.make_update_step(
        lambda params, x: x @ ps.unshard(params),
        optimizer,
        weight_fn=lambda x: torch.ones(len(x)),
        axis=axis,
        gather="microbatch",
    )
    group = [torch.eye(3).double()]
    compiled = ps.compile(eager, fullgraph=True)
    state = optimizer.init(w)
    return [ps.unshard(step(w, state, group)) for step in (compiled, eager)]


def test_inductor_takes_collectives(world: World) -> None:
    """One rank is enough to show that."""
    ((compiled, eager),) = on_processes(world, Ranks(1), step_by_inductor_and_eager)
    assert_same(compiled[:2], eager[:2])
    assert torch.equal(compiled[2].loss, eager[2].loss)


def test_compiled_shards_along_one_dimension_of_a_mesh(world: World) -> None:
    """Two ranks hold the same shard."""
    grid = Ranks(4, rows=2)
    args: Any = (range(4), ["step"] * 4, [True] * 4)

    results = on_processes(world, grid, gather_compiled_and_eager, *args)

    for compiled, eager in results:
        assert_same(compiled[:2], eager[:2])


COLLECTIVES: list[Any] = [
    ps.psum,
    ps.pvary,
    ps.pmean,
    ps.all_gather,
    ps.psum_scatter,
]


def collectives_compiled_and_eager(axis: ps.Axis, x: Tensor) -> list[Any]:
    """Runs each collective and its gradient, compiled whole and as they are."""
    results = []
    for collective in COLLECTIVES:

        def program(x: Tensor, y: Tensor, collective: Any = collective) -> Any:
            pulled = torch.func.grad(lambda x: (collective(x, axis) * y).sum())(x)
            return collective(x, axis), pulled

        y = collective(x, axis) + axis.index
        compiled = AOT(program)(x, y)
        eager = program(x, y)
        results.append((compiled, eager))
    return results


def test_compiled_collectives(world: World) -> None:
    block = torch.arange(6.0).view(2, 3)
    blocks = [block, block * 2]
    results = on_processes(world, Ranks(2), collectives_compiled_and_eager, blocks)
    for pairs in results:
        for compiled, eager in pairs:
            assert_same(compiled, eager)


def test_a_compiled_step_without_microbatches_is_refused(world: World) -> None:
    """It cannot be told what the others have. A rank that fails ends, so this is the last test."""
    message = r"holds no microbatch.* give it a microbatch whose weights are zero"
    with pytest.raises(AssertionError, match=message):
        on_processes(world, Ranks(1), step_compiled_and_eager, [[]])
