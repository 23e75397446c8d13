"""Tests stacked groups: as sequences, as microbatches of a step, and in one compiled graph."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import tree
from purestep.stacked import Stacked
from support.optimizers import CAPTURE
from support.purity import storages_in
from support.strategies import assert_same
from support.torch_private import count_cached_graphs

OPTIMIZER = ps.optim.adamw(0.1)
PARAMS = {"w": torch.tensor([[1.0, -2.0, 0.5], [0.5, 1.0, -1.0]]), "b": torch.ones(2)}


def make_group(length: int, num_rows: int = 4) -> list[dict[str, Tensor]]:
    """Makes microbatches of different numbers of tokens."""
    generator = torch.Generator().manual_seed(length)
    group = []
    for index in range(length):
        labels = torch.arange(num_rows)
        labels[: index % 3] = -100
        x = torch.randn(num_rows, 5, 3, generator=generator)
        keys = ps.random.split(ps.random.key(10 * length + index), num_rows)
        group.append({"x": x, "labels": labels, "keys": keys})
    return group


def loss_fn(params: Any, microbatch: Any) -> Tensor:
    output = functional.linear(microbatch["x"], params["w"], params["b"])
    return output.square().sum((1, 2))


def test_a_stacked_group_is_a_sequence_of_its_microbatches() -> None:
    group = make_group(3)
    stacked = ps.stack(group)
    assert len(stacked) == 3
    assert ps.stack(stacked) is stacked
    assert_same([*stacked], group)
    assert_same(stacked[-1], group[-1])
    assert isinstance(stacked[1:], Stacked)
    assert_same([*stacked[1:]], group[1:])
    with pytest.raises(IndexError):
        stacked[3]


@pytest.mark.parametrize(
    ("microbatches", "text"),
    [
        ([], "an empty list"),
        (
            [{"x": torch.ones(2)}, {"x": torch.ones(3)}],
            r"microbatches\[1\]\['x'\] is torch.float32 of shape \(3,\)",
        ),
        ([torch.ones(2), torch.ones(2).double()], "one dtype and shape"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "give all of them the same"),
        ([{"x": 1}, {"x": 1}], r"\['x'\] is int, no tensor: stacked leaves are"),
    ],
)
def test_microbatches_that_differ_are_not_stacked(microbatches: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ps.stack(microbatches)


@pytest.mark.parametrize(
    "batch", [{}, {"x": torch.ones(2), "y": torch.ones(3)}, torch.ones(()), {"x": 1}]
)
def test_leaves_that_count_other_microbatches_are_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="Stacked: "):
        Stacked(batch)


def test_a_step_takes_a_stacked_group_like_the_list() -> None:
    group = make_group(3)
    state = PARAMS, OPTIMIZER.init(PARAMS)
    step = ps.make_update_step(loss_fn, OPTIMIZER)
    assert_same(step(*state, ps.stack(group)), step(*state, group))
    evaluate = ps.make_eval_step(loss_fn)
    assert_same(evaluate(PARAMS, ps.stack(group)), evaluate(PARAMS, group))
    for prefetched in ps.prefetch([ps.stack(group)], "cpu"):
        assert_same(step(*state, prefetched), step(*state, group))


def own_terms(params: Any, microbatch: Any) -> ps.LossOutput:
    """Returns weights, and sums for the metrics; torch's generator drops nothing."""
    x = functional.dropout(microbatch["x"].bfloat16(), 1e-30)
    losses = loss_fn(params, {"x": x})
    weights = (microbatch["labels"] != -100).half() / 2
    aux = {"sum": losses.detach().sum(), "first": [microbatch["labels"][1]]}
    return ps.LossOutput(losses, weights=weights, aux=aux)


class Layer(nn.Module):
    """A linear layer with a buffer and dropout."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.linear(x)) * self.scale
        return output


MODULE_PARAMS, apply_module = ps.from_module(Layer())


def module_loss(params: Any, microbatch: Any) -> Tensor:
    """Draws by keys in the module, and rounds by autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        output = apply_module(params, microbatch["x"], key=microbatch["keys"])
    return output.float().square().sum((1, 2))


def module_terms(params: Any, microbatch: Any) -> ps.LossOutput:
    """Draws by keys before the module, too, and adds a term of the microbatch."""
    x, keys = microbatch["x"], microbatch["keys"]
    keep = ps.random.uniform(ps.random.fold_in(keys, 1), x.shape[1:]) < 0.5
    losses = module_loss(params, {"x": x * keep, "keys": keys})
    term = params["linear.weight"].square().sum()
    return ps.LossOutput(losses, microbatch_loss=term)


def weigh_thirds(microbatch: Any) -> Tensor:
    return (microbatch["labels"] >= 0) / 3


CASES: dict[str, Any] = {
    "own terms": (
        tree.map(Tensor.bfloat16, PARAMS),
        own_terms,
        {"weight_fn": None, "normalize": "grads"},
    ),
    "a module": (
        MODULE_PARAMS,
        module_terms,
        {"weight_fn": weigh_thirds, "on_nonfinite": "skip"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_graph_serves_all_numbers_of_microbatches(case: str) -> None:
    """Each shape of microbatch has a graph."""
    params, loss, settings = CASES[case]
    num_graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    step = ps.make_update_step(loss, CAPTURE, **settings)
    compiled = ps.compile(step, fullgraph=True, backend=count)
    # torch.func's reverse mode runs the operations of the graph, one by one.
    eager = ps.make_update_step(
        loss, CAPTURE, grad_and_value=torch.func.grad_and_value, **settings
    )
    state = params, CAPTURE.init(params)
    for length, num_rows in [(2, 4), (3, 4), (2, 6), (7, 6), (5, 4)]:
        group = make_group(length, num_rows)
        _, grads, metrics = compiled(*state, ps.stack(group))
        _, expected_grads, expected = eager(*state, group)
        assert_same(grads, expected_grads)
        # The norm is another kernel.
        assert_same(metrics._replace(grad_norm=expected.grad_norm), expected)
    assert num_graphs == 2


def loss_in_place(params: Any, microbatch: Any) -> Tensor:
    """Adds the loss of the module to one that writes to a slice and holds a matrix."""
    shifted = (microbatch["x"].sum(1) * params["scale"]).clone()
    shifted[:, :1] = shifted[:, 1:2] * 2
    losses = (shifted * torch.tensor([[3.0, 5.0, 7.0]])).sum(1)
    return losses + module_loss(params["module"], microbatch)


IN_PLACE_PARAMS = {"module": MODULE_PARAMS, "scale": torch.ones(3)}


def test_inductor_writes_a_stacked_group_over_what_is_donated() -> None:
    """One graph for two numbers of microbatches, to rounding."""
    settings: dict[str, Any] = {"weight_fn": weigh_thirds}
    momentum = ps.optim.sgd(0.1, momentum=0.9)
    eager: Any = ps.make_update_step(loss_in_place, momentum, **settings)
    donating = ps.make_update_step(loss_in_place, momentum, **settings, donate=True)
    compiled = ps.compile(donating, fullgraph=True)
    expected: Any = (IN_PLACE_PARAMS, momentum.init(IN_PLACE_PARAMS))
    state = tree.map(torch.clone, expected)
    before = storages_in(state)
    for length in (2, 3):
        group = make_group(length)
        *expected, _ = eager(*expected, group)
        *state, _ = compiled(*state, ps.stack(group))
        assert storages_in(state) == before
        for leaf, other in zip(tree.leaves(state), tree.leaves(expected), strict=True):
            torch.testing.assert_close(leaf, other)


def test_a_stacked_group_is_cached_by_what_its_loop_computes(
    fresh_compiler: None,
) -> None:
    """Another loss is another graph. The first loss, compiled again, finds its graph.

    Two parameters that no loss reads have one size: inductor may take memory of one for the other.
    """
    group = make_group(2)
    sgd = ps.optim.sgd(0.1)
    params = {**PARAMS, "unread": [torch.ones(6), torch.full((2, 3), 2.0)]}
    state = params, sgd.init(params)
    hits = []
    for scale in (2.0, 3.0, 2.0):

        def scaled(params: Any, microbatch: Any, scale: float = scale) -> Tensor:
            return scale * loss_fn(params, microbatch)

        torch.compiler.reset()
        step = ps.make_update_step(scaled, sgd)
        before = count_cached_graphs()
        compiled = ps.compile(step, fullgraph=True)
        actual, _, metrics = compiled(*state, ps.stack(group))
        hits.append(count_cached_graphs() - before)
        expected, _, expected_metrics = step(*state, group)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(metrics.loss, expected_metrics.loss)
        torch.testing.assert_close(metrics.grad_norm, expected_metrics.grad_norm)
    assert hits[2] > 0


def test_a_transform_around_a_compiled_step_unrolls_the_group() -> None:
    step = ps.make_update_step(loss_fn, OPTIMIZER)
    members = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), PARAMS)
    group = make_group(2)

    def ensemble(members: Any, group: Any) -> Any:
        def member_step(params: Any) -> Any:
            return step(params, OPTIMIZER.init(params), group)

        return torch.vmap(member_step)(members)

    compiled = ps.compile(ensemble, fullgraph=True, backend="eager")
    actual = compiled(members, ps.stack(group))
    for leaf, other in zip(
        tree.leaves(actual), tree.leaves(ensemble(members, group)), strict=True
    ):
        torch.testing.assert_close(leaf, other)


def test_a_refused_checkpoint_leaves_other_checkpoints_as_they_were() -> None:
    """``torch.func`` disables hooks on saved tensors, and a trace that fails there keeps that."""

    def checkpointed(params: Any, microbatch: Any) -> Any:
        return checkpoint(loss_fn, params, microbatch, use_reentrant=False)

    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(checkpointed, sgd, weight_fn=lambda m: m["x"][:, 0, 0])
    compiled = ps.compile(step, fullgraph=True, backend="eager")
    group = [{"x": torch.ones(4, 5, 3)}] * 2
    state = sgd.init(PARAMS)
    with suppress(Exception):  # torch 2.11 takes it.
        compiled(PARAMS, state, ps.stack(group))
    assert_same(compiled(PARAMS, state, group), step(PARAMS, state, group))


def test_a_compiled_group_whose_losses_do_not_depend_on_params_is_refused() -> None:
    params = torch.ones(3)
    others = params.clone()
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(
        lambda _, m: m @ others, sgd, weight_fn=lambda m: m[:, 0]
    )
    group = ps.stack([torch.ones(2, 3)] * 2)
    for run in (step, ps.compile(step, fullgraph=True, backend="eager")):
        # torch 2.11 shows no message of an error in a loop.
        with pytest.raises(Exception, match=r"do not depend on params|'ValueError'"):
            run(params, sgd.init(params), group)


def test_an_empty_stacked_group_compiles() -> None:
    group = ps.stack(make_group(2))[:0]
    step = ps.make_update_step(loss_fn, OPTIMIZER)
    compiled = ps.compile(step, fullgraph=True, backend="eager")
    state = OPTIMIZER.init(PARAMS)
    expected = step(PARAMS, state, group)
    assert_same(compiled(PARAMS, state, group), expected)
