"""Where ``compile=True`` cannot compile, or has nothing to compile, the step stays the step."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from purestep.types import UpdateStep
from tests.counted_graphs import AOT, GROUPS, PLAIN, assert_close, batch, loss_fn, make, run, start
from tests.torch_private import few_recompilations

# Dynamo looks at the loss's ``.grad`` when it gives up at the raise.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def of_ours(told: Iterable[warnings.WarningMessage]) -> list[str]:
    """What purestep says; torch's own imports warn the first time."""
    return [text for each in told if (text := str(each.message)).startswith("compile=True")]


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def branching(params: Any, m: Any) -> Tensor:
    return branches(loss_fn(params, m))


def picking(params: Any, m: Any) -> Tensor:
    """An index that only the data tells is an error of the compiler, and eagerly none at all."""
    return loss_fn(params, m) * params["v"][m["y"].argmax().clamp(max=1)]


def scaling(params: Any, m: Any) -> Tensor:
    """Each new text is a new graph, until the compiler has had enough."""
    return loss_fn(params, m) * len(m["name"])


def penalised(params: Any, m: Any) -> Tensor:
    """Graphs in pieces would lose the second derivative."""
    x = m["x"].clone().requires_grad_()
    energy = (x @ params["w"]).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    losses: Tensor = loss_fn(params, m) + force.square().mean()
    return losses


TEXTS = [[batch(2, 4) | {"name": "a" * length}] for length in range(1, 8)]
GIVEN_UP: dict[Any, tuple[list[Any], str]] = {
    branching: (GROUPS, "Data-dependent branching"),
    picking: (GROUPS[1:2], "cannot make one graph of"),
    scaling: (TEXTS, "recompile_limit"),
    penalised: (GROUPS[1:2], "cannot make one graph of"),
}


@pytest.mark.parametrize("loss", GIVEN_UP)
def test_where_the_compiler_gives_up(loss: Any) -> None:
    """One warning says why, and at which line; the step stays what it was."""
    groups, reason = GIVEN_UP[loss]
    with few_recompilations(), pytest.warns(UserWarning, match=reason) as told:
        ours, _ = run(make(PLAIN, loss, compile=True), PLAIN, groups)
    (text,) = of_ours(told)
    assert loss is not branching or "in branches: return x * 2 if x.sum() > 0 else x" in text
    theirs, _ = run(make(PLAIN, loss), PLAIN, groups)
    assert_close(ours, theirs)


def test_a_derivative_inside_the_loss_with_a_compiler_of_ones_own() -> None:
    with pytest.warns(UserWarning, match="cannot make one graph of"):
        ours, _ = run(make(PLAIN, penalised, compile=AOT), PLAIN, GROUPS[1:2])
    theirs, _ = run(make(PLAIN, penalised), PLAIN, GROUPS[1:2])
    assert_same(ours, theirs)


def test_a_checkpoint_runs_eagerly_with_a_warning() -> None:
    """What the compiler forbids when it fails is allowed again."""

    def checkpointed(params: Any, m: Any) -> Tensor:
        kept: Tensor = checkpoint(loss_fn, params, m, use_reentrant=False)
        return kept

    given = start(), PLAIN.init(start()), GROUPS[1]
    with pytest.warns(UserWarning, match="make one graph of .*checkpointed"):
        ours, theirs = (make(PLAIN, checkpointed, compile=c)(*given) for c in (True, False))
    assert_same(ours[:2], theirs[:2])
    w = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, w, use_reentrant=False).sum().backward()
    assert w.grad is not None


def test_errors_of_the_loss_come_through() -> None:
    """Without a word about the compiler; the next step is compiled."""
    step = make(PLAIN, compile=AOT)
    given, first = (start(), PLAIN.init(start())), batch(2, 4)
    for _ in range(2):
        with pytest.raises(KeyError, match="y") as raised:
            step(*given, [first, {"x": first["x"]}])
        assert raised.value.__context__ is None
    step(*given, [first])
    mean = make(PLAIN, lambda params, m: loss_fn(params, m).mean(), compile=AOT)
    with pytest.raises(ValueError, match=r"losses of shape \(\) against weights of shape \(2, 4\)"):
        mean(*given, [first])


def test_a_dispatch_mode_keeps_the_compiler_away() -> None:
    """As a counter of operations is: the step is taken once, without a warning."""
    with FlopCounterMode(display=False) as counter:
        ours, _ = run(make(PLAIN, compile=True, donate=True), PLAIN, GROUPS)
    assert counter.get_total_flops() > 0
    assert_same(ours, run(make(PLAIN), PLAIN, GROUPS)[0])


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
        assert torch.equal(old, torch.ones(2))
    finally:
        go_on.set()
        other.join(60)


SGD = ps.optim.sgd(0.125)
RATES = torch.tensor([1.0, 2.0]).double()


def ensemble(step: UpdateStep) -> Tensor:
    def moved(rate: Tensor) -> Tensor:
        params = tree.map(lambda leaf: leaf * rate, start())
        new: Tensor = step(params, SGD.init(params), GROUPS[1])[0]["w"]
        return new.sum()

    return torch.stack([torch.vmap(moved)(RATES), torch.vmap(torch.func.grad(moved))(RATES)])


def test_transforms_go_around_the_compiler() -> None:
    """An ensemble of compiled steps, a derivative through one, simulated ranks: no warning."""
    assert torch.equal(ensemble(make(SGD, compile=True)), ensemble(make(SGD)))
    axis = ps.VmapAxis(2)
    step = make(SGD, compile=True, axis=axis, grad_and_value=torch.func.grad_and_value)
    group = [tree.map(lambda *leaves: torch.stack(leaves), *GROUPS[1][:2])]
    on_ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
    given = start(), SGD.init(start())
    assert_same(on_ranks(*given, group)[0], make(SGD)(*given, GROUPS[1][:2])[0])
