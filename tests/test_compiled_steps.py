"""Losses that ``compile=True`` cannot compile, and derivatives of those that it compiles."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import purestep as ps
from purestep import tree
from purestep.compiling.graph import LetSizesVary
from purestep.torch_private import TRACES_AUTOGRAD
from purestep.types import UpdateStep
from support.strategies import assert_same
from support.torch_private import limit_recompilations
from tests.counted_graphs import (
    ADAM,
    AOT,
    GROUPS,
    assert_close,
    initial_params,
    loss_fn,
    make_batch,
    make_step,
    run_steps,
)
from tests.square_loss import weigh_by_one

# Dynamo looks at the loss's ``.grad`` when it gives up at the raise.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


def branch_on_sum(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def branching(params: Any, m: Any) -> Tensor:
    return branch_on_sum(loss_fn(params, m))


def picking(params: Any, m: Any) -> Tensor:
    """Indexes by the data, which is an error of the compiler, and eagerly none at all."""
    index = m["y"].argmax().clamp(max=1)
    return loss_fn(params, m) * params["v"][index]


def scaling(params: Any, m: Any) -> Tensor:
    """Needs a new graph for each new text, until the compiler has had enough."""
    return loss_fn(params, m) * len(m["name"])


def penalised(params: Any, m: Any) -> Tensor:
    """Differentiates twice; a graph with breaks would lose the second derivative."""
    x = m["x"].clone().requires_grad_()
    energy = (x @ params["w"]).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    losses: Tensor = loss_fn(params, m) + force.square().mean()
    return losses


def checkpointed(params: Any, m: Any) -> Tensor:
    losses: Tensor = checkpoint(loss_fn, params, m, use_reentrant=False)
    return losses


class GivenUp(NamedTuple):
    """A loss that the compiler does not make one graph of."""

    loss: Callable[..., Tensor]
    groups: list[Any]
    compiler: Any
    reason: str


TEXTS = [[make_batch(2, 4) | {"name": "a" * length}] for length in range(1, 8)]
ONE_GROUP = GROUPS[1:2]
BRANCHING = (
    "(?s)Data-dependent branching.*in branch_on_sum: return x . 2 if x.sum.. > 0"
)
NO_GRAPH = "cannot make one graph of"


@pytest.mark.parametrize(
    "case",
    [
        GivenUp(branching, GROUPS, compiler=True, reason=BRANCHING),
        GivenUp(picking, ONE_GROUP, compiler=AOT, reason=NO_GRAPH),
        GivenUp(scaling, TEXTS, compiler=AOT, reason="recompile_limit"),
        GivenUp(penalised, ONE_GROUP, compiler=AOT, reason=NO_GRAPH),
    ],
    ids=lambda case: case.loss.__name__,
)
def test_where_the_compiler_gives_up(case: GivenUp) -> None:
    """One warning says why, and at which line; the step stays what it was."""
    expectation = pytest.warns(UserWarning, match=case.reason)
    with limit_recompilations(), expectation as warnings:
        compiled = make_step(ADAM, case.loss, compile=case.compiler)
        ours = run_steps(compiled, ADAM, case.groups)

    messages = [str(warning.message) for warning in warnings]
    ours_alone = [m for m in messages if m.startswith("compile=True")]
    assert len(ours_alone) == 1
    theirs = run_steps(make_step(ADAM, case.loss), ADAM, case.groups)
    assert_same(ours, theirs)
    # What the compiler forbids when it fails is allowed again.
    w = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, w, use_reentrant=False).sum().backward()
    assert w.grad is not None


# What torch compiles


def branching_by_cond(params: Any, m: Any) -> Tensor:
    """Chooses by the data, in one graph."""
    losses: Tensor = loss_fn(params, m)
    is_positive = losses.sum() > 0
    return torch.cond(is_positive, torch.sin, torch.cos, (losses,))


def unflattened(params: Any, m: Any) -> Tensor:
    x = m["x"] @ params["w"]
    return x.unflatten(-1, (1, -1)).sum((-2, -1)) * params["v"].sum() - m["y"]


def curved(params: Any, m: Any) -> Tensor:
    """Takes second derivatives, whose kernels take no sizes that vary."""

    def energy(x: Tensor) -> Tensor:
        return (x @ params["w"]).tanh().sum()

    hessians: Tensor = torch.vmap(torch.func.hessian(energy))(m["x"].flatten(0, 1))
    return hessians.square().sum((-2, -1)).view_as(m["y"]) * params["v"].sum()


def dropped(params: Any, m: Any) -> Tensor:
    """Drops all of a term, which no random number changes."""
    losses: Tensor = loss_fn(params, m)
    return functional.dropout(losses, 1.0) + losses


@torch.library.custom_op("purestep_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Has a backward pass for autograd, and none for ``torch.func``, as those of Mixtral."""
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: doubled(grad))


def with_own_operation(params: Any, m: Any) -> Tensor:
    return loss_fn(tree.map(doubled, params), m)


SIZES = [[make_batch(size, 4)] for size in (2, 5, 3, 7)]
IN_WHOLE_STEPS = [unflattened, dropped]
if torch.__version__ >= "2.12":  # The trace of 2.11 makes no leaves.
    IN_WHOLE_STEPS += [branching_by_cond, checkpointed, with_own_operation]


@pytest.mark.parametrize(
    ("loss", "backend"),
    [
        (branching_by_cond, "eager"),
        (unflattened, "eager"),
        (curved, "eager"),
        (dropped, "eager"),
        (checkpointed, "eager"),
        (checkpointed, "aot_eager"),
        (with_own_operation, "aot_eager"),
    ],
)
def test_what_torch_compiles_is_compiled(loss: Any, backend: str) -> None:
    """At sizes that vary, without a warning, and without an eager call after the first update."""
    num_eager_calls = 0

    def counted(params: Any, m: Any) -> Tensor:
        nonlocal num_eager_calls
        if not torch.compiler.is_dynamo_compiling():
            num_eager_calls += 1
        losses: Tensor = loss(params, m)
        return losses

    compiler = partial(torch.compile, backend=backend)
    ours = run_steps(make_step(ADAM, counted, compile=compiler), ADAM, SIZES)
    assert num_eager_calls == 1
    theirs = run_steps(make_step(ADAM, loss), ADAM, SIZES)
    assert_close(ours, theirs)


@pytest.mark.parametrize("loss", IN_WHOLE_STEPS, ids=lambda loss: loss.__name__)
def test_what_torch_compiles_is_compiled_in_a_whole_step(loss: Any) -> None:
    compiled = ps.compile(make_step(SGD, loss), fullgraph=True, backend="eager")
    assert_close(
        run_steps(compiled, SGD, SIZES), run_steps(make_step(SGD, loss), SGD, SIZES)
    )


def test_dropout_whose_sizes_may_vary_is_dropout() -> None:
    """torch 2.11 takes it in every whole step, and later ones where params require grad."""
    x = torch.ones(1000)
    with LetSizesVary():
        kept = functional.dropout(x, 0.25)
        evaluated = functional.dropout(x, 0.25, training=False)
        with pytest.raises(ValueError, match="has to be between 0 and 1"):
            functional.dropout(x, 1.25)
    assert {*kept.tolist()} == {0, (x[0] / 0.75).item()}
    assert 700 < kept.count_nonzero() < 800
    assert torch.equal(evaluated, x)


def test_a_backend_that_fails_is_not_asked_again() -> None:
    """Only inductor is, without ``cpp_wrapper``."""
    num_calls = 0

    def fail(graph: Any, inputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        raise ArithmeticError("no graph")

    compiled = ps.compile(make_step(SGD), fullgraph=True, backend=fail)
    with pytest.raises(Exception, match="no graph"):
        run_steps(compiled, SGD, GROUPS[:1])
    assert num_calls == 1


def test_a_graph_that_fails_when_it_runs() -> None:
    """It may have written to data by then, so nothing runs again; a note says how to go on."""

    def fail_when_run(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            raise ArithmeticError("a kernel has failed")

        return run

    step = make_step(SGD, compile=partial(torch.compile, backend=fail_when_run))
    with pytest.raises(ArithmeticError, match="a kernel has failed") as raised:
        run_steps(step, SGD, GROUPS[:1])
    (note,) = raised.value.__notes__
    assert note.startswith("The graph of loss_fn that compile=True made has raised")


@pytest.mark.parametrize("before", ["nothing", "a step", "a mode"])
def test_no_body_of_a_loop_runs_a_step(before: str) -> None:
    """There autograd would silently give zeros: the compiler takes its operations below it.

    The compiler refuses the first change of the function modes in a trace, but no later one.
    """
    step = make_step(ADAM)
    params = initial_params()
    opt_state = ADAM.init(params)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step_or_stay(is_wanted: Tensor) -> Tensor:
        if before == "a step":
            step(params, opt_state, GROUPS[0])
        elif before == "a mode":
            with TorchFunctionMode():
                pass
        w: Tensor = torch.cond(
            is_wanted,
            lambda: step(params, opt_state, GROUPS[0])[0]["w"],
            lambda: params["w"].clone(),
        )
        return w

    if TRACES_AUTOGRAD or before == "nothing":
        with pytest.raises(Exception, match=r"torch\.cond"):
            step_or_stay(torch.tensor(True))
    else:
        # torch.func differentiates there, which a body takes.
        expected, _, _ = step(params, opt_state, GROUPS[0])
        torch.testing.assert_close(step_or_stay(torch.tensor(True)), expected["w"])


def test_errors_of_the_loss_come_through() -> None:
    """Without a word about the compiler; the next step is compiled."""
    step = make_step(ADAM, compile=AOT)
    params = initial_params()
    opt_state = ADAM.init(params)
    microbatch = make_batch(2, 4)
    without_y = {"x": microbatch["x"]}

    for _ in range(2):
        with pytest.raises(KeyError, match="y") as raised:
            step(params, opt_state, [microbatch, without_y])
        assert raised.value.__context__ is None
    step(params, opt_state, [microbatch])

    def mean_loss(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m).mean()

    step_on_mean = make_step(ADAM, mean_loss, compile=AOT)
    message = r"losses of shape \(\) against weights of shape \(2, 4\)"
    with pytest.raises(ValueError, match=message) as refused:
        step_on_mean(params, opt_state, [microbatch])
    notes = getattr(refused.value, "__notes__", [])
    assert not any("compile=True" in note for note in notes)


def test_a_dispatch_mode_keeps_the_compiler_away() -> None:
    """As a counter of operations is: the step is taken once, without a warning."""
    with FlopCounterMode(display=False) as counter:
        ours, _ = run_steps(make_step(ADAM, compile=True, donate=True), ADAM, GROUPS)
    theirs, _ = run_steps(make_step(ADAM), ADAM, GROUPS)

    assert counter.get_total_flops() > 0
    assert_same(ours, theirs)


def test_a_compiler_at_work_in_another_thread_is_not_ours() -> None:
    """``torch.compiler.is_compiling`` is true of every thread while one of them compiles, from torch 2.13 on."""
    began = threading.Event()
    go_on = threading.Event()

    def slow_backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        began.set()
        assert go_on.wait(60)
        return graph.forward

    with ThreadPoolExecutor() as pool:
        compiled = torch.compile(lambda x: x + 1, backend=slow_backend)
        pool.submit(compiled, torch.ones(2))
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


def step_an_ensemble(step: UpdateStep) -> Tensor:
    """Steps once from params at several scales: the sums of ``w``, and their slopes."""

    def sum_after_step(scale: Tensor) -> Tensor:
        params = tree.map(lambda leaf: leaf * scale, initial_params())
        new_params, *_ = step(params, SGD.init(params), GROUPS[1])
        w: Tensor = new_params["w"]
        return w.sum()

    sums = torch.vmap(sum_after_step)(RATES)
    slopes = torch.vmap(torch.func.grad(sum_after_step))(RATES)
    return torch.stack([sums, slopes])


def test_transforms_go_around_the_compiler() -> None:
    """An ensemble of compiled steps, and a derivative through one: no warning."""
    ours = step_an_ensemble(make_step(SGD, compile=True))
    theirs = step_an_ensemble(make_step(SGD))
    assert torch.equal(ours, theirs)


def test_simulated_ranks_go_around_the_compiler() -> None:
    """Each of two ranks holds one microbatch: no warning."""
    axis = ps.VmapAxis(2)
    params = initial_params()
    opt_state = SGD.init(params)
    group = GROUPS[1][:2]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *group)
    step = make_step(
        SGD, compile=True, axis=axis, grad_and_value=torch.func.grad_and_value
    )

    on_ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
    new_params = on_ranks(params, opt_state, [stacked])[0]

    assert_same(new_params, make_step(SGD)(params, opt_state, group)[0])


def adam_with_rate(rate: Any) -> ps.optim.Optimizer:
    return ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.sgd(rate))


def lion_with_master_weights(rate: Any) -> ps.optim.Optimizer:
    return ps.optim.master_weights(ps.optim.lion(rate))


@pytest.mark.parametrize(
    ("make_optimizer", "donate"),
    [
        (ps.optim.lion, False),
        (adam_with_rate, True),
        (lion_with_master_weights, True),
    ],
)
def test_a_rate_that_requires_grad(make_optimizer: Any, donate: bool) -> None:
    """What is recorded is not written over: the derivative is right, and the params stay."""
    direction = torch.arange(6).double()
    slopes: list[Tensor] = []
    for compile in (False, partial(torch.compile, backend="eager")):
        rate = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        params = initial_params()
        optimizer = make_optimizer(rate)
        step = make_step(optimizer, compile=compile, donate=donate)

        new, *_ = step(params, optimizer.init(params), GROUPS[1])
        slopes += torch.autograd.grad(new["w"].flatten() @ direction, rate)

        assert_same(params, initial_params())
    eager, compiled = slopes
    assert eager.abs() > 0
    assert_close(eager, compiled)


def step_of_scaled_losses(scale: Tensor, fullgraph: bool) -> UpdateStep:
    """Compiles a step, whole or its microbatches, whose loss closes over a scale."""

    def scaled(params: Any, m: Any) -> ps.LossOutput:
        losses = loss_fn(params, m) * scale
        return ps.LossOutput(losses, aux=losses.sum())

    if fullgraph:
        return ps.compile(make_step(SGD, scaled), backend="eager", fullgraph=True)
    return make_step(SGD, scaled, compile=AOT)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_a_compiled_loss_closes_over_is_a_constant(fullgraph: bool) -> None:
    """Nothing is recorded of it, nor of ``aux`` (one tensor here), and its ``.grad`` is not written."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    step = step_of_scaled_losses(scale, fullgraph)

    result = step(initial_params(), SGD.init(initial_params()), GROUPS[0])

    assert not tree.any_requires_grad(result)
    assert scale.grad is None
    if fullgraph:
        params = tree.map(lambda leaf: leaf.requires_grad_(), initial_params())
        new_params, *_ = step(params, SGD.init(params), GROUPS[0])
        assert new_params["w"].requires_grad


def test_hooks_around_a_compiled_step_are_refused() -> None:
    """One graph of both passes saves nothing that they could see; they are allowed as before."""
    compiled = make_step(ADAM, compile=AOT)
    eager = make_step(ADAM)
    arguments = (initial_params(), ADAM.init(initial_params()), GROUPS[1])

    with torch.autograd.graph.save_on_cpu():
        message = "compile=True takes no saved_tensors_hooks"
        with pytest.raises(RuntimeError, match=message):
            compiled(*arguments)
        eager(*arguments)

    ours = compiled(*arguments)
    theirs = eager(*arguments)
    assert_close(ours[:2], theirs[:2])


class Sign(torch.autograd.Function):
    """A straight-through estimator, whose own derivative would be zero."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 3 * grad


# torch's compiler instantiates it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("reverse", [ps.grad_and_value, torch.func.grad_and_value])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_of_a_leaf_itself_has_its_own_backward(
    fullgraph: bool, reverse: Any
) -> None:
    sgd = ps.optim.sgd(1.0)
    params = {"w": torch.tensor([2.0, -3.0])}

    def signed(p: Any, m: Any) -> Tensor:
        return Sign.apply(p["w"]) * m["x"]

    settings: Any = {"weight_fn": weigh_by_one, "grad_and_value": reverse}
    if fullgraph:
        step = AOT(ps.make_update_step(signed, sgd, **settings))
    else:
        step = ps.make_update_step(signed, sgd, compile=AOT, **settings)
    group = [{"x": torch.tensor([4.0, 8.0])}]
    new, _, metrics = step(params, sgd.init(params), group)

    assert metrics.loss == -2
    assert new["w"].tolist() == [2 - 6, -3 - 12]


# torch's compiler reads .grad, and the loss then runs eagerly.
@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:compile=True")
def test_ranks_in_threads_meet_in_a_compiled_loss() -> None:
    """Each rank's gradient is its own, from the first step on."""
    axis = ps.testing.ThreadAxis(2)
    sgd = ps.optim.sgd(1.0)
    w = torch.tensor(0.25).double()

    def loss_over_ranks(w: Tensor, x: Tensor) -> Tensor:
        logits = w * x
        return logits / ps.psum(logits.exp().sum(), axis)

    settings: Any = {"weight_fn": torch.ones_like, "axis": axis, "compile": AOT}
    step = ps.make_update_step(loss_over_ranks, sgd, **settings)

    def step_twice(rank: int) -> list[Tensor]:
        group = [torch.arange(1.0, 4.0).double() + rank]
        first, *_ = step(w, sgd.init(w), group)
        second, *_ = step(w, sgd.init(w), group)
        return [first, second]

    on_first_rank, on_second_rank = axis.map(step_twice)([0, 1])
    assert on_first_rank[0] == on_first_rank[1]
    assert on_first_rank == on_second_rank


def share_one_tensor(p: list[Tensor], m: dict[str, Tensor]) -> Tensor:
    total = p[0] + p[1]
    return total @ torch.ones(2) * m["x"]


def share_views_of_one_tensor(p: list[Tensor], m: dict[str, Tensor]) -> Tensor:
    total = torch.stack(p).sum(0)
    return total @ torch.ones(2) * m["x"]


def share_one_number(p: list[Tensor], m: dict[str, Tensor]) -> Tensor:
    difference = p[0].sum() - p[1].sum()
    return difference * m["x"]


def share_the_microbatch(p: list[Tensor], m: dict[str, Tensor]) -> Tensor:
    product = torch.dot(p[0], m["x"])
    return product[None] + p[1].sum() * m["x"]


def step_on_shared(loss_fn: Any, group: list[Any], **settings: Any) -> Any:
    """Takes two steps, on one microbatch and on three; clipping scales each sum once."""
    optimizer = ps.optim.chain(
        ps.optim.clip_by_global_norm(0.125),
        ps.optim.sgd(1.0, momentum=0.5),
    )
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=weigh_by_one, **settings)
    params: Any = [torch.zeros(2), torch.zeros(2)]
    opt_state = optimizer.init(params)
    for size in (1, 3):
        params, opt_state, _ = step(params, opt_state, group[:size])
    return params, opt_state


@pytest.mark.parametrize(
    "loss_fn",
    [
        share_one_tensor,
        share_views_of_one_tensor,
        share_one_number,
        share_the_microbatch,
    ],
)
def test_gradients_that_share_memory_are_added_up_apart(loss_fn: Any) -> None:
    """Every sum has its memory, each element its place, and clipping scales each once.

    Gradients of two leaves with two elements share memory, or are views of it.
    """
    group = [{"x": torch.arange(1.0, 3.0) * 2**m} for m in range(3)]
    before = tree.map(torch.clone, group)

    eager = step_on_shared(loss_fn, group)
    compiled = step_on_shared(loss_fn, group, compile=AOT, donate=True)

    assert_same(eager, compiled)
    assert_same(group, before)


def test_sparse_gradients_arrive_dense() -> None:
    """No graph of gradients holds an operation that makes such gradients: autograd runs it."""

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        rows = functional.embedding(x, p["table"], sparse=True)
        bags = functional.embedding_bag(x[:, None], p["bag"], sparse=True)
        return rows.sum(-1) * p["w"] + bags.sum(-1)

    sgd = ps.optim.sgd(1.0)
    eager = ps.make_update_step(loss, sgd, weight_fn=torch.ones_like)
    compiled = ps.make_update_step(loss, sgd, weight_fn=torch.ones_like, compile=AOT)
    params = {
        "table": torch.ones(4, 2),
        "bag": torch.ones(4, 2),
        "w": torch.tensor(2.0),
    }
    group = [torch.tensor([1, 1]), torch.tensor([3, 0])]

    ours = compiled(params, sgd.init(params), group)
    assert_same(ours, eager(params, sgd.init(params), group))


def test_the_first_update_calls_the_loss_once_eagerly() -> None:
    """Not once for each microbatch, and never again."""
    num_eager_calls = 0

    def loss(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        nonlocal num_eager_calls
        if not torch.compiler.is_compiling():
            num_eager_calls += 1
        return w * m["x"]

    sgd = ps.optim.sgd(1.0)
    w = torch.ones(2)
    group = [{"x": torch.ones(2)}] * 3
    step = ps.make_update_step(loss, sgd, weight_fn=weigh_by_one, compile=AOT)
    for _ in range(2):
        step(w, sgd.init(w), group)
    assert num_eager_calls == 1
