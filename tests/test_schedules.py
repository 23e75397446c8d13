"""Learning rates: schedules, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps


def test_schedules_refuse() -> None:
    with pytest.raises(ValueError, match="transition_steps=0 must be positive"):
        ps.optim.linear_schedule(0.0, 1.0, 0)
    with pytest.raises(ValueError, match="decay_steps=-1 must be positive"):
        ps.optim.cosine_decay_schedule(1.0, -1)
    with pytest.raises(ValueError, match=r"decay_steps=5 is the whole length .* warmup_steps=5"):
        ps.optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5)
    with pytest.raises(
        ValueError, match="2 schedules have 1 boundaries between them, but 2 were given"
    ):
        ps.optim.join_schedules([lambda s: s, lambda s: s], [1, 2])


def test_schedules_keep_their_precision() -> None:
    schedule = ps.optim.warmup_cosine_decay_schedule(0.0, 0.3, 10, 100, 0.03)
    assert schedule(torch.tensor(5)) == pytest.approx(0.15, rel=1e-15)
    assert schedule(torch.tensor(10)) == pytest.approx(0.3, rel=1e-15)
    assert schedule(torch.tensor(1000)) == pytest.approx(0.03, rel=1e-15)


@pytest.mark.parametrize(
    "make",
    [
        ps.optim.sgd,
        ps.optim.adamw,
        ps.optim.lion,
        ps.optim.descend,
        lambda rate: ps.optim.from_torch(torch.optim.SGD, lr=rate),
    ],
)
def test_a_rate_that_is_none(make: Any) -> None:
    """torch's schedulers write into torch's optimizers; a schedule is a function."""
    usual = torch.optim.SGD([torch.ones(1)], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.StepLR(usual, 3),
        schedulers.ReduceLROnPlateau(usual),
        schedulers.CosineAnnealingLR,
    ):
        with pytest.raises(TypeError, match=r"scheduler of torch.*function of the step: ps\.optim"):
            make(scheduler)
    for rate in ("0.1", dict, [0.1]):
        with pytest.raises(TypeError, match="must be a number, a scalar tensor or a schedule"):
            make(rate)
