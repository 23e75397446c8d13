"""Autocast inside of the loss and around the step: what it reaches, and nothing else."""

from typing import Any

import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, stack
from purestep import tree
from tests.halves import quadratic_loss, tokens, training, weights_of


def unaware_loss(params: Any, microbatch: Any) -> Tensor:
    """A network of the dtype that it finds, its loss in float32."""
    hidden = torch.relu(microbatch["x"] @ params["up"])
    return (hidden @ params["down"]).float().squeeze(-1).square()


def autocast_loss(params: Any, microbatch: Any) -> Tensor:
    """The same in bfloat16, as everyone trains."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (microbatch["x"] @ params["up"]).dtype == torch.bfloat16
        return unaware_loss(params, microbatch)


def test_autocast_inside_the_loss_and_around_the_step() -> None:
    """Gradients and state in float32, and the bits of the loop that everyone writes."""
    params, groups = training(torch.float32)
    leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
    usual = torch.optim.SGD(tree.leaves(leaves), lr=0.1, momentum=0.9)
    optimizer = ps.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    states = {}
    losses: Any = {
        "inside": autocast_loss,
        "around": unaware_loss,
        "without": quadratic_loss,
    }
    for name, loss_fn in losses.items():
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=weights_of)
        state = params, optimizer.init(params)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "around"):
            for group in groups:
                *state, metrics = step(*state, group)  # type: ignore[assignment]
        assert all(
            leaf.dtype == torch.float32
            for leaf in tree.leaves((state[0], metrics.loss))
        )
        states[name] = state
    for group in groups:
        usual.zero_grad()
        for batch in group:
            seed = (batch["w"].to(torch.float64) / tokens(group)).to(torch.float32)
            (autocast_loss(leaves, batch) * seed).sum().backward()
        usual.step()
    assert_same(states["inside"][0], tree.map(Tensor.detach, leaves))
    assert_same(states["around"], states["inside"])
    assert not torch.equal(states["without"][0]["up"], states["inside"][0]["up"])
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_under_vmap() -> None:
    """An ensemble is its members one by one, and float32 outside of the loss. Integers: nothing is rounded, in whatever order."""
    generator = torch.Generator().manual_seed(5)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    members = {"up": integers(3, 4, 16), "down": integers(3, 16, 1)}
    group = [{"x": integers(rows, 4), "w": torch.ones(rows)} for rows in (3, 1)]
    optimizer = ps.optim.adamw(0.1)
    step = ps.make_update_step(autocast_loss, optimizer, weight_fn=weights_of)

    def after(params: Any) -> Any:
        return step(params, optimizer.init(params), group)[:2]

    alone = [after(tree.map(lambda leaf, i=i: leaf[i], members)) for i in range(3)]
    assert_same(torch.vmap(after)(members), stack(alone))
    assert not torch.equal(alone[0][0]["up"], members["up"][0])
