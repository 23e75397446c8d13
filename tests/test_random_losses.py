"""Tests ``benchmarks.random_losses``: what it draws runs eagerly, and a wrong update is found."""

import pytest
import torch

from benchmarks.random_losses import (
    ENDS,
    OPERATIONS,
    Loss,
    draw_loss,
    judge,
    make_case,
    make_loss_fn,
    update,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_operation_keeps_shape_and_dtype(dtype: torch.dtype) -> None:
    params, (microbatch, _) = make_case(dtype)
    x = microbatch["x"] @ params["w"]
    for name, operation in OPERATIONS.items():
        y = operation(x, params)
        assert (y.shape, y.dtype) == (x.shape, dtype), name


def test_all_that_is_drawn_runs() -> None:
    names: set[str] = set()
    params, (microbatch, _) = make_case(torch.float32)
    for seed in range(100):
        loss = draw_loss(seed)
        assert draw_loss(seed) == loss
        losses = make_loss_fn(loss)(params, microbatch)
        assert losses.shape == (len(microbatch["x"]),)
        names.update(*loss.branches, loss.head, loss.ends)
    assert names == {*OPERATIONS, *ENDS}


def test_a_gradient_that_is_lost_is_found() -> None:
    loss = Loss(["sin"], [["matmul"], ["sort"]], ["greatest", "sum"])
    exact = update(loss, "eager", torch.float64)
    eager = update(loss, "eager")
    distance, is_wrong = judge(exact, eager, eager)
    assert distance < 1e-6
    assert not is_wrong
    for lost in (0.999 * eager["w"], eager["w"] * torch.nan):
        _, is_wrong = judge(exact, eager, {**eager, "w": lost})
        assert is_wrong
