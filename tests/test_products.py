"""The products of what is compiled: which are replaced, and that they stay the products they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from purestep.products import LEAST, product, with_products
from purestep.rewrites import summands_apart
from purestep.torch_private import rewriting
from tests.graphs import operators_after
from tests.torch_private import compiling_sizes_of_data, pass_of_the_compiler

SIDE = 192  # SIDE ** 3 > LEAST


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small enough that every sum of products is exact, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def layouts(rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """The same shape, in each way in which it may lie in memory."""
    return {
        "rows": integers(rows, columns, seed=seed),
        "columns": integers(columns, rows, seed=seed).t(),
        "every other": integers(rows, 2 * columns, seed=seed)[:, ::2],
        "the same row": integers(1, columns, seed=seed).expand(rows, columns),
        "the same column": integers(rows, 1, seed=seed).expand(rows, columns),
        "a sliding window": integers(rows + columns, seed=seed).unfold(0, columns, 1)[:rows],
        "a wide window": integers(rows, columns + 9, seed=seed)
        .flatten()
        .as_strided((rows, columns), (7, 3)),
    }


def mlp(params: Any, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.linear(x, params["w"], params["bias"]).relu()
    return hidden @ params["v"] + x


def parameters() -> dict[str, Tensor]:
    return {
        "bias": integers(SIDE, seed=1).requires_grad_(),
        "v": integers(SIDE, SIDE, seed=2).requires_grad_(),
        "w": integers(SIDE, SIDE, seed=3).requires_grad_(),
    }


def with_products_of_sums(graph: torch.fx.Graph) -> None:
    summands_apart(graph)
    with_products(graph)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """With these products on whatever processor this is."""
    compile_: Any = torch.compile
    made: Callable[..., Any] = compile_(
        function, options=rewriting(with_products_of_sums, __file__)
    )
    return made


replaced = partial(operators_after, with_products_of_sums)


@pytest.mark.parametrize("a", layouts(SIDE, SIDE + 16, 0).values(), ids=layouts(1, 1, 0))
@pytest.mark.parametrize("b", layouts(SIDE + 16, SIDE - 8, 1).values(), ids=layouts(1, 1, 0))
def test_every_layout(a: Tensor, b: Tensor) -> None:
    assert a.shape[0] * b.numel() >= LEAST
    assert torch.equal(product(a, b), a @ b)
    assert product(a, b).is_contiguous()


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1), (1, LEAST, 1)])
def test_every_size(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = integers(m, k), integers(k, n)
    assert torch.equal(product(a, b), a @ b)


def test_what_repays_is_replaced() -> None:
    x, y, z = (integers(SIDE, SIDE, seed=seed) for seed in range(3))
    ours, theirs = "purestep.product.default", "aten.mm.default"
    assert replaced(torch.mm, x, y) == [ours]
    assert replaced(torch.addmm, z, x, y) == [ours, "aten.add.Tensor"]
    assert replaced(torch.addmm, z[0], x, y) == [ours, "aten.add.Tensor"]
    assert replaced(lambda x, y: x.t() @ y, x, y)[-2:] == ["aten.clone.default", ours]
    assert replaced(torch.mm, x[:8], y) == [theirs]
    assert replaced(torch.mm, x.double(), y.double()) == [theirs]
    assert ours not in replaced(torch.mm, x.bfloat16(), y.bfloat16())
    scaled = partial(torch.addmm, beta=2, alpha=3)
    assert replaced(scaled, z, x, y) == ["aten.addmm.default"]


def test_compiled_with_gradients() -> None:
    """Forward and backward, of sizes that are known and of sizes that are not."""
    params = parameters()
    step = compiled(mlp)
    for rows in (SIDE, SIDE + 5, 3, SIDE + 9):
        x = integers(rows, SIDE, seed=rows)
        outputs = [function(params, x) for function in (step, mlp)]
        assert torch.equal(*outputs)
        grads = [torch.autograd.grad(output.sum(), list(params.values())) for output in outputs]
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


def test_compiled_with_sizes_that_only_the_data_knows() -> None:
    def picked(x: Tensor, chosen: Tensor, w: Tensor) -> Tensor:
        return (x[chosen] @ w).sum(0)

    x, w = (integers(SIDE, SIDE, seed=seed).requires_grad_() for seed in range(2))
    chosen = torch.arange(SIDE) % 3 > 0
    with compiling_sizes_of_data():
        output = compiled(picked)(x, chosen, w)
    for one, other in zip(
        torch.autograd.grad(output.sum(), (x, w)),
        torch.autograd.grad(picked(x, chosen, w).sum(), (x, w)),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_options_of_the_compiler_stay_as_they_are() -> None:
    compiled(mlp)(parameters(), integers(SIDE, SIDE))
    assert pass_of_the_compiler() is None
