"""Ranks that fail or disagree: every rank gets an error that says who, and the next step is sound.

On threads and in processes, where one rank of four holds no microbatch. Only tests that end a world
start processes of their own.
"""

import contextlib
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from purestep import tree
from purestep.sync.handshake import Status, check_status, encode_status, fingerprint
from purestep.testing import ThreadAxis
from purestep.testing.processes import DeadRankError, World
from support.ranks import Run
from support.strategies import assert_same
from tests import uneven_ranks
from tests.sharded_checkpoints import group_of_one, make_axis as axis_of_all
from tests.uneven_ranks import (
    FAILING_RANK,
    SGD,
    Arguments,
    Batch,
    loss_fn,
    make_arguments,
    make_batch,
    make_params,
    run_step,
    weigh_by_one,
)

pytestmark = pytest.mark.timeout(120)

Error = type[BaseException]


# What goes wrong


def fail_at_call(
    function: Callable[..., Any], number: int, error: Error = ArithmeticError
) -> Callable[..., Any]:
    """Wraps a function so that this call of it raises."""
    calls = itertools.count()

    def count_and_call(*args: Any) -> Any:
        if next(calls) == number:
            raise error("θ ≠ θ")
        return function(*args)

    return count_and_call


def with_broken_backward(error: Error) -> Callable[[Any, Batch], Tensor]:
    """Makes a loss whose gradient of w is final, and may be sent already, when that of b raises."""

    def fail(grad: Tensor) -> None:
        raise error("no way back")

    def loss(params: Any, microbatch: Batch) -> Tensor:
        b = params["b"].clone()
        b.register_hook(fail)
        return loss_fn({"w": params["w"], "b": b}, microbatch)

    return loss


class Tail(list[Batch]):
    """Raises after its last microbatch, whose gradients may be sent already."""

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        raise ArithmeticError("θ ≠ θ")


class Unruly(Tensor):
    """A tensor that cannot be packed with others."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.reshape:
            raise ArithmeticError("θ ≠ θ")
        return super().__torch_function__(func, types, args, kwargs)


class Expected(NamedTuple):
    """An error, and words of its message."""

    error: Error
    text: str


class Fault(NamedTuple):
    """What some ranks do differently, and which errors they and the others get."""

    change: Callable[[Arguments], Arguments]
    on_faulty: Expected
    on_others: Expected
    ranks: tuple[int, ...] = (FAILING_RANK,)


ALL = (0, 1, 2, 3)


def failure(
    error: Error,
    text: str,
    change: Callable[[Arguments], Arguments],
    reported: str | None = None,
) -> Fault:
    """Expects the failing rank's own exception on it, which the others name."""
    name = error.__name__
    if error.__module__ != "builtins":
        name = f"{error.__module__}.{name}"
    report = (
        "failed, and the step with it on every rank; nothing was updated. "
        f"rank 2: {name}: {reported or text}"
    )
    return Fault(change, Expected(error, text), Expected(ps.RankError, report))


def difference(
    what: str, right: str, wrong: str, ranks: str = "0, 1, 3", **change: Any
) -> Fault:
    """Expects one and the same error on every rank, which names both sides."""
    text = (
        f"disagree on {what}, and nothing was updated: "
        f"ranks {ranks} with {right} against rank 2 with {wrong}"
    )
    error = Expected(ValueError, text)
    return Fault(lambda _: change, error, error)


def fail_in(name: str, call: int, error: Any = ArithmeticError) -> Any:
    """Replaces this function of the step by one whose (call + 1)-th call raises."""
    return lambda arguments: {name: fail_at_call(arguments[name], call, error)}


def fail_in_backward(error: Error) -> Any:
    return lambda _: {"loss_fn": with_broken_backward(error)}


def fail_after_last_microbatch(arguments: Arguments) -> Arguments:
    return {"microbatches": Tail(arguments["microbatches"])}


def state_with(**leaves: Any) -> Arguments:
    """Makes params of which some leaves differ, and the state that fits."""
    theta = make_params() | leaves
    return {"params": theta, "opt_state": SGD.init(theta)}


def share_one_storage(_: Arguments) -> Arguments:
    """Donates two leaves that share their memory."""
    w = make_params()["w"]
    return {"donate": True, **state_with(b=w[0], w=w)}


def require_grad(_: Arguments) -> Arguments:
    return {"params": tree.map(Tensor.requires_grad_, make_params())}


def fail_on_every_rank(_: Arguments) -> Arguments:
    return {"weight_fn": fail_at_call(weigh_by_one, 0), "microbatches": [make_batch()]}


NO_MICROBATCH = (
    "which 1 of its 4 ranks cannot, as they hold no microbatch: "
    "give each of them one whose weights are zero"
)
OPT_STATE = (
    "opt_state[0].trace['b']: torch.float64 of shape (), "
    "opt_state[0].trace['w']: torch.float64 of shape (3,), "
    "opt_state[1].step: torch.int64 of shape ()"
)
FAULTS = {
    "normalize": difference(
        "settings",
        right="settings['normalize']: 'loss'",
        wrong="settings['normalize']: 'grads'",
        normalize="grads",
    ),
    "another leaf": difference(
        "params",
        right="the structure {'b': *, 'w': *}",
        wrong="params['c']: torch.float32 of shape (1,)",
        **state_with(c=torch.ones(1)),
    ),
    "another dtype": difference(
        "params",
        right="params['b']: torch.float64 of shape ()",
        wrong="params['b']: torch.float32 of shape ()",
        **state_with(b=torch.tensor(1.0)),
    ),
    "five other leaves": difference(
        "params",
        right="the structure {'b': *, 'w': *}",
        wrong=", ".join(
            f"params['c'][{index}]: torch.float32 of shape (1,)" for index in range(4)
        )
        + ", ...",
        **state_with(c=[torch.ones(1) for _ in range(5)]),
    ),
    "another opt_state": difference(
        "opt_state",
        right=OPT_STATE,
        wrong="the structure ()",
        opt_state=(),
    ),
    "another aux": difference(
        "LossOutput.aux",
        right="the structure ()",
        wrong="LossOutput.aux['small']: torch.int64 of shape ()",
        ranks="0, 3",
        loss_fn=uneven_ranks.loss_with_aux,
    ),
    "aux beside a rank without microbatches": Fault(
        lambda _: {"loss_fn": uneven_ranks.loss_with_aux},
        on_faulty=Expected(ValueError, NO_MICROBATCH),
        on_others=Expected(ValueError, ""),
        ranks=ALL,
    ),
    "params that require grad": failure(
        ValueError,
        "is not recorded, but params",
        require_grad,
        reported="a step over",
    ),
    "weights": failure(
        ArithmeticError,
        "θ ≠ θ",
        fail_in("weight_fn", 1),
    ),
    "first loss": failure(
        ArithmeticError,
        "θ ≠ θ",
        fail_in("loss_fn", 0),
    ),
    "exit": failure(
        SystemExit,
        "θ ≠ θ",
        fail_in("loss_fn", 1, SystemExit),
    ),
    "backward": failure(
        ArithmeticError,
        "no way back",
        fail_in_backward(ArithmeticError),
    ),
    "exit from backward": failure(
        SystemExit,
        "no way back",
        fail_in_backward(SystemExit),
    ),
    "after the last microbatch": failure(
        ArithmeticError,
        "θ ≠ θ",
        fail_after_last_microbatch,
    ),
    "no params": failure(
        ValueError,
        "params holds no tensors",
        lambda _: {"params": {}},
    ),
    "donated leaves that share a storage": failure(
        ValueError,
        "donate=True writes over",
        share_one_storage,
    ),
    "two ranks": Fault(
        fail_in("loss_fn", 0),
        on_faulty=Expected(ArithmeticError, "θ ≠ θ"),
        on_others=Expected(
            ps.RankError,
            "rank 0: ArithmeticError: θ ≠ θ; rank 2: ArithmeticError: θ ≠ θ",
        ),
        ranks=(0, 2),
    ),
    "every rank": Fault(
        fail_on_every_rank,
        on_faulty=Expected(ArithmeticError, "θ ≠ θ"),
        on_others=Expected(ps.RankError, ""),
        ranks=ALL,
    ),
}


# One faulty step, and a sound one after it


def catch(program: Callable[[], Any]) -> BaseException | None:
    """Returns the error that a program raises."""
    try:
        program()
    except BaseException as error:
        return error
    return None


def run_faulty_step(axis: ps.Axis, rank: int, name: str, settings: Arguments) -> Any:
    """Runs a step that changes no state; returns the axis's name, its error, a sound step."""
    fault = FAULTS[name]
    arguments = {**make_arguments(rank), **settings}
    if rank in fault.ranks:
        arguments |= fault.change(arguments)
    leaves = tree.leaves((arguments["params"], arguments["opt_state"]))
    before = tree.map(torch.clone, leaves)

    error = catch(lambda: run_step(axis, arguments))

    assert_same(leaves, before)
    return repr(axis), error, run_step(axis, {**make_arguments(rank), **settings})


def name_ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"ranks {numbers}" if len(ranks) > 1 else f"rank {numbers}"


def check_fault(name: str, results: Sequence[Any]) -> None:
    """Checks that every rank raised its error of the table, and then took a sound step."""
    fault = FAULTS[name]
    sound_step = uneven_ranks.run_alone()
    _, first_error, _ = results[0]
    for rank, (axis, error, next_step) in enumerate(results):
        expected = fault.on_faulty if rank in fault.ranks else fault.on_others
        assert type(error) is expected.error
        message = str(error)
        assert expected.text in message
        if expected.error is ps.RankError:
            assert message.startswith(f"{name_ranks(fault.ranks)} of {axis} failed")
        elif "disagree" in expected.text:
            assert message.startswith(f"the ranks of {axis} disagree")
            assert message == str(first_error)
        assert_same(next_step, sound_step)


CASES: list[tuple[str, Arguments]] = [
    *itertools.product(FAULTS, [{}, {"donate": True}]),
    # The rank that fails joins the others' scatter.
    ("first loss", {"gather": "step", "donate": True}),
    ("backward", {"gather": "step", "donate": True}),
]


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_faults_reach_every_rank(
    ranks: Run, name: str, settings: Arguments, bucket_bytes: int
) -> None:
    """Nothing waits for a timeout."""
    args = (range(4), [name] * 4, [settings] * 4)
    results = ranks(run_faulty_step, *args, bucket_bytes=bucket_bytes)
    check_fault(name, results)


@pytest.mark.parametrize("where", ["loss", "backward"])
def test_an_interrupted_rank_sends_nothing(where: str) -> None:
    """Which collectives it has launched is unknown: a message could meet another collective."""
    axis = ThreadAxis(4, bucket_bytes=8)
    fail = fail_in("loss_fn", 0, KeyboardInterrupt)
    if where == "backward":
        fail = fail_in_backward(KeyboardInterrupt)

    def program(rank: int) -> None:
        arguments = make_arguments(rank)
        if rank == FAILING_RANK:
            run_step(axis, arguments | fail(arguments))
        error = catch(lambda: run_step(axis, arguments))
        assert isinstance(error, ps.RankError)
        assert f"rank {FAILING_RANK} has raised KeyboardInterrupt" in str(error)

    with pytest.raises(KeyboardInterrupt):
        axis.map(program)(range(4))


def run_with_other_optimizer(axis: ps.Axis) -> None:
    """Steps with an optimizer that raises."""
    update = fail_at_call(SGD.update, 0)
    optimizer = ps.optim.Optimizer(SGD.init, update)
    run_step(axis, {**make_arguments(FAILING_RANK), "optimizer": optimizer})


def run_with_other_buckets(axis: Any) -> None:
    """Steps over an axis with small buckets."""
    other = copy(axis)
    other.bucket_bytes = 8
    run_step(other, make_arguments(FAILING_RANK))


def run_evaluation(axis: ps.Axis) -> None:
    ps.make_eval_step(loss_fn, weight_fn=weigh_by_one, axis=axis)(make_params(), [])


OTHER_PROGRAMS: dict[str, Callable[[Any], None]] = {
    "evaluation": run_evaluation,
    "bucket_bytes": run_with_other_buckets,
    "optimizer": run_with_other_optimizer,
}


def run_other_on_one_rank(axis: Any, rank: int, what: str) -> tuple[str, Any]:
    """Runs a step, or on rank 2 the other program; and then a sound step."""
    if rank == FAILING_RANK:
        error = catch(lambda: OTHER_PROGRAMS[what](axis))
    else:
        error = catch(lambda: run_step(axis, make_arguments(rank)))
    return str(error), run_step(axis, make_arguments(rank))


@pytest.mark.parametrize("what", ["evaluation", "bucket_bytes"])
def test_a_rank_that_calls_another_function_or_axis(ranks: Run, what: str) -> None:
    pattern = "disagree on.*ranks 0, 1, 3 with .*against rank 2 with "
    for text, next_step in ranks(run_other_on_one_rank, range(4), [what] * 4):
        assert re.search(pattern, text, re.DOTALL)
        assert_same(next_step, uneven_ranks.run_alone())


def test_an_optimizer_fails_on_its_rank_alone(ranks: Run) -> None:
    results = ranks(run_other_on_one_rank, range(4), ["optimizer"] * 4)
    for rank, (text, next_step) in enumerate(results):
        if rank == FAILING_RANK:
            assert "θ ≠ θ" in text
        else:
            assert text == "None"
        assert_same(next_step, uneven_ranks.run_alone())


def differentiate_step(axis: ps.Axis, rank: int) -> str:
    """Takes a step inside a derivative; returns the error."""

    def loss_after_step(x: Tensor) -> Tensor:
        *_, metrics = run_step(axis, make_arguments(rank))
        return metrics.loss + x

    slope = torch.func.grad(loss_after_step)
    return str(catch(lambda: slope(torch.tensor(1.0))))


def test_a_step_of_real_ranks_is_not_recorded(ranks: Run) -> None:
    for text in ranks(differentiate_step, range(4)):
        assert re.search("is not recorded.*ps.VmapAxis", text)


# Counts that overflow


class Weighed(NamedTuple):
    """A rank's microbatches: the weight of the only token of each, and how many there are."""

    weight: float
    number: int


OVERFLOWS = {
    "integers to a negative number": [
        Weighed(2**53, 512),
        Weighed(2**53, 512),
        Weighed(0, 1),
        Weighed(0, 1),
    ],
    "integers to zero": [Weighed(2**53, 512)] * 4,
    "integers to a positive number": [
        Weighed(2**53, 512),
        Weighed(2**53, 512),
        Weighed(2**53, 512),
        Weighed(2**53, 768),
    ],
    "integers beyond those that are exact": [
        Weighed(2**52, 1),
        Weighed(0, 1),
        Weighed(2**52, 1),
        Weighed(5, 1),
    ],
    "floats to infinity": [Weighed(1e308, 1)] * 4,
}


def run_overflowing(
    axis: ps.Axis, weighed: Weighed, normalize: Any
) -> tuple[str, Tensor]:
    """Runs a step and an evaluation whose count overflows, and then a sound step.

    Returns the step's error and the count of the sound step.
    """
    dtype = torch.float64 if isinstance(weighed.weight, float) else torch.int64
    weights = torch.tensor([weighed.weight], dtype=dtype)
    group = [make_batch(1)] * weighed.number
    arguments = make_arguments(0)
    arguments["microbatches"] = group
    arguments["weight_fn"] = lambda _: weights
    arguments["normalize"] = normalize
    arguments["donate"] = True

    error = catch(lambda: run_step(axis, arguments))
    assert_same(arguments["params"], make_params())
    assert_same(arguments["opt_state"], SGD.init(make_params()))

    evaluate = ps.make_eval_step(loss_fn, weight_fn=lambda _: weights, axis=axis)
    with pytest.raises(ValueError, match="overflows"):
        evaluate(make_params(), group)

    *_, metrics = run_step(axis, {**make_arguments(0), "microbatches": group[:1]})
    return str(error), metrics.num_tokens


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("case", OVERFLOWS)
def test_counts_that_overflow_together(ranks: Run, case: str, normalize: str) -> None:
    """No rank's count is too large, and their sum is: an error on every rank."""
    results = ranks(run_overflowing, OVERFLOWS[case], [normalize] * 4)
    for text, count in results:
        assert "num_tokens, the sum of all weights, overflows" in text
        names_limit = "more than MAX_EXACT_INT=9007199254740992" in text
        assert names_limit == ("integers" in case)
        assert count == 4


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("weighed", [Weighed(2**53, 1024), Weighed(1e308, 2)])
def test_a_count_that_overflows_on_one_rank(weighed: Weighed, normalize: str) -> None:
    text, count = run_overflowing(ps.LocalAxis(), weighed, normalize)
    assert "num_tokens, the sum of all weights, overflows" in text
    assert count == 1


# What only processes can do to each other


def kill_this_process(_: Any) -> Any:
    """Stands in for the error that is raised."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(rank: int, where: str) -> None:
    """Takes a sound step, and one in which rank 1 is killed."""
    arguments: Arguments = make_arguments(FAILING_RANK)
    run_step(axis_of_all(), arguments)
    if rank == 1:
        kill = fail_in(where, 1, kill_this_process)
        arguments |= kill(arguments)
    run_step(axis_of_all(), arguments)


@pytest.mark.parametrize("where", ["weight_fn", "loss_fn"])
def test_a_rank_that_is_killed(where: str) -> None:
    """Before the first collective, and between microbatches: the others end before the timeout."""
    with World(3, timeout=30) as world:
        first, killed, last = world.run(run_and_die, [where] * 3)

    assert isinstance(killed, DeadRankError)
    assert killed.args == (-signal.SIGKILL,)
    pattern = (
        r"MeshAxis\('dp', 3 ranks\) failed: most likely another rank has died"
        r".*start again from the last checkpoint"
    )
    for error in (first, last):
        assert type(error) is ps.RankError
        assert re.search(pattern, str(error), re.DOTALL)


class UnpicklableError(RuntimeError):
    """Holds what no other process can have, as errors of torch 2.11's compiler do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, lambda: message)


def raise_unpicklable(rank: int) -> None:
    raise UnpicklableError(f"what went wrong on rank {rank}")


def test_an_error_that_cannot_be_pickled_arrives_as_text() -> None:
    with World(1, timeout=30) as world:
        (error,) = world.run(raise_unpicklable)

    assert type(error) is RuntimeError
    pattern = "what went wrong on rank 0.*in raise_unpicklable"
    assert re.search(pattern, str(error), re.DOTALL)


def return_function(rank: int) -> Any:
    return lambda: rank


def test_a_result_that_cannot_be_pickled_is_an_error_that_says_so() -> None:
    with World(1, timeout=30) as world:
        (error,) = world.run(return_function)

    assert not isinstance(error, DeadRankError)
    assert re.search("pickle|local object", str(error))


class TwoWordsError(RuntimeError):
    """Can be pickled, but not loaded: its ``args`` are not those of ``__init__``."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def raise_two_words(rank: int) -> None:
    raise TwoWordsError("bad", "luck")


def test_an_error_that_cannot_be_loaded_arrives_as_text() -> None:
    with World(1, timeout=30) as world:
        (error,) = world.run(raise_two_words)

    assert type(error) is RuntimeError
    assert "bad luck" in str(error)


def test_arguments_that_cannot_be_pickled_reach_no_rank() -> None:
    """The next run would take its answers for those of this one."""
    with World(2, timeout=30) as world:
        with pytest.raises(Exception, match="pickle"):
            world.run(max, [1, lambda: None])
        with pytest.raises(ValueError, match="pass a value for each rank"):
            world.run(max, [1, 2, 3])
        with pytest.raises(ValueError, match="pass a value for each rank"):
            world.run(max, [1])
        assert world.run(max, [3, 4]) == [3, 4]


def make_impatient_axis() -> ps.MeshAxis:
    """Makes an axis over all ranks, whose process group waits for two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    return ps.MeshAxis(mesh, "dp")


def fail_before_the_peer(rank: int) -> None:
    """Raises on rank 0, which rank 1 waits for inside the loss, in a different process group."""
    axis = make_impatient_axis()
    other = make_impatient_axis()

    def loss(params: Any, microbatch: Batch) -> Tensor:
        if rank == 0:
            raise ArithmeticError("too soon")
        ps.all_gather(microbatch["x"], other)
        return loss_fn(params, microbatch)

    run_step(
        axis, {**make_arguments(0), "loss_fn": loss, "microbatches": [make_batch(4)]}
    )


def test_a_rank_that_fails_while_a_peer_waits_for_it_elsewhere() -> None:
    """It waits for as long as its group allows, and raises its own error, as the peer does."""
    with World(2, timeout=30) as world:
        first, peer = world.run(fail_before_the_peer)

    assert type(first) is ArithmeticError
    assert str(first) == "too soon"
    assert type(peer) is ps.RankError
    assert str(peer).startswith("a collective over MeshAxis('dp', 2 ranks) failed")


def detach_on_one_rank(rank: int, num_microbatches: int) -> None:
    """Steps with a loss that reaches no params, so has no backward pass, in which all ranks meet."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    axis = ps.MeshAxis(mesh, "dp")

    def loss(p: Any, x: Tensor) -> Tensor:
        losses = (x @ ps.unshard(p["w"])).square()
        return losses.detach() if rank == 1 else losses

    def weight_fn(x: Tensor) -> Tensor:
        return torch.ones(len(x))

    sharded = ps.shard({"w": torch.ones(6)}, axis)
    step = ps.make_update_step(loss, SGD, weight_fn=weight_fn, axis=axis, gather="loss")
    step(sharded, SGD.init(sharded), [torch.ones(2, 6)] * num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_a_loss_that_gathers_and_reaches_no_params_raises_at_once(
    num_microbatches: int,
) -> None:
    """With two microbatches, all ranks waited for the group's timeout."""
    with World(2, timeout=20, strict=False) as world:
        peer, detached = world.run(detach_on_one_rank, [num_microbatches] * 2)

    assert "do not depend on params" in str(detached)
    assert isinstance(peer, Exception)


# What is left in memory


def run_in_this_process(program: Callable[[ps.Axis], None], ranks: str) -> None:
    """Runs the program on one rank, on two threads, or on a process group of one."""
    if ranks == "local":
        program(ps.LocalAxis())
    elif ranks == "threads":
        axis = ThreadAxis(2)
        axis.map(lambda: program(axis))()
    else:
        with group_of_one():
            program(axis_of_all())


class FailingStep:
    """A step that raises at one of its parts, and weak references to what it computed."""

    def __init__(self, where: str, error: Error) -> None:
        self.where = where
        self.error = error
        self.computed: list[weakref.ref[Tensor]] = []

    def compute(self, x: Tensor) -> Tensor:
        result = x.exp()
        self.computed.append(weakref.ref(result))
        return result

    def fail_at(self, part: str, x: Tensor) -> None:
        """Raises in the second microbatch, which has two tokens."""
        if self.where == part and len(x) == 2:
            raise self.error

    def weigh(self, microbatch: Batch) -> Tensor:
        weights = self.compute(torch.zeros(len(microbatch["y"])))
        self.fail_at("weights", weights)
        return weights

    def loss(self, params: Any, microbatch: Batch) -> ps.LossOutput:
        inner: Callable[[Any, Batch], Tensor] = loss_fn
        if self.where == "backward":
            inner = with_broken_backward(self.error)
        w = self.compute(params["w"] * params["b"])
        losses = inner({**params, "w": w}, microbatch)
        self.fail_at("loss", losses)
        self.fail_at("evaluation", losses)

        aux = self.compute(losses.detach())
        if self.where == "aux":
            return ps.LossOutput(losses, aux=aux.as_subclass(Unruly))
        return ps.LossOutput(losses, aux=aux.sum())

    def run(self, axis: ps.Axis) -> None:
        settings: Any = {"weight_fn": self.weigh, "axis": axis}
        group = [make_batch(1), make_batch(2)]
        if self.where == "evaluation":
            evaluate = ps.make_eval_step(self.loss, **settings)
            evaluate(make_params(), group)
        else:
            update_step = ps.make_update_step(self.loss, SGD, **settings)
            update_step(make_params(), SGD.init(make_params()), group)
        raise self.error


@pytest.mark.parametrize("ranks", ["local", "threads", "mesh"])
@pytest.mark.parametrize("where", ["weights", "loss", "backward", "aux", "evaluation"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
def test_a_failed_step_keeps_nothing(error: Error, where: str, ranks: str) -> None:
    """No garbage collector has to look for it."""
    failing = FailingStep(where, error)
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(error, ValueError):
                run_in_this_process(failing.run, ranks)
        assert failing.computed
        assert all(reference() is None for reference in failing.computed)
    finally:
        gc.enable()


# Where reading a message waits for a device


class ReadsLater(ThreadAxis):
    """Ranks that read messages as on a device: when all work is queued."""

    @property
    def on_host(self) -> bool:
        return False


def run_and_read_later(change: Callable[[Arguments], Arguments]) -> list[Any]:
    """Runs a step, changed on one rank; returns what it raises or returns on each."""
    axis = ReadsLater(4, bucket_bytes=8)

    def program(rank: int) -> Any:
        arguments: Arguments = make_arguments(rank)
        if rank == FAILING_RANK:
            arguments |= change(arguments)
        try:
            return tuple(run_step(axis, arguments))
        except BaseException as error:
            return str(error)

    return axis.map(program)(range(4))


def test_a_step_that_is_read_later() -> None:
    params, opt_state, expected = uneven_ranks.run_alone()
    results = run_and_read_later(lambda _: {})
    for rank, (*new, metrics) in enumerate(results):
        has_microbatches = uneven_ranks.SHARES[rank] != []
        dtype = torch.int64 if has_microbatches else torch.float64
        assert_same(new, [params, opt_state])
        assert metrics.loss == expected.loss
        assert metrics.num_tokens == 16
        assert metrics.num_tokens.dtype == dtype


class LateFault(NamedTuple):
    """What one rank does differently, and words of the errors that it and the others get."""

    change: Any
    on_faulty: str
    on_others: str


FLOATS = "the weights of 1 ranks of ThreadAxis(4) are floats, those of 2 are integers"
SETTINGS = "disagree on one of settings, params, opt_state"
LATE_FAULTS = {
    "weights": LateFault(
        fail_in("weight_fn", 0),
        on_faulty="θ ≠ θ",
        on_others="rank 2 of ",
    ),
    "loss": LateFault(
        fail_in("loss_fn", 0),
        on_faulty="θ ≠ θ",
        on_others="these ranks cannot meet",
    ),
    "settings": LateFault(
        lambda _: {"normalize": "grads"},
        on_faulty=SETTINGS,
        on_others=SETTINGS,
    ),
    "dtype of weights": LateFault(
        lambda _: {"weight_fn": lambda m: weigh_by_one(m) / 2},
        on_faulty=FLOATS,
        on_others=FLOATS,
    ),
}


@pytest.mark.parametrize("what", LATE_FAULTS)
def test_a_fault_that_is_read_later(what: str) -> None:
    fault = LATE_FAULTS[what]
    for rank, text in enumerate(run_and_read_later(fault.change)):
        expected = fault.on_faulty if rank == FAILING_RANK else fault.on_others
        assert expected in text


class MeetsOnHost(ReadsLater):
    """Ranks that exchange numbers on the host, as with "cpu:gloo,cuda:nccl"."""

    @property
    def has_host_backend(self) -> bool:
        return True


@pytest.mark.parametrize("gather", ["microbatch", "loss"])
def test_a_rank_that_fails_early_meets_the_others_on_the_host(gather: str) -> None:
    """They wait there to compare their numbers of microbatches."""
    axis = MeetsOnHost(4, bucket_bytes=8)

    def program(rank: int) -> None:
        arguments: Arguments = make_arguments(rank) | {"gather": gather}
        if rank == FAILING_RANK:
            arguments |= fail_in("weight_fn", 0)(arguments)
        error = catch(lambda: run_step(axis, arguments))
        expected = "θ ≠ θ" if rank == FAILING_RANK else "rank 2 of ThreadAxis"
        assert expected in str(error), error

    axis.map(program)(range(4))


# Fingerprints, by which ranks compare trees

PROGRAM = """
import torch, optree, purestep as ps
from purestep.sync.handshake import Status, check_status, encode_status, fingerprint
@optree.dataclasses.dataclass(namespace="purestep")
class Layer:
    w: object
    static: object = optree.dataclasses.field(pytree_node=False, default=None)
class Mine: pass
def act(x): return x
words = {"a", "bb", "ccc", "dddd"}
statics = [words, act, lambda x: x, Mine(), torch.relu, torch.device("cuda", RANK), {Mine: words}]
print(fingerprint("params", [Layer(torch.ones(2), static) for static in statics]).hash)
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    fingerprints = set()
    for rank in range(2):
        command = [sys.executable, "-c", PROGRAM.replace("RANK", str(rank))]
        env = {**os.environ, "PYTHONHASHSEED": str(rank + 1)}
        fingerprints.add(subprocess.check_output(command, env=env, timeout=60))
    assert len(fingerprints) == 1


def shard_of(
    length: int, *shape: int, axis: Any = ps.LocalAxis(), dim: int = 0
) -> ps.Shard:
    """Makes a shard of a tensor of this shape."""
    return ps.Shard(torch.ones(length), axis, shape, dim)


ONE = torch.ones(1)
TWO = torch.ones(2)
TREES: list[Any] = [
    (),
    [],
    None,
    {"a": ()},
    [ONE],
    (ONE,),
    [ONE.double()],
    [TWO],
    [torch.ones(1, 1)],
    [1],
    ["1"],
    {"a": ONE, "b": TWO},
    {"a": TWO, "b": ONE},
    {"a": {"b": ONE}},
    [shard_of(1, 1)],
    [shard_of(1, 2)],
    [shard_of(1, 1, 2)],
    [shard_of(1, 1, 2, dim=1)],
]
OVER_VMAP = [shard_of(1, 1, axis=ps.VmapAxis(2))]


def test_four_differing_leaves_are_all_that_differ() -> None:
    """Dots stand for further ones."""
    axis = ps.testing.ThreadAxis(2)

    def program(rank: int) -> str:
        params = [torch.ones(2 + rank) for _ in range(4)]
        step = ps.make_update_step(
            lambda p, m: m, SGD, weight_fn=weigh_by_one, axis=axis
        )
        with pytest.raises(ValueError, match="disagree on params") as error:
            step(params, SGD.init(params), [make_batch()])
        return str(error.value)

    last = "params[3]: torch.float32 of shape (2,) against rank 1 with params[0]"
    assert all(last in text for text in axis.map(program)([0, 1]))


def test_fingerprints_differ_where_trees_do() -> None:
    trees = [*TREES, OVER_VMAP]
    fingerprints = {fingerprint("x", t).hash for t in trees}
    assert len(fingerprints) == len(trees)


def test_fingerprints_of_equal_trees_are_equal() -> None:
    for tree_of_tensors in TREES:
        same = tree.map(lambda leaf: leaf, tree_of_tensors)
        assert fingerprint("x", same) == fingerprint("x", tree_of_tensors)


def test_fingerprints_of_shards_of_one_tensor_are_equal() -> None:
    assert fingerprint("x", shard_of(2, 3)) == fingerprint("x", shard_of(1, 3))


class SixRanks:
    """An axis of which only the size matters."""

    size = 6
    rank = 0
    on_host = True
    device = torch.device("cpu")


@pytest.mark.parametrize("number", [2**25 - 1, 2**25 - 3])
def test_large_fingerprints_are_compared_exactly(number: int) -> None:
    """The square of six times one is beyond the integers that float64 holds."""
    axis: Any = SixRanks()
    message = encode_status(axis, group_len=1, fingerprint=number)
    equal = Status(*(6 * message).tolist())
    check_status(axis, equal, {}, num_ranks=6, can_ask=False)
    other = encode_status(axis, group_len=1, fingerprint=number - 1)
    unequal = Status(*(5 * message + other).tolist())
    with pytest.raises(ValueError, match="disagree"):
        check_status(axis, unequal, {}, num_ranks=6, can_ask=False)
