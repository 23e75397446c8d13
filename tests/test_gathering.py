"""Where sharded params are gathered: what travels when, what is whole, and what is alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.axis import Gather
from tests.layers import ADAMW, GATHERS, loss_of, network, of_pieces, of_whole, ones, rows
from tests.memory import LiveBytes

pytestmark = pytest.mark.timeout(60)


class Log(ps.testing.ThreadAxis):
    """Ranks that write down their collectives."""

    def __init__(self, size: int, *, bucket_bytes: int = 1 << 20) -> None:
        super().__init__(size, bucket_bytes=bucket_bytes)
        self.laws: list[list[Any]] = [[] for _ in range(size)]

    def meet(self, law: str, x: Tensor) -> Tensor:
        """As ever."""
        self.laws[self.rank].append((law, x.numel()))
        return super().meet(law, x)

    def launch(self, x: Tensor, law: str = "psum") -> Any:
        """As ever."""
        self.laws[self.rank].append((law, x.numel()))
        return super().launch(x, law)


def test_what_travels() -> None:
    """A gather and a scatter a step, or a microbatch; or for each layer, gathered twice."""

    def count(gather: Gather, microbatches: int) -> dict[str, int]:
        axis = Log(2, bucket_bytes=1 << 19)

        def program(rank: int) -> None:
            params = ps.shard(network(3, 256), axis)
            step = ps.make_update_step(
                lambda p, x: loss_of(gather)(p, x.repeat(1, 16)), ADAMW, weight_fn=ones, axis=axis,
                gather=gather,
            )  # fmt: skip
            state = ADAMW.init(params)
            axis.laws[rank].clear()
            step(params, state, [rows(2)] * microbatches)

        axis.map(program)(range(2))
        assert axis.laws[0] == axis.laws[1]
        laws = [law for law, numel in axis.laws[0] if numel > 1000]
        return {law: laws.count(law) for law in ("all_gather", "psum_scatter")}

    for microbatches in (1, 4):
        assert count("step", microbatches) == {"all_gather": 3, "psum_scatter": 3}
        each = {"all_gather": 3 * microbatches, "psum_scatter": 3 * microbatches}
        assert count("microbatch", microbatches) == each
        again = {"all_gather": 6 * microbatches, "psum_scatter": 3 * microbatches}
        assert count("loss", microbatches) == again


@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_blocks_leave_while_the_backward_pass_runs(gather: Gather) -> None:
    """When it comes to the first layer, the others are on their way; in each microbatch, or the last."""
    axis = Log(2, bucket_bytes=1 << 19)
    left: list[list[int]] = [[], []]

    def program(rank: int) -> None:
        def note(_: Tensor) -> None:
            laws = [law for law, numel in axis.laws[rank] if numel > 1000]
            left[rank].append(laws.count("psum_scatter"))

        def loss_fn(layers: Any, x: Tensor) -> Tensor:
            x = torch.relu(x.repeat(1, 16) @ layers[0])
            x.register_hook(note)
            return of_whole(layers[1:], x)

        params = ps.shard(network(3, 256), axis)
        step = ps.make_update_step(loss_fn, ADAMW, weight_fn=ones, axis=axis, gather=gather)
        step(params, ADAMW.init(params), [rows(2)] * 2)

    axis.map(program)(range(2))
    assert left == [[0, 2] if gather == "step" else [2, 5]] * 2


def test_one_layer_is_whole_at_a_time() -> None:
    """Sixteen layers more take the sums of their gradients and their inputs, and no whole layer.

    Measured on one rank, whose pieces are whole.
    """
    width, more = 128, 16
    of_layer = 8 * width * width

    def peak(layers: int) -> int:
        axis = ps.testing.ThreadAxis(1)

        def program(_: int) -> int:
            params = ps.shard(network(layers, width), axis)
            optimizer = ps.optim.sgd(0.1)
            step = ps.make_update_step(
                of_pieces, optimizer, weight_fn=ones, axis=axis, gather="loss", donate=True
            )
            state, x = optimizer.init(params), torch.ones(1, width).double()
            with LiveBytes() as live:
                step(params, state, [x, x])
            return live.peak

        (found,) = axis.map(program)(range(1))
        return int(found)

    assert more * of_layer <= peak(4 + more) - peak(4) < 1.05 * more * of_layer


def test_state_is_a_piece() -> None:
    """1/n of params and moments, and at most a row more."""
    axis = ps.testing.ThreadAxis(3)

    def program(rank: int) -> int:
        params = ps.shard({"w": torch.ones(7, 5), "b": torch.ones(6)}, axis)
        return sum(leaf.numel() for leaf in tree.leaves_of((params, ADAMW.init(params))))

    whole = 7 * 5 + 6
    for held in axis.map(program)(range(3)):
        assert held <= 3 * (whole + 2 * 5) / 3 + 1  # params and two moments, and a step


@pytest.mark.parametrize("gather", GATHERS)
def test_nothing_waits_for_the_garbage_collector(gather: Gather) -> None:
    """Whole tensors and sums are gone when the step has returned."""
    axis = ps.testing.ThreadAxis(2)
    wholes: list[list[Any]] = [[], []]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = ps.unshard(params)
        wholes[axis.rank] += map(weakref.ref, layers)
        return of_whole(layers, x)

    def program(rank: int) -> list[int]:
        params = ps.shard(network(3), axis)
        step = ps.make_update_step(loss_fn, ADAMW, weight_fn=ones, axis=axis, gather=gather)
        state = ADAMW.init(params)
        step(params, state, [rows(2)] * 2)
        return [sum(each() is not None for each in wholes[rank])]

    axis.map(program)(range(2))
    for each in wholes:
        each.clear()
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is Tensor for each in gc.get_objects())
        assert axis.map(program)(range(2)) == [[0], [0]]
        assert sum(type(each) is Tensor for each in gc.get_objects()) == before
    finally:
        gc.enable()
