"""Each collective on ranks of their own, and compiled: what comes out, and what its derivative sends back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
from proofs.worlds import Ranks, on_processes
from purestep.testing.processes import World

pytestmark = pytest.mark.timeout(120)

LAWS: dict[
    str, tuple[Callable[..., Any], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
] = {
    "psum": (ps.psum, lambda x: x.sum(0).expand_as(x), lambda y: y),
    "pvary": (ps.pvary, lambda x: x, lambda y: y.sum(0).expand_as(y)),
    "pmean": (ps.pmean, lambda x: x.mean(0).expand_as(x), lambda y: y / len(y)),
    "all_gather": (ps.all_gather, lambda x: x.expand(len(x), *x.shape), lambda y: y.sum(0)),
    "psum_scatter": (ps.psum_scatter, lambda x: x.sum(0), lambda y: y.expand(len(y), *y.shape)),
}
"""Each collective; what ranks that hold x₀, x₁, ... get; and its transpose."""


def blocks(law: str, size: int) -> tuple[Tensor, Tensor]:
    """What every rank puts in, ``(ranks, ranks, 3)``, and the cotangent of what comes out."""
    x = torch.arange(size * size * 3).view(size, size, 3).double()
    _, forward, _ = LAWS[law]
    return x, forward(x).flip(0) + torch.arange(size).view(size, *[1] * (forward(x).ndim - 1))


def forward_and_pulled(axis: ps.Axis, law: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """f(x), and the gradient of ⟨y, f(x)⟩ in what this rank put in."""
    collective, *_ = LAWS[law]
    pulled: Tensor = torch.func.grad(lambda x: (collective(x, axis) * y).sum())(x)
    return collective(x, axis), pulled


def check_law(law: str, results: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The law and its transpose on every rank."""
    _, forward, transpose = LAWS[law]
    x, y = blocks(law, len(results))
    outputs, pulled = map(torch.stack, zip(*results, strict=True))
    assert torch.equal(outputs, forward(x))
    assert torch.equal(pulled, transpose(y))


@pytest.mark.parametrize("law", LAWS)
def test_transpose(ranks: Run, law: str) -> None:
    x, y = blocks(law, 4)
    check_law(law, ranks(forward_and_pulled, [law] * 4, list(x), list(y)))


def compiled_law(axis: ps.Axis, law: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A collective and its gradient, each compiled whole."""
    run = torch.compile(forward_and_pulled, fullgraph=True, backend="aot_eager")
    result: tuple[Tensor, Tensor] = run(axis, law, x, y)
    return result


@pytest.mark.parametrize("law", LAWS)
def test_compiled_collectives(world: World, law: str) -> None:
    """On two ranks: compilers take their time."""
    x, y = blocks(law, 2)
    check_law(law, on_processes(world, Ranks(2), compiled_law, [law] * 2, list(x), list(y)))
