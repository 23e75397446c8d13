"""Kernels, plain arithmetic and transforms agree, and an update that is not applied is the identity.

T8 compares the fused kernel of AdamW with torch's, in leaves of any size.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from purestep.step import transition
from tests.optimizers import GRADS, PARAMS, RECIPES, updated
from tests.torch_private import TorchDispatchMode

RATES = {
    "number": 1e-2,
    "tensor": torch.tensor(1e-2),
    "schedule": ps.optim.linear_schedule(3e-2, 1e-3, 3),
}
SHAPES = [(), (7,), (64,), (33, 5), (128, 3)]
WHOLE_VECTORS = [(16,), (64,), (33, 16), (128, 3)]
"""Where torch's fused kernel of AdamW has the bits of its formula."""
FUSED = {"adamw", "masked adamw", "partition"}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_and_plain_arithmetic_agree(name: str, dtype: torch.dtype, rate: str) -> None:
    """In place, out of place and under a transform: the same bits, of gradients in any dtype."""
    shapes = WHOLE_VECTORS if name in FUSED and dtype == torch.float32 else SHAPES
    optimizer = RECIPES[name](RATES[rate])
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    state = in_place = (params, optimizer.init(params))
    batched = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    for number in range(4):
        of_grads = (torch.float32, torch.float16)[number % 2]
        grads = [torch.randn(shape, generator=generator).to(of_grads) for shape in shapes]
        both = [torch.stack([grad, -grad]) for grad in grads]
        batched = torch.vmap(optimizer.update)(both, batched[1], batched[0])
        # In place they are the step's sums, which are wide.
        wide = [grad.to(torch.float32, copy=True) for grad in grads]
        given = tree.map(torch.clone, (grads, *state))
        state = optimizer.update(grads, state[1], state[0])
        own_params, own_state = tree.map(torch.clone, in_place)
        in_place = updated(optimizer, "update_", wide, own_state, own_params)
        assert_same(grads, given[0])
    assert_same(tree.map(lambda leaf: leaf[0], batched), state)
    assert_same(in_place, state)


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("odd", ["float64", "bfloat16", "rows apart"])
def test_a_leaf_that_is_not_for_the_kernel(odd: str) -> None:
    """It goes by the formula, and the others by the kernel, to the bits of each alone."""
    leaf = torch.linspace(-1, 1, 64).view(4, 16)
    other = {"float64": leaf.double(), "bfloat16": leaf.bfloat16(), "rows apart": leaf.T}[odd]
    params = {"a": torch.ones(3, 16), "b": other, "c": torch.ones(16)}
    grads = tree.map(lambda p: torch.sin(p.to(torch.promote_types(p.dtype, torch.float32))), params)
    optimizer = ps.optim.adamw(0.1)
    given = (grads, optimizer.init(params), params)
    with Calls() as calls:
        result = updated(optimizer, "update_", *tree.map(torch.clone, given))
    assert calls.counts["_fused_adamw_"] == 2
    assert_same(result, optimizer.update(*given))


def test_one_kernel_for_all_leaves() -> None:
    """AdamW in float32 is one call of torch's fused kernel, and few other operations."""
    params = [torch.ones(16) for _ in range(50)]
    optimizer = ps.optim.adamw(0.1)
    given = tree.map(torch.clone, (params, optimizer.init(params), params))
    with Calls() as calls:
        updated(optimizer, "update_", *given)
    assert calls.counts.pop("_fused_adamw_") == 1
    views = {"view", "slice", "alias", "detach"}
    assert sum(count for name, count in calls.counts.items() if name not in views) < 10


def test_sums_are_divided_before_the_optimizer() -> None:
    """With ``normalize="grads"`` too."""
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


def doubling(grads: Any, state: Any, params: Any) -> Any:
    """Updates and a state that both are sums of the two."""
    return tree.map(torch.add, grads, state), tree.map(torch.add, state, grads)


HELD_BACK = {
    **RECIPES,
    "a transform without update_": lambda rate: ps.optim.chain(
        ps.optim.Transform(tree.zeros_like, doubling), ps.optim.sgd(rate, 0.9, weight_decay=0.1)
    ),
    "an optimizer without update_": lambda rate: ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0),
        ps.optim.Optimizer(
            lambda params: (),
            lambda grads, state, params: (
                tree.map(lambda p, g: p - rate * g, params, grads),
                state,
            ),
        ),
    ),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", HELD_BACK)
def test_derivatives_of_an_update_that_is_not_applied(name: str, bad: float, donate: bool) -> None:
    """It is the identity, and so are its derivatives: by params, rate and gradients."""
    ones = tree.map(torch.ones_like, PARAMS)

    def held_back(rate: Any, grads: Any, params: Any) -> Any:
        optimizer = HELD_BACK[name](rate)
        state, no = optimizer.init(PARAMS), torch.tensor(False)
        return transition(optimizer, grads, state, params, no, donate=donate)[0]

    def total(*point: Any) -> torch.Tensor:
        return torch.stack([leaf.sum() for leaf in tree.leaves_of(held_back(*point))]).sum()

    point = (torch.tensor(0.1), tree.map(lambda leaf: leaf * bad, GRADS), PARAMS)
    slopes = torch.func.grad(total, argnums=(0, 1, 2))(*point)
    own = tree.map(lambda leaf: leaf.clone().requires_grad_(), point)
    recorded = torch.autograd.grad(total(*own), tree.leaves_of(own), materialize_grads=True)
    tangents = torch.func.jvp(held_back, point, (torch.tensor(1.0), ones, ones))[1]
    expected = (torch.tensor(0.0), tree.zeros_like(GRADS), ones)
    assert_same(slopes, expected)
    assert_same([*recorded], tree.leaves_of(expected))
    assert_same(tangents, ones)
