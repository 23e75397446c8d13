"""T12, sharding. A step on pieces gives the pieces of the step on whole tensors, and its metrics.

    unshard(step(shard(θ), shard(s))) = step(θ, s)

Layers are spread over an axis that does not split tokens (tensor parallelism); some pieces are empty, some
shorter than others. Norms, clipping and skips are those of the whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs.sharded import (
    ShardCase,
    check_sharded,
    check_sharded_on_one_program,
    infinite_cases,
    infinite_step,
    shard_cases,
)
from proofs.strategies import assert_same
from proofs.theorem import System, theorem
from proofs.worlds import Ranks, on_threads
from purestep import tree


@theorem("T12", shard_cases())
def separate_pieces(system: System, drawn: ShardCase) -> None:
    """Ranks that run programs of their own: the state and all metrics, to the bit."""
    check_sharded(on_threads, system, drawn)


@theorem("T12", shard_cases())
def simulated_pieces(system: System, drawn: ShardCase) -> None:
    """Ranks of one program."""
    check_sharded_on_one_program(system, drawn)


@theorem("T12", infinite_cases())
def skipped_pieces(system: System, drawn: tuple[int, int, str]) -> None:
    """A gradient that is not finite on one rank alone is skipped by all of them."""
    size, *how = drawn
    program = partial(infinite_step, system.make_update_step)
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
    """Pieces are ``torch.chunk``'s, their norm is that of the whole, and together they are the whole; on all kinds of axes."""
    whole, dim, size = drawn

    def program(axis: Any) -> Any:
        pieces = ps.shard({"w": whole, "scale": whole.sum()}, axis, dim)
        seen = ps.unshard(pieces), tree.global_norm(pieces), tree.all_finite(pieces)
        return pieces["w"].piece, seen

    norm = torch.linalg.vector_norm(torch.cat([whole.flatten(), whole.sum()[None]]))
    expected = {"w": whole, "scale": whole.sum()}, norm, torch.tensor(True)
    chunks = [*whole.chunk(size, dim), *[whole.narrow(dim, 0, 0)] * size]
    separate = on_threads(Ranks(size, 40), program)
    for chunk, (piece, seen) in zip(chunks, separate, strict=False):
        assert torch.equal(piece, chunk) or not whole.numel()
        assert_same(seen, expected)
    axis = ps.VmapAxis(size)
    filled, seen = axis.map(lambda _: program(axis), out_dims=(0, None))(torch.arange(size))
    assert_same(seen, expected)
    for one, (piece, _) in zip(filled, separate, strict=True):
        assert torch.equal(one.narrow(dim, 0, piece.shape[dim]), piece)
        assert one.norm() == piece.norm()


test_separate_pieces = separate_pieces.test()
test_simulated_pieces = simulated_pieces.test()
test_skipped_pieces = skipped_pieces.test()
test_pieces_of_one_tensor = pieces_of_one_tensor.test()
