"""Where tensors have no address: donation, recomputation and a loss that swaps its leaf's values."""

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

SGD = optim.sgd(0.5)


def step_with(params: Any, group: list[Batch], loss_fn: Any = one_leaf, **how: Any) -> Any:
    step = ps.make_update_step(loss_fn, SGD, weight_fn=ones, **how)
    return step(params, SGD.init(params), group)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda w: ({"w": w, "v": w}, {}), "'v'.*'w'.* share memory"),
        (lambda w: ({"w": w, "v": w[:2]}, {}), "'v'.*'w'.* share memory"),
        (
            lambda w: ({"w": w}, {"z": w.view(1, 3)}),
            r"'w'.*microbatches\[0\]\['z'\] shares its memory",
        ),
    ],
)
def test_donation_sees_tensors_of_one_storage(make: Any, match: str) -> None:
    params, more = make(torch.ones(3, device=lazy()))
    with pytest.raises(ValueError, match=match):
        step_with(params, [row(**more)], donate=True)


def test_donation_of_many_leaves() -> None:
    """Each storage is taken for what it is, however close they lie."""
    params: dict[str, Any] = {
        "w": torch.ones(3, device=lazy()),
        "more": [torch.ones(1000, device=lazy()) for _ in range(50)],
        "some": torch.ones(9, device=lazy())[2:],
    }
    assert step_with(params, [row()], donate=True)[0]["w"] is params["w"]
    assert params["w"].tolist() == [0.5, 0.0, -0.5]


def test_a_loss_that_swaps_the_values_of_its_leaf() -> None:
    """They are not there for the next microbatch."""

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        losses = one_leaf(params, batch).square()
        params["w"].data = torch.full_like(params["w"], 7.0)
        return losses

    new, _, metrics = step_with({"w": torch.ones(3, device=lazy())}, [row(), row()], loss_fn)
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
def test_recomputation_with_a_modules_own_parameter_is_refused(shared: bool) -> None:
    """But for one that is a leaf's own memory."""
    parameter = torch.nn.Parameter(torch.ones(3, device=lazy()))
    params = {"w": parameter.detach() if shared else torch.ones(3, device=lazy())}

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        again: Tensor = Again.apply(one_leaf(params, batch), parameter)
        return again

    if shared:
        assert step_with(params, [row()], loss_fn)[0]["w"].tolist() == [-0.5, -2, -3.5]
    else:
        with pytest.raises(ValueError, match="a module's own parameter"):
            step_with(params, [row()], loss_fn)
