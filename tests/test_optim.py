"""Each optimizer by itself, chains, wide and slow copies of params, schedules. T8 compares with torch's."""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, labels, matrices
from proofs.test_t06_purity import storages
from proofs.test_t08_optimizers import random_grads, random_params
from purestep import tree
from purestep.step import apply_update
from tests.halves import HALVES
from tests.optimizers import GRADS, PARAMS, RECIPES, TRANSFORMS, states_of, updated


@pytest.mark.parametrize("max_norm", [0.1, 4.99, 5.0, 10.0])
def test_clipping(max_norm: float) -> None:
    """A norm of five; a shorter gradient stays, to the bit."""
    grads = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(-4.0)}
    clipped, _ = ps.optim.clip_by_global_norm(max_norm).update(grads, (), PARAMS)
    if max_norm < 5:
        assert tree.global_norm(clipped) == pytest.approx(max_norm, rel=1e-6)
    else:
        assert_same(clipped, grads)


def test_a_mask_is_a_tree_or_a_function() -> None:
    masks: list[Any] = [matrices, matrices(PARAMS), OrderedDict(w=True, b=False)]
    for mask in masks:
        optimizer = ps.optim.adamw(0.1, weight_decay=0.5, mask=mask)
        new, _ = optimizer.update(
            tree.zeros_like(PARAMS), optimizer.init(PARAMS), PARAMS
        )
        assert torch.equal(new["b"], PARAMS["b"])
        assert torch.allclose(new["w"], torch.full((2, 2), 0.95))
    assert set(ps.optim.adamw(0.1, mask=True).init(PARAMS)) == {"decay"}


def test_what_does_not_decay_is_not_touched() -> None:
    """Not even multiplied by zero."""
    params = {"w": torch.ones(2, 2), "b": torch.full((2,), float("inf"))}
    decay = ps.optim.add_decayed_weights(0.5, matrices)
    given, wanted = (
        (GRADS, decay.init(params), params),
        {"b": GRADS["b"], "w": GRADS["w"] + 0.5},
    )
    one, many = tree.map(lambda leaf: leaf[None], (given, wanted))
    assert_same(decay.update(*given)[0], wanted)
    assert_same(torch.vmap(decay.update)(*one)[0], many)


@pytest.mark.parametrize("name", RECIPES)
def test_a_state_is_complete_and_detached_and_update_leaves_it_alone(name: str) -> None:
    """The structure never changes, and params that require grad do not reach into the state."""
    optimizer = RECIPES[name](0.1)
    state = optimizer.init(tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS))
    assert not any(leaf.requires_grad for leaf in tree.leaves(state))
    assert len([*states_of(optimizer, PARAMS, [GRADS] * 2)]) == 2
    with pytest.raises(ValueError, match="this update reads the params"):
        optimizer.update(GRADS, state, None)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_that_require_grad_move_the_same(name: str) -> None:
    """As those of a clip at a norm that is learned, in float32, which kernels take."""
    found: list[Any] = []

    def loss_fn(p: Any, m: Tensor) -> Tensor:
        return (p["w"].sum() + p["b"].sum()) * m

    for norm in (torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)):
        optimizer = ps.optim.chain(
            ps.optim.clip_by_global_norm(norm), RECIPES[name](0.1)
        )
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=torch.ones_like)
        params: Any = tree.map(Tensor.float, PARAMS)
        state = optimizer.init(params)
        for scale in (1.0, 2.0):
            params, state, _ = step(params, state, [torch.tensor([scale])])
        found.append((params, state))
    assert found[1][0]["w"].requires_grad
    torch.testing.assert_close(tree.detach(found[1]), found[0])


PAPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (
        ps.optim.adamw,
        {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
    ),
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
    params, state = optimizer.update(
        torch.ones_like(params), optimizer.init(params), params
    )
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


def test_chain_uses_the_last_optimizers_own_update_() -> None:
    """Clipping in front of it does not take a fast in-place step away."""
    calls = []

    def update_(grads: Any, state: Any, params: Any, applied: Any) -> Any:
        calls.append(grads["w"])
        return params, state

    own = ps.optim.descend(1.0)._replace(update_=update_)
    optimizer = ps.optim.chain(TRANSFORMS["clip"], own)
    updated(
        optimizer,
        "update_",
        tree.map(torch.clone, GRADS),
        optimizer.init(PARAMS),
        PARAMS,
    )
    assert len(calls) == 1
    assert not torch.equal(calls[0], GRADS["w"])


def delayed(grads: Any, state: Any, params: Any) -> Any:
    """The gradients of the step before; the state keeps those of this one."""
    return state, grads


FIRST = [ps.optim.momentum(0.5), ps.optim.Transform(tree.zeros_like, delayed)]


@pytest.mark.parametrize("behind", ["clip", "decay", "momentum"])
@pytest.mark.parametrize("first", FIRST)
def test_what_comes_behind_a_part_leaves_its_state_alone(
    first: Any, behind: str
) -> None:
    """It may write to the updates that it gets, and they are not the state's memory."""
    optimizer = ps.optim.chain(first, TRANSFORMS[behind], ps.optim.descend(1.0))
    pure = in_place = (PARAMS, optimizer.init(PARAMS))
    for scale in (1.0, -2.0, 3.0):
        grads = tree.map(lambda leaf, scale=scale: leaf * scale, GRADS)
        pure = optimizer.update(grads, pure[1], pure[0])
        own = tree.map(torch.clone, (grads, in_place[1], in_place[0]))
        in_place = updated(optimizer, "update_", *own)
        assert_same(in_place, pure)


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_that_swaps_its_buffers(donate: bool) -> None:
    """The old params become state, and the state the params."""
    swap = ps.optim.Optimizer(
        tree.zeros_like, lambda grads, state, params: (state, params)
    )
    params, state = tree.map(torch.clone, (PARAMS, swap.init(PARAMS)))
    moved, after = apply_update(
        swap, GRADS, state, params, torch.tensor(True), donate=donate
    )
    assert_same((moved, after), (tree.zeros_like(PARAMS), PARAMS))


@pytest.mark.parametrize("donate", [False, True])
def test_the_mean_by_hand(donate: bool) -> None:
    """It begins at the params and moves where they do, in other memory, where it stays."""
    optimizer = ps.optim.ema(ps.optim.sgd(1.0), 0.75)
    step = ps.make_update_step(
        lambda w, x: w.sum() * x, optimizer, weight_fn=torch.ones_like, donate=donate
    )
    w = torch.tensor([0.0, 8.0])
    first = state = optimizer.init(w)
    place = first.average.data_ptr()
    for x, wanted, mean in (
        (-4.0, [4.0, 12.0], [1.0, 9.0]),
        (-8.0, [12.0, 20.0], [3.75, 11.75]),
    ):
        w, state, _ = step(w, state, [torch.tensor([x])])
        assert (w.tolist(), state.average.tolist()) == (wanted, mean)
        assert state.average.data_ptr() != w.data_ptr()
    assert (state.average.data_ptr() == place) == donate
    assert donate or first.average.tolist() == [0.0, 8.0]


def test_half_precision_is_averaged_in_float32() -> None:
    """256 + (258 - 256) / 4 is no bfloat16; in ``master_weights``, nor is 256 + 1.25 / 4."""
    theta, sgd = torch.tensor(256.0, dtype=torch.bfloat16), ps.optim.sgd(1.0)
    rounded = ps.optim.ema(sgd, 0.75)
    _, state = rounded.update(torch.tensor(-2.0), rounded.init(theta), theta)
    assert (state.average.dtype, float(state.average)) == (torch.float32, 256.5)
    wide = ps.optim.master_weights(rounded)
    _, state = wide.update(torch.tensor(-1.25), wide.init(theta), theta)
    assert (state.inner.average.dtype, float(state.inner.average)) == (
        torch.float32,
        256.3125,
    )


def test_a_decay_for_each_of_an_ensemble() -> None:
    def averaged(decay: Tensor) -> Tensor:
        optimizer = ps.optim.ema(ps.optim.sgd(1.0), decay)
        w = torch.tensor(0.0)
        return optimizer.update(torch.tensor(-4.0), optimizer.init(w), w)[1].average

    assert torch.vmap(averaged)(torch.tensor([0.0, 0.5, 1.0])).tolist() == [
        4.0,
        2.0,
        0.0,
    ]


INNER: dict[str, ps.optim.Optimizer] = {
    "adamw": ps.optim.adamw(0.01, weight_decay=0.1),
    "sgd": ps.optim.sgd(ps.optim.linear_schedule(0.1, 0.01, 10), 0.9, nesterov=True),
    "clipped": ps.optim.chain(ps.optim.clip_by_global_norm(1.0), ps.optim.lion(0.01)),
    "torch": ps.optim.from_torch(
        torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True
    ),
    "partition": ps.optim.partition(
        labels,
        {"matrix": ps.optim.from_torch(torch.optim.Muon), "rest": ps.optim.adamw(0.01)},
    ),
}


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("name", INNER)
def test_master_weights_are_the_wide_run(
    name: str, dtype: Any, grad_dtype: Any
) -> None:
    """Bitwise, with its whole state; and the params are the master rounded, in other memory."""
    generator, inner = torch.Generator().manual_seed(0), INNER[name]
    optimizer = ps.optim.master_weights(inner)
    params = random_params({"matrix": (4, 8), "rest": [(16,), (48,)]}, dtype, generator)
    wide = tree.map(lambda leaf: leaf.to(tree.accumulation_dtype(dtype)), params)
    grads = [random_grads(wide, generator) for _ in range(5)]
    grads = tree.map(lambda leaf: leaf.to(grad_dtype or dtype), grads)
    alone = wide, inner.init(wide)
    assert not storages(optimizer.init(params)) & storages(params)
    for one, (ours, state) in zip(
        grads, states_of(optimizer, params, grads), strict=True
    ):
        alone = inner.update(tree.map(Tensor.type_as, one, wide), alone[1], alone[0])
        assert_same(state, ps.optim.MasterState(*alone), "opt_state")
        assert_same(ours, tree.map(lambda leaf: leaf.to(dtype), state.master), "params")


def test_derivatives_through_master_weights() -> None:
    """The master's derivative passes through; rounding has that of the identity."""
    w = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    optimizer = ps.optim.master_weights(ps.optim.sgd(0.125))

    def moved(grad: Tensor) -> Any:
        new, state = optimizer.update(grad, optimizer.init(w), w)
        return new.sum(), state.master.sum()

    for slope in torch.func.jacrev(moved)(torch.tensor([0.5, 0.25])):
        assert slope.tolist() == [-0.125, -0.125]


def test_schedules_keep_their_precision() -> None:
    schedule = ps.optim.warmup_cosine_decay_schedule(0.0, 0.3, 10, 100, 0.03)
    for step, rate in ((5, 0.15), (10, 0.3), (1000, 0.03)):
        assert schedule(torch.tensor(step)) == pytest.approx(rate, rel=1e-15)


optim: Any = ps.optim
CLIP, SGD = TRANSFORMS["clip"], optim.sgd(0.1)
USUAL, schedulers = torch.optim.SGD([torch.ones(1)], lr=0.1), torch.optim.lr_scheduler
PLATEAU, STEPS = schedulers.ReduceLROnPlateau(USUAL), schedulers.StepLR(USUAL, 3)
MASK = r"a tree of bools like|is no prefix of a tree like"
OF_TORCH = r"scheduler of torch.*function of the step: ps\.optim"
NO_RATE = "must be a number, a scalar tensor or a schedule"
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: optim.chain(), ValueError, "at least one"),
    (lambda: optim.chain(SGD, SGD), TypeError, r"part 0 of 2 is an Optimizer.*put it last"),
    (lambda: optim.chain(CLIP, 0.1), TypeError, "part 1 must be a Transform or an Optimizer, got float"),
    (lambda: optim.sgd(0.1, nesterov=True), ValueError, r"nesterov=True looks ahead .*, but momentum=0"),
    (lambda: optim.ema(CLIP, 0.9), TypeError, "ema wraps an Optimizer, got Transform"),
    (lambda: optim.ema(SGD, 1.1), ValueError, r"decay=1\.1 must be from 0 to 1"),
    (lambda: optim.master_weights(CLIP), TypeError, r"wraps an Optimizer, got Transform: .*descend\(lr\)"),
    (lambda: optim.linear_schedule(0.0, 1.0, 0), ValueError, "transition_steps=0 must be positive"),
    (lambda: optim.cosine_decay_schedule(1.0, -1), ValueError, "decay_steps=-1 must be positive"),
    (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5), ValueError, "decay_steps=5 is the whole length .* warmup_steps=5"),
    (lambda: optim.join_schedules([abs, abs], [1, 2]), ValueError, "2 schedules have 1 boundaries between them, but 2 were given"),
    *((lambda mask=mask: optim.sgd(0.1, weight_decay=0.1, mask=mask).init(PARAMS), ValueError, MASK)
      for mask in ({"w": True}, 1, {"w": torch.tensor(True), "b": False})),
    *((partial(make, rate), TypeError, message)
      for make in (optim.descend, optim.adamw, optim.lion, partial(optim.from_torch, torch.optim.SGD))
      for message, rates in {OF_TORCH: (STEPS, PLATEAU, schedulers.CosineAnnealingLR), NO_RATE: ("0.1", dict, [0.1])}.items()
      for rate in rates),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    """A mask and a rate, too: torch's schedulers write into torch's optimizers, and a schedule is a function."""
    with pytest.raises(error, match=message):
        call()
