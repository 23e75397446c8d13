"""T11, collectives. Their laws and transposes; every axis kind agrees.

    psum(x)ᵣ = Σₛ xₛ       all_gather(x)ᵣ = (x₀, x₁, ...)       psum_scatter(x)ᵣ = Σₛ xₛ[r]       pvary(x)ᵣ = xᵣ

The transpose of each is its adjoint over the whole group, Σᵣ ⟨yᵣ, (f x)ᵣ⟩ = Σᵣ ⟨(fᵀ y)ᵣ, xᵣ⟩, where what is the
same on all ranks is counted once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import purestep as ps
from proofs.models import integers
from proofs.ranks import Run
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_threads

Collective = Callable[[Tensor, ps.Axis], Tensor]

LAWS: dict[str, tuple[Collective, Callable[[Tensor], Tensor]]] = {
    "psum": (ps.psum, lambda x: x.sum(0).expand_as(x)),
    "pmean": (ps.pmean, lambda x: (x.sum(0) / len(x)).expand_as(x)),
    "pvary": (ps.pvary, lambda x: x),
    "all_gather": (ps.all_gather, lambda x: x.expand(len(x), *x.shape)),
    "all_gather dim": (
        lambda x, axis: ps.all_gather(x, axis, dim=-1),
        lambda x: x.movedim(0, -1).expand(len(x), *x.shape[1:], len(x)),
    ),
    "all_gather tiled": (
        lambda x, axis: ps.all_gather(x, axis, dim=1, tiled=True),
        lambda x: torch.cat(list(x), 1).expand(len(x), x.shape[1], -1),
    ),
    "psum_scatter": (
        lambda x, axis: ps.psum_scatter(x, axis, dim=1),
        lambda x: x.sum(0).movedim(1, 0),
    ),
    "psum_scatter tiled": (
        lambda x, axis: ps.psum_scatter(x, axis, dim=-1, tiled=True),
        lambda x: torch.stack(x.sum(0).chunk(len(x), -1)),
    ),
}
TRANSPOSES: dict[str, tuple[Collective, Callable[[Tensor], Tensor]]] = {
    # What psum gives is the same everywhere, so its cotangent is too: counted once, it comes back as it is.
    "psum": (ps.psum, lambda y: y),
    "pvary": (ps.pvary, lambda y: y.sum(0).expand_as(y)),
    "all_gather": (ps.all_gather, lambda y: y.sum(0)),
    "psum_scatter": (ps.psum_scatter, lambda y: y.expand(len(y), *y.shape)),
}


@st.composite
def ranks(draw: st.DrawFn) -> Tensor:
    """Integers, ``(ranks, 2, ranks)``: one block of shape (2, ranks) on every rank."""
    size = draw(st.integers(1, 4))
    return integers((size, 2, size), torch.Generator().manual_seed(draw(st.integers(0, 999))), 8)


@pytest.mark.parametrize("law", LAWS)
@given(x=ranks())
def test_law(law: str, x: Tensor) -> None:
    """What every rank gets; also with other ensembles passing by, inside and outside, and nested axes."""
    collective, expected = LAWS[law]
    axis = ps.VmapAxis(len(x))

    def on_rank(block: Tensor) -> Tensor:
        return collective(block, axis)

    on_ranks = axis.map(on_rank)
    assert torch.equal(on_ranks(x), expected(x))
    both, each = torch.stack([x, x + 1], 1), torch.stack([expected(x), expected(x + 1)], 1)
    inside = axis.map(torch.vmap(on_rank))
    assert torch.equal(inside(both), each)
    assert torch.equal(torch.vmap(on_ranks, in_dims=1, out_dims=1)(both), each)
    last = torch.vmap(on_ranks, in_dims=-1, out_dims=1)(both.movedim(1, -1))
    assert torch.equal(last, each)
    other = ps.VmapAxis(2)
    nested = axis.map(other.map(on_rank))
    assert torch.equal(nested(both), each)
    nested = other.map(on_ranks)
    assert torch.equal(nested(both.movedim(1, 0)), each.movedim(1, 0))


@pytest.mark.parametrize("law", LAWS)
@given(x=ranks())
def test_one_rank_is_local(law: str, x: Tensor) -> None:
    """Over one rank, ``LocalAxis`` and ``VmapAxis(1)`` agree."""
    collective, _ = LAWS[law]
    block, axis = x[0, :, :1], ps.VmapAxis(1)
    simulated = axis.map(lambda block: collective(block, axis))(block[None])[0]
    assert torch.equal(collective(block, ps.LocalAxis()), simulated)


@pytest.mark.parametrize("law", ["psum", "all_gather", "psum_scatter"])
@given(x=ranks())
def test_what_all_ranks_share(law: str, x: Tensor) -> None:
    """A value that is the same everywhere is still one value per rank: psum of a constant is N·c."""
    collective, expected = LAWS[law]
    axis, block = ps.VmapAxis(len(x)), x[0].T if law == "psum_scatter" else x[0]
    collective = ps.psum_scatter if law == "psum_scatter" else collective
    repeated = block.expand(len(x), *block.shape)
    want = repeated.sum(0) if law == "psum_scatter" else expected(repeated)
    assert torch.equal(axis.map(lambda b: collective(b, axis), in_dims=None)(block), want)


@pytest.mark.parametrize("law", TRANSPOSES)
@given(x=ranks())
def test_transpose(law: str, x: Tensor) -> None:
    """vjp inside the program is the stated transpose; jvp is the law; twice transposed is the law."""
    collective, transpose = TRANSPOSES[law]
    axis = ps.VmapAxis(len(x))
    x = x.movedim(2, 1) if law == "psum_scatter" else x

    def pull(block: Tensor, cotangent: Tensor) -> Tensor:
        return torch.func.vjp(lambda b: collective(b, axis), block)[1](cotangent)[0]

    y = axis.map(lambda block: collective(block, axis))(x)
    cotangents = y + 1
    assert torch.equal(axis.map(pull)(x, cotangents), transpose(cotangents))

    def push(block: Tensor, tangent: Tensor) -> Any:
        return torch.func.jvp(lambda b: collective(b, axis), (block,), (tangent,))[1]

    assert torch.equal(axis.map(push)(x, x), y)

    def twice(block: Tensor, cotangent: Tensor) -> Tensor:
        return torch.func.vjp(lambda c: pull(block, c), cotangent)[1](block)[0]

    assert torch.equal(axis.map(twice)(x, cotangents), y)


@given(ranks())
def test_meta_gradient_inside_is_outside(x: Tensor) -> None:
    """An outer derivative taken by each rank inside the program is the one taken of the program."""
    axis = ps.VmapAxis(len(x))
    w = x[0, 0]

    def outer_loss(w: Tensor, block: Tensor) -> Tensor:
        grads = torch.func.grad(lambda w: (w * block).sum() ** 2)(ps.pvary(w, axis))
        moved = w - ps.psum(grads, axis) / 8
        return ps.psum(((ps.pvary(moved, axis) - block) ** 2).sum(), axis)

    inside = axis.map(torch.func.grad(outer_loss), in_dims=(None, 0), out_dims=0)(w, x)
    outside = torch.func.grad(lambda w: axis.map(outer_loss, (None, 0), None)(w, x))(w)

    def whole(w: Tensor) -> Tensor:
        total = torch.func.grad(lambda w: ((w * x).sum((1, 2)) ** 2).sum())(w)
        return ((w - total / 8 - x) ** 2).sum()

    assert torch.equal(outside, torch.func.grad(whole)(w))
    assert torch.equal(inside, outside.expand_as(inside))


@given(ranks())
def test_index_and_trees(x: Tensor) -> None:
    """Every rank knows its number, collectives take trees, and integers are summed as integers."""
    axis = ps.VmapAxis(len(x))
    assert axis.map(lambda _: axis.index)(x).tolist() == list(range(len(x)))
    total = axis.map(lambda b: ps.psum({"a": [b], "none": None, "flag": b > 0}, axis), 0, None)(x)
    assert torch.equal(total["a"][0], x.sum(0))
    assert total["none"] is None
    assert torch.equal(total["flag"], (x > 0).sum(0))


def separately(axis: ps.Axis, name: str, forward_mode: bool, block: Tensor) -> list[Tensor]:
    """What a rank of its own gets: the law, two at once as an ensemble, and the derivatives."""
    collective = (LAWS | TRANSPOSES)[name][0]

    def of(block: Tensor) -> Tensor:
        return collective(block, axis)

    def pull(block: Tensor, cotangent: Tensor) -> Tensor:
        return torch.func.vjp(of, block)[1](cotangent)[0]

    y = of(block)
    ensemble = torch.vmap(of)(torch.stack([block, block + 1]))
    push = [torch.func.jvp(of, (block,), (block,))[1]] if forward_mode else []
    twice = torch.func.vjp(lambda c: pull(block, c), y)[1](block)[0]
    return [y, *ensemble, *push, pull(block, y + 1), twice]


def check_separate_ranks(run: Run, name: str, x: Tensor, forward_mode: bool = True) -> None:
    """Ranks of their own get to the bit what a simulated rank gets, whose law and transposes are proved above."""
    x = x.movedim(2, 1) if name == "psum_scatter" else x
    axis = ps.VmapAxis(len(x))
    expected = axis.map(lambda block: separately(axis, name, forward_mode, block))(x)
    results = run(
        Ranks(len(x), 1 << 20), separately, [name] * len(x), [forward_mode] * len(x), list(x)
    )
    for rank, result in enumerate(results):
        assert_same(result, [leaf[rank] for leaf in expected], f"rank {rank}")


@pytest.mark.parametrize("name", sorted(LAWS | TRANSPOSES))
@given(x=ranks())
def test_threads(name: str, x: Tensor) -> None:
    """Threads are ranks; but torch has one level of forward-mode differentiation for all of them."""
    check_separate_ranks(on_threads, name, x, forward_mode=False)
