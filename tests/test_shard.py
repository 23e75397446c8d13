"""Leaves in pieces: what is refused, what others do with them, and figures that T12 does not say."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.test_t02_ranks import CountingAxis
from purestep import tree
from purestep.testing import ThreadAxis

SIZE, TP, TWO, LOCAL = 3, ps.VmapAxis(2), torch.ones(2), ps.LocalAxis()


def noise(*shape: int) -> Tensor:
    """Numbers that are the same every time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def assert_close(actual: Any, expected: Any) -> None:
    """Trees of one structure whose leaves are close."""
    torch.testing.assert_close(tree.leaves(actual), tree.leaves(expected))


def test_compiled() -> None:
    """One graph of cutting, gathering, a norm over pieces, and a clip by it; pieces come out as nodes."""
    axis, whole, clip = (
        ps.VmapAxis(SIZE),
        noise(5, 2),
        ps.optim.clip_by_global_norm(0.1),
    )

    def program(x: Tensor) -> Any:
        def rank(x: Tensor) -> Any:
            nodes = ps.shard({"w": x, "scale": x.sum()}, axis)
            clipped, _ = clip.update(nodes, (), None)
            return (
                nodes,
                ps.unshard(clipped),
                tree.global_norm(nodes),
                tree.all_finite(nodes),
            )

        return axis.map(rank, in_dims=None, out_dims=(0, None, None, None))(x)

    found = torch.compile(program, fullgraph=True, backend="aot_eager")(whole)
    assert isinstance(found[0]["w"], ps.Shard)
    assert_close(found, program(whole))


def test_a_zero_tree_has_a_zero_norm_with_a_zero_gradient() -> None:
    axis = ps.VmapAxis(SIZE)

    def rank(x: Tensor) -> Any:
        leaves, structure = tree.flatten({"a": ps.shard(x, axis), "b": torch.zeros(2)})
        norm = lambda leaves: tree.global_norm(tree.unflatten(structure, leaves))  # noqa: E731
        return torch.func.grad_and_value(norm)(leaves)

    slopes, norms = axis.map(rank, in_dims=None)(torch.zeros(4))
    assert not norms.any()
    assert not any(slope.any() for slope in slopes)
    slopes, norms = axis.map(rank, in_dims=None)(torch.full((4,), 0.25))
    assert {*norms.tolist(), *slopes[0].view(-1)[:4].tolist()} == {0.5}


def test_a_norm_is_one_number_in_the_dtype_of_sums() -> None:
    """However many leaves are sharded over an axis."""
    axis = CountingAxis()
    tree.global_norm(
        ps.shard({"w": noise(5, 2), "v": noise(3), "b": torch.ones(())}, axis)
    )
    assert axis.calls == [("psum", 1)]
    norm = tree.global_norm(ps.Shard(torch.full((4,), 300.0).bfloat16(), LOCAL, (4,)))
    assert (float(norm), norm.dtype) == (600, torch.float32)


def test_states_are_trees_of_nodes() -> None:
    """By name, and of the same structure as the params."""
    params = {"w": ps.Shard(TWO, LOCAL, (2,), dim=-1)}
    assert params["w"].dim == 0
    assert isinstance(ps.optim.adamw(0.1).init(params).mu["w"], ps.Shard)
    assert list(ps.state_dict(params)) == ["tree['w'].local"]
    with pytest.raises(ValueError, match="differ in structure"):
        tree.map(torch.add, params, {"w": ps.Shard(TWO, LOCAL, (4,))})
    count = torch.tensor(3)
    assert ps.unshard(ps.Shard(count, LOCAL, (4, 6))) is count, "kept beside a param"


def test_derivatives_of_a_step_on_pieces() -> None:
    """By the whole params, through gather and scatter: those of the step on whole tensors."""
    axis, whole, batch = ps.VmapAxis(2), noise(3), noise(4)
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(0.5), ps.optim.sgd(0.1))

    def after(axis: Any, w: Tensor, x: Tensor, sharded: bool) -> Tensor:
        params = ps.shard(w, axis) if sharded else w
        step = ps.make_update_step(
            lambda w, x: (w.square().sum() * x - 1).square(), optimizer,
            weight_fn=torch.ones_like, axis=axis,
        )  # fmt: skip
        return ps.unshard(step(params, optimizer.init(params), [x])[0])

    def on_ranks(w: Tensor) -> Tensor:
        rank = axis.map(
            partial(after, axis, sharded=True), in_dims=(None, 0), out_dims=None
        )
        return rank(w, batch.view(2, 2))

    expected = torch.func.jacrev(lambda w: after(LOCAL, w, batch, False))(whole)
    assert_close(torch.func.jacrev(on_ranks)(whole), expected)
    assert_close(torch.func.jacfwd(on_ranks)(whole), expected)
    assert_close(torch.vmap(on_ranks)(whole[None])[0], on_ranks(whole))


def test_partition_clips_its_own_pieces() -> None:
    """A part of the tree keeps the axes of its leaves."""
    axis, sgd, whole = (
        ps.VmapAxis(SIZE),
        ps.optim.sgd(1.0),
        {"a": noise(5), "b": noise(4)},
    )
    clipped = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), sgd)
    parts = {"clipped": clipped, "plain": sgd}
    optimizer = ps.optim.partition({"a": "clipped", "b": "plain"}, parts)

    def rank(whole: Any) -> Any:
        zeros = tree.map(torch.zeros_like, ps.shard(whole, axis))
        return ps.unshard(
            optimizer.update(ps.shard(whole, axis), optimizer.init(zeros), zeros)[0]
        )

    found = axis.map(rank, in_dims=None, out_dims=None)(whole)
    assert_close(found, {"a": -whole["a"] / whole["a"].norm(), "b": -whole["b"]})


def step_once(axis: Any, w: Any) -> Any:
    """A step with this param."""
    sgd, how = ps.optim.sgd(0.1), {"weight_fn": torch.ones_like, "axis": axis}
    step = ps.make_update_step(lambda p, x: p["w"].sum() * x, sgd, **how)
    return step({"w": w}, sgd.init({"w": w}), [torch.ones(2)])


def over_more_than_the_axis() -> None:
    world = ThreadAxis(4)
    rows, _ = world.split(2, 2)
    world.map(lambda w: step_once(rows, ps.Shard(w, world, (4,))))([torch.ones(1)] * 4)


def of_different_tensors() -> None:
    """Pieces of different lengths would be alike."""
    axis = ThreadAxis(2)
    axis.map(lambda size: step_once(axis, ps.shard(noise(size), axis)))([4, 5])


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "dim": (lambda: ps.Shard(TWO, TP, (2,), dim=1), ValueError, r"shape=\(2,\), dim=1.*no such dimension"),
    "scalar": (lambda: ps.Shard(torch.ones(()), TP, ()), ValueError, "a scalar is not cut"),
    "a name": (lambda: ps.Shard(TWO, "tp", (2,)), TypeError, r"axis='tp'.*must have an axis object"),
    "nested": (
        lambda: tree.global_norm(ps.Shard(ps.Shard(TWO, TP, (2,)), ps.VmapAxis(3), (2,))),
        ValueError, r"over VmapAxis\(3\) and over VmapAxis\(2\)",
    ),
    "no piece": (
        lambda: ps.unshard(ps.Shard(torch.ones(4, 3), LOCAL, (4, 6))),
        ValueError, r"shape \(4, 3\), but this rank's piece.*take ps.shard",
    ),
    "another piece": (
        lambda: TP.map(lambda w: step_once(LOCAL, ps.Shard(w, TP, (4,))))(torch.ones(2, 3)),
        ValueError, r"params\['w'\]\.local has shape \(3,\).*has shape \(2,\)",
    ),
    "Muon": (
        lambda: ps.optim.from_torch(torch.optim.Muon).init(ps.Shard(torch.ones(2, 2), TP, (4, 2))),
        ValueError, "Muon may look at all of a parameter",
    ),
    "more than the axis": (over_more_than_the_axis, ValueError, r"params\['w'\]\.local is sharded over .*some of whose ranks"),
    "different tensors": (
        of_different_tensors,
        ValueError, r"disagree on params.*rank 0 with params\['w'\]\.local: torch.float64, of shape \(4,\) in pieces.*\(5,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    act, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        act()
