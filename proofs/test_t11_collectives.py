"""T11, collectives. Their laws and transposes; every axis kind agrees.

    psum(x)ᵣ = Σₛ xₛ       all_gather(x)ᵣ = (x₀, x₁, ...)       psum_scatter(x)ᵣ = Σₛ xₛ[r]       pvary(x)ᵣ = xᵣ

The transpose of each is its adjoint over the whole group, Σᵣ ⟨yᵣ, (f x)ᵣ⟩ = Σᵣ ⟨(fᵀ y)ᵣ, xᵣ⟩, where what is the
same on all ranks is counted once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import purestep as ps
from proofs.models import integers
from proofs.ranks import Run
from proofs.strategies import Chooser, assert_same, drawn
from proofs.worlds import Ranks, on_threads

Collective = Callable[[Tensor, ps.Axis], Tensor]

Law = tuple[Collective, Callable[[Tensor], Tensor]]
"""What a rank calls, and what all ranks get of the blocks that they bring."""


def gathering(**how: Any) -> Law:
    """``all_gather``, along a dimension or as it comes."""
    join = torch.cat if how.get("tiled") else torch.stack

    def expected(x: Tensor) -> Tensor:
        joined = join(list(x), how.get("dim", 0))
        return joined.expand(len(x), *joined.shape)

    return lambda x, axis: ps.all_gather(x, axis, **how), expected


def scattering(**how: Any) -> Law:
    """``psum_scatter`` of blocks whose ranks lie along that dimension, twice where it is tiled."""
    dim, tiled = how.get("dim", 0), how.get("tiled", False)

    def arranged(block: Tensor) -> Tensor:
        moved = block.movedim(-1, dim)
        return torch.cat([moved, moved + 1], dim) if tiled else moved

    def expected(x: Tensor) -> Tensor:
        total = torch.vmap(arranged)(x).sum(0)
        return torch.stack(total.chunk(len(x), dim) if tiled else total.unbind(dim))

    return lambda x, axis: ps.psum_scatter(arranged(x), axis, **how), expected


HOW: list[dict[str, Any]] = [
    {},
    {"tiled": True},
    *({"dim": dim, "tiled": tiled} for dim in (0, 1, 2, -1) for tiled in (False, True)),
]
LAWS: dict[str, list[Law]] = {
    "psum": [(ps.psum, lambda x: x.sum(0).expand_as(x))],
    "pmean": [(ps.pmean, lambda x: (x.sum(0) / len(x)).expand_as(x))],
    "pvary": [(ps.pvary, lambda x: x)],
    "all_gather": [gathering(**how) for how in HOW],
    "psum_scatter": [scattering(**how) for how in HOW],
}
TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    # What psum gives is the same everywhere, so its cotangent is too: counted once, it comes back as it is.
    "psum": lambda y: y,
    "pmean": lambda y: y / len(y),
    "pvary": lambda y: y.sum(0).expand_as(y),
    "all_gather": lambda y: y.sum(0),
    "psum_scatter": lambda y: y.movedim(0, -1).expand(len(y), *y.shape[1:], len(y)),
}


def blocks(choose: Chooser) -> tuple[Tensor, int]:
    """Integers, ``(ranks, 2, 3, ranks)``: one block of shape (2, 3, ranks) on every rank; and a way to call a law."""
    size = choose.randint(1, 4)
    return integers((size, 2, 3, size), choose.generator(), 8), choose.randrange(
        len(HOW)
    )


def called(name: str, way: int) -> Law:
    """The law, called that way."""
    return LAWS[name][way % len(LAWS[name])]


@pytest.mark.parametrize("law", LAWS)
@given(drawn=drawn(blocks))
def test_law(law: str, drawn: tuple[Tensor, int]) -> None:
    """What every rank gets; also with ensembles passing by, nested axes, and of a value that all ranks share."""
    x, way = drawn
    collective, expected = called(law, way)
    axis, other = ps.VmapAxis(len(x)), ps.VmapAxis(2)

    def on_rank(block: Tensor) -> Tensor:
        return collective(block, axis)

    on_ranks = axis.map(on_rank)
    assert torch.equal(on_ranks(x), expected(x))
    both, each = (
        torch.stack([x, x + 1], 1),
        torch.stack([expected(x), expected(x + 1)], 1),
    )
    last = torch.vmap(on_ranks, in_dims=-1, out_dims=1)(both.movedim(1, -1))
    for found in (
        axis.map(torch.vmap(on_rank))(both),
        torch.vmap(on_ranks, in_dims=1, out_dims=1)(both),
        last,
        axis.map(other.map(on_rank))(both),
        other.map(on_ranks)(both.movedim(1, 0)).movedim(1, 0),
    ):
        assert torch.equal(found, each)
    shared = axis.map(on_rank, in_dims=None)(x[0])
    assert torch.equal(shared, expected(x[:1].expand_as(x)))
    if len(x) == 1:
        assert torch.equal(collective(x[0], ps.LocalAxis()), on_ranks(x)[0])


@given(drawn(blocks))
def test_index_and_trees(drawn: tuple[Tensor, int]) -> None:
    """Every rank knows its number, collectives take trees, and integers are summed as integers."""
    x, _ = drawn
    axis = ps.VmapAxis(len(x))
    assert axis.map(lambda _: axis.index)(x).tolist() == list(range(len(x)))
    total = axis.map(
        lambda b: ps.psum({"a": [b], "none": None, "flag": b > 0}, axis), 0, None
    )(x)
    assert_same(total, {"a": [x.sum(0)], "none": None, "flag": (x > 0).sum(0)})


def separately(
    axis: ps.Axis, name: str, way: int, forward_mode: bool, block: Tensor
) -> list[Tensor]:
    """What a rank of its own gets: the law, two at once as an ensemble, and the derivatives."""
    collective, _ = called(name, way)

    def of(block: Tensor) -> Tensor:
        return collective(block, axis)

    def pull(block: Tensor, cotangent: Tensor) -> Tensor:
        return torch.func.vjp(of, block)[1](cotangent)[0]

    y = of(block)
    ensemble = torch.vmap(of)(torch.stack([block, block + 1]))
    push = [torch.func.jvp(of, (block,), (block,))[1]] if forward_mode else []
    twice = torch.func.vjp(lambda c: pull(block, c), y)[1](block)[0]
    return [y, *ensemble, *push, pull(block, y + 1), twice]


@pytest.mark.parametrize("law", TRANSPOSES)
@given(drawn=drawn(blocks))
def test_transpose(law: str, drawn: tuple[Tensor, int]) -> None:
    """vjp inside the program is the stated transpose; jvp is the law; twice transposed is the law."""
    x, _ = drawn
    axis = ps.VmapAxis(len(x))
    y, _, _, tangent, pulled, twice = axis.map(partial(separately, axis, law, 0, True))(
        x
    )
    assert torch.equal(pulled, TRANSPOSES[law](y + 1))
    assert torch.equal(tangent, y)
    assert torch.equal(twice, y)


def check_separate_ranks(
    run: Run, name: str, x: Tensor, way: int, forward_mode: bool = True
) -> None:
    """Ranks of their own get to the bit what a simulated rank gets, whose law and transposes are proved above."""
    size, axis = len(x), ps.VmapAxis(len(x))
    expected = axis.map(lambda block: separately(axis, name, way, forward_mode, block))(
        x
    )
    args = [name] * size, [way] * size, [forward_mode] * size, list(x)
    for rank, result in enumerate(run(Ranks(size, 1 << 20), separately, *args)):
        assert_same(result, [leaf[rank] for leaf in expected], f"rank {rank}")


@pytest.mark.parametrize("name", LAWS)
@given(drawn=drawn(blocks))
def test_threads(name: str, drawn: tuple[Tensor, int]) -> None:
    """Threads are ranks; but torch has one level of forward-mode differentiation for all of them."""
    check_separate_ranks(on_threads, name, *drawn, forward_mode=False)
