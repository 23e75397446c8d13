"""Steps of several processes under transforms and compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_processes
from purestep import tree
from purestep.gathering import Gather
from purestep.testing.processes import World, values
from tests.uneven import SGD, Batch, batch, cut, loss_with_aux, ones, params, sound, step

pytestmark = pytest.mark.timeout(120)


def moved(axis: ps.Axis, group: list[Batch], theta: Any) -> Any:
    """The parameters after a step from these."""
    return step(axis, {**sound(0), "params": theta, "microbatches": group})[0]


def ensemble(axis: ps.Axis, group: list[Batch]) -> Any:
    """``vmap`` over three sets of parameters."""
    many = tree.map(lambda leaf: torch.stack([leaf, leaf + 1, leaf - 2]), params())
    return torch.vmap(lambda theta: moved(axis, group, theta))(many)


def meta_gradient(axis: ps.Axis, group: list[Batch]) -> Any:
    """``torch.func.grad`` through the step."""

    def outer(theta: Any) -> Tensor:
        after: dict[str, Tensor] = moved(axis, group, theta)
        return (after["w"] ** 2).sum() * 3 + after["b"]

    return torch.func.grad(outer)(params())


def tangent(axis: ps.Axis, group: list[Batch]) -> Any:
    """``torch.func.jvp`` through the step."""
    return torch.func.jvp(lambda theta: moved(axis, group, theta), (params(),), (params(),))


def ensemble_of_meta_gradients(axis: ps.Axis, group: list[Batch]) -> Any:
    """``vmap`` of ``grad`` of the step, over learning rates."""

    def after(rate: Tensor) -> Tensor:
        optimizer = ps.optim.sgd(rate)
        arguments = {"optimizer": optimizer, "opt_state": optimizer.init(params())}
        new_params, *_ = step(axis, {**sound(0), **arguments, "microbatches": group})
        total: Tensor = (new_params["w"] ** 2).sum()
        return total

    rates = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    return torch.vmap(torch.func.grad(after))(rates)


def ensemble_of_counts(axis: ps.Axis, group: list[Batch]) -> Any:
    """``vmap`` over weights, so that every member has a count of its own."""

    def member(weight: Tensor) -> Any:
        arguments = {**sound(0), "weight_fn": lambda m: ones(m) * weight, "microbatches": group}
        new_params, _, metrics = step(axis, arguments)
        return new_params, metrics.num_tokens

    return torch.vmap(member)(torch.tensor([1, 2, 4]))


TRANSFORMED = [ensemble, ensemble_of_counts, meta_gradient, tangent, ensemble_of_meta_gradients]


@pytest.mark.parametrize("program", TRANSFORMED)
def test_transforms_of_a_step(processes: Run, program: Callable[..., Any]) -> None:
    """On every rank what one rank gets that holds the whole batch."""
    groups = cut(batch(8), [[2, 1], [1], [2], [1, 1]])
    expected = program(ps.LocalAxis(), [batch(8)])
    for result in processes(program, groups):
        assert_same(result, expected)


def transformed_with_an_empty_rank(axis: ps.Axis, group: list[Batch]) -> str:
    with pytest.raises(ValueError, match="holds no microbatch") as info:
        meta_gradient(axis, group)
    return str(info.value)


def test_a_transform_with_an_empty_rank_is_refused_everywhere(processes: Run) -> None:
    groups = cut(batch(4), [[1], [2], [], [1]])
    for text in processes(transformed_with_an_empty_rank, groups):
        assert "a rank of MeshAxis('dp', 4 ranks) holds no microbatch" in text
        assert "give it a microbatch whose weights are zero" in text


def compiled_step(axis: ps.Axis, group: list[Batch]) -> Any:
    """The step compiled whole, and as it is."""
    run = ps.make_update_step(loss_with_aux, SGD, weight_fn=ones, axis=axis)
    arguments = params(), SGD.init(params()), group
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    return compiled(*arguments), run(*arguments)


def test_compiled_step(world: World) -> None:
    groups = cut(batch(8), [[5], [2, 1]])
    expected = step(ps.LocalAxis(), {**sound(0), "microbatches": cut(batch(8), [[5, 2, 1]])[0]})
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
    """A step over pieces, compiled by what compiles calls of kernels, too, which cannot compile those of a process group."""
    params = {"w": ps.shard(torch.arange(12.0).view(6, 2).double() - 5, axis)}
    loss_fn: Any = lambda p, x: (x @ ps.unshard(p)["w"]).square().sum(-1)  # noqa: E731
    how: Any = {"weight_fn": lambda x: torch.ones(len(x)), "axis": axis, "gather": gather}
    step = ps.make_update_step(loss_fn, SGD, compile=not whole, **how)
    eager = ps.make_update_step(loss_fn, SGD, **how)
    step = ps.compile(step, fullgraph=True) if whole else step
    given = params, SGD.init(params), [torch.eye(6).double()[rank : rank + 1]]
    return ps.unshard(step(*given)), ps.unshard(eager(*given))


@pytest.mark.parametrize(("gather", "whole"), [("loss", False), ("microbatch", True)])
def test_compiled_gathers(processes: Run, gather: Gather, whole: bool) -> None:
    for compiled, eager in processes(compiled_gathers, range(4), [gather] * 4, [whole] * 4):
        assert_same(compiled[:2], eager[:2])
        assert torch.equal(compiled[2].loss, eager[2].loss)
