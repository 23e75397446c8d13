"""T8, optimizers. Each equals its ``torch.optim`` namesake over many steps.

The recipes within the rounding of each step; ``from_torch`` to the bit, and so does ``adamw`` with
torch's fused kernel: in place for every leaf, by its formula where leaves are whole vectors.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import purestep as ps
from proofs.ranks import addresses
from proofs.strategies import Chooser, assert_same, builds, mask_matrices
from proofs.test_t06_purity import storages_in
from purestep import tree
from purestep.testing.bounds import rounding_bound

STEPS = 30
SMALL = {"matrix": (3, 2), "vector": (4,)}
DTYPES = [torch.float64, torch.float32]
Make = Callable[[list[Any]], torch.optim.Optimizer]


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


MATRICES = {"wide": (4, 6), "nested": {"tall": (5, 3)}}
SHAPES = {**MATRICES, "rest": [(17,), (), (2, 3, 4)]}
WHOLE_VECTORS = [(16,), (4, 8), (2, 3, 16), (160,), (64, 80)]
"""Numbers of elements that are multiples of sixteen, the longest vector of a CPU."""


LOOP: dict[str, bool] = {}
KERNELS = [LOOP, {"foreach": True}, {"fused": True}]
HAS_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
ASCENT: dict[str, Any] = {"maximize": True}
DECAY: dict[str, Any] = {"weight_decay": 0.1}
UPHILL = {**ASCENT, **DECAY}
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
NESTEROV = {**MOMENTUM, "nesterov": True}
MEANS: dict[str, Any] = {"betas": (0.5, 0.9)}
DECOUPLED = {**DECAY, "decoupled_weight_decay": True}
START: dict[str, Any] = {"initial_accumulator_value": 0.3}
AMSGRAD: dict[str, Any] = {"amsgrad": True}
ADAM = [
    {},
    {**MEANS, **DECAY, "eps": 1e-3},
    {**AMSGRAD, **DECAY},
    {**AMSGRAD, **ASCENT},
]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        DECAY,
        MOMENTUM,
        {**MOMENTUM, **DECAY, "dampening": 0.5},
        NESTEROV,
        {**NESTEROV, **DECAY},
        {**MOMENTUM, **UPHILL},
    ],
    "Adam": [*ADAM, DECOUPLED],
    "AdamW": ADAM,
    "RMSprop": [
        {},
        {"centered": True, "alpha": 0.9},
        {**MOMENTUM, **DECAY},
        {**MOMENTUM, "centered": True, **UPHILL},
        ASCENT,
    ],
    "Adagrad": [{}, START, {"lr_decay": 0.1, **START, **UPHILL}, ASCENT],
    "Adafactor": [
        {},
        {"d": 1.5, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)},
        UPHILL,
        ASCENT,
    ],
    "Adadelta": [{}, {"rho": 0.5}, UPHILL, ASCENT],
    "NAdam": [{}, DECAY, DECOUPLED, {"momentum_decay": 0.1, **UPHILL}, ASCENT],
    "RAdam": [{}, DECAY, DECOUPLED, {**MEANS, **UPHILL}, ASCENT],
    "Adamax": [{}, MEANS, UPHILL, ASCENT],
    "Rprop": [{}, {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.2)}, ASCENT],
    "ASGD": [{}, {"t0": 3.0, "lambd": 0.1, "alpha": 0.5}, UPHILL, ASCENT],
    "Muon": [
        {},
        {"nesterov": False, "momentum": 0.5},
        {"weight_decay": 0.0, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
    ],
}


class Algorithm(NamedTuple):
    """A class of ``torch.optim``, settings of it, and its kernels on the host."""

    cls: Any
    settings: list[dict[str, Any]]
    kernels: list[dict[str, bool]]


def kernels_of(name: str) -> list[dict[str, bool]]:
    """Returns the kernels that an algorithm has on the host."""
    if name in HAS_FUSED:
        return KERNELS
    if name == "Muon":
        return [LOOP]
    return [LOOP, {"foreach": True}]


ALGORITHMS = {
    name: Algorithm(getattr(torch.optim, name), settings, kernels_of(name))
    for name, settings in SETTINGS.items()
}
RATES = ["number", "default", "tensor", "schedule"]
CASES = [
    pytest.param(
        name, kernel, number, id=f"{name}-{next(iter(kernel), 'loop')}-{number}"
    )
    for name, algorithm in ALGORITHMS.items()
    for kernel in algorithm.kernels
    for number in range(len(algorithm.settings))
]


def inverse(step: Any) -> Any:
    """Computes a schedule for both libraries: of a tensor, and of a number."""
    if isinstance(step, Tensor):
        step = step.to(torch.float64)
    return 1 / (1 + step)


class Namesake:
    """Runs the torch.optim object the usual way: leaves that require grad, ``.grad``, ``step()``."""

    def __init__(self, params: Any, make: Make, *, scheduled: bool = False) -> None:
        self.params = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        self.leaves = tree.leaves(self.params)
        self.optimizer = make(self.leaves)
        self.scheduler = LambdaLR(self.optimizer, inverse) if scheduled else None
        self.steps = 0

    def step(self, grads: Any) -> None:
        """Takes a step on these gradients."""
        for leaf, grad in zip(self.leaves, tree.leaves(grads), strict=True):
            leaf.grad = grad.clone()
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.steps += 1

    def state(self) -> Any:
        """Returns the state that ``from_torch`` has to have."""
        states = [dict(self.optimizer.state[leaf]) for leaf in self.leaves]
        _, structure = tree.flatten(self.params)
        leaves = tree.unflatten(structure, states)
        return ps.optim.TorchState(torch.tensor(self.steps), leaves)


def random_params(shapes: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Draws normal numbers, in a tree like that of the shapes."""
    if isinstance(shapes, dict):
        params = {}
        for key, below in shapes.items():
            params[key] = random_params(below, dtype, generator)
        return params
    if isinstance(shapes, list):
        return [random_params(below, dtype, generator) for below in shapes]
    return torch.randn(shapes, generator=generator, dtype=dtype)


def random_grads(params: Any, generator: torch.Generator) -> Any:
    """Draws normal numbers, and now and then an exact zero."""

    def draw(leaf: Tensor) -> Tensor:
        present = torch.rand(leaf.shape, generator=generator) > 0.2
        normal = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        return normal * present

    return tree.map(draw, params)


def signature_of(value: Any) -> list[Any]:
    """Returns the structure, dtypes and shapes, which stay what ``init`` makes them."""
    leaves, structure = tree.flatten(value)
    return [structure, *((leaf.dtype, leaf.shape) for leaf in leaves)]


def iterate_states(
    optimizer: ps.optim.Optimizer,
    params: Any,
    grads: Iterable[Any],
    *,
    formula: bool = True,
) -> Iterator[Any]:
    """Yields ``(params, opt_state)`` after each update, which is the same to the bit in place.

    ``update`` leaves its arguments alone. ``update_`` writes to the same memory, and is the identity
    where it does not apply. Structure, dtypes and shapes are those of ``init``. Without
    ``formula``, a kernel rounds otherwise than ``update``, which is not called.
    """
    state = (params, optimizer.init(params))
    expected_kinds = signature_of(state)
    for grad in grads:
        if formula:
            new_state = check_update(optimizer, grad, state)
        else:
            new_state = update_in_place(optimizer, grad, state, None)
        assert signature_of(new_state) == expected_kinds
        for applied in (None, torch.tensor(True), torch.tensor(False)):
            expected = state if applied is not None and not applied else new_state
            actual = update_in_place(optimizer, grad, state, applied)
            assert_same(actual, expected, f"state where {applied=}")
        state = new_state
        yield state


def check_update(optimizer: ps.optim.Optimizer, grad: Any, state: Any) -> Any:
    """Updates out of place, and checks that inputs stay as they are and share no memory with outputs."""
    params, opt_state = state
    inputs = (grad, opt_state, params)
    before = tree.map(torch.clone, inputs)
    new_state = optimizer.update(*inputs)
    assert_same(inputs, before, "(grads, opt_state, params)")
    shared = storages_in(new_state) & storages_in(inputs)
    assert not shared, "an output lives in an input's storage"
    return new_state


def update_in_place(
    optimizer: ps.optim.Optimizer, grad: Any, state: Any, applied: Tensor | None
) -> Any:
    """Updates copies in place, and checks that they stay where they are in memory."""
    assert optimizer.update_ is not None
    grad, params, opt_state = tree.map(torch.clone, (grad, *state))
    before = addresses((params, opt_state))
    new_state = optimizer.update_(grad, opt_state, params, applied)
    assert addresses(new_state) == before
    return new_state


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


def shapes_of(name: str) -> Any:
    """Returns shapes that an algorithm updates: Muon is for matrices."""
    return MATRICES if name == "Muon" else SHAPES


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
    """``adamw`` in float32 has the bits of ``AdamW(fused=True)``.

    (In a leaf that is no whole vectors, torch's kernel rounds the rest as its scalar code does.)
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
