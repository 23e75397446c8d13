"""Tests ranks that fail where all meet inside a loss: named on every rank, without a hang, and the next step is right.

Each fault comes in the first update, where no rank knows what the others still gather, and in a later one.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep.testing.processes import World
from support.ranks import Run
from support.strategies import assert_same
from support.worlds import Ranks, on_processes, on_threads

pytestmark = pytest.mark.timeout(60)

WIDTH = 8
OPTIMIZER = ps.optim.sgd(0.5)
LENGTHS = {3: [2, 2, 4], 4: [2, 2, 3, 1]}
"""How many rows each rank holds."""


class FailsBackward(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error("a fault")


def fail(error: type[BaseException]) -> None:
    raise error("a fault")


IN_A_BLOCK: dict[str, Callable[[Tensor], Any]] = {
    "forward": lambda x: fail(ArithmeticError),
    "exit": lambda x: fail(SystemExit),
    "interrupt": lambda x: fail(KeyboardInterrupt),
    "backward": lambda x: FailsBackward.apply(x, ArithmeticError),
    "exit from backward": lambda x: FailsBackward.apply(x, SystemExit),
    "nothing reaches the params": Tensor.detach,
}


class Block(nn.Module):
    """A layer of integers, in which a call may fail."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 5 - 2
        self.weight = nn.Parameter(weight.to(torch.float64))

    def forward(self, x: Tensor, fault: str = "") -> Tensor:
        y = x @ self.weight
        return IN_A_BLOCK.get(fault, torch.relu)(y) * 0.125


class Model(nn.Module):
    """Three blocks behind a layer of the root; the second fails in calls that name a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        nn.init.eye_(self.first.weight)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, fault: str) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, fault if index == 1 else "")
        return x.square().sum(-1)


class Tail(list[Any]):
    """Raises after its last microbatch."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        fail(ArithmeticError)


class Gathering(NamedTuple):
    """How a step gathers, and units of its module; ``ranks`` may be a grid, whose rows hold shards."""

    gather: Any = "loss"
    units: Any = Block
    remat: bool = False
    ranks: Ranks = Ranks(3)


GATHERINGS = {
    "units": Gathering(),
    "units, remat": Gathering(remat=True),
    "units of a grid": Gathering(ranks=Ranks(4, rows=2)),
    "microbatch": Gathering("microbatch", units=None),
}


class Fault(NamedTuple):
    """Holds what goes wrong, in which microbatch, and on which ranks."""

    what: str
    microbatch: int = 0
    ranks: tuple[int, ...] = (1,)


FAULTS = {
    "forward": Fault("forward"),
    "forward of the second microbatch": Fault("forward", microbatch=1),
    "exit": Fault("exit"),
    "backward": Fault("backward"),
    "backward of the second microbatch": Fault("backward", microbatch=1),
    "exit from backward": Fault("exit from backward", microbatch=1),
    "nothing reaches the params": Fault("nothing reaches the params"),
    "weights": Fault("weights", microbatch=1),
    "after the last microbatch": Fault("tail"),
    "two ranks, one of them earlier": Fault("forward", ranks=(0, 1)),
    "every rank": Fault("backward", ranks=(0, 1, 2)),
    "another aux": Fault("aux"),
}


def make_rows() -> Tensor:
    """Makes integers."""
    return (torch.arange(8 * WIDTH).view(8, WIDTH) % 7 - 3).to(torch.float64)


def weigh_rows(microbatch: Any) -> Tensor:
    if microbatch["fault"] == "weights":
        fail(ArithmeticError)
    return torch.ones(len(microbatch["x"]), dtype=torch.int64)


def make_step(gathering: Gathering, axis: ps.Axis) -> tuple[Any, Any]:
    """Makes params and a step of a module that fails in microbatches that name a fault."""
    params, apply = ps.from_module(
        Model(), units=gathering.units, remat=gathering.remat
    )

    def loss_fn(params: Any, microbatch: Any) -> Any:
        losses = apply(params, microbatch["x"], microbatch["fault"])
        if microbatch["fault"] == "aux":
            return ps.LossOutput(losses, aux={"sum": losses.sum()})
        return losses

    step = ps.make_update_step(
        loss_fn,
        OPTIMIZER,
        weight_fn=weigh_rows,
        axis=axis,
        gather=gathering.gather,
    )
    return params, step


def fail_in_a_step(
    axis: Any, gathering: Gathering, fault: Fault, num_earlier: int
) -> tuple[str, Any]:
    """Fails after earlier updates; returns this rank's error, and the params of a right step."""
    shard_axis = axis
    if gathering.ranks.rows:
        shard_axis = axis.second
        axis = axis.both
    params, step = make_step(gathering, axis)
    rows = make_rows().split(LENGTHS[axis.size])[axis.rank]
    right = [{"x": part, "fault": ""} for part in rows.chunk(2)]
    wrong = [*right]
    if axis.rank in fault.ranks:
        # Ranks that fail together do so in other microbatches.
        index = (fault.microbatch + axis.rank + 1) % 2
        wrong[index] = {**right[index], "fault": fault.what}
        wrong = Tail(right) if fault.what == "tail" else wrong
    state = ps.shard((params, OPTIMIZER.init(params)), shard_axis)
    earlier = state
    for _ in range(num_earlier):
        *earlier, _ = step(*earlier, right)
    message = ""
    try:
        step(*earlier, wrong)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    new_params, _, _ = step(*state, right)
    return message, ps.unshard(new_params)


def check_results(fault: Fault, results: list[tuple[str, Any]]) -> None:
    params, step = make_step(Gathering("step", units=None), ps.LocalAxis())
    right = [{"x": make_rows(), "fault": ""}]
    expected, _, _ = step(params, OPTIMIZER.init(params), right)
    for rank, (message, new_params) in enumerate(results):
        if fault.what == "aux":
            assert "disagree on LossOutput.aux" in message
            assert "rank 1 with" in message
        elif rank in fault.ranks:
            assert "RankError" not in message or len(fault.ranks) > 1
            assert message
        else:
            if fault.what != "nothing reaches the params":  # It gathers something else.
                assert message.startswith("RankError: rank")
            assert "rank 1" in message
        assert_same(new_params, expected)


CASES = {("units", fault) for fault in FAULTS}
CASES |= {
    *itertools.product(GATHERINGS, ["forward", "backward", "after the last microbatch"])
}
CASES |= {
    *itertools.product(
        ["units, remat", "units of a grid"], ["nothing reaches the params"]
    )
}


def run_on_ranks(run: Run, gathering: str, fault: str, num_earlier: int) -> None:
    """Fails on some ranks, and checks what all of them say and do next."""
    ranks = GATHERINGS[gathering].ranks
    args = GATHERINGS[gathering], FAULTS[fault], num_earlier
    columns = [[arg] * ranks.size for arg in args]
    check_results(FAULTS[fault], run(ranks, fail_in_a_step, *columns))


@pytest.mark.parametrize("num_earlier", [0, 1])
@pytest.mark.parametrize(("gathering", "fault"), sorted(CASES))
def test_a_rank_that_fails(gathering: str, fault: str, num_earlier: int) -> None:
    run_on_ranks(on_threads, gathering, fault, num_earlier)


@pytest.mark.parametrize("num_earlier", [0, 1])
@pytest.mark.parametrize("fault", ["backward", "nothing reaches the params"])
@pytest.mark.parametrize("gathering", ["units", "units of a grid"])
def test_a_process_that_fails(
    gathering: str, fault: str, num_earlier: int, world: World
) -> None:
    run_on_ranks(partial(on_processes, world), gathering, fault, num_earlier)


def unshard_after_an_interrupt(axis: Any) -> Any:
    """Gathers all params after a second update that ended in the second block of every rank."""
    params, step = make_step(Gathering(), axis)
    rows = make_rows().split(LENGTHS[axis.size])[axis.rank]
    right = {"x": rows, "fault": ""}
    state = ps.shard((params, OPTIMIZER.init(params)), axis)
    step(*state, [right])
    with pytest.raises(KeyboardInterrupt):
        step(*state, [{**right, "fault": "interrupt"}])
    return ps.unshard(state[0])


def test_gathers_after_an_interrupt_are_not_compared_with_those_of_a_loss() -> None:
    params, _ = make_step(Gathering(), ps.LocalAxis())
    for full in on_threads(Ranks(3), unshard_after_an_interrupt):
        assert_same(full, params)
