"""Leaves that are spread over an axis: pieces, and what is computed of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.pieces import SIZE, drawn

SHAPES = [((6, 2), 0), ((5, 2), 0), ((2, 7), 1), ((7, 3), -1), ((2,), 0), ((1, 3), 0), ((0, 2), 0)]


def on_vmap(fn: Callable[..., Any], axis: Any, *same: Any) -> list[Any]:
    """What each rank of a ``VmapAxis`` gives."""
    results = axis.map(fn, in_dims=None)(*same)
    return [tree.map(lambda leaf, rank=rank: leaf[rank], results) for rank in range(axis.size)]


def on_threads(fn: Callable[..., Any], axis: Any, *same: Any) -> list[Any]:
    """What each thread gives."""
    results: list[Any] = axis.map(fn)(*[[each] * axis.size for each in same])
    return results


WORLDS: list[Any] = [
    pytest.param(ps.VmapAxis, on_vmap, id="vmap"),
    pytest.param(ps.testing.ThreadAxis, on_threads, id="threads"),
]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize(("make", "run"), WORLDS)
def test_pieces_are_chunks(make: Any, run: Any, shape: tuple[int, ...], dim: int) -> None:
    """Those of ``torch.chunk``, with nothing after the last; for ranks of one program filled up with zeros."""
    axis, whole = make(SIZE), drawn(*shape)
    chunks = whole.chunk(SIZE, dim) if whole.numel() else ()
    for rank, node in enumerate(run(lambda x: ps.shard(x, axis, dim), axis, whole)):
        expected = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
        held = expected.shape[dim]
        assert torch.equal(node.piece.narrow(dim, 0, held), expected)
        assert node.shape == shape
        rest = node.piece.narrow(dim, held, node.piece.shape[dim] - held)
        assert not rest.any()
        assert make is ps.VmapAxis or not rest.numel()


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize(
    ("make", "run"), [*WORLDS, pytest.param(lambda _: ps.LocalAxis(), None, id="local")]
)
def test_gathered_again(make: Any, run: Any, shape: tuple[int, ...], dim: int) -> None:
    """``unshard(shard(x))`` is x, beside scalars and leaves that are not spread; and so is its tangent."""
    axis, whole = make(SIZE), drawn(*shape)
    given = {"w": whole, "scale": torch.tensor(2.0)}

    def back(given: Any) -> Any:
        pieces = ps.shard(given, axis, dim)
        assert isinstance(pieces["scale"], Tensor)
        return ps.unshard({**pieces, "other": given["w"]})

    results = [back(given)] if run is None else run(back, axis, given)
    for result in results:
        assert torch.equal(result["w"], whole)
        assert torch.equal(result["scale"], given["scale"])
        assert torch.equal(result["other"], whole)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize(("make", "run"), WORLDS)
def test_transposes(make: Any, run: Any, shape: tuple[int, ...], dim: int) -> None:
    """The gradient of what each rank computes of the whole comes back summed: to pieces, and to the whole."""
    axis, whole, factors = make(SIZE), drawn(*shape), drawn(SIZE, *shape)

    def mine(whole: Tensor) -> Tensor:
        return whole * factors.index_select(0, axis.index.reshape(1)).squeeze(0)

    def grads(x: Tensor) -> Any:
        node = ps.shard(x, axis, dim)

        def of_piece(piece: Tensor) -> Tensor:
            return mine(ps.unshard(ps.Shard(piece, axis, shape, dim)).square()).sum()

        by_piece = torch.func.grad(of_piece)(node.piece)
        by_whole = torch.func.grad(
            lambda x: mine(ps.unshard(ps.shard(x, axis, dim)).square()).sum()
        )
        return ps.unshard(ps.Shard(by_piece, axis, shape, dim)), by_whole(x)

    expected = 2 * whole * factors.sum(0)
    for by_piece, by_whole in run(grads, axis, whole):
        torch.testing.assert_close(by_piece, expected)
        torch.testing.assert_close(by_whole, expected)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_transforms(shape: tuple[int, ...], dim: int) -> None:
    """Tangents, ensembles and compilers pass through."""
    axis, stack = ps.VmapAxis(SIZE), drawn(4, *shape)

    def squares(x: Tensor) -> Tensor:
        def rank(x: Tensor) -> Tensor:
            pieces = tree.map(torch.square, ps.shard({"w": x}, axis, dim))
            whole: Tensor = ps.unshard(pieces)["w"]
            return whole

        result: Tensor = axis.map(rank, in_dims=None, out_dims=None)(x)
        return result

    assert torch.equal(torch.vmap(squares)(stack), stack.square())
    jvp: Any = torch.func.jvp
    value, tangent = jvp(squares, (stack[0],), (stack[1],))
    assert torch.equal(value, stack[0].square())
    torch.testing.assert_close(tangent, 2 * stack[0] * stack[1])
    slope = torch.func.grad(lambda x: squares(x).sum())(stack[0])
    torch.testing.assert_close(slope, 2 * stack[0])


def test_compiled() -> None:
    """One graph of cutting, gathering, and a norm over pieces, which come out as nodes."""
    axis, whole = ps.VmapAxis(SIZE), drawn(5, 2)

    def program(x: Tensor) -> Any:
        def rank(x: Tensor) -> Any:
            nodes = ps.shard({"w": x, "scale": x.sum()}, axis)
            return nodes, ps.unshard(nodes), tree.global_norm(nodes), tree.all_finite(nodes)

        return axis.map(rank, in_dims=None, out_dims=(0, None, None, None))(x)

    expected = program(whole)
    found = torch.compile(program, fullgraph=True, backend="aot_eager")(whole)
    assert isinstance(found[0]["w"], ps.Shard)
    for one, other in zip(tree.leaves_of(found), tree.leaves_of(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("garbage", [7.0, torch.inf, torch.nan])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_what_a_piece_is_filled_up_with_is_never_read(
    shape: tuple[int, ...], dim: int, garbage: float
) -> None:
    """Not by a norm, a finite check, a gather or a loss."""
    axis, whole = ps.VmapAxis(SIZE), drawn(*shape)

    def rank(x: Tensor) -> Any:
        node, ones = ps.shard(x, axis, dim), ps.shard(torch.ones(shape), axis, dim)
        dirty = ps.Shard(torch.where(ones.piece > 0, node.piece, garbage), axis, shape, dim)
        evaluate = ps.make_eval_step(lambda w, m: w.sum() * m, weight_fn=torch.ones_like)
        loss = evaluate(dirty, [torch.ones(1, dtype=torch.float64)]).loss
        summed = ps.psum(loss, axis)
        return tree.global_norm(dirty), tree.all_finite(dirty), ps.unshard(dirty), summed

    norm, finite, gathered, loss = axis.map(rank, in_dims=None, out_dims=None)(whole)
    torch.testing.assert_close(norm, whole.norm())
    assert finite
    assert torch.equal(gathered, whole)
    torch.testing.assert_close(loss, whole.sum())


@pytest.mark.parametrize(("make", "run"), WORLDS)
def test_one_rank_alone_has_what_is_not_finite(make: Any, run: Any) -> None:
    """Every rank is told so, and of a zero tree every rank gets a zero norm with a zero gradient."""
    axis = make(SIZE)
    whole = torch.tensor([1.0, 2.0, torch.inf])

    def rank(x: Tensor) -> Any:
        nodes = {"a": ps.shard(x, axis), "b": torch.ones(2)}
        zero = tree.map(torch.zeros_like, nodes)
        leaves, structure = tree.flatten(zero)
        slopes = torch.func.grad(lambda leaves: tree.global_norm(tree.unflatten(structure, leaves)))
        return tree.all_finite(nodes), tree.global_norm(zero), slopes(leaves)

    for finite, norm, slopes in run(rank, axis, whole):
        assert not finite
        assert norm == 0
        assert not any(slope.any() for slope in slopes)


def test_the_norms_dtype_is_that_of_the_leaves() -> None:
    axis = ps.LocalAxis()
    for dtype, expected in [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]:
        node = ps.Shard(torch.full((4,), 300, dtype=dtype), axis, (4,))
        assert tree.global_norm(node).dtype == expected
        assert tree.global_norm(node) == 600


def test_states_are_trees_of_nodes() -> None:
    """By name, and of the same structure as the params."""
    axis = ps.LocalAxis()
    params = {"w": ps.Shard(torch.ones(2), axis, (2,), dim=-1)}
    assert params["w"].shape == (2,)
    assert params["w"].dim == 0
    state = ps.optim.adamw(0.1).init(params)
    assert isinstance(state.mu["w"], ps.Shard)
    assert list(ps.state_dict(params)) == ["tree['w'].piece"]
    other = {"w": ps.Shard(torch.ones(2), axis, (4,))}
    with pytest.raises(ValueError, match="differ in structure"):
        tree.map(torch.add, params, other)


def test_a_piece_of_another_shape_is_not_the_whole() -> None:
    """``unshard`` refuses it; what else an optimizer keeps for a param stays as it is."""
    axis = ps.LocalAxis()
    with pytest.raises(ValueError, match=r"shape \(4, 3\), but this rank's piece.*take ps.shard"):
        ps.unshard({"w": ps.Shard(torch.ones(4, 3), axis, (4, 6))})
    count = torch.tensor(3)
    assert ps.unshard(ps.Shard(count, axis, (4, 6))) is count
