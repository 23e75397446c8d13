"""On a device whose tensors have no address: what donation, recomputation and a loss that swaps its leaf come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import purestep as ps
from proofs.devices import lazy
from proofs.strategies import Batch
from purestep import optim
from tests.on_a_device import one_leaf, ones, row


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda w: ({"w": w, "v": w}, {}), "'v'.*'w'.* share memory"),
        (lambda w: ({"w": w, "v": w.detach()}, {}), "'v'.*'w'.* share memory"),
        (lambda w: ({"w": w, "v": w[:2]}, {}), "'v'.*'w'.* share memory"),
        (
            lambda w: ({"w": w}, {"z": w.view(1, 3)}),
            r"'w'.*microbatches\[0\]\['z'\] shares its memory",
        ),
    ],
)
def test_donation_sees_aliases(make: Any, match: str) -> None:
    """Without addresses, too: tensors of one storage."""
    params, more = make(torch.ones(3, device=lazy()))
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(one_leaf, optimizer, weight_fn=ones, donate=True)
    with pytest.raises(ValueError, match=match):
        step(params, optimizer.init(params), [row(**more)])


def test_donation_of_many_leaves() -> None:
    """Storages of their own are taken for what they are, however close they lie."""
    leaves = [torch.ones(1000, device=lazy()) for _ in range(200)]
    params: dict[str, Any] = {
        "w": torch.ones(3, device=lazy()),
        "more": leaves,
        "some": torch.ones(9, device=lazy())[2:],
    }
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(one_leaf, optimizer, weight_fn=ones, donate=True)
    new, _, _ = step(params, optimizer.init(params), [row()])
    assert new["w"] is params["w"]
    assert params["w"].tolist() == [0.5, 0.0, -0.5]


def test_a_loss_that_exchanges_values() -> None:
    """What it puts under its leaf is not there for the next microbatch."""

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        losses = one_leaf(params, batch).square()
        params["w"].data = torch.full_like(params["w"], 7.0)
        return losses

    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones)
    params = {"w": torch.ones(3, device=lazy())}
    new, _, metrics = step(params, optimizer.init(params), [row(), row()])
    assert metrics.loss == 25
    assert new["w"].tolist() == [-4, -9, -14]


class Again(Function):
    """Computes with a parameter in the backward pass again, as checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Tensor) -> Tensor:
        ctx.again = again
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            return grad * ctx.again.sum(), None


@pytest.mark.parametrize("shared", [True, False])
def test_recomputation(shared: bool) -> None:
    """With a module's own parameter it is refused, but for one that is a leaf's own memory."""
    parameter = torch.nn.Parameter(torch.ones(3, device=lazy()))
    params = {"w": parameter.detach() if shared else torch.ones(3, device=lazy())}

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        again: Tensor = Again.apply(one_leaf(params, batch), parameter)
        return again

    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones)
    if shared:
        assert step(params, optimizer.init(params), [row()])[0]["w"].tolist() == [-0.5, -2, -3.5]
        return
    with pytest.raises(ValueError, match="a module's own parameter"):
        step(params, optimizer.init(params), [row()])
