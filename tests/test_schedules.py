"""Learning rates: schedules, and what is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import purestep as ps

warmup = ps.optim.warmup_cosine_decay_schedule
REFUSED: dict[str, Callable[[], Any]] = {
    "transition_steps=0 must be positive": lambda: ps.optim.linear_schedule(0.0, 1.0, 0),
    "decay_steps=-1 must be positive": lambda: ps.optim.cosine_decay_schedule(1.0, -1),
    "decay_steps=5 is the whole length .* warmup_steps=5": lambda: warmup(0.0, 1.0, 5, 5),
    "2 schedules have 1 boundaries between them, but 2 were given": (
        lambda: ps.optim.join_schedules([lambda s: s, lambda s: s], [1, 2])
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_schedules_refuse(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_schedules_keep_their_precision() -> None:
    schedule = warmup(0.0, 0.3, 10, 100, 0.03)
    for step, rate in ((5, 0.15), (10, 0.3), (1000, 0.03)):
        assert schedule(torch.tensor(step)) == pytest.approx(rate, rel=1e-15)


@pytest.mark.parametrize(
    "make",
    [
        ps.optim.sgd,
        ps.optim.adamw,
        ps.optim.lion,
        lambda rate: ps.optim.from_torch(torch.optim.SGD, lr=rate),
    ],
)
def test_a_rate_that_is_none(make: Any) -> None:
    """torch's schedulers write into torch's optimizers; a schedule is a function."""
    usual = torch.optim.SGD([torch.ones(1)], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    plateau, cosine = schedulers.ReduceLROnPlateau(usual), schedulers.CosineAnnealingLR
    for scheduler in (schedulers.StepLR(usual, 3), plateau, cosine):
        with pytest.raises(TypeError, match=r"scheduler of torch.*function of the step: ps\.optim"):
            make(scheduler)
    for rate in ("0.1", dict, [0.1]):
        with pytest.raises(TypeError, match="must be a number, a scalar tensor or a schedule"):
            make(rate)
