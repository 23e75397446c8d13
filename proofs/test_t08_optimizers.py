"""T8, optimizers. Each equals its ``torch.optim`` namesake over many steps.

The recipes within the rounding of each step; ``from_torch`` to the bit, and so does ``adamw`` with
torch's fused kernel: in place for every leaf, by its formula where leaves are whole vectors.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import purestep as ps
from proofs.strategies import Chooser, assert_same, drawn, matrices
from proofs.test_t06_purity import storages
from purestep import tree
from purestep.testing.bounds import gamma

STEPS = 30
SMALL = {"matrix": (3, 2), "vector": (4,)}
DTYPES = [torch.float64, torch.float32]
Make = Callable[[list[Any]], torch.optim.Optimizer]


def recipe(choose: Chooser) -> tuple[ps.optim.Optimizer, Make, bool]:
    """``sgd`` or ``adamw``, and its namesake, for groups of one leaf each; and whether the rate is a schedule."""
    lr, decay = choose.choice([0.125, 2.0**-10]), choose.choice([0.0, 0.1])
    scheduled = choose.maybe()
    number = choose.choice([lr, torch.tensor(lr, dtype=torch.float64)])
    rate: Any = (lambda step: lr * inverse(step)) if scheduled else number
    if choose.maybe():
        momentum = choose.choice([0.0, 0.9])
        how: dict[str, Any] = {"nesterov": momentum > 0 and choose.maybe()}
        ours = ps.optim.sgd(rate, momentum, **how, weight_decay=decay, mask=matrices)
        algorithm: Any = torch.optim.SGD
        how["momentum"] = momentum
    else:
        betas = choose.choice([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)])
        how = {"eps": choose.choice([1e-8, 1e-3])}
        ours = ps.optim.adamw(rate, *betas, **how, weight_decay=decay, mask=matrices)
        algorithm = torch.optim.AdamW
        how["betas"] = betas

    def make(leaves: list[Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": [x], "weight_decay": decay * (x.ndim > 1)} for x in leaves]
        made: torch.optim.Optimizer = algorithm(groups, lr=lr, **how)
        return made

    return ours, make, scheduled


@given(drawn(recipe), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_equals_namesake(
    pair: tuple[ps.optim.Optimizer, Make, bool], dtype: torch.dtype, seed: int
) -> None:
    """The same gradients for thirty steps: the same parameters, to the rounding of each step."""
    optimizer, make, scheduled = pair
    generator = torch.Generator().manual_seed(seed)
    params = random_params(SMALL, dtype, generator)
    namesake = Namesake(params, make, scheduled=scheduled)
    opt_state = optimizer.init(params)
    travelled = tree.map(torch.abs, params)
    for _ in range(STEPS):
        grads = random_params(SMALL, dtype, generator)
        before = params
        params, opt_state = optimizer.update(grads, opt_state, params)
        moved = tree.map(lambda new, old: (new - old).abs(), params, before)
        travelled = tree.map(torch.add, travelled, moved)
        namesake.step(grads)
    # Both round a dozen times in each step, relative to how far the step goes; the decaying means
    # keep what they rounded before, so a step carries the roundings of all steps before it.
    roundings = gamma(2 * 12 * STEPS, dtype)
    for ours, theirs, distance in zip(
        *map(tree.leaves, (params, namesake.params, travelled)), strict=True
    ):
        assert ((ours - theirs).abs() <= roundings * distance.max()).all()


MATRICES = {"wide": (4, 6), "nested": {"tall": (5, 3)}}
SHAPES = {**MATRICES, "rest": [(17,), (), (2, 3, 4)]}
WHOLE_VECTORS = [(16,), (4, 8), (2, 3, 16), (160,), (64, 80)]
"""Elements by the sixteen."""


LOOP: dict[str, bool] = {}
KERNELS = [LOOP, {"foreach": True}, {"fused": True}]
FUSED_TOO = {"SGD", "Adam", "AdamW", "Adagrad"}
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
        {}, DECAY, MOMENTUM, {**MOMENTUM, **DECAY, "dampening": 0.5}, NESTEROV,
        {**NESTEROV, **DECAY}, {**MOMENTUM, **UPHILL},
    ],
    "Adam": [*ADAM, DECOUPLED],
    "AdamW": ADAM,
    "RMSprop": [
        {}, {"centered": True, "alpha": 0.9}, {**MOMENTUM, **DECAY},
        {**MOMENTUM, "centered": True, **UPHILL}, ASCENT,
    ],
    "Adagrad": [{}, START, {"lr_decay": 0.1, **START, **UPHILL}, ASCENT],
    "Adafactor": [{}, {"d": 1.5, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)}, UPHILL, ASCENT],
    "Adadelta": [{}, {"rho": 0.5}, UPHILL, ASCENT],
    "NAdam": [{}, DECAY, DECOUPLED, {"momentum_decay": 0.1, **UPHILL}, ASCENT],
    "RAdam": [{}, DECAY, DECOUPLED, {**MEANS, **UPHILL}, ASCENT],
    "Adamax": [{}, MEANS, UPHILL, ASCENT],
    "Rprop": [{}, {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.2)}, ASCENT],
    "ASGD": [{}, {"t0": 3.0, "lambd": 0.1, "alpha": 0.5}, UPHILL, ASCENT],
    "Muon": [
        {}, {"nesterov": False, "momentum": 0.5},
        {"weight_decay": 0.0, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
    ],
}  # fmt: skip


ALGORITHMS = {
    name: (getattr(torch.optim, name), settings, KERNELS[: 3 if name in FUSED_TOO else 1 if name == "Muon" else 2])
    for name, settings in SETTINGS.items()
}  # fmt: skip
"""A class of ``torch.optim``, settings of it, and the kernels that it has on the host."""
RATES = ["number", "default", "tensor", "schedule"]
CASES = [
    pytest.param(
        name, kernel, number, id=f"{name}-{next(iter(kernel), 'loop')}-{number}"
    )
    for name, (_, settings, kernels) in ALGORITHMS.items()
    for kernel in kernels
    for number in range(len(settings))
]


def inverse(step: Any) -> Any:
    """A schedule for both: of a tensor, and of a number."""
    return 1 / (1 + (step.to(torch.float64) if isinstance(step, Tensor) else step))


class Namesake:
    """The torch.optim object run the usual way: leaves that require grad, ``.grad``, ``step()``."""

    def __init__(self, params: Any, make: Make, *, scheduled: bool = False) -> None:
        self.params = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        self.leaves = tree.leaves(self.params)
        self.optimizer = make(self.leaves)
        self.scheduler = LambdaLR(self.optimizer, inverse) if scheduled else None
        self.steps = 0

    def step(self, grads: Any) -> None:
        """One step on these gradients."""
        for leaf, grad in zip(self.leaves, tree.leaves(grads), strict=True):
            leaf.grad = grad.clone()
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.steps += 1

    def state(self) -> Any:
        """The state, as ``from_torch`` is to have it."""
        kept = [dict(self.optimizer.state[leaf]) for leaf in self.leaves]
        leaves = tree.unflatten(tree.flatten(self.params)[1], kept)
        return ps.optim.TorchState(torch.tensor(self.steps), leaves)


def random_params(shapes: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Normal numbers, in a tree like that of the shapes."""
    if isinstance(shapes, dict):
        return {
            key: random_params(below, dtype, generator) for key, below in shapes.items()
        }
    if isinstance(shapes, list):
        return [random_params(below, dtype, generator) for below in shapes]
    return torch.randn(shapes, generator=generator, dtype=dtype)


def random_grads(params: Any, generator: torch.Generator) -> Any:
    """Normal numbers, and now and then an exact zero."""

    def grad(leaf: Tensor) -> Tensor:
        present = torch.rand(leaf.shape, generator=generator) > 0.2
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) * present

    return tree.map(grad, params)


def kinds(value: Any) -> list[Any]:
    """All that must stay as it is from ``init`` on."""
    leaves, structure = tree.flatten(value)
    return [structure, *((leaf.dtype, leaf.shape) for leaf in leaves)]


def buffers(value: Any) -> list[int]:
    """Where each leaf lives."""
    return [leaf.data_ptr() for leaf in tree.leaves(value)]


def states_of(
    optimizer: ps.optim.Optimizer,
    params: Any,
    grads: Iterable[Any],
    *,
    formula: bool = True,
) -> Iterator[Any]:
    """``(params, opt_state)`` after each update, which is the same to the bit in place.

    ``update`` leaves its arguments alone. ``update_`` keeps to the buffers, and is the identity
    where it does not apply. Structure, dtypes and shapes are those of ``init``. Without
    ``formula``, a kernel rounds otherwise than ``update``, which is not called.
    """
    state = (params, optimizer.init(params))
    full = kinds(state)
    assert optimizer.update_ is not None
    for one in grads:
        given = (one, state[1], state[0])
        before = tree.map(torch.clone, given)
        if formula:
            moved = optimizer.update(*given)
            assert_same(given, before, "(grads, opt_state, params)")
            assert not storages(moved) & storages(given), (
                "an output lives in an input's storage"
            )
        else:
            own, opt_state, ours = before
            moved = optimizer.update_(own, opt_state, ours, None)
        assert kinds(moved) == full
        for applied in (None, torch.tensor(True), torch.tensor(False)):
            own, ours, opt_state = tree.map(torch.clone, (one, *state))
            places = buffers((ours, opt_state))
            result = optimizer.update_(own, opt_state, ours, applied)
            left_out = applied is not None and not applied
            assert_same(result, state if left_out else moved, f"state where {applied=}")
            assert buffers(result) == places
        state = moved
        yield moved


def assert_follows(
    optimizer: ps.optim.Optimizer,
    namesake: Namesake,
    generator: torch.Generator,
    *,
    state_of: Callable[[Namesake], Any] = Namesake.state,
    formula: bool = True,
) -> None:
    """Params and state are torch's to the bit after each step, in full from the start.

    In place, and where the formula has the kernel's bits, out of place.
    """
    params = tree.map(lambda leaf: leaf.detach().clone(), namesake.params)
    grads = [random_grads(params, generator) for _ in range(8)]
    for one, state in zip(
        grads, states_of(optimizer, params, grads, formula=formula), strict=True
    ):
        namesake.step(one)
        expected = tree.map(Tensor.detach, namesake.params), state_of(namesake)
        assert_same(state, expected)


def test_no_algorithm_is_forgotten() -> None:
    """All of ``torch.optim``, less one that wants a closure and one for sparse gradients."""
    exported = {
        name for name, value in vars(torch.optim).items() if isinstance(value, type)
    }
    assert exported - {"Optimizer", "LBFGS", "SparseAdam"} == ALGORITHMS.keys()


def shapes_for(name: str) -> Any:
    """Muon is for matrices."""
    return MATRICES if name == "Muon" else SHAPES


@pytest.mark.parametrize(("name", "kernel", "number"), CASES)
@settings(max_examples=max(1, settings().max_examples // 30))
@given(seed=st.integers(0, 2**20))
def test_from_torch_is_torch(
    name: str, kernel: dict[str, bool], number: int, seed: int
) -> None:
    """Every algorithm and kernel, for each kind of rate: to the bit, and so is its state."""
    algorithm, settings, _ = ALGORITHMS[name]
    how = {**settings[number], **kernel}
    for place, dtype in enumerate(DTYPES):
        kind = RATES[(number + place) % 4]
        rate = torch.tensor(0.05, dtype=dtype)
        rates: dict[str, tuple[Any, Any]] = {
            "number": ({"lr": 0.05}, {"lr": 0.05}),
            "default": ({}, {}),
            "tensor": ({"lr": rate}, {"lr": float(rate)}),
            "schedule": ({"lr": lambda step: 0.25 * inverse(step)}, {"lr": 0.25}),
        }
        ours, theirs = rates[kind]
        generator = torch.Generator().manual_seed(seed)
        params = random_params(shapes_for(name), dtype, generator)

        def make(leaves: list[Tensor], rate: Any = theirs) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = algorithm(leaves, **rate, **how)
            return made

        optimizer = ps.optim.from_torch(algorithm, **ours, **how)
        namesake = Namesake(params, make, scheduled=kind == "schedule")
        assert_follows(optimizer, namesake, generator)
        assert rate == torch.tensor(0.05, dtype=dtype)


FUSED = {
    "lr": st.sampled_from([0.1, 1e-3]),
    "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)]),
    "eps": st.sampled_from([1e-8, 1e-3]),
    "weight_decay": st.sampled_from([0.0, 0.01, 0.1]),
}


@given(
    st.fixed_dictionaries(FUSED),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_adamw_is_the_fused_kernel(
    how: dict[str, Any], masked: bool, scheduled: bool, whole: bool, seed: int
) -> None:
    """``adamw`` in float32 has the bits of ``AdamW(fused=True)``.

    (In a leaf that is no whole vectors, torch's kernel rounds the rest as its scalar code does.)
    """

    def decaying(leaf: Tensor) -> bool:
        return leaf.ndim > 1 or not masked

    def make(leaves: list[Tensor]) -> torch.optim.Optimizer:
        decay = how["weight_decay"]
        groups = [
            {"params": [leaf], "weight_decay": decay * decaying(leaf)}
            for leaf in leaves
        ]
        return torch.optim.AdamW(groups, **how, fused=True)

    def state_of(namesake: Namesake) -> Any:
        kept = [namesake.optimizer.state[leaf] for leaf in namesake.leaves]
        structure = tree.flatten(namesake.params)[1]

        def part(decayed: bool) -> ps.optim.AdamWState:
            where = {
                i for i, leaf in enumerate(namesake.leaves) if decaying(leaf) == decayed
            }
            means = (
                [state[key] for state in kept] for key in ("exp_avg", "exp_avg_sq")
            )
            parts = (tree.subset(structure, one, where) for one in means)
            return ps.optim.AdamWState(torch.tensor(namesake.steps), *parts)

        return {"decay": part(True), "rest": part(False)} if masked else part(True)

    rate = (lambda step: how["lr"] * inverse(step)) if scheduled else how["lr"]
    mask = matrices if masked else None
    b1, b2 = how["betas"]
    optimizer = ps.optim.adamw(rate, b1, b2, how["eps"], how["weight_decay"], mask)
    generator = torch.Generator().manual_seed(seed)
    params = random_params(WHOLE_VECTORS if whole else SHAPES, torch.float32, generator)
    namesake = Namesake(params, make, scheduled=scheduled)
    assert_follows(optimizer, namesake, generator, state_of=state_of, formula=whole)
