"""Donation: each buffer is given away once, and none that the data or autograd still need."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import purestep as ps
from purestep import tree
from support.purity import storages_in
from support.strategies import assert_same
from tests.line_problem import MICROBATCH, PARAMS, SGD, loss_fn, weight_fn


def test_outputs_are_no_views_of_inputs() -> None:
    """A loss may return a parameter as aux; the metrics hold a copy."""

    def loss_with_param(p: Any, m: Any) -> ps.LossOutput:
        return ps.LossOutput(loss_fn(p, m), aux=p["w"])

    step = ps.make_update_step(loss_with_param, SGD, weight_fn=weight_fn, donate=True)
    params = tree.map(torch.clone, PARAMS)

    new, _, metrics = step(params, SGD.init(params), [MICROBATCH])

    assert new["w"].data_ptr() == params["w"].data_ptr()
    assert metrics.aux == 1
    assert new["w"] != 1


LEAVES = r"\[0\]\['a'\], but \(.*\)\[0\]\['b'\] shares its memory: clone one of them"
DATA = r"\[0\]\['a'\], but microbatches\[1\]\['x'\] shares its memory"
ITSELF = r"\[0\]\['a'\] overlaps itself"
ALLOWED = ""
ONE = torch.ones(1)


class Memory(NamedTuple):
    """How two leaves and the data are made of eight numbers in one storage."""

    refused: str
    a: Callable[[Tensor], Tensor]
    b: Callable[[Tensor], Tensor] = lambda eight: ONE.clone()
    x: Callable[[Tensor], Tensor] = lambda eight: ONE


@pytest.mark.parametrize(
    "case",
    [
        Memory(
            refused=LEAVES,
            a=lambda eight: eight[:2],
            b=lambda eight: eight[:2],
        ),
        Memory(
            refused=LEAVES,
            a=lambda eight: eight[:2],
            b=lambda eight: eight[4:6],
        ),
        Memory(
            refused=DATA,
            a=lambda eight: eight[:2],
            x=lambda eight: eight[2:4],
        ),
        Memory(ITSELF, a=lambda eight: eight.expand(2, 8)),
        Memory(ITSELF, a=lambda eight: eight[:1].expand(4)),
        Memory(ITSELF, a=lambda eight: eight.unfold(0, 3, 1)),
        # As many elements as memory, and as many gaps as are shared.
        Memory(ITSELF, a=lambda eight: eight.as_strided((2, 2), (2, 2))),
        Memory(ITSELF, a=lambda eight: eight.as_strided((2, 2, 2), (3, 3, 1))),
        Memory(ALLOWED, a=lambda eight: torch.zeros(10, 4)[:0, :2].flatten()),
        # A leaf without elements shares nothing, though it lies in the memory of another.
        Memory(ALLOWED, a=lambda eight: eight[:0], b=lambda eight: eight[:1]),
        # A leaf with gaps, or in another order, is given away like any other.
        Memory(ALLOWED, a=lambda eight: eight.unfold(0, 3, 3)),
        Memory(ALLOWED, a=lambda eight: eight[::2]),
        Memory(ALLOWED, a=lambda eight: eight.as_strided((3, 2), (2, 3))),
        Memory(ALLOWED, a=lambda eight: eight.view(2, 4).t()[1:]),
    ],
)
def test_leaves_and_data_that_share_memory_are_refused(case: Memory) -> None:
    """Before anything is written, by any strides."""
    eight = torch.arange(8.0)
    params = {"a": case.a(eight), "b": case.b(eight)}
    x = case.x(eight)
    shape = params["a"].shape
    not_dense = ["a word", torch.eye(2).to_sparse()]
    group = [{"x": torch.ones(1), "more": not_dense}, {"x": x}]
    clones = tree.map(torch.clone, params)

    def product(p: Any, m: Any) -> Tensor:
        return p["a"] * p["b"] * m["x"]

    def ones(m: Any) -> Tensor:
        return torch.ones(shape)

    plain = ps.make_update_step(product, SGD, weight_fn=ones)
    donating = ps.make_update_step(product, SGD, weight_fn=ones, donate=True)
    expected, *_ = plain(clones, SGD.init(clones), group)

    if case.refused:
        with pytest.raises(ValueError, match=case.refused):
            donating(params, SGD.init(params), group)
        for name, leaf in params.items():
            assert torch.equal(leaf, clones[name])
        params = clones
    new, *_ = donating(params, SGD.init(params), group)

    for name, leaf in new.items():
        assert leaf.data_ptr() == params[name].data_ptr()
        assert torch.equal(leaf, expected[name])


def as_it_is(step: Any) -> Any:
    return step


def compile_by_eager(step: Any) -> Any:
    return ps.compile(step, backend="eager", fullgraph=True)


@pytest.mark.parametrize("make", [as_it_is, compile_by_eager])
def test_a_tensor_that_is_two_leaves_is_refused_in_later_updates_too(make: Any) -> None:
    """Nothing is written: the state goes on from clones."""
    ema = ps.optim.ema(SGD, decay=0.5)
    step = make(
        ps.make_update_step(product_of_two, ema, weight_fn=torch.ones_like, donate=True)
    )
    group = [torch.ones(2)]
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    new, state, _ = step(params, ema.init(params), group)
    for wrong in (state.average, dict.fromkeys("ab", new["a"])):
        before = tree.map(torch.clone, (wrong, state))
        with pytest.raises(ValueError, match="shares its memory: clone one of them"):
            step(wrong, state, group)
        assert_same((wrong, state), before)
    step(tree.map(torch.clone, state.average), state, group)


def test_a_compiled_step_writes_to_what_is_donated() -> None:
    """Before that, the first call raises for memory that a microbatch shares."""
    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn, donate=True)
    expected = step(tree.map(torch.clone, PARAMS), SGD.init(PARAMS), [MICROBATCH])
    params = tree.map(torch.clone, PARAMS)
    opt_state = SGD.init(params)
    before = storages_in((params, opt_state))
    compiled = ps.compile(step, fullgraph=True, backend="aot_eager")
    group = [{**MICROBATCH, "view": params["w"].view(-1)}]
    with pytest.raises(ValueError, match=r"microbatches\[0\]\['view'\] shares"):
        compiled(params, opt_state, group)
    assert_same(params, PARAMS)

    *state, metrics = compiled(params, opt_state, [MICROBATCH])

    assert storages_in(state) == before
    assert_same((*state, metrics), expected)


def product_of_two(params: Any, x: Tensor) -> Tensor:
    return (params["a"] * 2 + params["b"] * 3).sum() * x


def donate_to(around: Callable[[Any], Any], params: Any) -> Any:
    """Runs a step that donates, with a function around it, compiled."""
    step = ps.make_update_step(
        product_of_two, SGD, weight_fn=torch.ones_like, donate=True
    )
    compiled = ps.compile(around(step), backend="eager", fullgraph=True)
    return compiled(params, SGD.init(params), [torch.ones(2)])


def with_lambda(step: Any) -> Any:
    return lambda *args: step(*args)


def with_wraps(step: Any) -> Any:
    @functools.wraps(step)
    def wrapped(params: Any, opt_state: Any, group: Any, scale: float = 1.0) -> Any:
        return step(params, opt_state, group)

    return wrapped


@pytest.mark.parametrize("around", [with_lambda, with_wraps])
def test_a_function_around_a_step_donates_nothing(around: Any) -> None:
    """Nothing looks for leaves that share memory there."""
    a = torch.ones(2)
    params = {"a": a, "b": a}
    expected = ps.make_update_step(product_of_two, SGD, weight_fn=torch.ones_like)(
        params, SGD.init(params), [torch.ones(2)]
    )
    assert_same(donate_to(around, params), expected)
    assert torch.equal(a, torch.ones(2))


def test_a_compiled_step_without_donation_takes_one_tensor_as_two_leaves() -> None:
    step = ps.make_update_step(product_of_two, SGD, weight_fn=torch.ones_like)
    shared = dict.fromkeys("ab", torch.ones(2))
    arguments = shared, SGD.init(shared), [torch.ones(2)]
    compiled = compile_by_eager(step)
    for _ in range(2):
        assert_same(compiled(*arguments), step(*arguments))


def test_a_compiled_step_checks_params_of_each_structure() -> None:
    step = ps.make_update_step(
        product_of_two, SGD, weight_fn=torch.ones_like, donate=True
    )
    compiled = ps.compile(step, backend="eager", fullgraph=True)
    params = {name: torch.ones(2) for name in "abc"}
    compiled(params, SGD.init(params), [torch.ones(2)])
    shared = dict.fromkeys("ab", torch.ones(2))
    with pytest.raises(ValueError, match="shares its memory"):
        compiled(shared, SGD.init(shared), [torch.ones(2)])


def test_dual_numbers_around_a_compiled_step_are_not_written_over() -> None:
    """Nor is their tangent lost: the step runs eagerly."""
    momentum = ps.optim.sgd(0.5, momentum=0.5)
    step = ps.make_update_step(
        lambda p, x: product_of_two(p, x).square(),
        momentum,
        weight_fn=torch.ones_like,
        donate=True,
    )
    compiled = ps.compile(step, backend="eager", fullgraph=True)
    group = [torch.ones(2)]
    params = {name: torch.ones(2) for name in "ab"}
    compiled(tree.map(torch.clone, params), momentum.init(params), group)
    tangents = []
    for run in (step, compiled):
        with forward_ad.dual_level():
            duals = {k: forward_ad.make_dual(p, p) for k, p in params.items()}
            new, *_ = run(duals, momentum.init(params), group)
            tangents.append(forward_ad.unpack_dual(new["a"]).tangent)
    assert torch.equal(params["a"], torch.ones(2))
    assert_same(*tangents)


def test_a_call_under_a_transform_does_not_make_the_checks_of_later_ones() -> None:
    params = dict.fromkeys("ab", torch.ones(2))
    state = SGD.init(params)
    x = torch.ones(2)

    def product(p: Any, m: Any) -> Tensor:
        return p["a"] * p["b"] * m

    step = ps.make_update_step(product, SGD, weight_fn=torch.ones_like, donate=True)

    def sum_after_step(params: Any) -> Tensor:
        new, *_ = step(params, state, [x])
        a: Tensor = new["a"]
        return a.sum()

    torch.func.grad(sum_after_step)(params)

    with pytest.raises(ValueError, match="memory"):
        step(params, state, [x])
