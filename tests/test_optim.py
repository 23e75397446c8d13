"""Each optimizer by itself, chains, means of params, schedules. T8 compares with torch's."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, matrices
from proofs.test_t08_optimizers import buffers
from purestep import tree
from purestep.step import transition
from tests.optimizers import GRADS, PARAMS, RECIPES, TRANSFORMS, states_of, updated


@given(st.floats(0.1, 10))
def test_clipping(max_norm: float) -> None:
    """To a norm of five; a shorter gradient stays, to the bit."""
    grads = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(-4.0)}
    clipped, _ = ps.optim.clip_by_global_norm(max_norm).update(grads, (), PARAMS)
    if max_norm < 5:
        assert tree.global_norm(clipped) == pytest.approx(max_norm, rel=1e-6)
    else:
        assert_same(clipped, grads)


def test_a_mask_is_a_tree_or_a_function() -> None:
    masks: list[Any] = [matrices, matrices(PARAMS)]
    for mask in masks:
        optimizer = ps.optim.adamw(0.1, weight_decay=0.5, mask=mask)
        new, _ = optimizer.update(tree.zeros_like(PARAMS), optimizer.init(PARAMS), PARAMS)
        assert torch.equal(new["b"], PARAMS["b"])
        assert torch.allclose(new["w"], torch.full((2, 2), 0.95))
    assert set(ps.optim.adamw(0.1, mask=True).init(PARAMS)) == {"decay"}
    for mask in ({"w": True}, 1, tree.map(lambda leaf: torch.tensor(True), PARAMS)):
        with pytest.raises(ValueError, match=r"a tree of bools like|is no prefix of a tree like"):
            ps.optim.sgd(0.1, weight_decay=0.1, mask=mask).init(PARAMS)


@pytest.mark.parametrize("transform", [lambda f: f, torch.vmap])
def test_what_does_not_decay_is_not_touched(transform: Any) -> None:
    """Not even multiplied by zero."""
    params = {"w": torch.ones(2, 2), "b": torch.full((2,), float("inf"))}
    decay = ps.optim.add_decayed_weights(0.5, matrices)
    given = (GRADS, decay.init(params), params)
    if transform is torch.vmap:
        given = tree.map(lambda leaf: leaf[None], given)
    updates, _ = transform(decay.update)(*given)
    assert torch.equal(updates["b"].squeeze(0), GRADS["b"])
    assert torch.equal(updates["w"].squeeze(0), GRADS["w"] + 0.5)


def test_sgd_refuses_nesterov_without_momentum() -> None:
    with pytest.raises(ValueError, match=r"nesterov=True looks ahead .*, but momentum=0"):
        ps.optim.sgd(0.1, nesterov=True)


STATES = {
    **RECIPES,
    "torch's Adagrad": lambda rate: ps.optim.from_torch(
        torch.optim.Adagrad, rate, initial_accumulator_value=0.5
    ),
    "torch's ASGD": lambda rate: ps.optim.from_torch(torch.optim.ASGD, rate),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_complete_and_detached_and_update_leaves_it_alone(name: str) -> None:
    """The structure never changes, and params that require grad do not reach into the state."""
    optimizer = STATES[name](0.1)
    state = optimizer.init(tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS))
    assert not any(leaf.requires_grad for leaf in tree.leaves_of(state))
    assert len([*states_of(optimizer, PARAMS, [GRADS])]) == 1


PAPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (ps.optim.adamw, {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}),
    "scale_by_adam": (ps.optim.scale_by_adam, {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
    "sgd": (ps.optim.sgd, {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
    "lion": (ps.optim.lion, {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0}),
    "momentum": (ps.optim.momentum, {"nesterov": False}),
}


@pytest.mark.parametrize("name", PAPERS)
def test_defaults_are_the_papers(name: str) -> None:
    """Adam's [Kingma and Ba, 2015], AdamW's as in torch, Lion's [Chen et al., 2023]."""
    make, wanted = PAPERS[name]
    own = inspect.signature(make).parameters
    defaults = {key: p.default for key, p in own.items() if p.default is not p.empty}
    defaults.pop("mask", None)
    assert defaults == wanted


def test_lions_defaults_in_effect() -> None:
    """After a gradient of 1, μ is 0.01, and sign(0.9 μ + 0.1 g) turns at g = -0.09."""
    optimizer = ps.optim.lion(1.0)
    params = torch.zeros(2, dtype=torch.float64)
    params, state = optimizer.update(torch.ones_like(params), optimizer.init(params), params)
    params, _ = optimizer.update(torch.tensor([-0.089, -0.091]).double(), state, params)
    assert params.tolist() == [-2.0, 0.0]


def test_lion_passes_on_what_is_not_finite() -> None:
    """torch's sign of NaN is 0, which would hide it."""
    optimizer, params = ps.optim.lion(0.1), torch.ones(3)
    grad = torch.tensor([float("nan"), 0.0, float("inf")])
    moved, _ = optimizer.update(grad, optimizer.init(params), params)
    assert moved.isnan().tolist() == [True, False, True]


def test_chain_of_transforms_is_a_transform() -> None:
    chained = ps.optim.chain(TRANSFORMS["clip"], TRANSFORMS["momentum"])
    assert isinstance(chained, ps.optim.Transform)
    nested = ps.optim.chain(chained, ps.optim.sgd(0.1))
    assert isinstance(nested, ps.optim.Optimizer)
    flat = ps.optim.chain(TRANSFORMS["clip"], TRANSFORMS["momentum"], ps.optim.sgd(0.1))
    results = [o.update(GRADS, o.init(PARAMS), PARAMS)[0] for o in (nested, flat)]
    assert torch.equal(results[0]["w"], results[1]["w"])


def test_chain_refuses() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ps.optim.chain()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"part 0 of 2 is an Optimizer.*put it last"):
        ps.optim.chain(ps.optim.sgd(0.1), ps.optim.sgd(0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="part 1 must be a Transform or an Optimizer, got float"):
        ps.optim.chain(TRANSFORMS["clip"], 0.1)  # type: ignore[type-var]


def test_chain_uses_the_last_optimizers_own_update_() -> None:
    """Clipping in front of it does not take a fast in-place step away."""
    calls = []

    def update_(grads: Any, state: Any, params: Any, applied: Any) -> Any:
        calls.append(grads["w"])
        return params, state

    own = ps.optim.descend(1.0)._replace(update_=update_)
    optimizer = ps.optim.chain(TRANSFORMS["clip"], own)
    updated(optimizer, "update_", tree.map(torch.clone, GRADS), optimizer.init(PARAMS), PARAMS)
    assert len(calls) == 1
    assert not torch.equal(calls[0], GRADS["w"])


def delayed(grads: Any, state: Any, params: Any) -> Any:
    """The gradients of the step before; the state keeps those of this one."""
    return state, grads


FIRST = {
    "keeps a trace": ps.optim.momentum(0.5),
    "hands on its state": ps.optim.Transform(tree.zeros_like, delayed),
}


@pytest.mark.parametrize("behind", ["clip", "decay", "momentum"])
@pytest.mark.parametrize("first", FIRST)
def test_what_comes_behind_a_part_leaves_its_state_alone(first: str, behind: str) -> None:
    """It may write to the updates that it gets, and they are not the state's memory."""
    optimizer = ps.optim.chain(FIRST[first], TRANSFORMS[behind], ps.optim.descend(1.0))
    pure = in_place = (PARAMS, optimizer.init(PARAMS))
    for scale in (1.0, -2.0, 3.0):
        grads = tree.map(lambda leaf, scale=scale: leaf * scale, GRADS)
        pure = optimizer.update(grads, pure[1], pure[0])
        given = tree.map(torch.clone, (grads, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *given)
        assert_same(in_place, pure)


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_that_swaps_its_buffers(donate: bool) -> None:
    """The old params become state, and the state the params."""
    swap = ps.optim.Optimizer(tree.zeros_like, lambda grads, state, params: (state, params))
    params, state = tree.map(torch.clone, (PARAMS, swap.init(PARAMS)))
    moved, after = transition(swap, GRADS, state, params, torch.tensor(True), donate=donate)
    assert_same((moved, after), (tree.zeros_like(PARAMS), PARAMS))


EMA = ps.optim.ema(ps.optim.sgd(1.0), 0.75)


def params_of_ema() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.0, 8.0]), "b": torch.tensor(16.0)}


def loss_of_ema(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Its gradient is x for each element."""
    return x * (params["w"].sum() + params["b"])


def lists(params: Any) -> Any:
    return params["w"].tolist(), params["b"].tolist()


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("donate", [False, True])
def test_the_mean_by_hand(donate: bool, normalize: Any) -> None:
    """It moves where the params do, and then alone; it lies in other memory, and stays there."""
    step = ps.make_update_step(
        loss_of_ema, EMA, weight_fn=lambda x: x != 0, on_nonfinite="skip",
        donate=donate, normalize=normalize,
    )  # fmt: skip
    params = params_of_ema()
    first = state = EMA.init(params)
    assert lists(state.average) == lists(params)
    places = buffers(state.average)
    for group, wanted, mean in (
        ([torch.tensor([-4.0])], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([torch.tensor([float("inf")])], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([torch.tensor([0.0])], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([torch.tensor([-8.0, -8.0])], ([12.0, 20.0], 28.0), ([3.75, 11.75], 19.75)),
    ):
        params, state, _ = step(params, state, group)
        assert (lists(params), lists(state.average)) == (wanted, mean)
        assert not {*buffers(state.average)} & {*buffers(params)}
    assert (buffers(state.average) == places) == donate
    assert donate or lists(first.average) == lists(params_of_ema())


def test_half_precision_is_averaged_in_float32() -> None:
    """256 + (258 - 256) / 4 is no bfloat16; in ``master_weights``, nor is 256 + 1.25 / 4."""
    theta, sgd = torch.tensor(256.0, dtype=torch.bfloat16), ps.optim.sgd(1.0)
    rounded = ps.optim.ema(sgd, 0.75)
    _, state = rounded.update(torch.tensor(-2.0), rounded.init(theta), theta)
    assert (state.average.dtype, float(state.average)) == (torch.float32, 256.5)
    wide = ps.optim.master_weights(rounded)
    _, state = wide.update(torch.tensor(-1.25), wide.init(theta), theta)
    assert (state.inner.average.dtype, float(state.inner.average)) == (torch.float32, 256.3125)


def test_a_decay_for_each_of_an_ensemble() -> None:
    def averaged(decay: Tensor) -> Tensor:
        optimizer = ps.optim.ema(ps.optim.sgd(1.0), decay)
        w = torch.tensor(0.0)
        return optimizer.update(torch.tensor(-4.0), optimizer.init(w), w)[1].average

    assert torch.vmap(averaged)(torch.tensor([0.0, 0.5, 1.0])).tolist() == [4.0, 2.0, 0.0]


def test_ema_refuses() -> None:
    with pytest.raises(TypeError, match="ema wraps an Optimizer, got Transform"):
        ps.optim.ema(ps.optim.momentum(0.9), 0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decay=1\.1 must be from 0 to 1"):
        ps.optim.ema(ps.optim.sgd(1.0), 1.1)
    other = EMA.init({"w": torch.ones(3)})
    with pytest.raises(ValueError, match=r"opt_state was not made by optimizer\.init of these"):
        EMA.update(params_of_ema(), other, params_of_ema())


warmup = ps.optim.warmup_cosine_decay_schedule
NO_SCHEDULE: dict[str, Callable[[], Any]] = {
    "transition_steps=0 must be positive": lambda: ps.optim.linear_schedule(0.0, 1.0, 0),
    "decay_steps=-1 must be positive": lambda: ps.optim.cosine_decay_schedule(1.0, -1),
    "decay_steps=5 is the whole length .* warmup_steps=5": lambda: warmup(0.0, 1.0, 5, 5),
    "2 schedules have 1 boundaries between them, but 2 were given": (
        lambda: ps.optim.join_schedules([lambda s: s, lambda s: s], [1, 2])
    ),
}


@pytest.mark.parametrize("message", NO_SCHEDULE)
def test_schedules_refuse(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NO_SCHEDULE[message]()


def test_schedules_keep_their_precision() -> None:
    schedule = warmup(0.0, 0.3, 10, 100, 0.03)
    for step, rate in ((5, 0.15), (10, 0.3), (1000, 0.03)):
        assert schedule(torch.tensor(step)) == pytest.approx(rate, rel=1e-15)


TAKE_A_RATE = [ps.optim.descend, ps.optim.adamw, partial(ps.optim.from_torch, torch.optim.SGD)]


@pytest.mark.parametrize("make", TAKE_A_RATE)
def test_a_rate_that_is_none(make: Any) -> None:
    """torch's schedulers write into torch's optimizers; a schedule is a function."""
    usual = torch.optim.SGD([torch.ones(1)], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    plateau, cosine = schedulers.ReduceLROnPlateau(usual), schedulers.CosineAnnealingLR
    for scheduler in (schedulers.StepLR(usual, 3), plateau, cosine):
        with pytest.raises(TypeError, match=r"scheduler of torch.*function of the step: ps\.optim"):
            make(scheduler)
    for rate in ("0.1", dict, [0.1]):
        with pytest.raises(TypeError, match="must be a number, a scalar tensor or a schedule"):
            make(rate)
