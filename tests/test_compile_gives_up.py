"""Where ``compile=True`` cannot compile, or has nothing to compile, the step stays the step.

The compiler gives up, a transform goes around it, the loss raises, or somebody looks at every operation.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from purestep.types import UpdateStep
from tests.counted_graphs import (
    GROUPS,
    PLAIN,
    assert_close,
    batch,
    loss_fn,
    make,
    run,
    start,
    weight_fn,
)
from tests.torch_private import few_recompilations

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def of_ours(told: Iterable[warnings.WarningMessage]) -> list[str]:
    """What purestep says; torch's own imports warn the first time."""
    return [text for each in told if (text := str(each.message)).startswith("compile=True")]


def test_where_the_compiler_gives_up() -> None:
    """It is told once, with the reason and the line; the step stays what it was."""

    def branches(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    def branching_loss(params: Any, m: Any) -> Tensor:
        return branches(loss_fn(params, m))

    step, plain = (
        ps.make_update_step(branching_loss, PLAIN, weight_fn=weight_fn, compile=compile)
        for compile in (True, False)
    )
    with pytest.warns(UserWarning, match="cannot make one graph of") as told:
        ours, _ = run(step, PLAIN, GROUPS)
    (text,) = of_ours(told)
    assert "Data-dependent branching" in text
    assert "in branches: return x * 2 if x.sum() > 0 else x" in text
    theirs, _ = run(plain, PLAIN, GROUPS)
    assert_close(ours, theirs)


def test_where_the_compiler_fails() -> None:
    """An index that only the data tells is an error of the compiler's own kind, and eagerly no error at all."""

    def picked(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m) * params["v"][m["y"].argmax().clamp(max=1)]

    step, plain = (
        ps.make_update_step(picked, PLAIN, weight_fn=weight_fn, compile=compile)
        for compile in (True, False)
    )
    with pytest.warns(UserWarning, match="cannot make one graph of"):
        ours, _ = run(step, PLAIN, GROUPS)
    theirs, _ = run(plain, PLAIN, GROUPS)
    assert_close(ours, theirs)


def test_under_a_transform_nothing_is_compiled() -> None:
    """Nor is anybody told that the compiler cannot make a graph of it: a warning would be an error here."""
    axis = ps.VmapAxis(2)
    optimizer = ps.optim.sgd(0.125)
    step = make(optimizer, compile=True, axis=axis, grad_and_value=torch.func.grad_and_value)
    group = [tree.map(lambda *leaves: torch.stack(leaves), batch(2, 4, 0), batch(2, 4, 1))]
    moved = axis.map(step, in_dims=(None, None, 0), out_dims=None)(
        start(), optimizer.init(start()), group
    )
    expected = make(optimizer)(start(), optimizer.init(start()), GROUPS[1][:2])
    assert_same(moved[0], expected[0])


def test_what_varies_without_end_is_told() -> None:
    """A microbatch with a new text each time is a new graph each time, until the compiler has had enough."""
    optimizer = ps.optim.adamw(0.125)

    def scaled(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m) * len(m["name"])

    step, plain = (
        ps.make_update_step(scaled, optimizer, weight_fn=weight_fn, compile=compile)
        for compile in (True, False)
    )
    groups = [[batch(2, 4) | {"name": "a" * length}] for length in range(1, 8)]
    with few_recompilations(), pytest.warns(UserWarning, match="recompile_limit") as told:
        ours, _ = run(step, optimizer, groups)
    assert len(of_ours(told)) == 1
    theirs, _ = run(plain, optimizer, groups)
    assert_close(ours, theirs)


def test_a_loss_that_raises_is_no_matter_of_the_compiler() -> None:
    """The error is the loss's own, and the next step is compiled."""
    step = make(ps.optim.adamw(0.125), compile=True)
    state = ps.optim.adamw(0.125).init(start())
    with warnings.catch_warnings():
        # Dynamo looks at the loss's ``.grad`` when it gives up at the raise.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for _ in range(2):
            with pytest.raises(KeyError, match="y") as raised:
                step(
                    start(),
                    state,
                    [{"x": batch(2, 4)["x"]} | {"y": batch(2, 4)["y"]}, {"x": batch(2, 4)["x"]}],
                )
            assert raised.value.__context__ is None
    step(start(), state, [batch(2, 4)])


@pytest.mark.parametrize("settings", [{}, {"donate": True}])
def test_who_looks_at_every_operation(settings: dict[str, Any]) -> None:
    """A dispatch mode, as a counter of operations is, keeps the compiler away: the step is taken once, without a word."""
    step = make(PLAIN, compile=True, **settings)
    with FlopCounterMode(display=False) as counter:
        ours, _ = run(step, PLAIN, GROUPS)
    assert counter.get_total_flops() > 0
    theirs, _ = run(make(PLAIN), PLAIN, GROUPS)
    assert_same(ours, theirs)


# Dynamo looks at the loss's ``.grad`` when it gives up at the raise.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_errors_come_through() -> None:
    step = ps.make_update_step(
        lambda params, m: loss_fn(params, m).mean(),
        ps.optim.sgd(0.1),
        weight_fn=weight_fn,
        compile=True,
    )
    with pytest.raises(ValueError, match=r"losses of shape \(\) against weights of shape \(2, 4\)"):
        step(start(), ps.optim.sgd(0.1).init(start()), [batch(2, 4)])


def test_a_compiler_at_work_in_another_thread_is_not_ours() -> None:
    """``torch.compiler.is_compiling`` is true of every thread while one of them compiles."""
    began, go_on = threading.Event(), threading.Event()

    def slow(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        began.set()
        assert go_on.wait(60)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=slow)
    other = threading.Thread(target=lambda: compiled(torch.ones(2)))
    other.start()
    try:
        assert began.wait(60)
        assert torch.compiler.is_compiling()
        with pytest.raises(ValueError, match="one is -1"):
            ps.count_tokens([torch.tensor([1.0, -1.0])], lambda m: m)
        old = torch.ones(2, requires_grad=True).clone()
        assert tree.overwrite(old, torch.zeros(2), None) is not old
        torch.testing.assert_close(old, torch.ones(2), rtol=0, atol=0)
    finally:
        go_on.set()
        other.join(60)


def test_transforms_go_around_the_compiler() -> None:
    """An ensemble of compiled steps is the ensemble of steps; a derivative through one is the derivative."""
    optimizer = ps.optim.sgd(0.125)
    group = [batch(2, 4, seed) for seed in range(2)]

    def moved(step: UpdateStep, rate: Tensor) -> Tensor:
        params = tree.map(lambda leaf: leaf * rate, start())
        new: Tensor = step(params, optimizer.init(params), group)[0]["w"]
        return new.sum()

    rates = torch.tensor([1.0, 2.0]).double()
    plain, through = make(optimizer), make(optimizer, compile=True)
    for transform in (torch.vmap, lambda f: torch.vmap(torch.func.grad(f))):
        expected = transform(lambda rate: moved(plain, rate))(rates)
        assert torch.equal(transform(lambda rate: moved(through, rate))(rates), expected)
