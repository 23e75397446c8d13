"""What a failed step has computed is gone with its exception: on one rank, on threads and in a process group."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from tests.broken import Unruly
from tests.uneven import Batch, batch, loss_fn, params

pytestmark = pytest.mark.timeout(60)


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

    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(fails, ValueError):
                in_this_process(program, kind)
        assert alive
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
