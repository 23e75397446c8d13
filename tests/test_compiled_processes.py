"""Compiled steps and collectives of several processes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from proofs.worlds import Grid, Ranks, on_processes
from purestep.testing.processes import World
from purestep.types import Gather
from tests.uneven import (
    SGD,
    Batch,
    batch,
    cut,
    loss_with_aux,
    ones,
    params,
    sound,
    step,
)

pytestmark = pytest.mark.timeout(120)
AOT = partial(ps.compile, backend="aot_eager", fullgraph=True)


def compiled_step(axis: ps.Axis, group: list[Batch]) -> Any:
    """The step compiled whole, and as it is."""
    run = ps.make_update_step(loss_with_aux, SGD, weight_fn=ones, axis=axis)
    return [each(params(), SGD.init(params()), group) for each in (AOT(run), run)]


def test_compiled_step(world: World) -> None:
    """Without microbatches it is refused: it cannot be told what the others have."""
    groups = cut(batch(8), [[5], [2, 1]])
    whole = {"loss_fn": loss_with_aux, "microbatches": cut(batch(8), [[5, 2, 1]])[0]}
    expected = step(ps.LocalAxis(), {**sound(0), **whole})
    for found in on_processes(world, Ranks(2), compiled_step, groups):
        assert_same(found, [expected] * 2)
    told = r"holds no microbatch.* give it a microbatch whose weights are zero"
    with pytest.raises(AssertionError, match=told):
        on_processes(world, Ranks(1), compiled_step, [[]])


def compiled_gathers(over: Any, rank: int, gather: Gather, whole: bool) -> Any:
    """A step over pieces, of which microbatches or, by the compiler that torch has, all of it is compiled.

    On a grid, pieces lie along the second dimension.
    """
    axis, along = (over.both, over.second) if isinstance(over, Grid) else (over, over)
    pieces = {"w": ps.shard(torch.arange(12.0).view(6, 2).double() - 5, along)}
    loss_fn: Any = lambda p, x: (x @ ps.unshard(p)["w"]).square().sum(-1)  # noqa: E731
    how: Any = {
        "weight_fn": lambda x: torch.ones(len(x)),
        "axis": axis,
        "gather": gather,
    }
    eager = ps.make_update_step(loss_fn, SGD, **how)
    compiled = ps.make_update_step(loss_fn, SGD, compile=not whole and AOT, **how)
    compiler: Any = AOT if along is not axis else partial(ps.compile, fullgraph=True)
    compiled = compiler(compiled) if whole else compiled
    given = pieces, SGD.init(pieces), [torch.eye(6).double()[rank : rank + 1]]
    return [ps.unshard(each(*given)) for each in (compiled, eager)]


GATHERS = [("step", False), ("loss", False), ("microbatch", True)]


@pytest.mark.parametrize(("gather", "whole"), GATHERS)
def test_compiled_gathers(world: World, gather: Gather, whole: bool) -> None:
    """The compiler that torch has is slow: one rank is enough to show that it takes collectives."""
    size = 1 if whole else 2
    args: Any = range(size), [gather] * size, [whole] * size
    for compiled, eager in on_processes(world, Ranks(size), compiled_gathers, *args):
        assert_same(compiled[:2], eager[:2])
        assert torch.equal(compiled[2].loss, eager[2].loss)


def test_compiled_pieces_along_one_dimension_of_a_mesh(world: World) -> None:
    """Two ranks hold the same piece."""
    args: Any = range(4), ["step"] * 4, [True] * 4
    for compiled, eager in on_processes(
        world, Ranks(4, rows=2), compiled_gathers, *args
    ):
        assert_same(compiled[:2], eager[:2])


LAWS: list[Any] = [ps.psum, ps.pvary, ps.pmean, ps.all_gather, ps.psum_scatter]


def compiled_laws(axis: ps.Axis, x: Tensor) -> list[Any]:
    """Each collective and its gradient, compiled whole and as they are."""
    found = []
    for law in LAWS:

        def program(x: Tensor, y: Tensor, law: Any = law) -> Any:
            pulled = torch.func.grad(lambda x: (law(x, axis) * y).sum())(x)
            return law(x, axis), pulled

        y = law(x, axis) + axis.index
        found.append((AOT(program)(x, y), program(x, y)))
    return found


def test_compiled_collectives(world: World) -> None:
    blocks = [torch.arange(6.0).view(2, 3) * rank for rank in (1, 2)]
    for found in on_processes(world, Ranks(2), compiled_laws, blocks):
        for compiled, eager in found:
            assert_same(compiled, eager)
