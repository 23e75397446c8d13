"""Kernels, plain arithmetic and transforms agree, also on gradients in half precision.

T8 compares the fused kernel of AdamW with torch's, in leaves of any size. T10 has derivatives.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from support.strategies import assert_same
from tests.memory import CountTouching
from tests.optimizers import RECIPES, call_update

RATES = {
    "number": 1e-2,
    "tensor": torch.tensor(1e-2),
    "schedule": ps.optim.linear_schedule(3e-2, 1e-3, 3),
}
SHAPES = [(), (7,), (64,), (33, 5), (128, 3)]
SHAPES_OF_WHOLE_VECTORS = [(16,), (64,), (33, 16), (128, 3)]
"""Where torch's fused kernel of AdamW has the bits of its formula."""
FUSED = {"adamw", "masked adamw", "partition"}
ADAMW = ps.optim.adamw(0.1)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_and_plain_arithmetic_agree(
    name: str, dtype: torch.dtype, rate: str
) -> None:
    """In place, out of place and under a transform: the same bits, of gradients in any dtype."""
    optimizer = RECIPES[name](RATES[rate])
    shapes = SHAPES
    if name in FUSED and dtype == torch.float32:
        shapes = SHAPES_OF_WHOLE_VECTORS
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float, dtype: torch.dtype) -> list[Tensor]:
        numbers = [torch.randn(shape, generator=generator) for shape in shapes]
        return [(scale * x).to(dtype) for x in numbers]

    params = draw(1, dtype)
    state = (params, optimizer.init(params))
    state_in_place = state
    batched = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    for number in range(4):
        # 300² is no number of float16: gradients are widened before they are squared.
        half = torch.float16 if number % 2 == 0 else torch.bfloat16
        narrow = draw(300, half)
        wide = tree.map(lambda grad: grad.to(torch.float32), narrow)
        both_signs = [torch.stack([grad, -grad]) for grad in wide]
        if number < 2:
            grads = narrow
            grads_in_place = wide
        else:
            grads = wide
            grads_in_place = narrow

        batched = torch.vmap(optimizer.update)(both_signs, batched[1], batched[0])
        state = optimizer.update(grads, state[1], state[0])
        copies = tree.map(
            torch.clone, (grads_in_place, state_in_place[1], state_in_place[0])
        )
        state_in_place = call_update(optimizer, "update_", *copies)

    first_of_batch = tree.map(lambda leaf: leaf[0], batched)
    assert_same(first_of_batch, state)
    assert_same(state_in_place, state)


def count_operators(params: Any, grads: Any) -> dict[str, int]:
    """Counts what AdamW calls in place; checks that it gives the formula's result."""
    arguments = (grads, ADAMW.init(params), params)
    copies = tree.map(torch.clone, arguments)
    with CountTouching() as calls:
        result = call_update(ADAMW, "update_", *copies)
    assert_same(result, ADAMW.update(*arguments))
    return calls.counts


LEAF = torch.linspace(-1, 1, 64).view(4, 16)


@pytest.mark.parametrize(
    "odd",
    [LEAF.double(), LEAF.bfloat16(), LEAF.T],
    ids=["float64", "bfloat16", "rows apart"],
)
def test_a_leaf_that_is_not_for_the_kernel(odd: Tensor) -> None:
    """It goes by the formula, and the others together by the kernel, to the bits of each alone."""
    params = {"a": torch.ones(3, 16), "b": odd, "c": torch.ones(16)}

    def grad_of(param: Tensor) -> Tensor:
        dtype = torch.promote_types(param.dtype, torch.float32)
        return torch.sin(param.to(dtype))

    calls = count_operators(params, tree.map(grad_of, params))
    assert calls["_fused_adamw_"] == 1


def test_one_kernel_for_all_leaves() -> None:
    """AdamW in float32 is one call of torch's fused kernel, and few other operations."""
    params = [torch.ones(16) for _ in range(50)]
    calls = count_operators(params, params)
    assert calls["_fused_adamw_"] == 1
    assert sum(calls.values()) < 11
