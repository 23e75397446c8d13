"""Tests autocast inside of the loss and around the step: it reaches the loss and nothing else."""

from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from support.strategies import assert_same, stack_trees
from tests.half_precision import (
    count_tokens,
    draw_training,
    get_weights,
    quadratic_loss,
)


def unaware_loss(params: Any, microbatch: Any) -> Tensor:
    """Runs a network in the dtype of its inputs, with its loss in float32."""
    hidden = torch.relu(microbatch["x"] @ params["up"])
    output = hidden @ params["down"]
    return output.float().squeeze(-1).square()


def autocast_loss(params: Any, microbatch: Any) -> Tensor:
    """Runs the same in bfloat16, as in most training loops."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = microbatch["x"] @ params["up"]
        assert product.dtype == torch.bfloat16
        return unaware_loss(params, microbatch)


def train_by_hand(params: Any, groups: Any) -> Any:
    """Trains as in most training loops, and returns the params."""
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    sgd = torch.optim.SGD(tree.leaves(leaves), lr=0.1, momentum=0.9)
    for group in groups:
        sgd.zero_grad()
        count = count_tokens(group)
        for batch in group:
            weights = batch["w"].to(torch.float64) / count
            losses = autocast_loss(leaves, batch)
            weighted = losses * weights.to(torch.float32)
            weighted.sum().backward()
        sgd.step()
    return tree.map(Tensor.detach, leaves)


def test_autocast_inside_the_loss_and_around_the_step() -> None:
    """Gradients and state are in float32, with the bits of a loop by hand."""
    params, groups = draw_training(torch.float32)
    optimizer = ps.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)

    def train(loss_fn: Any, *, autocast_around: bool = False) -> Any:
        step: Any = ps.make_update_step(loss_fn, optimizer, weight_fn=get_weights)
        state = (params, optimizer.init(params))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast_around):
            for group in groups:
                *state, metrics = step(*state, group)
        new_params, opt_state = state
        for leaf in tree.leaves((new_params, metrics.loss)):
            assert leaf.dtype == torch.float32
        return new_params, opt_state

    inside = train(autocast_loss)
    around = train(unaware_loss, autocast_around=True)
    without = train(quadratic_loss)

    new_params, _ = inside
    new_params_without, _ = without
    assert_same(new_params, train_by_hand(params, groups))
    assert_same(around, inside)
    assert not torch.equal(new_params_without["up"], new_params["up"])
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_under_vmap() -> None:
    """An ensemble is its members one by one, and in float32 outside of the loss.

    All numbers are integers, so nothing is rounded, in whatever order.
    """
    generator = torch.Generator().manual_seed(5)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    members = {
        "up": integers(3, 4, 16),
        "down": integers(3, 16, 1),
    }
    group = [
        {"x": integers(3, 4), "w": torch.ones(3)},
        {"x": integers(1, 4), "w": torch.ones(1)},
    ]
    optimizer = ps.optim.adamw(0.1)
    step = ps.make_update_step(autocast_loss, optimizer, weight_fn=get_weights)

    def run_step(params: Any) -> Any:
        new_params, opt_state, _ = step(params, optimizer.init(params), group)
        return new_params, opt_state

    one_by_one = []
    for i in range(3):
        member = {name: leaf[i] for name, leaf in members.items()}
        one_by_one.append(run_step(member))

    assert_same(torch.vmap(run_step)(members), stack_trees(one_by_one))
    first_params, _ = one_by_one[0]
    assert not torch.equal(first_params["up"], members["up"][0])
