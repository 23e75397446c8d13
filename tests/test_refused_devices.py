"""Devices that do not go together, or lack what a step needs, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purestep as ps
from proofs.devices import Waits, lazy
from purestep import optim
from tests.on_a_device import one_leaf, ones, row

NO_STATE: Any = ()


def test_two_devices() -> None:
    params = {"v": torch.ones(3), "w": torch.ones(3, device=lazy())}
    step = ps.make_update_step(one_leaf, optim.sgd(0.5), weight_fn=ones)
    with pytest.raises(ValueError, match=r"params\['v'\] is on cpu, but params\['w'\] is on lazy"):
        step(params, NO_STATE, [row()])


def test_data_on_the_host() -> None:
    """As on CUDA, the loss meets tensors of two devices; only ``weight_fn`` and ``prefetch`` may stay behind."""
    params = {"w": torch.ones(3, device=lazy())}
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(one_leaf, optimizer, weight_fn=ones)
    with pytest.raises(RuntimeError, match="not a lazy tensor"):
        step(params, optimizer.init(params), [{"x": torch.ones(1, 3), "y": torch.ones(1)}])
    weighed = ps.make_update_step(one_leaf, optimizer, weight_fn=lambda m: torch.ones(1))
    data = row()
    with Waits() as waits:
        new = weighed(params, optimizer.init(params), [data])[0]
    assert waits.seen == []
    assert new["w"].tolist() == [0.5, 0, -0.5]
