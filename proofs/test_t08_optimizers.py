"""T8, optimizers. Each equals its ``torch.optim`` namesake over many steps.

The recipes within the rounding of each step; ``from_torch`` to the bit, and so does ``adamw`` with torch's fused
kernel, where leaves are whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import purestep as ps
from proofs.strategies import Batch, assert_same, weights_of
from proofs.test_t06_purity import storages
from purestep import tree
from purestep.testing.bounds import gamma

STEPS = 30
DTYPES = [torch.float64, torch.float32]
Optimizers = tuple[ps.optim.Optimizer, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]]


def decays(params: Any) -> Any:
    """Matrices decay, vectors do not."""
    return tree.map(lambda leaf: leaf.ndim > 1, params)


@st.composite
def sgds(draw: st.DrawFn) -> Optimizers:
    """``sgd`` and its namesake."""
    lr = draw(st.sampled_from([0.1, 0.01]))
    momentum = draw(st.sampled_from([0.0, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    decay = draw(st.sampled_from([0.0, 0.1]))
    return (
        ps.optim.sgd(lr, momentum, nesterov=nesterov, weight_decay=decay, mask=decays),
        lambda groups: torch.optim.SGD(
            [{**group, "weight_decay": decay * group["decays"]} for group in groups],
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
        ),
    )


@st.composite
def adamws(draw: st.DrawFn) -> Optimizers:
    """``adamw`` and its namesake."""
    lr = draw(st.sampled_from([0.1, 0.001]))
    b1, b2 = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)]))
    eps = draw(st.sampled_from([1e-8, 1e-3]))
    decay = draw(st.sampled_from([0.0, 0.1]))
    return (
        ps.optim.adamw(lr, b1, b2, eps, weight_decay=decay, mask=decays),
        lambda groups: torch.optim.AdamW(
            [{**group, "weight_decay": decay * group["decays"]} for group in groups],
            lr=lr,
            betas=(b1, b2),
            eps=eps,
        ),
    )


@given(st.one_of(sgds(), adamws()), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_equals_namesake(optimizers: Optimizers, dtype: torch.dtype, seed: int) -> None:
    """The same gradients for thirty steps: the same parameters, but for the rounding of each step."""
    optimizer, make_torch = optimizers
    generator = torch.Generator().manual_seed(seed)
    params = {
        "matrix": torch.randn(3, 2, generator=generator, dtype=dtype),
        "vector": torch.randn(4, generator=generator, dtype=dtype),
    }
    theirs = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    torch_optimizer = make_torch(
        [
            {"params": [theirs["matrix"]], "decays": True},
            {"params": [theirs["vector"]], "decays": False},
        ]
    )
    opt_state = optimizer.init(params)
    travelled = tree.map(lambda leaf: leaf.abs(), params)
    for _ in range(STEPS):
        grads = tree.map(
            lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=dtype), params
        )
        before = params
        params, opt_state = optimizer.update(grads, opt_state, params)
        moved = tree.map(lambda new, old: (new - old).abs(), params, before)
        travelled = tree.map(torch.add, travelled, moved)
        for leaf, grad in zip(tree.leaves_of(theirs), tree.leaves_of(grads), strict=True):
            leaf.grad = grad
        torch_optimizer.step()
    # Both round a dozen times in each step, relative to how far the step goes; the decaying means keep
    # what they rounded before, so a step carries the roundings of all steps before it.
    roundings = gamma(2 * 12 * STEPS, dtype)
    for ours, their, distance in zip(
        *map(tree.leaves_of, (params, theirs, travelled)), strict=True
    ):
        assert ((ours - their).abs() <= roundings * distance.max()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [ps.optim.sgd, ps.optim.adamw])
def test_schedule_and_tensor(make: Callable[..., ps.optim.Optimizer], dtype: torch.dtype) -> None:
    """A learning rate that is a number, a tensor or a schedule of the same value: the same, to rounding."""
    params = {"w": torch.linspace(-1, 1, 5, dtype=dtype)}
    rate = 0.125
    results = []
    for learning_rate in (rate, torch.tensor(rate, dtype=dtype), lambda step: 0 * step + rate):
        optimizer = make(learning_rate)
        state = (params, optimizer.init(params))
        for _ in range(3):
            state = optimizer.update(tree.map(torch.cos, state[0]), state[1], state[0])
        results.append(state[0]["w"])
    for other in results[1:]:
        assert torch.equal(results[0], other)
        assert other.dtype == dtype


def test_schedule_is_followed() -> None:
    """Step t moves by the rate of step t, counted from 0."""
    schedule = ps.optim.linear_schedule(1.0, 0.0, 4)
    optimizer = ps.optim.sgd(schedule)
    params, opt_state = torch.tensor(0.0, dtype=torch.float64), optimizer.init(torch.tensor(0.0))
    places = []
    for _ in range(5):
        params, opt_state = optimizer.update(torch.ones((), dtype=torch.float64), opt_state, params)
        places.append(float(params))
    assert places == [-1.0, -1.75, -2.25, -2.5, -2.5]


MATRICES = {"wide": (4, 6), "nested": {"tall": (5, 3)}}
SHAPES = {**MATRICES, "rest": [(17,), (), (2, 3, 4)]}
WHOLE_VECTORS = [(16,), (4, 8), (2, 3, 16), (160,), (64, 80)]
"""Elements by the sixteen: small leaves, which ``adamw`` joins, and a large one."""


class Algorithm(NamedTuple):
    """A class of ``torch.optim``, settings of it, and the kernels that it has on the host."""

    make: Callable[..., torch.optim.Optimizer]
    settings: list[dict[str, Any]]
    kernels: list[dict[str, bool]]


LOOP: dict[str, bool] = {}
FOREACH = {"foreach": True}
FUSED = {"fused": True}
ADAM: list[dict[str, Any]] = [
    {},
    {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True},
]
DECOUPLED: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
]
ASCENT: dict[str, Any] = {"maximize": True}
UPHILL: dict[str, Any] = {"maximize": True, "weight_decay": 0.1}
ALGORITHMS = {
    "SGD": Algorithm(
        torch.optim.SGD,
        [
            {},
            {"weight_decay": 0.1},
            {"momentum": 0.9},
            {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, **UPHILL},
        ],
        [LOOP, FOREACH, FUSED],
    ),
    "Adam": Algorithm(
        torch.optim.Adam,
        [*ADAM, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
        [LOOP, FOREACH, FUSED],
    ),
    "AdamW": Algorithm(torch.optim.AdamW, ADAM, [LOOP, FOREACH, FUSED]),
    "RMSprop": Algorithm(
        torch.optim.RMSprop,
        [
            {},
            {"centered": True, "alpha": 0.9},
            {"momentum": 0.9, "weight_decay": 0.1},
            {"momentum": 0.9, "centered": True, **UPHILL},
            ASCENT,
        ],
        [LOOP, FOREACH],
    ),
    "Adagrad": Algorithm(
        torch.optim.Adagrad,
        [
            {},
            {"initial_accumulator_value": 0.3},
            {"lr_decay": 0.1, "initial_accumulator_value": 0.3, **UPHILL},
            ASCENT,
        ],
        [LOOP, FOREACH, FUSED],
    ),
    "Adafactor": Algorithm(
        torch.optim.Adafactor,
        [{}, {"d": 1.5, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)}, UPHILL, ASCENT],
        [LOOP, FOREACH],
    ),
    "Adadelta": Algorithm(
        torch.optim.Adadelta, [{}, {"rho": 0.5}, UPHILL, ASCENT], [LOOP, FOREACH]
    ),
    "NAdam": Algorithm(
        torch.optim.NAdam, [*DECOUPLED, {"momentum_decay": 0.1, **UPHILL}, ASCENT], [LOOP, FOREACH]
    ),
    "RAdam": Algorithm(
        torch.optim.RAdam, [*DECOUPLED, {"betas": (0.5, 0.9), **UPHILL}, ASCENT], [LOOP, FOREACH]
    ),
    "Adamax": Algorithm(
        torch.optim.Adamax, [{}, {"betas": (0.5, 0.9)}, UPHILL, ASCENT], [LOOP, FOREACH]
    ),
    "Rprop": Algorithm(
        torch.optim.Rprop,
        [{}, {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.2)}, {"maximize": True}],
        [LOOP, FOREACH],
    ),
    "ASGD": Algorithm(
        torch.optim.ASGD,
        [{}, {"t0": 3.0, "lambd": 0.1, "alpha": 0.5}, UPHILL, ASCENT],
        [LOOP, FOREACH],
    ),
    "Muon": Algorithm(
        torch.optim.Muon,
        [
            {},
            {"nesterov": False, "momentum": 0.5},
            {"weight_decay": 0.0, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
        ],
        [LOOP],
    ),
}
KERNELS = [
    pytest.param(name, kernel, id=f"{name}-{next(iter(kernel), 'loop')}")
    for name, algorithm in ALGORITHMS.items()
    for kernel in algorithm.kernels
]
CASES = [
    pytest.param(name, kernel, chosen, id=f"{name}-{next(iter(kernel), 'loop')}-{number}")
    for name, algorithm in ALGORITHMS.items()
    for kernel in algorithm.kernels
    for number, chosen in enumerate(algorithm.settings)
]
FEW = settings(max_examples=max(1, settings().max_examples // 60))


class Namesake:
    """The torch.optim object run the usual way: leaves that require grad, ``.grad``, ``step()``."""

    def __init__(self, params: Any, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self.params = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        self.leaves = tree.leaves_of(self.params)
        self.optimizer = make(self.leaves)
        self.steps = 0

    def step(self, grads: Any) -> None:
        """One step on these gradients."""
        for leaf, grad in zip(self.leaves, tree.leaves_of(grads), strict=True):
            leaf.grad = grad.clone()
        self.optimizer.step()
        self.steps += 1

    def state(self) -> ps.optim.TorchState:
        """The state, as ``from_torch`` is to have it."""
        kept = [dict(self.optimizer.state[leaf]) for leaf in self.leaves]
        leaves = tree.unflatten(tree.flatten(self.params)[1], kept)
        return ps.optim.TorchState(torch.tensor(self.steps), leaves)


def random_params(shapes: Any, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Normal numbers, in a tree like that of the shapes."""
    if isinstance(shapes, dict):
        return {key: random_params(below, dtype, generator) for key, below in shapes.items()}
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
    return [leaf.data_ptr() for leaf in tree.leaves_of(value)]


def assert_follows(
    optimizer: ps.optim.Optimizer,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    shapes: Any,
    dtype: torch.dtype,
    seed: int,
    *,
    after_step: Callable[[Namesake], None] = lambda _: None,
    state_of: Callable[[Namesake], Any] = Namesake.state,
    steps: int = 20,
) -> None:
    """Params and state are torch's to the bit after each step, in place and out of place, in full from the start."""
    generator = torch.Generator().manual_seed(seed)
    params = random_params(shapes, dtype, generator)
    namesake = Namesake(params, make)
    pure = (params, optimizer.init(params))
    donated = tree.map(torch.clone, pure)
    full, places = kinds(pure), buffers(donated)
    assert optimizer.update_ is not None
    for _ in range(steps):
        grads = random_grads(params, generator)
        namesake.step(grads)
        after_step(namesake)
        expected = tree.map(Tensor.detach, namesake.params), state_of(namesake)

        given = (grads, pure[1], pure[0])
        before = tree.map(torch.clone, given)
        pure = optimizer.update(*given)
        assert_same(given, before, "(grads, opt_state, params)")
        assert not storages(pure) & storages(given), "an output lives in an input's storage"

        donated = optimizer.update_(tree.map(torch.clone, grads), donated[1], donated[0], None)
        assert buffers(donated) == places
        for name, actual in {"update": pure, "update_": donated}.items():
            assert kinds(actual) == full
            assert_same(actual, expected, f"{name}(...)")


def test_no_algorithm_is_forgotten() -> None:
    """All of ``torch.optim``, but for one that wants a closure and one that wants sparse gradients."""
    exported = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    assert exported - {"Optimizer", "LBFGS", "SparseAdam"} == ALGORITHMS.keys()


def shapes_for(name: str) -> Any:
    """Muon is for matrices."""
    return MATRICES if name == "Muon" else SHAPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel", "chosen"), CASES)
@FEW
@given(seed=st.integers(0, 2**20), lr=st.sampled_from([0.05, 0.3, 1e-3]))
def test_from_torch_equals_torch(
    name: str,
    kernel: dict[str, bool],
    chosen: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
    lr: float,
) -> None:
    """Every algorithm, in each of its kernels: twenty steps to the bit, and so is its state."""
    make: Any = ALGORITHMS[name].make
    how = {"lr": lr, **chosen, **kernel}
    optimizer = ps.optim.from_torch(make, **how)
    assert_follows(optimizer, lambda leaves: make(leaves, **how), shapes_for(name), dtype, seed)


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_from_torch_with_its_own_rate(name: str, kernel: dict[str, bool]) -> None:
    """Without ``lr``, the algorithm's default."""
    make: Any = ALGORITHMS[name].make
    optimizer = ps.optim.from_torch(make, **kernel)
    assert_follows(
        optimizer,
        lambda leaves: make(leaves, **kernel),
        shapes_for(name),
        torch.float64,
        0,
        steps=3,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_from_torch_with_a_rate_in_a_tensor(
    name: str, kernel: dict[str, bool], dtype: torch.dtype
) -> None:
    """A scalar tensor is the number that it holds."""
    make: Any = ALGORITHMS[name].make
    rate = torch.tensor(0.05, dtype=dtype)
    optimizer = ps.optim.from_torch(make, lr=rate, **kernel)
    assert_follows(
        optimizer,
        lambda leaves: make(leaves, lr=float(rate), **kernel),
        shapes_for(name),
        dtype,
        0,
        steps=5,
    )
    assert rate == torch.tensor(0.05, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_from_torch_with_a_schedule(name: str, kernel: dict[str, bool], dtype: torch.dtype) -> None:
    """A schedule is torch's LambdaLR: step t, counted from 0, moves by the rate of t."""
    make: Any = ALGORITHMS[name].make
    schedulers = []

    def scheduled(leaves: list[Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = make(leaves, lr=1.0, **kernel)
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(made, lambda t: 0.25 / (1 + t)))
        return made

    optimizer = ps.optim.from_torch(
        make, lr=lambda step: 0.25 / (1 + step.to(torch.float64)), **kernel
    )
    assert_follows(
        optimizer,
        scheduled,
        shapes_for(name),
        dtype,
        0,
        after_step=lambda _: schedulers[0].step(),
        steps=8,
    )


@st.composite
def fused_adamws(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of AdamW."""
    return {
        "lr": draw(st.sampled_from([0.1, 1e-3])),
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)])),
        "eps": draw(st.sampled_from([1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.1])),
    }


@settings(max_examples=max(1, settings().max_examples // 5))
@given(fused_adamws(), st.booleans(), st.booleans(), st.integers(0, 2**20))
def test_adamw_is_the_fused_kernel(
    how: dict[str, Any], masked: bool, scheduled: bool, seed: int
) -> None:
    """``adamw`` in float32 has the bits of ``AdamW(fused=True)`` in every leaf that is whole vectors of sixteen.

    (What is left of others, torch's kernel rounds as its scalar code does.)
    """
    b1, b2 = how["betas"]
    mask = decays if masked else None

    def make(leaves: list[Tensor]) -> torch.optim.Optimizer:
        groups = [
            {"params": [leaf], "weight_decay": how["weight_decay"] * (leaf.ndim > 1 or not masked)}
            for leaf in leaves
        ]
        return torch.optim.AdamW(groups, **how, fused=True)

    def decay_rate(namesake: Namesake) -> None:
        for group in namesake.optimizer.param_groups if scheduled else []:
            group["lr"] = how["lr"] / (1 + namesake.steps)

    def state_of(namesake: Namesake) -> Any:
        kept = [namesake.optimizer.state[leaf] for leaf in namesake.leaves]
        structure = tree.flatten(namesake.params)[1]

        def part(where: list[int]) -> ps.optim.AdamWState:
            means = ([state[key] for state in kept] for key in ("exp_avg", "exp_avg_sq"))
            return ps.optim.AdamWState(
                torch.tensor(namesake.steps),
                *(tree.part(structure, one, {*where}) for one in means),
            )

        flags = [leaf.ndim > 1 or not masked for leaf in namesake.leaves]
        parts = {
            label: part([position for position, flag in enumerate(flags) if flag == wanted])
            for label, wanted in (("decay", True), ("rest", False))
        }
        return parts if masked else parts["decay"]

    rate = (lambda step: how["lr"] / (1 + step.to(torch.float64))) if scheduled else how["lr"]
    optimizer = ps.optim.adamw(rate, b1, b2, how["eps"], how["weight_decay"], mask)
    assert_follows(
        optimizer,
        make,
        WHOLE_VECTORS,
        torch.float32,
        seed,
        after_step=decay_rate,
        state_of=state_of,
    )


def network(params: dict[str, Tensor], batch: Batch) -> Tensor:
    """A squared loss for each token, of matrices and, where there is one, a bias."""
    hidden = batch["x"] @ params["up"]
    hidden = torch.tanh(hidden + params["bias"] if "bias" in params else hidden)
    return ((hidden @ params["down"]).squeeze(-1) - batch["y"]).square()


def groups_of(count: int, dtype: torch.dtype, generator: torch.Generator) -> list[list[Batch]]:
    """Groups of three uneven microbatches with weights, one of which is 0."""

    def batch(rows: int) -> Batch:
        weights = torch.randint(1, 4, (rows, 2), generator=generator)
        weights[0, 0] = 0
        return {
            "x": torch.randn(rows, 2, 3, generator=generator, dtype=dtype),
            "y": torch.randn(rows, 2, generator=generator, dtype=dtype),
            "w": weights,
        }

    return [[batch(rows) for rows in (2, 1, 3)] for _ in range(count)]


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_from_torch_in_the_step(name: str, dtype: torch.dtype, normalize: Any) -> None:
    """Three whole steps are a loop of ``backward()`` and ``step()`` to the bit, with donation and without (T13)."""
    make: Any = ALGORITHMS[name].make
    how = {"lr": 0.05, **ALGORITHMS[name].settings[-1]}
    generator = torch.Generator().manual_seed(0)
    shapes = {"up": (3, 5), "down": (5, 1), **({} if name == "Muon" else {"bias": (5,)})}
    params = random_params(shapes, dtype, generator)
    groups = groups_of(3, dtype, generator)

    namesake = Namesake(params, lambda leaves: make(leaves, **how))
    for group in groups:
        total = sum(int(batch["w"].sum()) for batch in group)
        namesake.optimizer.zero_grad()
        for batch in group:
            weights = batch["w"].to(torch.float64)
            weights = (weights / total if normalize == "loss" else weights).to(dtype)
            (network(namesake.params, batch) * weights).sum().backward()
        for leaf in namesake.leaves if normalize == "grads" else []:
            leaf.grad /= total
        namesake.step(tree.map(lambda leaf: leaf.grad, namesake.params))

    optimizer = ps.optim.from_torch(make, **how)
    for donate in (False, True):
        step = ps.make_update_step(
            network, optimizer, weight_fn=weights_of, normalize=normalize, donate=donate
        )
        given = ours, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        for group in groups:
            ours, opt_state, metrics = step(ours, opt_state, group)
            assert metrics.applied
        shared = storages((ours, opt_state)) & storages(given)
        assert shared == (storages(given) if donate else set())
        expected = tree.map(Tensor.detach, namesake.params), namesake.state()
        assert_same((ours, opt_state), expected, f"state with {donate=}")
