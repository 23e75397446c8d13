"""T8, optimizers. Each equals its ``torch.optim`` namesake over many steps.

The recipes within the rounding of each step; ``from_torch`` to the bit, and so does ``adamw`` with
torch's fused kernel: in place for every leaf, by its formula where leaves are whole vectors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.testing.bounds import rounding_bound
from support.random_updates import (
    iterate_states,
    random_grads,
    random_params,
)
from support.strategies import Chooser, assert_same, builds, mask_matrices
from support.torch_algorithms import (
    ALGORITHMS,
    SHAPES,
    WHOLE_VECTORS,
    Make,
    Namesake,
    inverse,
    shapes_of,
)

STEPS = 30
SMALL = {"matrix": (3, 2), "vector": (4,)}
DTYPES = [torch.float64, torch.float32]


class Pair(NamedTuple):
    """A recipe, and a function that makes its namesake; ``scheduled``: the rate is a schedule."""

    optimizer: ps.optim.Optimizer
    make: Make
    scheduled: bool


def make_pair(choose: Chooser) -> Pair:
    """Makes ``sgd`` or ``adamw``, and its namesake, for groups of one leaf each."""
    lr = choose.choice([0.125, 2.0**-10])
    decay = choose.choice([0.0, 0.1])
    scheduled = choose.maybe()
    number = choose.choice([lr, torch.tensor(lr, dtype=torch.float64)])

    def schedule(step: Any) -> Any:
        return lr * inverse(step)

    rate: Any = schedule if scheduled else number
    if choose.maybe():
        momentum = choose.choice([0.0, 0.9])
        nesterov = momentum > 0 and choose.maybe()
        optimizer = ps.optim.sgd(
            rate,
            momentum,
            nesterov=nesterov,
            weight_decay=decay,
            mask=mask_matrices,
        )
        algorithm: Any = torch.optim.SGD
        options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov}
    else:
        betas = choose.choice([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)])
        eps = choose.choice([1e-8, 1e-3])
        optimizer = ps.optim.adamw(
            rate,
            *betas,
            eps=eps,
            weight_decay=decay,
            mask=mask_matrices,
        )
        algorithm = torch.optim.AdamW
        options = {"betas": betas, "eps": eps}

    def make(leaves: list[Tensor]) -> torch.optim.Optimizer:
        groups = group_by_decay(leaves, decay, lambda leaf: leaf.ndim > 1)
        namesake: torch.optim.Optimizer = algorithm(groups, lr=lr, **options)
        return namesake

    return Pair(optimizer, make, scheduled)


def group_by_decay(
    leaves: list[Tensor], decay: float, decays: Callable[[Tensor], bool]
) -> list[dict[str, Any]]:
    """Makes a parameter group for each leaf, with weight decay where ``decays`` says so."""
    groups: list[dict[str, Any]] = []
    for leaf in leaves:
        weight_decay = decay if decays(leaf) else 0.0
        groups.append({"params": [leaf], "weight_decay": weight_decay})
    return groups


@given(builds(make_pair), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_equals_namesake(pair: Pair, dtype: torch.dtype, seed: int) -> None:
    """The same gradients for thirty steps: the same parameters, to the rounding of each step."""
    generator = torch.Generator().manual_seed(seed)
    params = random_params(SMALL, dtype, generator)
    namesake = Namesake(params, pair.make, scheduled=pair.scheduled)
    opt_state = pair.optimizer.init(params)
    distances = tree.map(torch.abs, params)

    for _ in range(STEPS):
        grads = random_params(SMALL, dtype, generator)
        old_params = params
        params, opt_state = pair.optimizer.update(grads, opt_state, params)
        distances = tree.map(
            lambda distance, new, old: distance + (new - old).abs(),
            distances,
            params,
            old_params,
        )
        namesake.step(grads)

    # Both round a dozen times in each step, relative to how far the step goes; the decaying means
    # keep what they rounded before, so a step carries the roundings of all steps before it.
    roundings = rounding_bound(2 * 12 * STEPS, dtype)
    for leaf, expected, distance in zip(
        tree.leaves(params),
        tree.leaves(namesake.params),
        tree.leaves(distances),
        strict=True,
    ):
        assert ((leaf - expected).abs() <= roundings * distance.max()).all()


RATES = ["number", "default", "tensor", "schedule"]
CASES = [
    pytest.param(
        name, kernel, number, id=f"{name}-{next(iter(kernel), 'loop')}-{number}"
    )
    for name, algorithm in ALGORITHMS.items()
    for kernel in algorithm.kernels
    for number in range(len(algorithm.settings))
]


def assert_follows(
    optimizer: ps.optim.Optimizer,
    namesake: Namesake,
    generator: torch.Generator,
    *,
    state_of: Callable[[Namesake], Any] = Namesake.state,
    formula: bool = True,
) -> None:
    """Asserts that params and state are torch's to the bit after each step, in full from the start.

    In place, and where the formula has the kernel's bits, out of place.
    """
    params = tree.map(lambda leaf: leaf.detach().clone(), namesake.params)
    grads = [random_grads(params, generator) for _ in range(8)]
    states = iterate_states(optimizer, params, grads, formula=formula)
    for grad, state in zip(grads, states, strict=True):
        namesake.step(grad)
        expected_params = tree.map(Tensor.detach, namesake.params)
        assert_same(state, (expected_params, state_of(namesake)))


def test_no_algorithm_is_forgotten() -> None:
    """All of ``torch.optim``, less one that wants a closure and one for sparse gradients."""
    names = {
        name for name, value in vars(torch.optim).items() if isinstance(value, type)
    }
    assert names - {"Optimizer", "LBFGS", "SparseAdam"} == ALGORITHMS.keys()


class RatePair(NamedTuple):
    """Keyword arguments of ``from_torch``, and of the namesake, for one learning rate."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    scheduled: bool = False


def make_rates(rate: Tensor) -> dict[str, RatePair]:
    """Returns each kind of learning rate."""
    return {
        "number": RatePair({"lr": 0.05}, {"lr": 0.05}),
        "default": RatePair({}, {}),
        "tensor": RatePair({"lr": rate}, {"lr": float(rate)}),
        "schedule": RatePair(
            {"lr": lambda step: 0.25 * inverse(step)},
            {"lr": 0.25},
            scheduled=True,
        ),
    }


@pytest.mark.parametrize(("name", "kernel", "number"), CASES)
@settings(max_examples=max(1, settings().max_examples // 30))
@given(seed=st.integers(0, 2**20))
def test_from_torch_is_torch(
    name: str, kernel: dict[str, bool], number: int, seed: int
) -> None:
    """Every algorithm and kernel, for each kind of rate: to the bit, and so is its state."""
    algorithm = ALGORITHMS[name]
    options = {**algorithm.settings[number], **kernel}
    for offset, dtype in enumerate(DTYPES):
        tensor = torch.tensor(0.05, dtype=dtype)
        rate = make_rates(tensor)[RATES[(number + offset) % 4]]
        generator = torch.Generator().manual_seed(seed)
        params = random_params(shapes_of(name), dtype, generator)

        def make(leaves: list[Tensor], rate: RatePair = rate) -> torch.optim.Optimizer:
            namesake: torch.optim.Optimizer = algorithm.cls(
                leaves, **rate.theirs, **options
            )
            return namesake

        optimizer = ps.optim.from_torch(algorithm.cls, **rate.ours, **options)
        namesake = Namesake(params, make, scheduled=rate.scheduled)
        assert_follows(optimizer, namesake, generator)
        assert tensor == torch.tensor(0.05, dtype=dtype), "the rate was written to"


FUSED = {
    "lr": st.sampled_from([0.1, 1e-3]),
    "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)]),
    "eps": st.sampled_from([1e-8, 1e-3]),
    "weight_decay": st.sampled_from([0.0, 0.01, 0.1]),
}


def adamw_state(namesake: Namesake, leaf_numbers: set[int]) -> ps.optim.AdamWState:
    """Returns torch's state as that of ``adamw``, of some of the leaves."""
    states = [namesake.optimizer.state[leaf] for leaf in namesake.leaves]
    _, structure = tree.flatten(namesake.params)
    means = []
    for key in ("exp_avg", "exp_avg_sq"):
        values = [state[key] for state in states]
        means.append(tree.subset(structure, values, leaf_numbers))
    return ps.optim.AdamWState(torch.tensor(namesake.steps), *means)


@given(
    st.fixed_dictionaries(FUSED),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_adamw_is_the_fused_kernel(
    options: dict[str, Any], masked: bool, scheduled: bool, vectors: bool, seed: int
) -> None:
    """Checks that ``adamw`` in float32 has the bits of ``AdamW(fused=True)``.

    It has them in place for every leaf, and out of place for leaves of whole vectors. In others,
    torch's kernel rounds the rest as its scalar code does.
    """
    lr = options["lr"]
    decay = options["weight_decay"]

    def decays(leaf: Tensor) -> bool:
        return leaf.ndim > 1 or not masked

    def make(leaves: list[Tensor]) -> torch.optim.Optimizer:
        groups = group_by_decay(leaves, decay, decays)
        return torch.optim.AdamW(groups, **options, fused=True)

    def state_of(namesake: Namesake) -> Any:
        leaves = namesake.leaves
        everything = set(range(len(leaves)))
        decayed = {i for i in everything if decays(leaves[i])}
        if not masked:
            return adamw_state(namesake, decayed)
        return {
            "decay": adamw_state(namesake, decayed),
            "rest": adamw_state(namesake, everything - decayed),
        }

    b1, b2 = options["betas"]
    optimizer = ps.optim.adamw(
        (lambda step: lr * inverse(step)) if scheduled else lr,
        b1,
        b2,
        options["eps"],
        weight_decay=decay,
        mask=mask_matrices if masked else None,
    )
    generator = torch.Generator().manual_seed(seed)
    shapes = WHOLE_VECTORS if vectors else SHAPES
    params = random_params(shapes, torch.float32, generator)
    namesake = Namesake(params, make, scheduled=scheduled)
    assert_follows(optimizer, namesake, generator, state_of=state_of, formula=vectors)
