"""The mean of the params that an optimizer keeps: by hand, through steps that are donated, skipped or without tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree

OPTIMIZER = ps.optim.ema(ps.optim.sgd(1.0), 0.75)


def start(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"w": torch.tensor([0.0, 8.0], dtype=dtype), "b": torch.tensor(16.0, dtype=dtype)}


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Its gradient is x for each element."""
    return x * (params["w"].sum() + params["b"])


def lists(params: Any) -> Any:
    return params["w"].tolist(), params["b"].tolist()


HOW: list[dict[str, Any]] = [
    {"donate": donate, "normalize": normalize, "compile": compile}
    for donate in (False, True)
    for normalize, compile in (("loss", False), ("grads", False), ("loss", True))
]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_by_hand(how: dict[str, Any]) -> None:
    """Moved where the params are, and by nothing else."""
    step = ps.make_update_step(
        loss_fn, OPTIMIZER, weight_fn=lambda x: x != 0, on_nonfinite="skip", **how
    )
    params, state = start(), OPTIMIZER.init(start())
    assert lists(state.average) == lists(params)

    params, state, metrics = step(params, state, [torch.tensor([-4.0])])
    assert metrics.applied
    assert lists(params) == ([4.0, 12.0], 20.0)
    assert lists(state.average) == ([1.0, 9.0], 17.0)

    for group in ([torch.tensor([float("inf")])], [torch.tensor([0.0])], []):
        params, state, metrics = step(params, state, group)
        assert not metrics.applied
        assert lists(params) == ([4.0, 12.0], 20.0)
        assert lists(state.average) == ([1.0, 9.0], 17.0)

    params, state, _ = step(params, state, [torch.tensor([-8.0, -8.0]), torch.tensor([-8.0])])
    assert lists(params) == ([12.0, 20.0], 28.0)
    assert lists(state.average) == ([3.75, 11.75], 19.75)


@pytest.mark.parametrize("donate", [False, True])
def test_the_mean_lies_in_memory_of_its_own(donate: bool) -> None:
    """From init on. Donated, it stays where it is."""
    params = start()
    state = OPTIMIZER.init(params)
    step = ps.make_update_step(loss_fn, OPTIMIZER, weight_fn=torch.ones_like, donate=donate)
    places = [leaf.data_ptr() for leaf in tree.leaves_of(state.average)]
    given = state
    for _ in range(2):
        params, state, _ = step(params, state, [torch.ones(2)])
        mine, theirs = (
            {leaf.data_ptr() for leaf in tree.leaves_of(each)} for each in (state.average, params)
        )
        assert not mine & theirs
    assert ([leaf.data_ptr() for leaf in tree.leaves_of(state.average)] == places) == donate
    if not donate:
        assert lists(given.average) == lists(start())


def test_half_precision_is_averaged_wide() -> None:
    """256 + (258 - 256) / 4 is no number of bfloat16; inside of ``master_weights``, nor is 256 + (257.25 - 256) / 4."""
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


def test_refuses() -> None:
    with pytest.raises(TypeError, match="ema wraps an Optimizer, got Transform"):
        ps.optim.ema(ps.optim.momentum(0.9), 0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decay=1\.1 must be from 0 to 1"):
        ps.optim.ema(ps.optim.sgd(1.0), 1.1)
    other = OPTIMIZER.init({"w": torch.ones(3)})
    with pytest.raises(
        ValueError, match=r"opt_state was not made by optimizer\.init of these params"
    ):
        OPTIMIZER.update(start(), other, start())
