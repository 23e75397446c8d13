"""What threads alone show of ranks that go wrong: a default dtype that is set, and what decides which collectives come."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.worlds import Ranks, on_threads
from tests.faults import check_fault, faulty_step

pytestmark = pytest.mark.timeout(60)


def test_a_fault_is_told_in_any_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        results = on_threads(Ranks(4), faulty_step, range(4), ["first loss"] * 4, [{}] * 4)
    finally:
        torch.set_default_dtype(before)
    check_fault("first loss", results)


@pytest.mark.parametrize("differing", ["bucket_bytes", "requires_grad"])
def test_what_decides_the_path_is_agreed_on(differing: str) -> None:
    """Another size of buckets, or one rank that is being differentiated, would take other collectives."""
    axis = ps.testing.ThreadAxis(2)
    optimizer = ps.optim.sgd(0.5)

    def on_rank(w: Tensor) -> Any:
        if axis.rank == 1 and differing == "bucket_bytes":
            axis_of_mine = copy(axis)
            axis_of_mine.bucket_bytes = 8
        else:
            axis_of_mine = axis
        if axis.rank == 1 and differing == "requires_grad":
            w = w.clone().requires_grad_()
        step = ps.make_update_step(
            lambda w, x: w * x, optimizer, weight_fn=torch.ones_like, axis=axis_of_mine
        )
        return step(w, optimizer.init(w), [torch.ones(3)])

    with pytest.raises(ValueError, match="disagree on settings"):
        axis.map(on_rank)([torch.tensor(1.0)] * 2)
