"""Where ``compile=True`` cannot compile, and what derivatives come of what it compiles."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from purestep.types import UpdateStep
from tests.counted_graphs import (
    AOT,
    GROUPS,
    PLAIN,
    assert_close,
    batch,
    loss_fn,
    make,
    run,
    start,
)
from tests.squares import x_ones
from tests.torch_private import few_recompilations

# Dynamo looks at the loss's ``.grad`` when it gives up at the raise.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


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


def checkpointed(params: Any, m: Any) -> Tensor:
    losses: Tensor = checkpoint(loss_fn, params, m, use_reentrant=False)
    return losses


TEXTS = [[batch(2, 4) | {"name": "a" * length}] for length in range(1, 8)]
NO_GRAPH = "cannot make one graph of"
GIVEN_UP: dict[Any, tuple[list[Any], Any, str]] = {
    branching: (GROUPS, True, "(?s)Data-dependent branching.*in branches: return x . 2 if x.sum.. > 0"),
    picking: (GROUPS[1:2], AOT, NO_GRAPH),
    scaling: (TEXTS, AOT, "recompile_limit"),
    penalised: (GROUPS[1:2], AOT, NO_GRAPH),
    checkpointed: (GROUPS[1:2], AOT, NO_GRAPH),
}  # fmt: skip


@pytest.mark.parametrize("loss", GIVEN_UP)
def test_where_the_compiler_gives_up(loss: Any) -> None:
    """One warning says why, and at which line; the step stays what it was. torch 2.11 does make a graph of a checkpoint."""
    groups, compiler, reason = GIVEN_UP[loss]
    gives_up = loss is not checkpointed or torch.__version__ >= "2.12"
    warns: Any = (
        pytest.warns(UserWarning, match=reason) if gives_up else nullcontext([])
    )
    with few_recompilations(), warns as told:
        ours = run(make(PLAIN, loss, compile=compiler), PLAIN, groups)
    assert (
        sum(str(each.message).startswith("compile=True") for each in told) == gives_up
    )
    assert_same(ours, run(make(PLAIN, loss), PLAIN, groups))
    # What the compiler forbids when it fails is allowed again.
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
    with pytest.raises(
        ValueError, match=r"losses of shape \(\) against weights of shape \(2, 4\)"
    ):
        mean(*given, [first])


def test_a_dispatch_mode_keeps_the_compiler_away() -> None:
    """As a counter of operations is: the step is taken once, without a warning."""
    with FlopCounterMode(display=False) as counter:
        ours, _ = run(make(PLAIN, compile=True, donate=True), PLAIN, GROUPS)
    assert counter.get_total_flops() > 0
    assert_same(ours, run(make(PLAIN), PLAIN, GROUPS)[0])


def test_a_compiler_at_work_in_another_thread_is_not_ours() -> None:
    """``torch.compiler.is_compiling`` is true of every thread while one of them compiles, from torch 2.13 on."""
    began, go_on = threading.Event(), threading.Event()

    def slow(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        began.set()
        assert go_on.wait(60)
        return graph.forward

    with ThreadPoolExecutor() as pool:
        pool.submit(torch.compile(lambda x: x + 1, backend=slow), torch.ones(2))
        try:
            assert began.wait(60)
            assert torch.compiler.is_compiling() or torch.__version__ < "2.13"
            with pytest.raises(ValueError, match="one is -1"):
                ps.count_tokens([torch.tensor([1.0, -1.0])], lambda m: m)
            old = torch.ones(2, requires_grad=True).clone()
            assert tree.copy_(old, torch.zeros(2), None) is not old
            assert torch.equal(old, torch.ones(2))
        finally:
            go_on.set()


SGD = ps.optim.sgd(0.125)
RATES = torch.tensor([1.0, 2.0]).double()


def ensemble(step: UpdateStep) -> Tensor:
    def moved(rate: Tensor) -> Tensor:
        params = tree.map(lambda leaf: leaf * rate, start())
        new: Tensor = step(params, SGD.init(params), GROUPS[1])[0]["w"]
        return new.sum()

    return torch.stack(
        [torch.vmap(moved)(RATES), torch.vmap(torch.func.grad(moved))(RATES)]
    )


def test_transforms_go_around_the_compiler() -> None:
    """An ensemble of compiled steps, a derivative through one, simulated ranks: no warning."""
    assert torch.equal(ensemble(make(SGD, compile=True)), ensemble(make(SGD)))
    axis = ps.VmapAxis(2)
    step = make(SGD, compile=True, axis=axis, grad_and_value=torch.func.grad_and_value)
    group = [tree.map(lambda *leaves: torch.stack(leaves), *GROUPS[1][:2])]
    on_ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
    given = start(), SGD.init(start())
    assert_same(on_ranks(*given, group)[0], make(SGD)(*given, GROUPS[1][:2])[0])


RATED: list[tuple[Any, bool]] = [
    (ps.optim.lion, False),
    (
        lambda rate: ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(rate)),
        True,
    ),
    (lambda rate: ps.optim.master_weights(ps.optim.lion(rate)), True),
]


@pytest.mark.parametrize(("make_optimizer", "donate"), RATED)
def test_a_rate_that_requires_grad(make_optimizer: Any, donate: bool) -> None:
    """What is recorded is not written over: the derivative is right, and the params stay."""
    slopes: list[Tensor] = []
    for compile in (False, partial(torch.compile, backend="eager")):
        rate, params = (
            torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
            start(),
        )
        optimizer = make_optimizer(rate)
        step = make(optimizer, compile=compile, donate=donate)
        new, *_ = step(params, optimizer.init(params), GROUPS[1])
        slopes += torch.autograd.grad(
            new["w"].flatten() @ torch.arange(6).double(), rate
        )
        assert_same(params, start())
    assert slopes[0].abs() > 0
    assert_close(*slopes)


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_compiled_loss_closes_over_is_a_constant(whole: bool) -> None:
    """Nothing is recorded of it, nor of ``aux`` (one tensor here), and its ``.grad`` is not written."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def scaled(params: Any, m: Any) -> ps.LossOutput:
        losses = loss_fn(params, m) * scale
        return ps.LossOutput(losses, aux=losses.sum())

    step = make(SGD, scaled, compile=False if whole else AOT)
    step = ps.compile(step, backend="eager", fullgraph=True) if whole else step
    assert not tree.any_requires_grad(step(start(), SGD.init(start()), GROUPS[0]))
    assert scale.grad is None
    if whole:
        recorded = tree.map(lambda leaf: leaf.requires_grad_(), start())
        assert step(recorded, SGD.init(recorded), GROUPS[0])[0]["w"].requires_grad


def test_hooks_around_a_compiled_step_are_refused() -> None:
    """One graph of both passes saves nothing that they could see; they are allowed as before."""
    step = make(PLAIN, compile=AOT)
    given = start(), PLAIN.init(start()), GROUPS[1]
    with torch.autograd.graph.save_on_cpu():
        with pytest.raises(
            RuntimeError, match="compile=True takes no saved_tensors_hooks"
        ):
            step(*given)
        make(PLAIN)(*given)
    assert_close(step(*given)[:2], make(PLAIN)(*given)[:2])


class Sign(torch.autograd.Function):
    """A straight-through estimator, whose own derivative would be zero."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 3 * grad


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated"
)  # what torch's compiler does
@pytest.mark.parametrize("reverse", [ps.grad_and_value, torch.func.grad_and_value])
@pytest.mark.parametrize("whole", [False, True])
def test_a_function_of_a_leaf_itself_has_its_own_backward(
    whole: bool, reverse: Any
) -> None:
    sgd, params = ps.optim.sgd(1.0), {"w": torch.tensor([2.0, -3.0])}
    loss_fn: Any = lambda p, m: Sign.apply(p["w"]) * m["x"]  # noqa: E731
    how: Any = {"grad_and_value": reverse, "compile": False if whole else AOT}
    step = ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, **how)
    step = AOT(step) if whole else step
    new, _, metrics = step(params, sgd.init(params), [{"x": torch.tensor([4.0, 8.0])}])
    assert metrics.loss == -2
    assert new["w"].tolist() == [2 - 6, -3 - 12]


@pytest.mark.filterwarnings(
    "ignore:.*grad attribute of a Tensor that is not a leaf"
)  # so does it
@pytest.mark.filterwarnings("ignore:compile=True")  # its loss runs eagerly
def test_ranks_in_threads_meet_in_a_compiled_loss() -> None:
    """Each rank's gradient is its own, from the first step on."""
    axis, sgd = ps.testing.ThreadAxis(2), ps.optim.sgd(1.0)
    loss_fn: Any = lambda w, x: w * x / ps.psum((w * x).exp().sum(), axis)  # noqa: E731
    how: Any = {"weight_fn": torch.ones_like, "axis": axis, "compile": AOT}
    step, w = ps.make_update_step(loss_fn, sgd, **how), torch.tensor(0.25).double()

    def moved(rank: int) -> list[Tensor]:
        group = [torch.arange(1.0, 4.0).double() + rank]
        return [step(w, sgd.init(w), group)[0] for _ in range(2)]

    first, second = axis.map(moved)([0, 1])
    assert first == second == first[::-1]


SHARED: dict[str, Callable[[list[Tensor], dict[str, Tensor]], Tensor]] = {
    "one tensor for both": lambda p, m: (p[0] + p[1]) @ torch.ones(2) * m["x"],
    "views of one tensor": lambda p, m: torch.stack(p).sum(0) @ torch.ones(2) * m["x"],
    "one number for all elements": lambda p, m: (p[0].sum() - p[1].sum()) * m["x"],
    "the microbatch": lambda p, m: torch.dot(p[0], m["x"])[None] + p[1].sum() * m["x"],
}
"""Of two leaves with two elements, what their gradients may share, or be a view of."""


@pytest.mark.parametrize("shared", SHARED)
def test_gradients_that_share_memory_are_sums_of_their_own(shared: str) -> None:
    """Every sum has its memory, each element its place, and clipping scales each once."""
    optimizer = ps.optim.chain(
        ps.optim.clip_by_global_norm(0.125), ps.optim.sgd(1.0, momentum=0.5)
    )
    group = [{"x": torch.arange(1.0, 3.0) * 2**m} for m in range(3)]
    before, found = tree.map(torch.clone, group), []
    settings: list[dict[str, Any]] = [{}, {"compile": AOT, "donate": True}]
    for how in settings:
        step: Any = ps.make_update_step(
            SHARED[shared], optimizer, weight_fn=x_ones, **how
        )
        params = [torch.zeros(2), torch.zeros(2)]
        state: Any = params, optimizer.init(params)
        for number in (1, 3):
            state = step(*state, group[:number])[:2]
        found.append(state)
    assert_same(*found)
    assert_same(group, before)


def test_sparse_gradients_arrive_dense_with_a_warning() -> None:
    """No graph holds an operation that makes such gradients."""

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        rows = functional.embedding(x, p["table"], sparse=True).sum(-1)
        bag = functional.embedding_bag(x[:, None], p["bag"], sparse=True).sum(-1)
        return rows * p["w"] + bag

    sgd, make_step = (
        ps.optim.sgd(1.0),
        partial(ps.make_update_step, weight_fn=torch.ones_like),
    )
    params = {
        "table": torch.ones(4, 2),
        "bag": torch.ones(4, 2),
        "w": torch.tensor(2.0),
    }
    given = params, sgd.init(params), [torch.tensor([1, 1]), torch.tensor([3, 0])]
    step, eager = (make_step(loss, sgd, compile=how) for how in (AOT, False))
    with pytest.warns(UserWarning, match="make one graph of .*loss"):
        found = step(*given)
    assert_same(found, eager(*given))


def test_the_first_update_calls_the_loss_once_eagerly() -> None:
    """Not once for each microbatch, and never again."""
    calls: list[int] = []

    def loss(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        if not torch.compiler.is_compiling():
            calls.append(1)
        return w * m["x"]

    sgd, w = ps.optim.sgd(1.0), torch.ones(2)
    step = ps.make_update_step(loss, sgd, weight_fn=x_ones, compile=AOT)
    for _ in range(2):
        step(w, sgd.init(w), [{"x": torch.ones(2)}] * 3)
    assert calls == [1]
