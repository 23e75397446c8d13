"""Where the gather of params in pieces stands: what travels when, what is whole, and what is alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.axis.ranks import Wait
from purestep.gathering import Gather
from tests.layers import ADAMW, GATHERS, loss_of, network, of_pieces, of_whole, ones, rows
from tests.memory import LiveBytes

pytestmark = pytest.mark.timeout(60)


class Log(ps.testing.ThreadAxis):
    """Ranks that write down what they launch."""

    def __init__(self, size: int, *, bucket_bytes: int = 1 << 20) -> None:
        super().__init__(size, bucket_bytes=bucket_bytes)
        self.launched: list[list[Any]] = [[] for _ in range(size)]
        self.waited = [0] * size

    def launch(self, law: str, x: Tensor, out: Tensor) -> Wait:
        """As ever."""
        self.launched[self.rank].append((law, x.numel()))
        wait = super().launch(law, x, out)

        def waited() -> None:
            self.waited[self.rank] += 1
            wait()

        return waited


def test_what_travels() -> None:
    """However many microbatches: a gather and a scatter a step, or each for a microbatch, or two gathers of each layer."""

    def count(gather: Gather, microbatches: int) -> dict[str, int]:
        axis = Log(2, bucket_bytes=1 << 19)

        def program(rank: int) -> None:
            params = ps.shard(network(3, 256), axis)
            step = ps.make_update_step(
                lambda p, x: loss_of(gather)(p, x.repeat(1, 16)), ADAMW, weight_fn=ones, axis=axis,
                gather=gather,
            )  # fmt: skip
            state = ADAMW.init(params)
            axis.launched[rank].clear()
            step(params, state, [rows(2)] * microbatches)

        axis.map(program)(range(2))
        assert axis.launched[0] == axis.launched[1]
        laws = [law for law, numel in axis.launched[0] if numel > 1000]
        return {law: laws.count(law) for law in ("all_gather", "psum_scatter")}

    for microbatches in (1, 4):
        assert count("step", microbatches) == {"all_gather": 3, "psum_scatter": 3}
        each = {"all_gather": 3 * microbatches, "psum_scatter": 3 * microbatches}
        assert count("microbatch", microbatches) == each
        again = {"all_gather": 6 * microbatches, "psum_scatter": 3 * microbatches}
        assert count("loss", microbatches) == again


@pytest.mark.parametrize("gather", GATHERS)
def test_gradients_leave_while_the_backward_pass_runs(gather: Gather) -> None:
    """When the first layer's gradient is found, that of the last one is on its way."""
    axis = Log(2, bucket_bytes=8)
    seen: list[list[str]] = [[], []]

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen[axis.rank] += [law for law, _ in axis.launched[axis.rank]]
            return grad

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        first = torch.relu(x @ ps.unshard(params[0])) * 0.125
        look: Callable[[Tensor], Tensor] = Look.apply
        return loss_of(gather)(params[1:], look(first))

    def program(rank: int) -> None:
        params = ps.shard(network(3, 256), axis)
        step = ps.make_update_step(loss_fn, ADAMW, weight_fn=ones, axis=axis, gather=gather)
        state = ADAMW.init(params)
        axis.launched[rank].clear()
        step(params, state, [rows(2, rank).repeat(1, 16)])

    axis.map(program)(range(2))
    for laws in seen:
        assert laws.count("psum_scatter") == 2


@pytest.mark.parametrize("recomputed", [False, True])
def test_one_layer_is_whole_at_a_time(recomputed: bool) -> None:
    """Sixteen layers more take the sums of their gradients and their activations, and no whole layer.

    Of one rank, whose pieces are whole: what threads copy for each other they count for whoever comes last.
    """
    width, more = 128, 16
    of_layer = 8 * width * width

    def loss_fn(params: Sequence[Any], x: Tensor) -> Tensor:
        def block(layer: Any, x: Tensor) -> Tensor:
            return torch.relu(x @ ps.unshard(layer)) * 0.125

        if recomputed:
            for layer in params:
                x = ps.remat(block)(layer, x)
            return x.square().sum(-1)
        return of_pieces(params, x)

    def peak(layers: int) -> int:
        axis = ps.testing.ThreadAxis(1)

        def program(_: int) -> int:
            params = ps.shard(network(layers, width), axis)
            optimizer = ps.optim.sgd(0.1)
            step = ps.make_update_step(
                loss_fn, optimizer, weight_fn=ones, axis=axis, gather="loss", donate=True
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
    """What was whole, and what was summed, is gone when the step has returned."""
    axis = ps.testing.ThreadAxis(2)
    wholes: list[list[Any]] = [[], []]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = list(ps.unshard_each(params))
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


def test_who_leaves_unshard_each_early_waits() -> None:
    """The next tree is on its way already: nobody leaves it there, nor takes a following collective for it."""
    axis = Log(2)

    def program(rank: int) -> Any:
        layers = [ps.shard(layer, axis) for layer in network(3)]
        for layer in ps.unshard_each(layers):
            first = layer
            break
        return first, axis.apply("psum", torch.tensor(rank))

    for first, total in axis.map(program)(range(2)):
        assert torch.equal(first, network(3)[0])
        assert total == 1
    assert axis.waited == [len(launched) for launched in axis.launched] == [2, 2]
