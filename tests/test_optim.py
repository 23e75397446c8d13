"""Tests each optimizer by itself, chains, ema, master weights and schedules. T8 compares with torch's."""

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.optim.arithmetic import FOREACH, LEAF
from purestep.optim.elementwise import compute_updates_
from purestep.step import apply_update
from support.purity import storages_in
from support.random_updates import random_grads, random_params
from support.strategies import assert_same, label_leaves, mask_matrices
from tests.half_precision import HALVES
from tests.optimizers import (
    GRADS,
    PARAMS,
    RECIPES,
    TRANSFORMS,
    call_update,
    iterate_states,
)

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize("max_norm", [0.1, 4.99, 5.0, 10.0])
def test_clipping(max_norm: float) -> None:
    """Clips a norm of five; leaves a shorter gradient as it is, to the bit."""
    grads = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(-4.0)}
    clipped, _ = ps.optim.clip_by_global_norm(max_norm).update(grads, (), PARAMS)
    if max_norm < 5:
        assert tree.global_norm(clipped) == pytest.approx(max_norm, rel=1e-6)
    else:
        assert_same(clipped, grads)


@pytest.mark.parametrize(
    "make",
    [
        partial(ps.optim.adamw, 0.1, 0.8, 0.9, 0.01),
        partial(ps.optim.lion, 0.1, 0.8, 0.9),
    ],
)
def test_params_outside_of_a_mask_are_updated_without_decay(make: Any) -> None:
    masked = make(weight_decay=0.5, mask=False)
    plain = make(weight_decay=0.0)
    params = others = PARAMS
    masked_state = masked.init(params)
    state = plain.init(params)
    for factor in (1.0, -3.0):
        grads = tree.map(lambda grad: factor * grad, GRADS)  # noqa: B023
        params, masked_state = masked.update(grads, masked_state, params)
        others, state = plain.update(grads, state, others)
    assert_same(params, others)


def test_a_mask_is_a_tree_or_a_function() -> None:
    masks: list[Any] = [
        mask_matrices,
        mask_matrices(PARAMS),
        OrderedDict(w=True, b=False),
    ]
    for mask in masks:
        optimizer = ps.optim.adamw(0.1, weight_decay=0.5, mask=mask)
        state = optimizer.init(PARAMS)
        new, _ = optimizer.update(tree.zeros_like(PARAMS), state, PARAMS)
        assert torch.equal(new["b"], PARAMS["b"])
        assert torch.allclose(new["w"], torch.full((2, 2), 0.95))
    of_all = ps.optim.adamw(0.1, mask=True)
    assert set(of_all.init(PARAMS)) == {"decay"}
    with pytest.raises(ValueError, match="mask names params"):
        ps.optim.adamw(0.1, mask=["w"])


def test_what_does_not_decay_is_not_touched() -> None:
    """Does not even multiply it by zero, which would make a NaN of an infinite param."""
    params = {"w": torch.ones(2, 2), "b": torch.full((2,), INF)}
    decay = ps.optim.add_decayed_weights(0.5, mask_matrices)
    inputs = (GRADS, decay.init(params), params)
    expected = {"b": GRADS["b"], "w": GRADS["w"] + 0.5}
    assert_same(decay.update(*inputs)[0], expected)

    batched = tree.map(lambda leaf: leaf[None], inputs)
    batched_expected = tree.map(lambda leaf: leaf[None], expected)
    assert_same(torch.vmap(decay.update)(*batched)[0], batched_expected)


@pytest.mark.parametrize("name", RECIPES)
def test_a_state_is_complete_and_detached_and_update_leaves_it_alone(name: str) -> None:
    """Keeps the state's structure, and detaches it from params that require grad."""
    optimizer = RECIPES[name](0.1)
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
    state = optimizer.init(params)
    assert not any(leaf.requires_grad for leaf in tree.leaves(state))
    assert len([*iterate_states(optimizer, PARAMS, [GRADS] * 2)]) == 2
    with pytest.raises(ValueError, match="this update reads the params"):
        optimizer.update(GRADS, state, None)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_that_require_grad_move_the_same(name: str) -> None:
    """Takes gradients of a clip at a learned norm, in float32, which kernels take."""

    def loss_fn(p: Any, m: Tensor) -> Tensor:
        return (p["w"].sum() + p["b"].sum()) * m

    def train(norm: Tensor) -> Any:
        clip = ps.optim.clip_by_global_norm(norm)
        optimizer = ps.optim.chain(clip, RECIPES[name](0.1))
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=torch.ones_like)
        params: Any = tree.map(Tensor.float, PARAMS)
        state = optimizer.init(params)
        for scale in (1.0, 2.0):
            params, state, _ = step(params, state, [torch.tensor([scale])])
        return params, state

    fixed = train(torch.tensor(0.5))
    learned = train(torch.tensor(0.5, requires_grad=True))
    assert learned[0]["w"].requires_grad
    torch.testing.assert_close(tree.detach(learned), fixed)


PAPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (
        ps.optim.adamw,
        {
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-8,
            "weight_decay": 1e-2,
        },
    ),
    "scale_by_adam": (
        ps.optim.scale_by_adam,
        {
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-8,
        },
    ),
    "sgd": (
        ps.optim.sgd,
        {
            "momentum": 0.0,
            "nesterov": False,
            "weight_decay": 0.0,
        },
    ),
    "lion": (
        ps.optim.lion,
        {
            "b1": 0.9,
            "b2": 0.99,
            "weight_decay": 0.0,
        },
    ),
    "momentum": (ps.optim.momentum, {"nesterov": False}),
}


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_are_the_papers(name: str) -> None:
    """Compares with Adam [Kingma and Ba, 2015], torch's AdamW, Lion [Chen et al., 2023]."""
    make, expected = PAPERS[name]
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(make).parameters.values()
        if parameter.default is not parameter.empty
    }
    defaults.pop("mask", None)
    assert defaults == expected


def test_lions_defaults_in_effect() -> None:
    """After a gradient of 1, μ is 0.01, and sign(0.9 μ + 0.1 g) turns at g = -0.09."""
    optimizer = ps.optim.lion(1.0)
    params = torch.zeros(2, dtype=torch.float64)
    state = optimizer.init(params)
    params, state = optimizer.update(torch.ones_like(params), state, params)
    around_the_turn = torch.tensor([-0.089, -0.091]).double()
    params, _ = optimizer.update(around_the_turn, state, params)
    assert params.tolist() == [-2.0, 0.0]


def test_lion_passes_on_what_is_not_finite() -> None:
    """torch's sign of NaN is 0, which would hide it."""
    optimizer = ps.optim.lion(0.1)
    params = torch.ones(3)
    grad = torch.tensor([NAN, 0.0, INF])
    state = optimizer.init(params)
    moved, _ = optimizer.update(grad, state, params)
    assert moved.isnan().tolist() == [True, False, True]


def test_chain_of_transforms_is_a_transform() -> None:
    clip = TRANSFORMS["clip"]
    momentum = TRANSFORMS["momentum"]
    chained = ps.optim.chain(clip, momentum)
    assert isinstance(chained, ps.optim.Transform)

    nested = ps.optim.chain(chained, ps.optim.sgd(0.1))
    assert isinstance(nested, ps.optim.Optimizer)

    flat = ps.optim.chain(clip, momentum, ps.optim.sgd(0.1))
    of_nested, _ = nested.update(GRADS, nested.init(PARAMS), PARAMS)
    of_flat, _ = flat.update(GRADS, flat.init(PARAMS), PARAMS)
    assert torch.equal(of_nested["w"], of_flat["w"])


def test_chain_uses_the_last_optimizers_own_update_() -> None:
    """Clipping in front of it does not take a fast in-place step away."""
    calls = []

    def update_(grads: Any, state: Any, params: Any, applied: Any) -> Any:
        calls.append(grads["w"])
        return params, state

    in_place = ps.optim.sgd(1.0)._replace(update_=update_)
    optimizer = ps.optim.chain(TRANSFORMS["clip"], in_place)
    grads = tree.map(torch.clone, GRADS)
    call_update(optimizer, "update_", grads, optimizer.init(PARAMS), PARAMS)
    assert len(calls) == 1
    assert not torch.equal(calls[0], GRADS["w"])


def delayed(grads: Any, state: Any, params: Any) -> Any:
    """Returns the gradients of the step before, and keeps those of this one."""
    return state, grads


FIRST = [
    ps.optim.momentum(0.5),
    ps.optim.Transform(tree.zeros_like, delayed),
]


@pytest.mark.parametrize("behind", ["clip", "decay", "momentum"])
@pytest.mark.parametrize("first", FIRST)
def test_what_comes_behind_a_part_leaves_its_state_alone(
    first: Any, behind: str
) -> None:
    """A later part may write to the updates that it gets: they do not alias the state."""
    optimizer = ps.optim.chain(
        first,
        TRANSFORMS[behind],
        ps.optim.sgd(1.0),
    )
    pure = (PARAMS, optimizer.init(PARAMS))
    in_place = pure
    for scale in (1.0, -2.0, 3.0):
        grads = tree.map(lambda leaf, scale=scale: leaf * scale, GRADS)
        copies = tree.map(torch.clone, (grads, in_place[1], in_place[0]))
        pure = optimizer.update(grads, pure[1], pure[0])
        in_place = call_update(optimizer, "update_", *copies)
        assert_same(in_place, pure)


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_that_swaps_its_buffers(donate: bool) -> None:
    """The old params become state, and the state the params."""

    def swap_update(grads: Any, state: Any, params: Any) -> Any:
        return state, params

    swap = ps.optim.Optimizer(tree.zeros_like, swap_update)
    params = tree.map(torch.clone, PARAMS)
    state = swap.init(PARAMS)
    applied = torch.tensor(True)
    new = apply_update(swap, GRADS, state, params, applied, donate=donate)
    assert_same(new, (tree.zeros_like(PARAMS), PARAMS))


@pytest.mark.parametrize("donate", [False, True])
def test_the_mean_by_hand(donate: bool) -> None:
    """Begins at the params and follows them in other memory, which it keeps."""

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return w.sum() * x

    optimizer = ps.optim.ema(ps.optim.sgd(1.0), 0.75)
    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=torch.ones_like, donate=donate
    )
    w = torch.tensor([0.0, 8.0])
    first = optimizer.init(w)
    first_address = first.average.data_ptr()

    w, state, _ = step(w, first, [torch.tensor([-4.0])])
    assert w.tolist() == [4.0, 12.0]
    assert state.average.tolist() == [1.0, 9.0]
    assert state.average.data_ptr() != w.data_ptr()

    w, state, _ = step(w, state, [torch.tensor([-8.0])])
    assert w.tolist() == [12.0, 20.0]
    assert state.average.tolist() == [3.75, 11.75]
    assert state.average.data_ptr() != w.data_ptr()

    assert (state.average.data_ptr() == first_address) == donate
    assert donate or first.average.tolist() == [0.0, 8.0]


def test_half_precision_is_averaged_in_float32() -> None:
    """256 + (258 - 256) / 4 is no bfloat16; in ``master_weights``, nor is 256 + 1.25 / 4."""
    theta = torch.tensor(256.0, dtype=torch.bfloat16)
    rounded = ps.optim.ema(ps.optim.sgd(1.0), 0.75)
    state = rounded.init(theta)
    _, state = rounded.update(torch.tensor(-2.0), state, theta)
    assert state.average.dtype == torch.float32
    assert float(state.average) == 256.5

    wide = ps.optim.master_weights(rounded)
    state = wide.init(theta)
    _, state = wide.update(torch.tensor(-1.25), state, theta)
    assert state.inner.average.dtype == torch.float32
    assert float(state.inner.average) == 256.3125


def test_a_decay_for_each_of_an_ensemble() -> None:
    def average(decay: Tensor) -> Tensor:
        optimizer = ps.optim.ema(ps.optim.sgd(1.0), decay)
        w = torch.tensor(0.0)
        state = optimizer.init(w)
        _, state = optimizer.update(torch.tensor(-4.0), state, w)
        return state.average

    averages = torch.vmap(average)(torch.tensor([0.0, 0.5, 1.0]))
    assert averages.tolist() == [4.0, 2.0, 0.0]


INNER: dict[str, ps.optim.Optimizer] = {
    "adamw": ps.optim.adamw(0.01, weight_decay=0.1),
    "sgd": ps.optim.sgd(
        ps.optim.linear_schedule(0.1, 0.01, 10),
        0.9,
        nesterov=True,
    ),
    "clipped": ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0),
        ps.optim.lion(0.01),
    ),
    "torch": ps.optim.from_torch(
        torch.optim.RMSprop,
        lr=0.01,
        momentum=0.9,
        centered=True,
    ),
    "partition": ps.optim.partition(
        {
            "matrix": ps.optim.from_torch(torch.optim.Muon),
            "rest": ps.optim.adamw(0.01),
        },
        label_leaves,
    ),
}


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("name", INNER)
def test_master_weights_are_the_wide_run(
    name: str, dtype: Any, grad_dtype: Any
) -> None:
    """Bitwise, with its whole state; and the params are the master rounded, in other memory."""
    generator = torch.Generator().manual_seed(0)
    inner = INNER[name]
    optimizer = ps.optim.master_weights(inner)
    shapes = {"matrix": (4, 8), "rest": [(16,), (48,)]}
    params = random_params(shapes, dtype, generator)
    assert not storages_in(optimizer.init(params)) & storages_in(params)

    wide_dtype = tree.accumulation_dtype(dtype)
    wide = tree.map(lambda leaf: leaf.to(wide_dtype), params)
    all_grads = [
        tree.map(
            lambda leaf: leaf.to(grad_dtype or dtype), random_grads(wide, generator)
        )
        for _ in range(5)
    ]
    wide_state = inner.init(wide)
    ours = iterate_states(optimizer, params, all_grads)
    for grads, (new, state) in zip(all_grads, ours, strict=True):
        wide_grads = tree.map(Tensor.type_as, grads, wide)
        wide, wide_state = inner.update(wide_grads, wide_state, wide)
        assert_same(state, ps.optim.MasterState(wide, wide_state), "opt_state")
        rounded = tree.map(lambda leaf: leaf.to(dtype), state.master)
        assert_same(new, rounded, "params")


def test_params_as_wide_as_their_master_weights_are_other_tensors() -> None:
    """A donated step writes to both."""
    params = torch.ones(2)
    optimizer = ps.optim.master_weights(ps.optim.sgd(0.5))
    new, state = optimizer.update(params, optimizer.init(params), params)
    assert torch.equal(new, state.master)
    assert new.data_ptr() != state.master.data_ptr()


def test_derivatives_through_master_weights() -> None:
    """The master's derivative passes through; rounding has that of the identity."""
    w = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    optimizer = ps.optim.master_weights(ps.optim.sgd(0.125))

    def sums_after_update(grad: Tensor) -> Any:
        state = optimizer.init(w)
        new, state = optimizer.update(grad, state, w)
        return new.sum(), state.master.sum()

    slopes = torch.func.jacrev(sums_after_update)(torch.tensor([0.5, 0.25]))
    for slope in slopes:
        assert slope.tolist() == [-0.125, -0.125]


def test_schedules_keep_their_precision() -> None:
    schedule = ps.optim.warmup_cosine_decay_schedule(0.0, 0.3, 10, 100, 0.03)
    rates = {5: 0.15, 10: 0.3, 1000: 0.03}
    for step, rate in rates.items():
        assert schedule(torch.tensor(step)) == pytest.approx(rate, rel=1e-15)


# optim without its types: the cases below call it with arguments that it refuses.
optim: Any = ps.optim
CLIP = TRANSFORMS["clip"]
SGD = optim.sgd(0.1)

Refusal = tuple[Callable[[], Any], type[Exception], str]
"""A call, the class of its error, and a pattern of its text."""

BAD_ARGUMENTS: list[Refusal] = [
    (
        lambda: optim.chain(),
        ValueError,
        "at least one",
    ),
    (
        lambda: optim.chain(SGD, SGD),
        TypeError,
        r"part 0 of 2 is an Optimizer.*put it last",
    ),
    (
        lambda: optim.chain(CLIP, 0.1),
        TypeError,
        "part 1 must be a Transform or an Optimizer, got float",
    ),
    (
        lambda: optim.sgd(0.1, nesterov=True),
        ValueError,
        r"nesterov=True looks ahead .*, but momentum=0",
    ),
    (
        lambda: optim.ema(CLIP, 0.9),
        TypeError,
        "ema wraps an Optimizer, got Transform",
    ),
    (
        lambda: optim.ema(SGD, 1.1),
        ValueError,
        r"decay=1\.1 must be from 0 to 1",
    ),
    (
        lambda: optim.master_weights(CLIP),
        TypeError,
        r"wraps an Optimizer, got Transform: .*sgd\(lr\)",
    ),
    (
        lambda: optim.linear_schedule(0.0, 1.0, 0),
        ValueError,
        "transition_steps=0 must be positive",
    ),
    (
        lambda: optim.cosine_decay_schedule(1.0, -1),
        ValueError,
        "decay_steps=-1 must be positive",
    ),
    (
        lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5),
        ValueError,
        "decay_steps=5 is the whole length .* warmup_steps=5",
    ),
    (
        lambda: optim.join_schedules([abs, abs], [1, 2]),
        ValueError,
        "2 schedules have 1 boundaries between them, but 2 were given",
    ),
    (
        lambda: optim.join_schedules([abs, abs, abs], [10, 5]),
        ValueError,
        r"boundaries=\[10, 5\] must increase, from above 0",
    ),
    (
        lambda: optim.join_schedules([abs, abs, abs], [5, 5]),
        ValueError,
        r"boundaries=\[5, 5\] must increase, from above 0",
    ),
]


def test_a_line_may_begin_and_end_anywhere() -> None:
    schedule = ps.optim.linear_schedule(1.0, 0.5, 2)
    assert schedule(torch.arange(4)).tolist() == [1.0, 0.75, 0.5, 0.5]


def test_a_peak_of_zero_is_a_rate_of_zero() -> None:
    schedule = ps.optim.warmup_cosine_decay_schedule(0.0, 0.0, 2, 4)
    assert schedule(torch.arange(5)).tolist() == [0.0] * 5


def test_a_state_in_half_precision_stays_if_nothing_is_applied() -> None:
    """By foreach kernels, too, which write in place."""
    trace = torch.ones(2, dtype=torch.bfloat16)
    columns = [[torch.ones(2)], [torch.ones(2)], [trace]]

    def halve(grads: Any, params: Any, trace: Any) -> Any:
        return grads, FOREACH.mul_(trace, 0.5)

    compute_updates_(halve, columns, torch.tensor(False))
    assert trace.tolist() == [1, 1]
    compute_updates_(halve, columns, torch.tensor(True))
    assert trace.tolist() == [0.5, 0.5]


def test_no_schedule_sees_a_step_outside_of_its_interval() -> None:
    """A rate that is infinite there has a derivative that is NaN, though it is not selected."""
    seen: list[list[int]] = [[], [], []]

    def make_schedule(number: int) -> Callable[[Tensor], Tensor]:
        def schedule(step: Tensor) -> Tensor:
            seen[number].append(int(step))
            return step * 1.0

        return schedule

    joined = optim.join_schedules([make_schedule(i) for i in range(3)], [2, 5])
    rates = [float(joined(torch.tensor(step))) for step in range(8)]

    assert rates == [0, 1, 0, 1, 2, 0, 1, 2]
    assert [(min(steps), max(steps)) for steps in seen] == [(0, 1), (0, 2), (0, 2)]


def init_with_mask(mask: Any) -> Any:
    return optim.sgd(0.1, weight_decay=0.1, mask=mask).init(PARAMS)


BAD_MASKS: list[Refusal] = [
    (
        partial(init_with_mask, mask),
        ValueError,
        r"a tree of bools like|the prefix lacks \['b'\] and adds \[\] to the keys",
    )
    for mask in (
        {"w": True},
        1,
        {"w": torch.tensor(True), "b": False},
    )
]

SCHEDULERS = torch.optim.lr_scheduler
OF_TORCH = torch.optim.SGD([torch.ones(1)], lr=0.1)
SCHEDULER = r"scheduler of torch.*function of the step: ps\.optim"
NO_RATE = "must be a number, a scalar tensor or a schedule"
# torch's schedulers write into torch's optimizers; a schedule here is a function.
BAD_RATES: list[tuple[Any, str]] = [
    (SCHEDULERS.StepLR(OF_TORCH, 3), SCHEDULER),
    (SCHEDULERS.ReduceLROnPlateau(OF_TORCH), SCHEDULER),
    (SCHEDULERS.CosineAnnealingLR, SCHEDULER),
    ("0.1", NO_RATE),
    (dict, NO_RATE),
    ([0.1], NO_RATE),
    (torch.tensor([0.1, 0.2]), rf"{NO_RATE}.*a tensor of shape \(2,\)"),
]
WITH_RATES: list[Callable[[Any], Any]] = [
    optim.sgd,
    optim.adamw,
    optim.lion,
    partial(optim.from_torch, torch.optim.SGD),
]
RATES_REFUSED: list[Refusal] = [
    (partial(make, rate), TypeError, message)
    for make in WITH_RATES
    for rate, message in BAD_RATES
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [*BAD_ARGUMENTS, *BAD_MASKS, *RATES_REFUSED]
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    """Refuses arguments, masks and rates where the optimizer is made or initialised."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("whole", [3.0, 1e30, math.inf])
def test_steps_stay_integers_after_a_boundary_that_is_a_float(whole: float) -> None:
    """A schedule may look its rate up in a table."""
    rates = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def look_up(step: Tensor) -> Tensor:
        return rates[step]

    def look_up_doubled(step: Tensor) -> Tensor:
        return 2 * rates[step]

    joined = optim.join_schedules([look_up, look_up_doubled], [whole])
    expected = [0.5, 0.25, 0.125, 0.0625]
    if whole == 3:
        expected[3] = 1.0
    for step, rate in enumerate(expected):
        assert joined(torch.tensor(step)) == rate


def test_a_schedule_may_return_a_number_of_numpy() -> None:
    """It is an array in a trace."""

    def schedule(step: Tensor) -> Any:
        return numpy.float64(0.5) * numpy.array(1.0)

    params = torch.ones(2)
    sgd = optim.sgd(schedule)
    state = sgd.init(params)
    eager, _ = sgd.update(params, state, params)
    update = torch.compile(sgd.update, backend="eager", fullgraph=True)
    compiled, _ = update(params, state, params)
    assert eager.tolist() == [0.5, 0.5]
    assert_same(compiled, eager)


BAD_RESULTS = [torch.tensor([0.1, 0.2]), None, "0.1", 1j, numpy.ones(2), {0.1}]


@pytest.mark.parametrize("rate", BAD_RESULTS)
def test_what_a_schedule_must_not_return(rate: Any) -> None:
    params = torch.ones(2)
    optimizer = optim.sgd(lambda step: rate)
    state = optimizer.init(params)
    with pytest.raises(TypeError, match="a schedule must return a number or a scalar"):
        optimizer.update(params, state, params)


@pytest.mark.parametrize("x", [0.0, 4.0, INF, NAN, -1.0])
def test_roots_are_torchs(x: float) -> None:
    """A state that is not finite stays so, as on a device."""
    roots = [*FOREACH.sqrt([torch.tensor(x)]), LEAF.sqrt(torch.tensor(x))]
    for root in roots:
        torch.testing.assert_close(root, torch.tensor(x).sqrt(), equal_nan=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_params_of_all_dtypes_are_updated_together(in_place: bool) -> None:
    params = {str(dtype): torch.ones(2, dtype=dtype) for dtype in tree.FLOAT_DTYPES}
    optimizer = ps.optim.sgd(0.5)
    update = optimizer.update_ if in_place else optimizer.update
    assert update is not None
    grads = tree.map(torch.clone, params)
    arguments = (torch.tensor(True),) if in_place else ()
    new, _ = update(grads, optimizer.init(params), params, *arguments)
    assert_same(new, tree.map(torch.clone, {k: p * 0 + 0.5 for k, p in params.items()}))


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_under_other_names_are_refused(in_place: bool) -> None:
    """Though they have the shapes of params, one by one."""
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    grads = {"a": torch.ones(2), "c": torch.ones(2)}
    optimizer = ps.optim.sgd(0.5)
    update = optimizer.update_ if in_place else optimizer.update
    assert update is not None
    arguments = (torch.tensor(True),) if in_place else ()
    with pytest.raises(ValueError, match=r"'c'|\['b'\]"):
        update(grads, optimizer.init(params), params, *arguments)


@pytest.mark.parametrize("kind", [OrderedDict, lambda d: defaultdict(list, d)])
def test_state_in_dicts_of_another_kind_pairs_by_key(kind: Any) -> None:
    """A file may give an ``OrderedDict``, in another order."""
    optimizer = ps.optim.adamw(0.5)
    params = {"a": torch.ones(1), "b": torch.ones(1)}
    grads = {"a": torch.ones(1), "b": torch.zeros(1)}
    _, state = optimizer.update(grads, optimizer.init(params), params)
    expected, _ = optimizer.update(grads, state, params)

    mu = kind([("b", state.mu["b"]), ("a", state.mu["a"])])
    actual, new_state = optimizer.update(grads, state._replace(mu=mu), params)

    assert actual == expected
    assert [*new_state.mu] == ["b", "a"]
    assert type(new_state.mu) is type(mu)


def test_gradients_in_a_dict_of_another_kind_pair_by_key() -> None:
    """An ``OrderedDict`` keeps the order of its keys, which a dict sorts."""
    optimizer = ps.optim.sgd(1.0)
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    grads = OrderedDict(
        b=torch.tensor([1.0]),
        a=torch.tensor([5.0]),
    )
    new_params, _ = optimizer.update(grads, optimizer.init(params), params)
    assert new_params == {"a": -5, "b": -1}


def test_a_rate_that_varies_compiles() -> None:
    def update(w: Tensor, rate: float) -> Any:
        optimizer = ps.optim.sgd(rate)
        state = optimizer.init(w)
        return optimizer.update(w, state, w)[0]

    compiled = torch.compile(update, fullgraph=True, backend="eager")
    w = torch.ones(2)
    for rate in (0.0, 0.25, 0.5):
        assert torch.equal(compiled(w, rate), update(w, rate))


@pytest.mark.parametrize("step", [None, 3, torch.tensor([1, 2])])
def test_a_step_that_is_no_scalar_is_refused(step: Any) -> None:
    optimizer = ps.optim.adamw(0.5)
    params = {"a": torch.ones(2)}
    state = optimizer.init(params)._replace(step=step)
    assert optimizer.update_ is not None
    with pytest.raises(ValueError, match="step"):
        optimizer.update(params, state, params)
    with pytest.raises(ValueError, match="step"):
        optimizer.update_(params, state, params, None)


@pytest.mark.parametrize(
    "mu", [{"a": {}}, {"a": [torch.ones(1)]}, {"a": 1.0}, {"a": None}]
)
def test_a_container_in_the_place_of_a_moment_is_refused(mu: Any) -> None:
    optimizer = ps.optim.adamw(0.5)
    params = {"a": torch.ones(1)}
    state = optimizer.init(params)._replace(mu=mu)
    with pytest.raises((ValueError, TypeError)):
        optimizer.update(params, state, params)
