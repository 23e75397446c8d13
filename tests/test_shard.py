"""Shards: what is refused, what others do with them, and figures that T12 does not say."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.testing import ThreadAxis
from support.counting_axis import CountingAxis

SIZE = 3
TP = ps.VmapAxis(2)
LOCAL = ps.LocalAxis()
TWO = torch.ones(2)


def noise(*shape: int) -> Tensor:
    """Draws numbers that are the same every time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def assert_close(actual: Any, expected: Any) -> None:
    """Compares the leaves of trees of one structure."""
    torch.testing.assert_close(tree.leaves(actual), tree.leaves(expected))


def test_compiled() -> None:
    """One graph shards, gathers, takes a norm of shards and clips by it; shards come out as nodes."""
    axis = ps.VmapAxis(SIZE)
    full = noise(5, 2)
    clip = ps.optim.clip_by_global_norm(0.1)

    def program(x: Tensor) -> Any:
        def on_rank(x: Tensor) -> Any:
            nodes = ps.shard({"w": x, "scale": x.sum()}, axis)
            clipped, _ = clip.update(nodes, (), None)
            norm = tree.global_norm(nodes)
            return nodes, ps.unshard(clipped), norm, tree.all_finite(nodes)

        return axis.map(on_rank, in_dims=None, out_dims=(0, None, None, None))(x)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    result = compiled(full)

    assert isinstance(result[0]["w"], ps.Shard)
    assert_close(result, program(full))


def test_a_zero_tree_has_a_zero_norm_with_a_zero_gradient() -> None:
    axis = ps.VmapAxis(SIZE)

    def on_rank(x: Tensor) -> Any:
        params = {"a": ps.shard(x, axis), "b": torch.zeros(2)}
        leaves, structure = tree.flatten(params)

        def norm_of(leaves: list[Tensor]) -> Tensor:
            return tree.global_norm(tree.unflatten(structure, leaves))

        return torch.func.grad_and_value(norm_of)(leaves)

    on_ranks = axis.map(on_rank, in_dims=None)

    slopes, norms = on_ranks(torch.zeros(4))
    assert not norms.any()
    assert not any(slope.any() for slope in slopes)

    slopes, norms = on_ranks(torch.full((4,), 0.25))
    slope = slopes[0].view(-1)[:4]
    assert set(norms.tolist()) == {0.5}
    assert set(slope.tolist()) == {0.5}


def test_a_norm_is_one_number_in_the_dtype_of_sums() -> None:
    """However many leaves are sharded over an axis."""
    axis = CountingAxis()
    params = {
        "w": noise(5, 2),
        "v": noise(3),
        "b": torch.ones(()),
    }
    tree.global_norm(ps.shard(params, axis))
    assert axis.calls == [("psum", 1)]

    half = torch.full((4,), 300.0).bfloat16()
    norm = tree.global_norm(ps.Shard(half, LOCAL, (4,)))
    assert float(norm) == 600
    assert norm.dtype == torch.float32


def test_states_are_trees_of_nodes() -> None:
    """By name, and of the same structure as the params."""
    params = {"w": ps.Shard(TWO, LOCAL, (2,), dim=-1)}
    assert params["w"].dim == 0

    state = ps.optim.adamw(0.1).init(params)
    assert isinstance(state.mu["w"], ps.Shard)
    assert list(ps.state_dict(params)) == ["tree['w'].local"]

    of_another_shape = {"w": ps.Shard(TWO, LOCAL, (4,))}
    with pytest.raises(ValueError, match="differ in structure"):
        tree.map(torch.add, params, of_another_shape)

    count = torch.tensor(3)
    unsharded = ps.unshard(ps.Shard(count, LOCAL, (4, 6)))
    assert unsharded is count, "kept beside a param"


def test_derivatives_of_a_step_on_shards() -> None:
    """By the full params, through gather and scatter: those of the step on full tensors."""
    axis = ps.VmapAxis(2)
    full = noise(3)
    batch = noise(4)
    clip = ps.optim.clip_by_global_norm(0.5)
    optimizer = ps.optim.chain(clip, ps.optim.sgd(0.1))

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return (w.square().sum() * x - 1).square()

    def step_with(axis: Any, params: Any, x: Tensor) -> Tensor:
        step = ps.make_update_step(
            loss_fn, optimizer, weight_fn=torch.ones_like, axis=axis
        )
        new, *_ = step(params, optimizer.init(params), [x])
        return ps.unshard(new)

    def on_rank(w: Tensor, x: Tensor) -> Tensor:
        return step_with(axis, ps.shard(w, axis), x)

    def on_ranks(w: Tensor) -> Tensor:
        program = axis.map(on_rank, in_dims=(None, 0), out_dims=None)
        return program(w, batch.view(2, 2))

    expected = torch.func.jacrev(lambda w: step_with(LOCAL, w, batch))(full)
    assert_close(torch.func.jacrev(on_ranks)(full), expected)
    assert_close(torch.func.jacfwd(on_ranks)(full), expected)
    assert_close(torch.vmap(on_ranks)(full[None])[0], on_ranks(full))


def test_partition_clips_its_own_shards() -> None:
    """A part of the tree keeps the axes of its leaves."""
    axis = ps.VmapAxis(SIZE)
    full = {"a": noise(5), "b": noise(4)}
    sgd = ps.optim.sgd(1.0)
    clipped = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), sgd)
    optimizers = {"clipped": clipped, "plain": sgd}
    optimizer = ps.optim.partition(optimizers, {"a": "clipped", "b": "plain"})

    def on_rank(full: Any) -> Any:
        grads = ps.shard(full, axis)
        params = tree.map(torch.zeros_like, grads)
        new, *_ = optimizer.update(grads, optimizer.init(params), params)
        return ps.unshard(new)

    result = axis.map(on_rank, in_dims=None, out_dims=None)(full)

    a = full["a"]
    assert_close(result["a"], -a / a.norm())
    assert_close(result["b"], -full["b"])


# What is refused


class Refused(NamedTuple):
    """A call that is refused, and with which error."""

    act: Callable[[], Any]
    message: str
    error: type[Exception] = ValueError


def step_once(axis: Any, w: Any) -> Any:
    """Takes a step on this param."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return p["w"].sum() * x

    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(loss_fn, sgd, weight_fn=torch.ones_like, axis=axis)
    params = {"w": w}
    return step(params, sgd.init(params), [torch.ones(2)])


def unshard_wrong_shape() -> None:
    matrix = torch.ones(4, 3)
    ps.unshard(ps.Shard(matrix, LOCAL, (4, 6)))


def take_norm_of_nested_shards() -> None:
    inner = ps.Shard(TWO, TP, (2,))
    tree.global_norm(ps.Shard(inner, ps.VmapAxis(3), (2,)))


def step_on_shards_of_another_length() -> None:
    def on_rank(w: Tensor) -> Any:
        return step_once(LOCAL, ps.Shard(w, TP, (4,)))

    TP.map(on_rank)(torch.ones(2, 3))


def init_on_shard(algorithm: type[torch.optim.Optimizer]) -> None:
    matrix = ps.Shard(torch.ones(2, 2), TP, (4, 2))
    ps.optim.from_torch(algorithm).init(matrix)


class AdamW(torch.optim.AdamW):
    """Stands for an algorithm of another library, of a name that torch has, too."""


def step_over_less_than_the_shards() -> None:
    world = ThreadAxis(4)
    rows, _ = world.split(2, 2)

    def on_rank(w: Tensor) -> Any:
        return step_once(rows, ps.Shard(w, world, (4,)))

    world.map(on_rank)([torch.ones(1)] * 4)


def step_on_shards_of_different_tensors() -> None:
    """Shards tensors of 4 and 5 numbers, whose local shards would be alike."""
    axis = ThreadAxis(2)

    def on_rank(size: int) -> Any:
        return step_once(axis, ps.shard(noise(size), axis))

    axis.map(on_rank)([4, 5])


REFUSED = {
    "dim": Refused(
        lambda: ps.Shard(TWO, TP, (2,), dim=1),
        r"shape=\(2,\), dim=1.*no such dimension",
    ),
    "scalar": Refused(
        lambda: ps.Shard(torch.ones(()), TP, ()),
        "a scalar is not cut",
    ),
    "a name": Refused(
        lambda: ps.Shard(TWO, "tp", (2,)),
        r"axis='tp'.*must have an axis object",
        error=TypeError,
    ),
    "nested": Refused(
        take_norm_of_nested_shards,
        r"a Shard of shape \(2,\) is in one of shape \(2,\), whose part .* shape \(1,\)",
    ),
    "no shard": Refused(
        unshard_wrong_shape,
        r"shape \(4, 3\), but this rank's piece.*take ps.shard",
    ),
    "another shard": Refused(
        step_on_shards_of_another_length,
        r"params\['w'\]\.local has shape \(3,\).*has shape \(2,\)",
    ),
    "Muon": Refused(
        lambda: init_on_shard(torch.optim.Muon),
        "Muon may look at all of a parameter",
    ),
    "a namesake": Refused(
        lambda: init_on_shard(AdamW),
        "AdamW may look at all of a parameter",
    ),
    "more than the axis": Refused(
        step_over_less_than_the_shards,
        r"params\['w'\]\.local is sharded over .*some of whose ranks",
    ),
    "different tensors": Refused(
        step_on_shards_of_different_tensors,
        r"disagree on params.*rank 0 with params\['w'\]\.local: torch.float64, "
        r"of shape \(4,\) in pieces.*\(5,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    refused = REFUSED[case]
    with pytest.raises(refused.error, match=refused.message):
        refused.act()


def test_the_place_of_a_shard_in_a_shard() -> None:
    """Both are cut along one dimension, where a rank's place is the sum of two."""
    axis = ThreadAxis(4)
    dp, tp = axis.split(2, 2)
    full = torch.arange(24.0).view(8, 3)

    def local_rows(rank: int) -> bool:
        (local,), spec = tree.flatten(ps.shard(ps.shard(full, tp), dp))
        (shard_spec,) = tree.shard_specs(spec)
        assert shard_spec is not None
        rows, columns = shard_spec.local_block
        return torch.equal(local, full.narrow(0, *rows).narrow(1, *columns))

    assert all(axis.map(local_rows)(range(4)))


def test_a_leaf_is_sharded_once_over_an_axis() -> None:
    axis = ThreadAxis(2)

    def shard_twice(full: Tensor) -> Any:
        with pytest.raises(ValueError, match="a leaf is sharded over"):
            ps.shard(ps.shard(full, axis), axis)

    axis.map(shard_twice)([torch.arange(4.0)] * 2)
    local = ps.LocalAxis()
    twice = ps.shard(ps.shard(torch.arange(4.0), local), local)
    assert torch.equal(ps.unshard(twice), torch.arange(4.0))
