"""Kernels, plain arithmetic and transforms agree, and an update that is held back is the identity in each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import purestep as ps
from purestep import tree
from purestep.step import transition
from purestep.testing.bounds import gamma
from tests.optimizers import GRADS, PARAMS, RECIPES, SHAPES, updated
from tests.torch_private import TorchDispatchMode

RATES = [1e-2, torch.tensor(1e-2), ps.optim.linear_schedule(3e-2, 1e-3, 3)]
VECTOR = 16
"""A multiple of the elements that one instruction takes."""
FUSED: dict[str, Any] = {
    "adamw": lambda rate: ps.optim.adamw(rate, weight_decay=0.0),
    "masked adamw": lambda rate: ps.optim.adamw(rate, 0.5, 0.9, weight_decay=0.0),
    "partition": lambda rate: ps.optim.adamw(rate, weight_decay=0.0),
}
"""Those with a fused kernel, as they are without weight decay."""


def rounding_of_adamw(optimizer: ps.optim.Optimizer, params: Any, history: Any) -> Any:
    """How far two float32 runs of AdamW can be apart in params, μ and ν, on these gradients; for each element.

    Let M and D be μ and the distance travelled if all gradients were positive, in float64. Each of T steps rounds μ
    four times, relative to M, and ν, which is positive, five times: γ(4T) M and γ(5T) ν. A step is rate · μ̂ / (√ν̂ + ε),
    with μ rounded 4T times, √ν half as often as ν, and a dozen roundings of its own: γ(9T + 12) of what is added to
    D. Params are rounded four times in each step, relative to |θ₀| + D at most; decay makes errors smaller. Both runs
    round.
    """
    steps, dtype = len(history), torch.float32
    state: Any = ([torch.zeros_like(leaf, dtype=torch.float64) for leaf in params],) * 2
    state = (state[0], optimizer.init(state[0]))
    for grads in history:
        state = optimizer.update([grad.abs() for grad in grads], state[1], state[0])
    travelled = [-leaf for leaf in state[0]]
    return (
        [
            gamma(2 * (9 * steps + 12), dtype) * far
            + gamma(2 * 4 * steps, dtype) * (leaf.abs().double() + far)
            for leaf, far in zip(params, travelled, strict=True)
        ],
        [gamma(2 * 4 * steps, dtype) * leaf for leaf in state[1].mu],
        [gamma(2 * 5 * steps, dtype) * leaf for leaf in state[1].nu],
    )


def of_adamw(state: Any) -> dict[str, ps.optim.AdamWState]:
    """The states of AdamW in it."""
    states = state if isinstance(state, dict) else {"all": state}
    return {key: one for key, one in states.items() if isinstance(one, ps.optim.AdamWState)}


def assert_tail_within(a: torch.Tensor, b: torch.Tensor, bound: torch.Tensor) -> None:
    """Equal to the bit in whole vectors, and within the bound in what is left."""
    whole = a.numel() // VECTOR * VECTOR
    assert torch.equal(a.flatten()[:whole], b.flatten()[:whole])
    assert ((a.double() - b.double()).abs() <= bound).all()


@pytest.mark.parametrize("of_grads", [torch.float32, torch.float16])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_and_plain_arithmetic_agree(
    name: str, dtype: torch.dtype, rate: Any, of_grads: torch.dtype
) -> None:
    """In place, out of place and under a transform: the same bits, at any length and whatever the rate is.

    Torch's fused kernel of AdamW rounds otherwise in what is left of whole vectors: there, within the bound.
    """
    optimizer = RECIPES[name](rate)
    assert optimizer.update_ is not None
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    state = in_place = (params, optimizer.init(params))
    batched = tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    history = []
    for _ in range(4):
        grads = [torch.randn(shape, generator=generator).to(of_grads) for shape in SHAPES]
        history.append([grad.double() for grad in grads])
        both = [torch.stack([grad, -grad]) for grad in grads]
        batched = torch.vmap(optimizer.update)(both, batched[1], batched[0])
        given = tree.map(torch.clone, grads)
        state = optimizer.update(grads, state[1], state[0])
        assert all(map(torch.equal, grads, given))
        own_params, own_state = tree.map(torch.clone, in_place)
        # They are the step's sums, which are wide.
        wide = [grad.to(torch.float32) for grad in given]
        in_place = optimizer.update_(wide, own_state, own_params, None)
    one = tree.map(lambda leaf: leaf[0], batched)
    assert all(map(torch.equal, tree.leaves_of(one), tree.leaves_of(state)))
    if name not in FUSED or dtype != torch.float32:
        assert all(map(torch.equal, tree.leaves_of(in_place), tree.leaves_of(state)))
        return
    bounds = rounding_of_adamw(FUSED[name](rate), params, history)
    for place, bound in enumerate(bounds[0]):
        assert_tail_within(in_place[0][place], state[0][place], bound)
    for label, other in of_adamw(in_place[1]).items():
        mine = of_adamw(state[1])[label]
        assert other.step == mine.step
        for slot, bound in (("mu", bounds[1]), ("nu", bounds[2])):
            pairs = zip(getattr(other, slot), getattr(mine, slot), bound, strict=True)
            for theirs, ours, limit in pairs:
                if isinstance(ours, torch.Tensor):
                    assert_tail_within(theirs, ours, limit)


@pytest.mark.parametrize("odd", ["float64", "bfloat16", "rows apart"])
def test_a_leaf_that_is_not_for_the_kernel(odd: str) -> None:
    """It goes by the formula, and the others by the kernel, to the bits of each alone; applied or not."""
    leaf = torch.linspace(-1, 1, 64).view(4, 16)
    other = {"float64": leaf.double(), "bfloat16": leaf.bfloat16(), "rows apart": leaf.T}[odd]
    params = {"a": torch.ones(3, 16), "b": other, "c": torch.ones(16)}
    grads = tree.map(lambda p: torch.sin(p.to(torch.promote_types(p.dtype, torch.float32))), params)
    optimizer = ps.optim.adamw(0.1)
    assert optimizer.update_ is not None
    given = tree.map(torch.clone, (grads, optimizer.init(params), params))
    expected = optimizer.update(*given)
    with Calls() as calls:
        result = updated(optimizer, "update_", *tree.map(torch.clone, given))
    assert calls.counts["_fused_adamw_"] == 2
    assert all(map(torch.equal, tree.leaves_of(result), tree.leaves_of(expected)))


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_one_kernel_for_all_leaves() -> None:
    """AdamW in float32 is one call of torch's fused kernel for all leaves that decay alike, and of little else."""
    params = [torch.ones(16) for _ in range(50)]
    optimizer = ps.optim.adamw(0.1)
    opt_state = optimizer.init(params)
    assert optimizer.update_ is not None
    with Calls() as calls:
        optimizer.update_(params, opt_state, tree.map(torch.clone, params), None)
    assert calls.counts.pop("_fused_adamw_") == 1
    calls.counts.pop("clone")
    views = {"view", "slice", "alias", "detach"}
    assert sum(count for name, count in calls.counts.items() if name not in views) < 10


HELD_BACK = {
    **RECIPES,
    "own parts": lambda rate: ps.optim.chain(
        ps.optim.Transform(
            lambda params: tree.zeros_like(params),
            lambda grads, state, params: (
                tree.map(torch.add, grads, state),
                tree.map(torch.add, state, grads),
            ),
        ),
        ps.optim.sgd(rate, 0.9, weight_decay=0.1),
    ),
    "own optimizer": lambda rate: ps.optim.chain(
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
def test_derivatives_of_an_update_that_is_held_back(name: str, bad: float, donate: bool) -> None:
    """A transition that is not applied is the identity, and so are its derivatives: by params, rate and gradients."""
    bads = tree.map(lambda leaf: leaf * bad, GRADS)
    ones = tree.map(torch.ones_like, PARAMS)

    def held_back(rate: Any, grads: Any, params: Any) -> Any:
        optimizer = HELD_BACK[name](rate)
        state, no = optimizer.init(PARAMS), torch.tensor(False)
        return transition(optimizer, grads, state, params, no, donate=donate)[0]

    def total(*point: Any) -> torch.Tensor:
        return torch.stack([leaf.sum() for leaf in tree.leaves_of(held_back(*point))]).sum()

    point = (torch.tensor(0.1), bads, PARAMS)
    slopes = torch.func.grad(total, argnums=(0, 1, 2))(*point)
    own = tree.map(lambda leaf: leaf.clone().requires_grad_(), point)
    recorded = torch.autograd.grad(total(*own), tree.leaves_of(own), materialize_grads=True)
    tangents = torch.func.jvp(held_back, point, (torch.tensor(1.0), ones, ones))[1]
    expected = tree.leaves_of((torch.tensor(0.0), tree.map(torch.zeros_like, GRADS), ones))
    assert all(map(torch.equal, tree.leaves_of(slopes), expected))
    assert all(map(torch.equal, recorded, expected))
    assert all(map(torch.equal, tree.leaves_of(tangents), tree.leaves_of(ones)))
