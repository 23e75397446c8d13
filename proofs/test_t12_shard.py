"""T12, sharding. A step on pieces gives the pieces of the step on whole tensors, and its metrics.

    unshard(step(shard(θ), shard(s))) = step(θ, s)

The axis over which the state is spread is the step's own (the ranks that split the tokens), one dimension of it, or one that
does not split tokens (tensor parallelism). The step gathers once, or for each microbatch, or leaves it to the loss. Some pieces
are empty, some shorter than others. Norms, clipping and skips are those of the whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.ranks import (
    GATHERS,
    ShareCase,
    alone,
    check_pieces,
    check_tensor_parallel,
    in_two,
    program_of,
    share_cases,
    tensor_parallel,
)
from proofs.strategies import assert_same, cut, side_by_side
from proofs.theorem import System, theorem
from proofs.worlds import Grid, Ranks, on_threads

PiecesCase = tuple[ShareCase, str, tuple[int, int]]
LayersCase = tuple[ShareCase, str, int]


def pieces_cases(*grids: tuple[int, int]) -> st.SearchStrategy[PiecesCase]:
    """Ranks that hold what they hold, or nothing; where the gather stands; the rows of a grid, if any, and its ranks."""
    return st.tuples(share_cases(), st.sampled_from(GATHERS), st.sampled_from(grids))


def layers_cases(*columns: int) -> st.SearchStrategy[LayersCase]:
    """A layer of four in three columns leaves one of them empty; the rest may be spread over the rows."""
    gathers = st.sampled_from(["", "step", "microbatch"])
    return st.tuples(share_cases(), gathers, st.sampled_from(columns))


def simulated(axis: ps.VmapAxis, fn: Callable[..., Any], **dims: Any) -> Callable[..., Any]:
    """``axis.map``, for which it is a failure of the claim that ranks differ."""

    def run(*args: Any) -> Any:
        try:
            return axis.map(fn, **dims)(*args)
        except ValueError as error:
            raise AssertionError("the ranks end up in different states") from error

    return run


@theorem("T12", layers_cases(1, 2, 3))
def separate_layers(system: System, drawn: LayersCase) -> None:
    """Layers spread beside the ranks that split the tokens: the state and all metrics, to the bit."""
    check_tensor_parallel(on_threads, system, *drawn)


@theorem("T12", layers_cases(1, 2, 3))
def simulated_layers(system: System, drawn: LayersCase) -> None:
    """Where a batch of uneven pieces, which are filled up, runs through one program."""
    (case, share, *_), _, size = drawn
    rows, columns = ps.VmapAxis(2), ps.VmapAxis(size)
    program = partial(tensor_parallel(system, *drawn[:2]), Grid(rows, columns, rows))
    on_columns = columns.map(program, in_dims=None, out_dims=None)
    on_grid = simulated(rows, on_columns, in_dims=(None, None, 0), out_dims=None)
    groups = [cut(case.batch, rank) for rank in in_two(share)]
    found = on_grid(case.params, case.opt_state, side_by_side(groups))
    assert_same(found, alone(system, case, groups, aux=False)[: len(found)])


@theorem("T12", pieces_cases((0, 1), (0, 9), (1, 3), (2, 2), (3, 9)))
def separate_params(system: System, drawn: PiecesCase) -> None:
    """Params and state spread over the step's own axis, or one of two dimensions of it, whose ranks are uneven."""
    check_pieces(on_threads, system, *drawn)


@theorem("T12", pieces_cases((0, 1)))
def simulated_params(system: System, drawn: PiecesCase) -> None:
    """Where a batch of uneven pieces runs through one program."""
    (case, share, _, settings), gather, _ = drawn
    axis = ps.VmapAxis(len(share))
    program = program_of(system, case, models.integer_loss, settings, gather)
    rank = partial(program, axis)
    on_ranks = simulated(axis, rank, in_dims=(None, None, 0), out_dims=None)
    groups = [cut(case.batch, rank) for rank in share]
    found = on_ranks(case.params, case.opt_state, side_by_side(groups))
    assert_same(found, alone(system, case, groups, aux=False))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Integers of any shape, a dimension, and how many ranks there are."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    whole = torch.randint(-4, 5, shape, generator=generator).to(torch.float64)
    return whole, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))


@theorem("T12", tensors())
def pieces_of_one_tensor(system: System, drawn: tuple[Tensor, int, int]) -> None:
    """Pieces are ``torch.chunk``'s, norm, clip and what is finite are the whole's, which they are together; on all kinds of axes."""
    whole, dim, size = drawn
    params = {"w": whole, "scale": whole.sum()}
    clip = system.optim.clip_by_global_norm(1.0)

    def program(axis: Any) -> Any:
        pieces = system.shard(params, axis, dim - whole.ndim)
        clipped, _ = clip.update(pieces, (), None)
        finite = system.tree.all_finite(system.tree.map(torch.reciprocal, pieces))
        seen = system.unshard((pieces, clipped)), system.tree.global_norm(pieces), finite
        return pieces["w"].piece, seen

    every = torch.cat([whole.flatten(), whole.sum()[None]])
    clipped = clip.update(params, (), None)[0]
    expected = (params, clipped), torch.linalg.vector_norm(every), every.all()
    chunks = [*whole.chunk(size, dim), *[whole.narrow(dim, 0, 0)] * size]
    separate = on_threads(Ranks(size, 40), program) if size > 1 else [program(ps.LocalAxis())]
    for chunk, (piece, seen) in zip(chunks, separate, strict=False):
        assert torch.equal(piece, chunk) or not whole.numel()
        assert_same(seen, expected)
    axis = ps.VmapAxis(size)
    on_ranks = simulated(axis, lambda _: program(axis), out_dims=(0, None))
    filled, seen = on_ranks(torch.arange(size))
    assert_same(seen, expected)
    for one, (piece, _) in zip(filled, separate, strict=False):
        assert torch.equal(one.narrow(dim, 0, piece.shape[dim]), piece)
        assert one.norm() == piece.norm()


@theorem("T12", tensors())
def summed_cotangents(system: System, drawn: tuple[Tensor, int, int]) -> None:
    """What each rank computes of the gathered whole adds up: in the gradient of the pieces, and of the whole."""
    whole, dim, size = drawn

    def program(axis: Any, factor: Tensor) -> Any:
        def of_piece(piece: Tensor) -> Tensor:
            gathered = system.unshard(ps.Shard(piece, axis, tuple(whole.shape), dim))
            return (factor * gathered.square()).sum()

        def of_whole(whole: Tensor) -> Tensor:
            return of_piece(system.shard(whole, axis, dim).piece)

        slope = torch.func.grad(of_piece)(system.shard(whole, axis, dim).piece)
        by_piece = system.unshard(ps.Shard(slope, axis, tuple(whole.shape), dim))
        return by_piece, torch.func.grad(of_whole)(whole)

    factors = torch.arange(1, size + 1, dtype=torch.float64)
    expected = (2 * factors.sum() * whole,) * 2
    for slopes in on_threads(Ranks(size, 40), program, factors.unbind()):
        assert_same(slopes, expected)
    axis = ps.VmapAxis(size)
    assert_same(simulated(axis, partial(program, axis), out_dims=None)(factors), expected)


@theorem("T12", st.tuples(tensors(), st.sampled_from([7.0, torch.inf, torch.nan])))
def filled_up(system: System, drawn: tuple[tuple[Tensor, int, int], float]) -> None:
    """What a piece is filled up with is never read: by a norm, a finite check, a gather, a loss."""
    (whole, dim, size), garbage = drawn
    axis = ps.VmapAxis(size)

    def program(_: Tensor) -> Any:
        node, ones = (system.shard(x, axis, dim) for x in (whole, torch.ones_like(whole)))
        node.piece = torch.where(ones.piece > 0, node.piece, garbage)
        evaluate = system.make_eval_step(lambda w, x: w.sum() * x, weight_fn=torch.ones_like)
        loss = ps.psum(evaluate(node, [torch.ones(1, dtype=torch.float64)]).loss, axis)
        seen = system.tree.global_norm(node), system.tree.all_finite(node)
        return *seen, system.unshard(node), loss

    seen = simulated(axis, program, out_dims=None)(torch.arange(size))
    norm = torch.linalg.vector_norm(whole)
    assert_same(seen, (norm, torch.tensor(True), whole, whole.sum()))


test_separate_layers = separate_layers.test()
test_simulated_layers = simulated_layers.test()
test_separate_params = separate_params.test()
test_simulated_params = simulated_params.test()
test_pieces_of_one_tensor = pieces_of_one_tensor.test()
test_summed_cotangents = summed_cotangents.test()
test_filled_up = filled_up.test()
