"""Compiled steps and collectives of several processes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_processes
from purestep.axis import Gather
from purestep.testing.processes import World, values
from tests.uneven import SGD, Batch, batch, cut, loss_with_aux, ones, params, sound, step

pytestmark = pytest.mark.timeout(120)


def compiled_step(axis: ps.Axis, group: list[Batch]) -> Any:
    """The step compiled whole, and as it is."""
    run = ps.make_update_step(loss_with_aux, SGD, weight_fn=ones, axis=axis)
    arguments = params(), SGD.init(params()), group
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    return compiled(*arguments), run(*arguments)


def test_compiled_step(world: World) -> None:
    groups = cut(batch(8), [[5], [2, 1]])
    whole = {"loss_fn": loss_with_aux, "microbatches": cut(batch(8), [[5, 2, 1]])[0]}
    expected = step(ps.LocalAxis(), {**sound(0), **whole})
    for compiled, eager in on_processes(world, Ranks(2), compiled_step, groups):
        assert_same(eager, expected)
        assert_same(compiled, expected)


def compiled_without_microbatches(rank: int) -> str | None:
    """A step compiled whole, of a rank that holds none."""
    if rank:
        return None
    axis = ps.MeshAxis(DeviceMesh("cpu", [0], mesh_dim_names=("alone",)), "alone")
    run = ps.make_update_step(loss_with_aux, SGD, weight_fn=ones, axis=axis)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="holds no microbatch") as info:
        compiled(params(), SGD.init(params()), [])
    return str(info.value)


def test_a_compiled_step_with_an_empty_rank_is_refused() -> None:
    """It cannot be told what the others have."""
    with World(1) as world:
        (text,) = values(world.run(compiled_without_microbatches))
    assert "give it a microbatch whose weights are zero" in text


def compiled_gathers(axis: ps.Axis, rank: int, gather: Gather, whole: bool) -> Any:
    """A step over pieces, of which microbatches or all of it are compiled."""
    params = {"w": ps.shard(torch.arange(12.0).view(6, 2).double() - 5, axis)}
    loss_fn: Any = lambda p, x: (x @ ps.unshard(p)["w"]).square().sum(-1)  # noqa: E731
    how: Any = {"weight_fn": lambda x: torch.ones(len(x)), "axis": axis, "gather": gather}
    step = ps.make_update_step(loss_fn, SGD, compile=not whole, **how)
    eager = ps.make_update_step(loss_fn, SGD, **how)
    step = ps.compile(step, fullgraph=True) if whole else step
    given = params, SGD.init(params), [torch.eye(6).double()[rank : rank + 1]]
    return ps.unshard(step(*given)), ps.unshard(eager(*given))


@pytest.mark.parametrize(
    ("gather", "whole"), [("step", False), ("loss", False), ("microbatch", True)]
)
def test_compiled_gathers(processes: Run, gather: Gather, whole: bool) -> None:
    for compiled, eager in processes(compiled_gathers, range(4), [gather] * 4, [whole] * 4):
        assert_same(compiled[:2], eager[:2])
        assert torch.equal(compiled[2].loss, eager[2].loss)


LAWS: list[Any] = [ps.psum, ps.pvary, ps.pmean, ps.all_gather, ps.psum_scatter]


def compiled_laws(axis: ps.Axis, x: Tensor) -> list[Any]:
    """Each collective and its gradient, compiled whole and as they are."""
    found = []
    for law in LAWS:

        def program(x: Tensor, y: Tensor, law: Any = law) -> Any:
            pulled = torch.func.grad(lambda x: (law(x, axis) * y).sum())(x)
            return law(x, axis), pulled

        y = law(x, axis) + axis.index
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
        found.append((compiled(x, y), program(x, y)))
    return found


def test_compiled_collectives(world: World) -> None:
    blocks = [torch.arange(6.0).view(2, 3) * rank for rank in (1, 2)]
    for found in on_processes(world, Ranks(2), compiled_laws, blocks):
        for compiled, eager in found:
            assert_same(compiled, eager)
