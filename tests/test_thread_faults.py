"""Ranks that go wrong, on threads: every rank hears what happened, and the next step is sound.

``tests/test_process_faults.py`` says the same of processes.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import weakref
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from tests.faults import (
    COMPUTED,
    FAULTS,
    SGD,
    Batch,
    Unruly,
    batch,
    check_fault,
    check_faulty_derivative,
    cut,
    faulty_derivative,
    faulty_step,
    loss_fn,
    params,
)
from tests.programs import (
    OVERFLOWS,
    aux_without_zeros,
    check_aux_without_zeros,
    overflowing,
    threads,
    weights_of,
    with_aux_of_its_own,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_on_every_rank(name: str, bucket_bytes: int, donate: bool) -> None:
    axis = ps.testing.ThreadAxis(4, bucket_bytes=bucket_bytes)
    results = axis.map(lambda rank: faulty_step(axis, rank, name, donate))(range(4))
    check_fault(name, results, repr(axis))


@pytest.mark.parametrize("gather", ["step", "microbatch"])
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_params_are_in_pieces(
    name: str, bucket_bytes: int, gather: str
) -> None:
    """The others go on with their gathers, and the rank that failed joins them."""
    axis = ps.testing.ThreadAxis(4, bucket_bytes=bucket_bytes)
    results = axis.map(lambda rank: faulty_step(axis, rank, name, True, gather=gather))(range(4))
    check_fault(name, results, repr(axis))


def test_a_fault_is_told_in_any_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        axis = ps.testing.ThreadAxis(4)
        results = axis.map(lambda rank: faulty_step(axis, rank, "first loss", False))(range(4))
    finally:
        torch.set_default_dtype(before)
    check_fault("first loss", results, repr(axis))


@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_somebody_differentiates(name: str) -> None:
    axis = ps.testing.ThreadAxis(4)
    check_faulty_derivative(
        name, axis.map(lambda rank: faulty_derivative(axis, rank, name))(range(4))
    )


def test_aux_that_an_empty_rank_cannot_be_told() -> None:
    for text in threads(4, with_aux_of_its_own, cut(batch())):
        assert "make it of containers that can be pickled" in text


def test_aux_that_an_empty_rank_cannot_make() -> None:
    check_aux_without_zeros(threads(4, aux_without_zeros, range(4)))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", OVERFLOWS.values(), ids=list(OVERFLOWS))
def test_counts_that_overflow_together(held: list[tuple[float, int]], normalize: str) -> None:
    """No rank's count is too large, and their sum is: an error on every rank, before anything is updated."""
    for untouched, count in threads(4, overflowing, held, [normalize] * 4):
        assert untouched
        assert count == 4


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", [(2**53, 1024), (1e308, 2)])
def test_a_count_that_overflows_on_one_rank(held: tuple[float, int], normalize: Any) -> None:
    weight, number = held
    step_ = ps.make_update_step(
        loss_fn, SGD, weight_fn=lambda _: weights_of(weight), normalize=normalize
    )
    with pytest.raises(ValueError, match="overflows"):
        step_(params(), SGD.init(params()), [batch(1)] * number)


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


def in_this_process(program: Callable[[ps.Axis], None], kind: str) -> None:
    """The program on one rank, on two threads, or on a process group of one."""
    if kind == "local":
        program(ps.LocalAxis())
    elif kind == "threads":
        axis = ps.testing.ThreadAxis(2)
        axis.map(lambda: program(axis))()
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
            try:
                program(ps.MeshAxis(DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), "dp"))
            finally:
                dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["local", "threads", "mesh"])
@pytest.mark.parametrize("where", ["weights", "loss", "backward", "aux", "evaluation"])
@pytest.mark.parametrize("fails", [KeyboardInterrupt, ArithmeticError])
def test_a_failed_step_keeps_nothing(fails: type[BaseException], where: str, kind: str) -> None:
    """What it has computed is gone when its exception is, and no garbage collector has to look for it."""
    alive: list[weakref.ref[Tensor]] = []

    def activation(x: Tensor) -> Tensor:
        h = x.exp()
        alive.append(weakref.ref(h))
        return h

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise fails

    def weight_fn(microbatch: Batch) -> Tensor:
        weights = activation(torch.zeros(len(microbatch["y"])))
        if where == "weights" and len(weights) == 2:
            raise fails
        return weights

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        h = activation(params["w"] * params["b"])
        losses = loss_fn({**params, "w": h}, microbatch)
        if where in ("loss", "evaluation") and len(losses) == 2:
            raise fails
        if where == "backward":
            losses = Broken.apply(losses)
        aux = activation(losses.detach())
        return ps.LossTerms(losses, aux=aux.as_subclass(Unruly) if where == "aux" else aux.sum())

    def program(axis: ps.Axis) -> None:
        optimizer = ps.optim.sgd(0.5)
        if where == "evaluation":
            evaluate = ps.make_eval_step(loss, weight_fn=weight_fn, axis=axis)
            evaluate(params(), [batch(1), batch(2)])
        else:
            update = ps.make_update_step(loss, optimizer, weight_fn=weight_fn, axis=axis)
            update(params(), optimizer.init(params()), [batch(1), batch(2)])
        raise fails

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(fails, ValueError):
                in_this_process(program, kind)
        assert alive
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
