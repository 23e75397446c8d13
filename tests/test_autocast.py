"""Autocast inside of the loss and around the step: what it reaches, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.halves import quadratic_loss, tokens, training, weights_of


def autocast_loss(params: Any, microbatch: Any) -> Tensor:
    """A network in bfloat16, its loss in float32, as everyone trains."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.tanh(microbatch["x"] @ params["up"])
        output = hidden @ params["down"]
    assert hidden.dtype == output.dtype == torch.bfloat16
    return output.float().squeeze(-1).square()


@pytest.mark.parametrize("donate", [False, True])
def test_autocast_inside_the_loss(donate: bool) -> None:
    """Gradients and state in float32, and the bits of the loop that everyone writes."""
    params, groups = training(torch.float32)
    optimizer = ps.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    usual = torch.optim.SGD(tree.leaves_of(leaves), lr=0.1, momentum=0.9)
    step = ps.make_update_step(autocast_loss, optimizer, weight_fn=weights_of, donate=donate)
    ours, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
    for group in groups:
        total = tokens(group)
        grads, loss, *_ = ps.accumulate(
            autocast_loss, ours, group, weight_fn=weights_of, total=ps.count(group, weights_of)
        )
        in_float32, *_ = ps.accumulate(
            quadratic_loss,
            ours,
            group,
            weight_fn=weights_of,
            total=ps.count(group, weights_of),
        )
        usual.zero_grad()
        for batch in group:
            seed = (batch["w"].to(torch.float64) / total).to(torch.float32)
            (autocast_loss(leaves, batch) * seed).sum().backward()
        assert_same(grads, tree.map(lambda leaf: leaf.grad, leaves), "grads")
        assert all(leaf.dtype == torch.float32 for leaf in tree.leaves_of(grads))
        assert not torch.equal(grads["up"], in_float32["up"])
        usual.step()
        ours, opt_state, metrics = step(ours, opt_state, group)
        assert metrics.loss == loss
        assert metrics.loss.dtype == torch.float32
        assert_same(ours, tree.map(Tensor.detach, leaves), "params")
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_around_the_step() -> None:
    """It reaches into the loss, and nothing else."""
    params, groups = training(torch.float32)
    optimizer = ps.optim.adamw(0.1)

    def unaware(params: Any, microbatch: Any) -> Tensor:
        hidden = torch.tanh(microbatch["x"] @ params["up"])
        return (hidden @ params["down"]).float().squeeze(-1).square()

    results = []
    for loss_fn, enabled in ((autocast_loss, False), (unaware, True)):
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=weights_of)
        ours, opt_state = params, optimizer.init(params)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for group in groups:
                ours, opt_state, metrics = step(ours, opt_state, group)
        results.append((ours, opt_state, metrics))
    assert_same(results[1], results[0])


def exact_training() -> tuple[list[Any], list[Any]]:
    """Members of an ensemble, and a group of four rows, in integers: no product or sum is rounded, in whatever order."""
    generator = torch.Generator().manual_seed(5)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    members = [{"up": integers(4, 16), "down": integers(16, 1)} for _ in range(3)]
    return members, [{"x": integers(rows, 4), "w": torch.ones(rows)} for rows in (3, 1)]


def exact_autocast_loss(params: Any, microbatch: Any) -> Tensor:
    """The same network without anything that rounds."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = torch.relu(microbatch["x"] @ params["up"]) @ params["down"]
    assert output.dtype == torch.bfloat16
    return output.float().squeeze(-1).square()


def test_autocast_under_vmap() -> None:
    """An ensemble is its members one by one, to the bit, and float32 outside of the loss."""
    members, group = exact_training()
    optimizer = ps.optim.adamw(0.1)
    step = ps.make_update_step(exact_autocast_loss, optimizer, weight_fn=weights_of)
    states = [(params, optimizer.init(params)) for params in members]

    def of_group(params: Any, opt_state: Any) -> Any:
        return step(params, opt_state, group)[:2]

    def stacked(states: list[Any]) -> Any:
        return tree.map(lambda *leaves: torch.stack(leaves), *states)

    expected = stacked([of_group(*state) for state in states])
    assert not torch.equal(expected[0]["up"], stacked(members)["up"])
    assert_same(torch.vmap(of_group)(*stacked(states)), expected)


def test_autocast_under_grad() -> None:
    """The derivative of a step is autograd's second derivative of the same loss."""
    (params, *_), group = exact_training()
    optimizer = ps.optim.sgd(0.125)
    step = ps.make_update_step(exact_autocast_loss, optimizer, weight_fn=weights_of)

    def after(params: Any) -> Tensor:
        new, _, _ = step(params, optimizer.init(params), group)
        return torch.stack([leaf.sum() for leaf in new.values()]).sum()

    slope = torch.func.grad(after)(params)
    leaves = [leaf.clone().requires_grad_() for leaf in params.values()]
    theta = dict(zip(params, leaves, strict=True))
    loss = torch.stack([exact_autocast_loss(theta, batch).sum() for batch in group]).sum() / 4
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    new = [leaf - 0.125 * grad for leaf, grad in zip(leaves, grads, strict=True)]
    by_hand = torch.autograd.grad(torch.stack([leaf.sum() for leaf in new]).sum(), leaves)
    assert_same(list(slope.values()), list(by_hand))
    assert not torch.equal(slope["up"], torch.ones(4, 16))
