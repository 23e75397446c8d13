"""T12, sharding. A step on pieces gives the pieces of the step on whole tensors, and its metrics.

    unshard(step(shard(θ), shard(s))) = step(θ, s)

The axis over which the state is spread is the step's own (the ranks that split the tokens), one dimension of it, or one that
does not split tokens (tensor parallelism). The step gathers once, or for each microbatch, or leaves it to the loss. Some pieces
are empty, some shorter than others. Norms, clipping and skips are those of the whole.
"""

from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs.parallel import tensor_parallel_step
from proofs.ranks import alone, check_metrics, check_tensor_parallel, simulated
from proofs.strategies import (
    GATHERS,
    Chooser,
    Drawn,
    assert_same,
    drawn,
    side_by_side,
    step_case,
    steps,
)
from proofs.theorem import System, as_tests, theorem
from proofs.worlds import Grid, Ranks, on_threads
from purestep import tree

PIECES: dict[str, Any] = {"dtypes": [torch.float64], "gathers": GATHERS}


def layers_case(choose: Chooser, *columns: int) -> tuple[Drawn, int]:
    """A layer of four in three columns leaves one of them empty; the rest may be spread over the rows."""
    how: dict[str, Any] = {
        "axes": ["threads"],
        "ranks": [2],
        "gathers": ["", "step", "microbatch"],
    }
    case = step_case(choose, dtypes=[torch.float64], scalars=False, trees=True, **how)
    return case, choose.choice(columns)


@theorem("T12", drawn(layers_case, 1, 2, 3))
def separate_layers(system: System, drawn: tuple[Drawn, int]) -> None:
    """Layers spread beside the ranks that split the tokens: the state and all metrics, to the bit."""
    check_tensor_parallel(on_threads, *drawn)


@theorem("T12", drawn(layers_case, 2, 3))
def simulated_layers(system: System, drawn: tuple[Drawn, int]) -> None:
    """Where a batch of uneven pieces, which are filled up, runs through one program."""
    (case, how, groups), size = drawn
    rows, columns = ps.VmapAxis(2), ps.VmapAxis(size)

    def program(_: Any, *rank: Any) -> Any:
        one = partial(tensor_parallel_step, case.recipe, how, Grid(rows, columns, rows))
        return columns.map(one, in_dims=None, out_dims=None)(*rank)

    on_grid = simulated(rows, program, (None, None, 0))
    found = on_grid(case.params, case.opt_state, side_by_side(groups))
    assert_same(found, alone(case, how, groups))


@theorem(
    "T12",
    steps(**PIECES, axes=["threads"], grids=[(0, 1), (0, 5), (1, 3), (2, 2), (2, 6)]),
)
def separate_params(system: System, drawn: Drawn) -> None:
    """Params and state spread over the step's own axis, or one of two dimensions of it, whose ranks are uneven."""
    check_metrics(system, drawn)


@theorem("T12", steps(**PIECES, axes=["simulated"]))
def simulated_params(system: System, drawn: Drawn) -> None:
    """Where a batch of uneven pieces runs through one program."""
    check_metrics(system, drawn)


def tensor_case(choose: Chooser) -> tuple[Tensor, int, int]:
    """Integers of any shape, a dimension, and how many ranks there are."""
    shape = [choose.randrange(6) for _ in range(choose.randint(1, 3))]
    whole = torch.randint(-4, 5, shape, generator=choose.generator()).to(torch.float64)
    return whole, choose.randrange(len(shape)), choose.randint(1, 4)


@theorem("T12", drawn(tensor_case))
def pieces_of_one_tensor(system: System, drawn: tuple[Tensor, int, int]) -> None:
    """Pieces are ``torch.chunk``'s, norm, clip and what is finite are the whole's, which they are together; on all kinds of axes."""
    whole, dim, size = drawn
    params = {"w": whole, "scale": whole.sum()}
    clip = ps.optim.clip_by_global_norm(1.0)

    def program(axis: Any) -> Any:
        pieces = ps.shard(params, axis, dim - whole.ndim)
        clipped, _ = clip.update(pieces, (), None)
        finite = tree.all_finite(tree.map(torch.reciprocal, pieces))
        seen = ps.unshard((pieces, clipped)), tree.global_norm(pieces), finite
        return pieces["w"].local, seen

    every = torch.cat([whole.flatten(), whole.sum()[None]])
    clipped = clip.update(params, (), None)[0]
    expected = (params, clipped), torch.linalg.vector_norm(every), every.all()
    chunks = [*whole.chunk(size, dim), *[whole.narrow(dim, 0, 0)] * size]
    separate = (
        on_threads(Ranks(size, 40), program) if size > 1 else [program(ps.LocalAxis())]
    )
    for chunk, (piece, seen) in zip(chunks, separate, strict=False):
        assert torch.equal(piece, chunk) or not whole.numel()
        assert_same(seen, expected)
    axis = ps.VmapAxis(size)
    on_ranks = simulated(axis, lambda axis, _: program(axis), out_dims=(0, None))
    filled, seen = on_ranks(torch.arange(size))
    assert_same(seen, expected)
    for one, (piece, _) in zip(filled, separate, strict=False):
        assert torch.equal(one.narrow(dim, 0, piece.shape[dim]), piece)
        assert one.norm() == piece.norm()


@theorem("T12", drawn(tensor_case))
def summed_cotangents(system: System, drawn: tuple[Tensor, int, int]) -> None:
    """What each rank computes of the gathered whole adds up: in the gradient of the pieces, and of the whole."""
    whole, dim, size = drawn

    def program(axis: Any, factor: Tensor) -> Any:
        def of_piece(piece: Tensor) -> Tensor:
            gathered = ps.unshard(ps.Shard(piece, axis, tuple(whole.shape), dim))
            return (factor * gathered.square()).sum()

        def of_whole(whole: Tensor) -> Tensor:
            return of_piece(ps.shard(whole, axis, dim).local)

        slope = torch.func.grad(of_piece)(ps.shard(whole, axis, dim).local)
        by_piece = ps.unshard(ps.Shard(slope, axis, tuple(whole.shape), dim))
        return by_piece, torch.func.grad(of_whole)(whole)

    factors = torch.arange(1, size + 1, dtype=torch.float64)
    expected = (2 * factors.sum() * whole,) * 2
    for slopes in on_threads(Ranks(size, 40), program, factors.unbind()):
        assert_same(slopes, expected)
    axis = ps.VmapAxis(size)
    assert_same(simulated(axis, program)(factors), expected)


@theorem(
    "T12", st.tuples(drawn(tensor_case), st.sampled_from([7.0, torch.inf, torch.nan]))
)
def filled_up(system: System, drawn: tuple[tuple[Tensor, int, int], float]) -> None:
    """What a piece is filled up with is never read: by a norm, a finite check, a gather, a loss."""
    (whole, dim, size), garbage = drawn

    def program(axis: Any, _: Tensor) -> Any:
        node, ones = (ps.shard(x, axis, dim) for x in (whole, torch.ones_like(whole)))
        node.local = torch.where(ones.local > 0, node.local, garbage)
        evaluate = system.make_eval_step(
            lambda w, x: w.sum() * x, weight_fn=torch.ones_like
        )
        loss = ps.psum(evaluate(node, [torch.ones(1, dtype=torch.float64)]).loss, axis)
        seen = tree.global_norm(node), tree.all_finite(node)
        return *seen, ps.unshard(node), loss

    seen = simulated(ps.VmapAxis(size), program)(torch.arange(size))
    norm = torch.linalg.vector_norm(whole)
    assert_same(seen, (norm, torch.tensor(True), whole, whole.sum()))


globals().update(as_tests(globals()))
