"""Kernels, plain arithmetic and transforms agree, also on gradients in half precision.

T8 compares the fused kernel of AdamW with torch's, in leaves of any size. T10 has derivatives.
"""

from typing import Any

import pytest
import torch

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.memory import Touched
from tests.optimizers import RECIPES, updated

SCHEDULE = ps.optim.linear_schedule(3e-2, 1e-3, 3)
RATES = {"number": 1e-2, "tensor": torch.tensor(1e-2), "schedule": SCHEDULE}
SHAPES = [(), (7,), (64,), (33, 5), (128, 3)]
WHOLE_VECTORS = [(16,), (64,), (33, 16), (128, 3)]
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
    shapes = WHOLE_VECTORS if name in FUSED and dtype == torch.float32 else SHAPES
    optimizer = RECIPES[name](RATES[rate])
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    state = in_place = (params, optimizer.init(params))
    batched = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    for number in range(4):
        # 300² is no number of float16: gradients are widened before they are squared.
        half = (torch.float16, torch.bfloat16)[number % 2]
        grads = [
            (300 * torch.randn(shape, generator=generator)).to(half) for shape in shapes
        ]
        wide = tree.map(lambda grad: grad.to(torch.float32), grads)
        both = [torch.stack([grad, -grad]) for grad in wide]
        batched = torch.vmap(optimizer.update)(both, batched[1], batched[0])
        one, other = (grads, wide) if number < 2 else (wide, grads)
        state = optimizer.update(one, state[1], state[0])
        own = tree.map(torch.clone, (other, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *own)
    assert_same(tree.map(lambda leaf: leaf[0], batched), state)
    assert_same(in_place, state)


def in_place(params: Any, grads: Any) -> dict[str, int]:
    """What AdamW makes of them, which is the formula's, and the operators that it calls."""
    given = grads, ADAMW.init(params), params
    copies = tree.map(torch.clone, given)
    with Touched() as calls:
        result = updated(ADAMW, "update_", *copies)
    assert_same(result, ADAMW.update(*given))
    return calls.counts


@pytest.mark.parametrize("odd", ["float64", "bfloat16", "rows apart"])
def test_a_leaf_that_is_not_for_the_kernel(odd: str) -> None:
    """It goes by the formula, and the others together by the kernel, to the bits of each alone."""
    leaf = torch.linspace(-1, 1, 64).view(4, 16)
    other = {
        "float64": leaf.double(),
        "bfloat16": leaf.bfloat16(),
        "rows apart": leaf.T,
    }[odd]
    params = {"a": torch.ones(3, 16), "b": other, "c": torch.ones(16)}
    grads = tree.map(
        lambda p: torch.sin(p.to(torch.promote_types(p.dtype, torch.float32))), params
    )
    assert in_place(params, grads)["_fused_adamw_"] == 1


def test_one_kernel_for_all_leaves() -> None:
    """AdamW in float32 is one call of torch's fused kernel, and few other operations."""
    params = [torch.ones(16) for _ in range(50)]
    calls = in_place(params, params)
    assert calls["_fused_adamw_"] == 1
    assert sum(calls.values()) < 11
