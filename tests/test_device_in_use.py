"""On a device: loss terms, parts of a step, prefetched groups, ensembles, ranks and recorded steps, without a wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.devices import Waits, lazy, moved, placed
from proofs.strategies import Batch, assert_same, cut, weights_of
from purestep import optim, tree
from tests.on_a_device import OPTIMIZERS, assert_near, problem


def brings_weights(params: Any, batch: Batch) -> ps.LossTerms:
    losses = models.integer_loss(params, batch)
    return ps.LossTerms(
        losses, weights=batch["w"], aux={"sum": losses.sum(), "rows": batch["w"].sum()}
    )


def brings_terms(params: Any, batch: Batch) -> ps.LossTerms:
    return brings_weights(params, batch)._replace(
        weights=None, microbatch=params["hidden"]["weight"].sum().square()
    )


@pytest.mark.parametrize(
    ("loss_fn", "settings"),
    [
        (brings_weights, {"weight_fn": None, "normalize": "grads"}),
        (brings_terms, {"weight_fn": weights_of}),
    ],
)
def test_terms(loss_fn: Any, settings: dict[str, Any]) -> None:
    """Weights, a term and aux from the loss, in the step and in evaluation."""
    params, batch = problem()
    group = cut(batch, [[0, 1], [2, 3]])
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, **settings)
    evaluate = ps.make_eval_step(loss_fn, weight_fn=settings["weight_fn"])
    there, group_there = moved((params, group))
    with Waits() as waits:
        actual = step(there, optimizer.init(there), group_there), evaluate(there, group_there)
    assert waits.seen == []
    expected = step(params, optimizer.init(params), group), evaluate(params, group)
    everything = placed(actual, expected)
    assert_same(everything[0][:2], expected[0][:2])
    assert_same(everything[0][2].aux, expected[0][2].aux)
    assert_same(everything[1], expected[1])


def test_parts() -> None:
    """``count``, ``accumulate`` and an update, as who outgrows the step calls them."""
    params, batch = problem()
    optimizer = optim.sgd(0.5)

    def by_hand(params: Any, group: list[Batch]) -> Any:
        total = ps.count_tokens(group, weights_of)
        grads, loss, *_ = ps.accumulate(
            models.integer_loss,
            params,
            group,
            weight_fn=weights_of,
            total=ps.Count(total, torch.tensor(1)),
        )
        return optimizer.update(grads, optimizer.init(params), params), loss

    there, batch_there = moved((params, batch))
    with Waits() as waits:
        actual = by_hand(there, [batch_there])
    assert waits.seen == []
    expected = by_hand(params, [batch])
    assert_same(placed(actual, expected), expected)


def test_half_precision() -> None:
    """A copy in float32 moves; integers of one digit are exact in bfloat16 as well."""
    optimizer = optim.master_weights(
        optim.sgd(0.5, 0.5, weight_decay=0.5, mask=lambda p: {"w": True})
    )
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    batch = {"x": torch.tensor([[1.0, 2, 3, 4], [1, 0, 1, 0]], dtype=torch.bfloat16)}

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return (params["w"] * batch["x"]).sum(-1)

    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=lambda m: torch.ones_like(m["x"][:, 0], dtype=torch.bool)
    )
    there, batch_there = moved((params, batch))
    state = optimizer.init(there)
    with Waits() as waits:
        actual = step(there, state, [batch_there])
    assert waits.seen == []
    expected = step(params, optimizer.init(params), [batch])
    assert_same(placed(actual[:2], expected[:2]), expected[:2])


def test_prefetch() -> None:
    """Groups from the host, empty ones included: nothing is waited for, and the weights come with them."""
    params, batch = problem()
    groups = [cut(batch, [[0, 1], [2], [3]]), [], [batch]]
    optimizer = optim.sgd(0.5, 0.5)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    there = moved(params)
    ours: tuple[Any, Any] = there, optimizer.init(there)
    theirs: tuple[Any, Any] = params, optimizer.init(params)
    stream = ps.prefetch(groups, lazy(), weight_fn=weights_of)
    seen: list[str] = []
    for group in groups:
        arriving = next(stream)
        with Waits() as waits:
            *state, metrics = step(*ours, arriving)
        seen += waits.seen
        ours = state[0], state[1]
        *state, expected = step(*theirs, group)
        theirs = state[0], state[1]
        assert_same(placed(metrics.num_tokens, expected.num_tokens), expected.num_tokens)
        assert_same(placed(ours, theirs), theirs)
    assert seen == []


def test_ensemble() -> None:
    """Members that differ: every member's own step."""
    params, batch = problem()
    for name in ("masked", "all of lion", "all of adamw"):
        optimizer = OPTIMIZERS[name]
        step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
        both = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), params)
        there, batch_there = moved((both, batch))
        state, state_there = (torch.vmap(optimizer.init)(each) for each in (both, there))
        run = torch.vmap(step, (0, 0, None))
        with Waits() as waits:
            actual = run(there, state_there, [batch_there])
        assert waits.seen == []
        expected = run(both, state, [batch])
        assert_near(actual[:2], expected[:2], (both, state))


def test_simulated_ranks() -> None:
    params, batch = problem()
    axis = ps.VmapAxis(2)
    optimizer = OPTIMIZERS["all of sgd"]
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of, axis=axis)
    run = axis.map(step, (None, None, 0), None)
    group = [tree.map(lambda leaf: leaf.unflatten(0, (2, 2)), batch)]
    there, group_there = moved((params, group))
    state = optimizer.init(there)
    with Waits() as waits:
        actual = run(there, state, group_there)
    assert waits.seen == []
    expected = run(params, optimizer.init(params), group)
    assert_same(placed(actual[:2], expected[:2]), expected[:2])


def test_threads() -> None:
    """Threads meet on the host, which waits; the answer is the same."""
    params, batch = problem()
    axis = ps.testing.ThreadAxis(2)
    optimizer = optim.sgd(0.5, 0.5)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of, axis=axis)
    groups = [cut(batch, [[0], [1, 2], [3]]), []]
    there, groups_there = moved((params, groups))
    actual = axis.map(lambda group: step(there, optimizer.init(there), group))(groups_there)
    expected = axis.map(lambda group: step(params, optimizer.init(params), group))(groups)
    assert_same(placed([rank[:2] for rank in actual], [rank[:2] for rank in expected]), [
        rank[:2] for rank in expected
    ])  # fmt: skip


def test_recorded() -> None:
    """A step under ``torch.func.grad``, and one of parameters that require grad."""
    params, batch = problem()
    optimizer = OPTIMIZERS["masked"]
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)

    def after(params: Any, state: Any, batch: Batch) -> Tensor:
        new = step(params, state, [batch])[0]
        return torch.stack([leaf.sum() for leaf in tree.leaves_of(new)]).sum()

    def recorded(params: Any, batch: Batch) -> Any:
        state = optimizer.init(params)
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        total = after(own, state, batch)
        return torch.func.grad(after)(params, state, batch), torch.autograd.grad(
            total, tree.leaves_of(own)
        )

    there, batch_there = moved((params, batch))
    with Waits() as waits:
        actual = recorded(there, batch_there)
    assert waits.seen == []
    expected = recorded(params, batch)
    assert_same(placed(actual, expected), expected)
