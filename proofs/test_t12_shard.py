"""T12, sharding. A step on pieces gives the pieces of the step on whole tensors, and its metrics.

    unshard(step(shard(θ), shard(s))) = step(θ, s)

The axis over which the state is spread is the step's own (the ranks that split the tokens), one dimension of it, or one that
does not split tokens (tensor parallelism). The step gathers once, or for each microbatch, or leaves it to the loss. Some pieces
are empty, some shorter than others. Norms, clipping and skips are those of the whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs.ranks import one_step
from proofs.sharded import (
    HeldCase,
    ShardCase,
    check_sharded,
    check_sharded_on_one_program,
    check_sharded_params,
    gathered_by,
    held_cases,
    infinite_cases,
    infinite_step,
    shard_cases,
    sharded_params_step,
    sharding,
    simulated,
)
from proofs.strategies import Batch, assert_same, simulate
from proofs.theorem import System, theorem
from proofs.worlds import Ranks, on_threads


@theorem("T12", shard_cases())
def separate_pieces(system: System, drawn: ShardCase) -> None:
    """Ranks that run programs of their own: the state and all metrics, to the bit."""
    check_sharded(on_threads, system, drawn)


@theorem("T12", shard_cases())
def simulated_pieces(system: System, drawn: ShardCase) -> None:
    """Ranks of one program."""
    check_sharded_on_one_program(system, drawn)


@theorem("T12", held_cases())
def separate_params(system: System, drawn: HeldCase) -> None:
    """Params and state spread over the step's own axis, whose ranks hold what they hold: uneven, or nothing."""
    check_sharded_params(on_threads, system, drawn)


@theorem("T12", held_cases())
def replicated_pieces(system: System, drawn: HeldCase) -> None:
    """Spread over one of two dimensions of the step's axis: each piece is held twice."""
    check_sharded_params(on_threads, system, drawn, grid=True)


@theorem("T12", held_cases())
def simulated_params(system: System, drawn: HeldCase) -> None:
    """Where a batch of uneven pieces runs through one program."""
    case, share, _, settings, gather = drawn
    axis = ps.VmapAxis(len(share))
    gathering = gathered_by(system, gather)

    def rank(params: Any, opt_state: Any, group: list[Batch]) -> Any:
        how = gathering, system.make_update_step, axis
        return sharded_params_step(*how, params, opt_state, group, case.recipe, settings)

    on_ranks = simulated(axis, rank, in_dims=(None, None, 0), out_dims=None)
    *actual, metrics = on_ranks(case.params, case.opt_state, simulate(case, share))
    *state, expected = one_step(
        system.make_update_step, ps.LocalAxis(), case.params, case.opt_state,
        [case.batch], case.recipe, {},
    )  # fmt: skip
    assert_same(actual, state)
    for name in ("loss", "num_tokens", "grad_norm", "applied"):
        assert_same(getattr(metrics, name), getattr(expected, name), name)


@theorem("T12", infinite_cases())
def skipped_pieces(system: System, drawn: tuple[int, int, str]) -> None:
    """A gradient that is not finite on one rank alone is skipped by all of them."""
    size, *how = drawn
    program = partial(infinite_step, sharding(system), system.make_update_step)
    for new, old, applied in on_threads(Ranks(size, 40), program, *[[each] * size for each in how]):
        assert not applied, "one rank has gone on"
        assert_same(new, old)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Integers of any shape, a dimension, and how many ranks there are."""
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    whole = torch.randint(-4, 5, shape, generator=generator).to(torch.float64)
    return whole, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))


@theorem("T12", tensors())
def pieces_of_one_tensor(system: System, drawn: tuple[Tensor, int, int]) -> None:
    """Pieces are ``torch.chunk``'s, norm and clip are those of the whole, and together they are the whole; on all kinds of axes."""
    whole, dim, size = drawn

    def program(axis: Any) -> Any:
        pieces = system.shard({"w": whole, "scale": whole.sum()}, axis, dim)
        clipped, _ = system.optim.clip_by_global_norm(1.0).update(pieces, (), None)
        seen = system.unshard((pieces, clipped)), system.tree.global_norm(pieces)
        return pieces["w"].piece, seen

    norm = torch.linalg.vector_norm(torch.cat([whole.flatten(), whole.sum()[None]]))
    tensors_ = {"w": whole, "scale": whole.sum()}
    clipped, _ = system.optim.clip_by_global_norm(1.0).update(tensors_, (), None)
    expected = (tensors_, clipped), norm
    chunks = [*whole.chunk(size, dim), *[whole.narrow(dim, 0, 0)] * size]
    separate = on_threads(Ranks(size, 40), program)
    for chunk, (piece, seen) in zip(chunks, separate, strict=False):
        assert torch.equal(piece, chunk) or not whole.numel()
        assert_same(seen, expected)
    axis = ps.VmapAxis(size)
    on_ranks = simulated(axis, lambda _: program(axis), out_dims=(0, None))
    filled, seen = on_ranks(torch.arange(size))
    assert_same(seen, expected)
    for one, (piece, _) in zip(filled, separate, strict=True):
        assert torch.equal(one.narrow(dim, 0, piece.shape[dim]), piece)
        assert one.norm() == piece.norm()


@theorem("T12", tensors())
def summed_cotangents(system: System, drawn: tuple[Tensor, int, int]) -> None:
    """What each rank computes of the gathered whole adds up in the gradient of the pieces."""
    whole, dim, size = drawn

    def program(axis: Any, factor: Tensor) -> Any:
        node = system.shard(whole, axis, dim)

        def of_piece(piece: Tensor) -> Tensor:
            gathered = system.unshard(ps.Shard(piece, axis, tuple(whole.shape), dim))
            return (factor * gathered.square()).sum()

        slope = torch.func.grad(of_piece)(node.piece)
        return system.unshard(ps.Shard(slope, axis, tuple(whole.shape), dim))

    factors = torch.arange(1, size + 1, dtype=torch.float64)
    expected = 2 * factors.sum() * whole
    for slope in on_threads(Ranks(size, 40), program, factors.unbind()):
        assert_same(slope, expected)
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


test_separate_pieces = separate_pieces.test()
test_simulated_pieces = simulated_pieces.test()
test_separate_params = separate_params.test()
test_replicated_pieces = replicated_pieces.test()
test_simulated_params = simulated_params.test()
test_skipped_pieces = skipped_pieces.test()
test_pieces_of_one_tensor = pieces_of_one_tensor.test()
test_summed_cotangents = summed_cotangents.test()
test_filled_up = filled_up.test()
