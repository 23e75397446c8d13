"""``grad_scale`` divides the gradients by the number that it is, whatever dtype either has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import purestep as ps
from purestep import tree
from tests.optimizers import GRADS, PARAMS, RECIPES, SHAPES, TRANSFORMS, WAYS


@pytest.mark.parametrize("name", TRANSFORMS)
@given(scale=st.sampled_from([0.25, 1.0, 8.0]))
def test_grad_scale_divides(name: str, scale: float) -> None:
    """``grad_scale`` is a division of the gradients, exactly so for a power of two."""
    transform = TRANSFORMS[name]
    state = transform.init(PARAMS)
    scaled = tree.map(lambda g: g * scale, GRADS)
    folded = transform.update(scaled, state, PARAMS, grad_scale=torch.tensor(scale))
    plain = transform.update(GRADS, state, PARAMS)
    assert all(map(torch.equal, tree.leaves_of(folded), tree.leaves_of(plain)))


def test_grad_scale_for_whom_it_is_unknown() -> None:
    """A transform of one's own with three arguments gets gradients that are divided already."""
    seen = []

    def update(grads: Any, state: Any, params: Any) -> Any:
        seen.append(grads)
        return grads, state

    optimizer = ps.optim.chain(ps.optim.Transform(lambda params: (), update), ps.optim.sgd(0.1))
    step = ps.make_update_step(
        lambda p, m: p["w"].sum() * m, optimizer, weight_fn=torch.ones_like, normalize="grads"
    )
    step(PARAMS, optimizer.init(PARAMS), [torch.ones(4)])
    assert torch.equal(seen[0]["w"], torch.ones(2, 2))


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECIPES)
def test_a_count_of_any_dtype_is_the_number_that_it_is(
    name: str, dtype: torch.dtype, method: str
) -> None:
    """``grad_scale`` in int64, uint8 or bool divides to the bits of the same number in float64."""
    optimizer = RECIPES[name](0.1)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    grads = [100 * torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    kinds = [(37, torch.uint8), (100003, torch.int64), (100003, torch.int32), (1, torch.bool)]
    for number, kind in kinds:
        scales = torch.tensor(number, dtype=torch.float64), torch.tensor(number).to(kind)
        results = []
        for scale in scales:
            given = tree.map(torch.clone, (grads, optimizer.init(params), params))
            results.append(getattr(optimizer, method)(*given, grad_scale=scale))
        assert all(map(torch.equal, *map(tree.leaves_of, results)))


@pytest.mark.parametrize("scale", [None, torch.tensor(100003)])
@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_a_half_precision_gradient_is_what_it_is_in_float32(
    name: str, dtype: torch.dtype, half: torch.dtype, method: str, scale: torch.Tensor | None
) -> None:
    """To the bit: 300² and 1e-4 / 100003 are no numbers of float16, and 257 none of bfloat16."""
    optimizer = RECIPES[name](0.1)
    params = [torch.ones(2, 2, dtype=dtype), torch.ones(3, dtype=dtype)]
    grads = [torch.tensor([[300.0, -3e4], [1e-4, 0.0]]), torch.tensor([1e-4, 257.0, -6e-8])]
    results = []
    for kind in (half, torch.float32):
        state = (params, optimizer.init(params))
        for _ in range(2):
            own = [grad.to(half).to(kind) for grad in grads]
            ours, opt_state = tree.map(torch.clone, state)
            state = getattr(optimizer, method)(own, opt_state, ours, grad_scale=scale)
        results.append(state)
    assert all(map(torch.equal, *map(tree.leaves_of, results)))


def test_a_part_without_grad_scale_gets_what_its_own_dtype_can_hold() -> None:
    """A count of 100003 is infinite in float16, and 257 is 256 in bfloat16: the quotients are neither."""
    own = ps.optim.Transform(lambda params: (), lambda grads, state, params: (grads, state))
    chained = ps.optim.chain(own)
    for kind, number, count in ((torch.float16, 3e4, 100003), (torch.bfloat16, 1.0, 257)):
        grad = torch.full((1,), number, dtype=kind)
        divided = torch.vmap(lambda g, n: chained.update(g, ((),), g, grad_scale=n)[0])(
            grad[None], torch.tensor([count])
        )
        assert torch.equal(divided[0], (grad.double() / count).to(kind))
