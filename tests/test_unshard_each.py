"""``unshard_each`` is ``unshard`` of each, and what a loss does with pieces and wholes stays its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.layers import ones

pytestmark = pytest.mark.timeout(60)


def test_unshard_in_inference_mode() -> None:
    axis = ps.testing.ThreadAxis(2)

    def program(_: int) -> Any:
        params = ps.shard({"w": torch.arange(5.0), "n": torch.arange(3)}, axis)
        with torch.inference_mode():
            return ps.unshard(params), next(iter(ps.unshard_each([params])))

    for found in axis.map(program)(range(2)):
        for each in found:
            assert torch.equal(each["w"], torch.arange(5.0))
            assert torch.equal(each["n"], torch.arange(3))


def test_unshard_each_is_unshard() -> None:
    """Of every tree, under transforms too; and a derivative of a derivative passes."""
    axis, vmapped = ps.testing.ThreadAxis(2), ps.VmapAxis(2)
    layers = [{"w": torch.arange(5.0), "b": torch.tensor(2.0)}, {"w": torch.ones(3, 2)}]

    def program(_: int) -> Any:
        mine = [ps.shard(layer, axis) for layer in layers]
        assert list(ps.unshard_each([])) == []
        piece = ps.Shard(mine[0]["w"].piece.requires_grad_(), axis, (5,))
        loss = sum(each.pow(3).sum() for each in ps.unshard_each([piece]))
        (slope,) = torch.autograd.grad(loss, piece.piece, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), piece.piece)
        return list(ps.unshard_each(mine)), ps.unshard(ps.Shard(curve, axis, (5,)))

    for found, curve in axis.map(program)(range(2)):
        assert all(map(torch.equal, tree.leaves_of(found), tree.leaves_of(layers)))
        # Both ranks compute the same, and what they compute is summed.
        assert torch.equal(curve, 2 * 6 * layers[0]["w"])

    def on_ranks(w: Tensor) -> Tensor:
        nodes = [ps.shard(w, vmapped), ps.shard(2 * w, vmapped)]
        return torch.stack(list(ps.unshard_each(nodes)))

    run = vmapped.map(on_ranks, in_dims=None, out_dims=None)
    assert torch.equal(
        run(torch.arange(3.0)), torch.stack([torch.arange(3.0), 2 * torch.arange(3.0)])
    )


def test_a_loss_that_transforms_itself_is_told_so() -> None:
    axis = ps.testing.ThreadAxis(1)

    def loss_fn(w: Any, x: Tensor) -> Tensor:
        force: Tensor = torch.func.grad(lambda x: (ps.unshard(w) * x).sum())(x)
        return force.square()

    def program(_: int) -> None:
        w = ps.shard(torch.ones(2), axis)
        step = ps.make_update_step(
            loss_fn, ps.optim.sgd(1.0), axis=axis, weight_fn=ones, gather="loss"
        )
        with pytest.raises(
            ValueError, match=r"torch.func.grad and vjp inside.*torch.autograd.grad"
        ):
            step(w, ps.optim.sgd(1.0).init(w), [torch.ones(2)])

    axis.map(program)(range(1))


def test_a_loss_that_keeps_a_whole() -> None:
    """Of one microbatch for the next: it has the values of a constant there."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(1.0)

    def program(rank: int) -> Any:
        kept: list[Tensor] = []

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            (whole,) = ps.unshard_each(params)
            kept.append(whole)
            return (whole * kept[0] * x).sum()[None]

        params = ps.shard([torch.arange(4.0)], axis)
        step = ps.make_update_step(
            loss_fn, optimizer, axis=axis, weight_fn=lambda x: torch.ones(1), gather="loss"
        )
        new, _, _ = step(params, optimizer.init(params), [torch.tensor(4.0)] * 2)
        return ps.unshard(new)

    for (new,) in axis.map(program)(range(2)):
        # Twice two ranks of w w, then of w times a constant.
        assert torch.equal(new, torch.arange(4.0) * (1 - 2 * (2 * 4 + 4) / 4))


def test_hooks_on_pieces_see_one_microbatch() -> None:
    """And may change its gradient, which is then a piece's."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(1.0)

    def program(rank: int) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            params[0].piece.register_hook(lambda grad: 10 * grad)
            return (ps.unshard(params)[0] * x).sum()[None]

        params = ps.shard([torch.zeros(4)], axis)
        step = ps.make_update_step(
            loss_fn, optimizer, axis=axis, weight_fn=lambda x: torch.ones(1), gather="loss"
        )
        new, _, _ = step(params, optimizer.init(params), [torch.tensor(1.0), torch.tensor(2.0)])
        return ps.unshard(new)

    for (new,) in axis.map(program)(range(2)):
        assert torch.equal(new, torch.full((4,), -10 * 2 * 3 / 4))
