"""T11, collectives. Their laws and transposes; every axis kind agrees.

    psum(x)ᵣ = Σₛ xₛ       all_gather(x)ᵣ = (x₀, x₁, ...)       psum_scatter(x)ᵣ = Σₛ xₛ[r]       pvary(x)ᵣ = xᵣ

The transpose of each is its adjoint over the whole group, Σᵣ ⟨yᵣ, (f x)ᵣ⟩ = Σᵣ ⟨(fᵀ y)ᵣ, xᵣ⟩, where what is the
same on all ranks is counted once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor

import purestep as ps
from purestep import tree
from support.models import integers
from support.ranks import Run
from support.strategies import Chooser, assert_same, builds
from support.worlds import Ranks, on_threads


class Law(NamedTuple):
    """A collective that a rank calls, and the results of all ranks as a function of their blocks."""

    collective: Callable[[Tensor, ps.Axis], Tensor]
    expected: Callable[[Tensor], Tensor]


def gather_law(dim: int = 0, tiled: bool = False) -> Law:
    """Makes the law of ``all_gather``: blocks are joined along ``dim`` if ``tiled``, or stacked."""

    def collective(x: Tensor, axis: ps.Axis) -> Tensor:
        return ps.all_gather(x, axis, dim=dim, tiled=tiled)

    def expected(x: Tensor) -> Tensor:
        blocks = list(x)
        joined = torch.cat(blocks, dim) if tiled else torch.stack(blocks, dim)
        return joined.expand(len(x), *joined.shape)

    return Law(collective, expected)


def scatter_law(dim: int = 0, tiled: bool = False) -> Law:
    """Makes the law of ``psum_scatter``, with one slice a rank along ``dim``, two if ``tiled``."""

    def arrange(block: Tensor) -> Tensor:
        moved = block.movedim(-1, dim)
        return torch.cat([moved, moved + 1], dim) if tiled else moved

    def collective(x: Tensor, axis: ps.Axis) -> Tensor:
        return ps.psum_scatter(arrange(x), axis, dim=dim, tiled=tiled)

    def expected(x: Tensor) -> Tensor:
        total = torch.vmap(arrange)(x).sum(0)
        return torch.stack(total.chunk(len(x), dim) if tiled else total.unbind(dim))

    return Law(collective, expected)


GATHERS = [gather_law(), gather_law(tiled=True)]
SCATTERS = [scatter_law(), scatter_law(tiled=True)]
for dim in (0, 1, 2, -1):
    for tiled in (False, True):
        GATHERS.append(gather_law(dim, tiled))
        SCATTERS.append(scatter_law(dim, tiled))

LAWS: dict[str, list[Law]] = {
    "psum": [Law(ps.psum, lambda x: x.sum(0).expand_as(x))],
    "pmean": [Law(ps.pmean, lambda x: (x.sum(0) / len(x)).expand_as(x))],
    "pvary": [Law(ps.pvary, lambda x: x)],
    "all_gather": GATHERS,
    "psum_scatter": SCATTERS,
}
"""Each collective, with each choice of its arguments."""
TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    # What psum gives is the same everywhere, so its cotangent is too: counted once, it comes back as it is.
    "psum": lambda y: y,
    "pmean": lambda y: y / len(y),
    "pvary": lambda y: y.sum(0).expand_as(y),
    "all_gather": lambda y: y.sum(0),
    "psum_scatter": lambda y: y.movedim(0, -1).expand(len(y), *y.shape[1:], len(y)),
}


def blocks(choose: Chooser) -> tuple[Tensor, int]:
    """Makes integers, ``(ranks, 2, 3, ranks)``: a block of shape (2, 3, ranks) on each rank; and a law's variant."""
    size = choose.randint(1, 4)
    x = integers((size, 2, 3, size), choose.generator(), 8)
    return x, choose.randrange(len(GATHERS))


def law_of(name: str, variant: int) -> Law:
    """Returns the law, with one choice of its arguments."""
    return LAWS[name][variant % len(LAWS[name])]


@pytest.mark.parametrize("law", LAWS)
@given(drawn=builds(blocks))
def test_law(law: str, drawn: tuple[Tensor, int]) -> None:
    """What every rank gets; also with ensembles passing by, nested axes, and of a value that all ranks share."""
    x, variant = drawn
    collective, expected = law_of(law, variant)
    axis = ps.VmapAxis(len(x))

    def on_rank(block: Tensor) -> Tensor:
        return collective(block, axis)

    on_ranks = axis.map(on_rank)
    assert torch.equal(on_ranks(x), expected(x))
    check_ensembles(axis, on_rank, x, expected)
    shared = axis.map(on_rank, in_dims=None)(x[0])
    assert torch.equal(shared, expected(x[:1].expand_as(x)))
    if len(x) == 1:
        assert torch.equal(collective(x[0], ps.LocalAxis()), on_ranks(x)[0])


def check_ensembles(
    axis: ps.VmapAxis,
    on_rank: Callable[[Tensor], Tensor],
    x: Tensor,
    expected: Callable[[Tensor], Tensor],
) -> None:
    """Checks that an ensemble of two is its members, whichever vmap is inside the other."""
    on_ranks = axis.map(on_rank)
    other = ps.VmapAxis(2)
    ensemble = torch.stack([x, x + 1], 1)
    inside = axis.map(torch.vmap(on_rank))
    outside = torch.vmap(on_ranks, in_dims=1, out_dims=1)
    last = torch.vmap(on_ranks, in_dims=-1, out_dims=1)
    inner_axis = axis.map(other.map(on_rank))
    outer_axis = other.map(on_ranks)
    members = torch.stack([expected(x), expected(x + 1)], 1)
    for actual in (
        inside(ensemble),
        outside(ensemble),
        last(ensemble.movedim(1, -1)),
        inner_axis(ensemble),
        outer_axis(ensemble.movedim(1, 0)).movedim(1, 0),
    ):
        assert torch.equal(actual, members)


@given(builds(blocks))
def test_index_and_trees(drawn: tuple[Tensor, int]) -> None:
    """Checks that ranks know their number, collectives take trees, booleans sum to integers."""
    x, _ = drawn
    axis = ps.VmapAxis(len(x))

    def sum_tree(block: Tensor) -> Any:
        return ps.psum({"a": [block], "none": None, "flag": block > 0}, axis)

    total = axis.map(sum_tree, in_dims=0, out_dims=None)(x)
    assert_same(total, {"a": [x.sum(0)], "none": None, "flag": (x > 0).sum(0)})
    assert axis.map(lambda _: axis.index)(x).tolist() == list(range(len(x)))


class RankResult(NamedTuple):
    """The results of one rank: of the law, for an ensemble of two, and its derivatives."""

    y: Tensor
    ensemble: Tensor
    tangent: Tensor | None
    pulled: Tensor
    transposed_twice: Tensor


def call_law(
    axis: ps.Axis, name: str, variant: int, forward_mode: bool, block: Tensor
) -> RankResult:
    """Computes the results of one rank."""
    law = law_of(name, variant)

    def call(block: Tensor) -> Tensor:
        return law.collective(block, axis)

    def pull(block: Tensor, cotangent: Tensor) -> Tensor:
        vjp_fn = torch.func.vjp(call, block)[1]
        (pulled,) = vjp_fn(cotangent)
        return pulled

    y = call(block)
    ensemble = torch.vmap(call)(torch.stack([block, block + 1]))
    tangent = None
    if forward_mode:
        tangent = torch.func.jvp(call, (block,), (block,))[1]
    transpose_again = torch.func.vjp(lambda c: pull(block, c), y)[1]
    (transposed_twice,) = transpose_again(block)
    return RankResult(y, ensemble, tangent, pull(block, y + 1), transposed_twice)


@pytest.mark.parametrize("law", TRANSPOSES)
@given(drawn=builds(blocks))
def test_transpose(law: str, drawn: tuple[Tensor, int]) -> None:
    """vjp inside the program is the stated transpose; jvp is the law; twice transposed is the law."""
    x, _ = drawn
    axis = ps.VmapAxis(len(x))
    program = partial(call_law, axis, law, 0, True)

    result = axis.map(program)(x)

    assert torch.equal(result.pulled, TRANSPOSES[law](result.y + 1))
    assert torch.equal(result.tangent, result.y)
    assert torch.equal(result.transposed_twice, result.y)


def check_separate_ranks(
    run: Run, name: str, x: Tensor, variant: int, forward_mode: bool = True
) -> None:
    """Checks that separate ranks get to the bit what a simulated rank gets, whose law and transposes are proved above."""
    size = len(x)
    axis = ps.VmapAxis(size)
    program = partial(call_law, axis, name, variant, forward_mode)
    expected = axis.map(program)(x)
    args = [name] * size, [variant] * size, [forward_mode] * size, list(x)

    results = run(Ranks(size, 1 << 20), call_law, *args)

    for rank, result in enumerate(results):
        of_rank = tree.map(lambda leaf, rank=rank: leaf[rank], expected)
        assert_same(result, of_rank, f"rank {rank}")


@pytest.mark.parametrize("name", LAWS)
@given(drawn=builds(blocks))
def test_threads(name: str, drawn: tuple[Tensor, int]) -> None:
    """Threads are ranks; but torch has one level of forward-mode differentiation for all of them."""
    check_separate_ranks(on_threads, name, *drawn, forward_mode=False)
