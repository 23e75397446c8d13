"""``ema``: the mean of the params by hand, in steps that are donated, skipped or have no tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.test_t08_optimizers import buffers

OPTIMIZER = ps.optim.ema(ps.optim.sgd(1.0), 0.75)


def start() -> dict[str, Tensor]:
    return {"w": torch.tensor([0.0, 8.0]), "b": torch.tensor(16.0)}


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Its gradient is x for each element."""
    return x * (params["w"].sum() + params["b"])


def lists(params: Any) -> Any:
    return params["w"].tolist(), params["b"].tolist()


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("donate", [False, True])
def test_the_mean_by_hand(donate: bool, normalize: Any) -> None:
    """It moves where the params do, and then alone; it lies in other memory, and stays there."""
    step = ps.make_update_step(
        loss_fn, OPTIMIZER, weight_fn=lambda x: x != 0, on_nonfinite="skip",
        donate=donate, normalize=normalize,
    )  # fmt: skip
    params = start()
    first = state = OPTIMIZER.init(params)
    assert lists(state.average) == lists(params)
    places = buffers(state.average)
    for group, wanted, mean in (
        ([torch.tensor([-4.0])], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([torch.tensor([float("inf")])], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([torch.tensor([0.0])], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([], ([4.0, 12.0], 20.0), ([1.0, 9.0], 17.0)),
        ([torch.tensor([-8.0, -8.0])], ([12.0, 20.0], 28.0), ([3.75, 11.75], 19.75)),
    ):
        params, state, _ = step(params, state, group)
        assert (lists(params), lists(state.average)) == (wanted, mean)
        assert not {*buffers(state.average)} & {*buffers(params)}
    assert (buffers(state.average) == places) == donate
    assert donate or lists(first.average) == lists(start())


def test_half_precision_is_averaged_in_float32() -> None:
    """256 + (258 - 256) / 4 is no bfloat16; in ``master_weights``, nor is 256 + 1.25 / 4."""
    theta, sgd = torch.tensor(256.0, dtype=torch.bfloat16), ps.optim.sgd(1.0)
    rounded = ps.optim.ema(sgd, 0.75)
    _, state = rounded.update(torch.tensor(-2.0), rounded.init(theta), theta)
    assert (state.average.dtype, float(state.average)) == (torch.float32, 256.5)
    wide = ps.optim.master_weights(rounded)
    _, state = wide.update(torch.tensor(-1.25), wide.init(theta), theta)
    assert (state.inner.average.dtype, float(state.inner.average)) == (torch.float32, 256.3125)


def test_a_decay_for_each_of_an_ensemble() -> None:
    def averaged(decay: Tensor) -> Tensor:
        optimizer = ps.optim.ema(ps.optim.sgd(1.0), decay)
        w = torch.tensor(0.0)
        return optimizer.update(torch.tensor(-4.0), optimizer.init(w), w)[1].average

    assert torch.vmap(averaged)(torch.tensor([0.0, 0.5, 1.0])).tolist() == [4.0, 2.0, 0.0]


def test_ema_refuses() -> None:
    with pytest.raises(TypeError, match="ema wraps an Optimizer, got Transform"):
        ps.optim.ema(ps.optim.momentum(0.9), 0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decay=1\.1 must be from 0 to 1"):
        ps.optim.ema(ps.optim.sgd(1.0), 1.1)
    other = OPTIMIZER.init({"w": torch.ones(3)})
    with pytest.raises(ValueError, match=r"opt_state was not made by optimizer\.init of these"):
        OPTIMIZER.update(start(), other, start())
