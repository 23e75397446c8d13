"""What a failed step has computed is gone with its exception: on one rank, on threads and in a process group."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep.testing import ThreadAxis
from tests.broken import Unruly, broken_backward
from tests.uneven import SGD, Batch, batch, loss_fn, params

pytestmark = pytest.mark.timeout(60)


def run_in_this_process(program: Callable[[ps.Axis], None], ranks: str) -> None:
    """The program on one rank, on two threads, or on a process group of one."""
    if ranks == "local":
        program(ps.LocalAxis())
    elif ranks == "threads":
        axis = ThreadAxis(2)
        axis.map(lambda: program(axis))()
    else:
        store = vars(dist)["HashStore"]()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            program(ps.MeshAxis(DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), "dp"))
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("ranks", ["local", "threads", "mesh"])
@pytest.mark.parametrize("where", ["weights", "loss", "backward", "aux", "evaluation"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ArithmeticError])
def test_a_failed_step_keeps_nothing(kind: type[BaseException], where: str, ranks: str) -> None:
    """No garbage collector has to look for it."""
    alive: list[weakref.ref[Tensor]] = []

    def activation(x: Tensor) -> Tensor:
        h = x.exp()
        alive.append(weakref.ref(h))
        return h

    def fail_at(place: str, x: Tensor) -> None:
        if where == place and len(x) == 2:
            raise kind

    def weight_fn(microbatch: Batch) -> Tensor:
        weights = activation(torch.zeros(len(microbatch["y"])))
        fail_at("weights", weights)
        return weights

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        own = {**params, "w": activation(params["w"] * params["b"])}
        losses = (broken_backward(kind) if where == "backward" else loss_fn)(own, microbatch)
        fail_at("loss", losses)
        fail_at("evaluation", losses)
        aux = activation(losses.detach())
        return ps.LossTerms(losses, aux=aux.as_subclass(Unruly) if where == "aux" else aux.sum())

    def program(axis: ps.Axis) -> None:
        how: Any = {"weight_fn": weight_fn, "axis": axis}
        group = [batch(1), batch(2)]
        if where == "evaluation":
            ps.make_eval_step(loss, **how)(params(), group)
        else:
            ps.make_update_step(loss, SGD, **how)(params(), SGD.init(params()), group)
        raise kind

    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(kind, ValueError):
                run_in_this_process(program, ranks)
        assert alive
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()
