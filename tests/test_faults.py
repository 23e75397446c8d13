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
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from purestep import tree
from purestep.sync.handshake import fingerprint
from purestep.testing import ThreadAxis
from purestep.testing.processes import DeadRankError, World
from tests import uneven
from tests.held_by_ranks import axis as axis_of_all, group_of_one
from tests.uneven import (
    BAD,
    SGD,
    Arguments,
    Batch,
    batch,
    loss_fn,
    ones,
    params,
    sound,
    step,
)

pytestmark = pytest.mark.timeout(120)


def raising(
    function: Callable[..., Any], at: int, kind: type[BaseException] = ArithmeticError
) -> Callable[..., Any]:
    """The function, which raises at this call."""
    calls = itertools.count()

    def raises(*args: Any) -> Any:
        if next(calls) == at:
            raise kind("θ ≠ θ")
        return function(*args)

    return raises


def broken_backward(kind: type[BaseException]) -> Callable[[Any, Batch], Tensor]:
    """The gradient of w is found, and may be on its way already, when that of b raises."""

    def fail(grad: Tensor) -> None:
        raise kind("no way back")

    def loss(params: Any, microbatch: Batch) -> Tensor:
        b = params["b"].clone()
        b.register_hook(fail)
        return loss_fn({"w": params["w"], "b": b}, microbatch)

    return loss


class Tail(list[Batch]):
    """Microbatches whose end raises: their gradients may be on their way already."""

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


class Fault(NamedTuple):
    """What some ranks do differently, and which errors they and the others get."""

    change: Callable[[Arguments], Arguments]
    own: tuple[type[BaseException], str]
    others: tuple[type[BaseException], str]
    ranks: tuple[int, ...] = (BAD,)


def failure(
    kind: type[BaseException],
    text: str,
    change: Callable[..., Arguments],
    heard: str | None = None,
) -> Fault:
    """The rank that fails raises its own exception, which the others name."""
    name = (
        kind.__name__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__name__}"
    )
    failed = f"failed, and the step with it on every rank; nothing was updated. rank 2: {name}: "
    return Fault(change, (kind, text), (ps.RankError, failed + (heard or text)))


def difference(
    what: str, right: str, wrong: str, ranks: str = "0, 1, 3", **change: Any
) -> Fault:
    """Every rank raises one and the same error, which names both sides."""
    text = f"disagree on {what}, and nothing was updated: ranks {ranks} with {right} against rank 2"
    error = ValueError, f"{text} with {wrong}"
    return Fault(lambda _: change, error, error)


def raises_at(name: str, call: int, kind: Any = ArithmeticError) -> Any:
    """This function raises when it is called for the (call + 1)-th time."""
    return lambda arguments: {name: raising(arguments[name], call, kind)}


def state(**more: Tensor) -> Arguments:
    """Params of which some leaves differ, and the state that fits."""
    theta = params() | more
    return {"params": theta, "opt_state": SGD.init(theta)}


def one_storage(_: Arguments) -> Arguments:
    """Two leaves share their memory."""
    return {"donate": True, **state(b=(w := params()["w"])[0], w=w)}


def breaks_backward(kind: type[BaseException]) -> Any:
    """The backward pass of the loss raises."""
    return lambda _: {"loss_fn": broken_backward(kind)}


ALL = (0, 1, 2, 3)
PARAMS_B = (
    "params['b']: torch.float64 of shape ()",
    "params['b']: torch.float32 of shape ()",
)
TRACE = "opt_state[0].trace['b']: torch.float64 of shape (), opt_state[0].trace['w']: torch.float64"
TRACE += " of shape (3,), opt_state[1].step: torch.int64 of shape ()"
FAULTS = {
    "normalize": difference("settings", *(f"settings['normalize']: '{how}'" for how in ("loss", "grads")), normalize="grads"),
    "another leaf": difference("params", "the structure {'b': *, 'w': *}", "params['c']: torch.float32 of shape (1,)",
                               **state(c=torch.ones(1))),
    "another dtype": difference("params", *PARAMS_B, **state(b=torch.tensor(1.0))),
    "another opt_state": difference("opt_state", TRACE, "the structure ()", opt_state=()),
    "another aux": difference("LossOutput.aux", "the structure ()", "LossOutput.aux['small']: torch.int64 of shape ()",
                              ranks="0, 3", loss_fn=uneven.loss_with_aux),
    "aux beside a rank without microbatches": Fault(
        lambda _: {"loss_fn": uneven.loss_with_aux},
        (ValueError, "which 1 of its 4 ranks cannot, as they hold no microbatch: give each of them one whose weights are zero"),
        (ValueError, ""), ALL),
    "params that require grad": failure(
        ValueError, "is not recorded, but params", lambda _: {"params": tree.map(Tensor.requires_grad_, params())}, "a step over"),
    "weights": failure(ArithmeticError, "θ ≠ θ", raises_at("weight_fn", 1)),
    "first loss": failure(ArithmeticError, "θ ≠ θ", raises_at("loss_fn", 0)),
    "exit": failure(SystemExit, "θ ≠ θ", raises_at("loss_fn", 1, SystemExit)),
    "backward": failure(ArithmeticError, "no way back", breaks_backward(ArithmeticError)),
    "interrupted backward": failure(KeyboardInterrupt, "no way back", breaks_backward(KeyboardInterrupt)),
    "after the last microbatch": failure(ArithmeticError, "θ ≠ θ", lambda a: {"microbatches": Tail(a["microbatches"])}),
    "no params": failure(ValueError, "params holds no tensors", lambda _: {"params": {}}),
    "donated leaves that share a storage": failure(ValueError, "donate=True writes over", one_storage),
    "two ranks": Fault(raises_at("loss_fn", 0), (ArithmeticError, "θ ≠ θ"),
                       (ps.RankError, "rank 0: ArithmeticError: θ ≠ θ; rank 2: ArithmeticError: θ ≠ θ"), (0, 2)),
    "every rank": Fault(lambda _: {"weight_fn": raising(ones, 0), "microbatches": [batch()]},
                        (ArithmeticError, "θ ≠ θ"), (ps.RankError, ""), ALL),
}  # fmt: skip


def caught(program: Callable[[], Any]) -> BaseException | None:
    """The error that a program raises."""
    try:
        program()
    except BaseException as error:
        return error
    return None


def faulty_step(axis: ps.Axis, rank: int, name: str, how: Arguments) -> Any:
    """The axis's name, the error of a step that changes no state, and a sound step after it."""
    arguments, fault = {**sound(rank), **how}, FAULTS[name]
    if rank in fault.ranks:
        arguments |= fault.change(arguments)
    leaves = tree.leaves((arguments["params"], arguments["opt_state"]))
    before = tree.map(torch.clone, leaves)
    error = caught(partial(step, axis, arguments))
    assert_same(leaves, before)
    return repr(axis), error, step(axis, {**sound(rank), **how})


def check_fault(name: str, results: Sequence[Any]) -> None:
    """Every rank has raised the error of the table, and goes on with a sound step."""
    fault, expected = FAULTS[name], uneven.alone()
    for rank, (axis, error, next_step) in enumerate(results):
        kind, text = fault.own if rank in fault.ranks else fault.others
        assert type(error) is kind
        assert text in str(error)
        if kind is ps.RankError:
            ranks = (
                f"rank{'s' * (len(fault.ranks) > 1)} {', '.join(map(str, fault.ranks))}"
            )
            assert str(error).startswith(f"{ranks} of {axis} failed")
        elif "disagree" in text:
            assert str(error).startswith(f"the ranks of {axis} disagree")
            assert str(error) == str(results[0][1])
        assert_same(next_step, expected)


CASES: list[tuple[str, Arguments]] = [
    *itertools.product(FAULTS, [{}, {"donate": True}]),
    # The rank that fails joins the others' scatter.
    *itertools.product(
        ["first loss", "backward"], [{"gather": "step", "donate": True}]
    ),
]


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize(("name", "how"), CASES)
def test_faults_reach_every_rank(
    ranks: Run, name: str, how: Arguments, bucket_bytes: int
) -> None:
    """Nothing waits for a timeout."""
    args = range(4), [name] * 4, [how] * 4
    check_fault(name, ranks(faulty_step, *args, bucket_bytes=bucket_bytes))


def differs_on_one_rank(axis: Any, rank: int, what: str) -> tuple[str, Any]:
    """Rank 2's optimizer raises, it evaluates, or has small buckets; and then a sound step."""
    other, arguments = copy(axis), sound(rank)
    if rank == BAD and what == "optimizer":
        update = raising(SGD.update, 0)
        arguments["optimizer"] = ps.optim.Optimizer(SGD.init, update)
    elif rank == BAD and what == "bucket_bytes":
        other.bucket_bytes = 8
    act = partial(step, other, arguments)
    if rank == BAD and what == "evaluation":
        act = partial(
            ps.make_eval_step(loss_fn, weight_fn=ones, axis=axis), params(), []
        )
    return str(caught(act)), step(axis, sound(rank))


@pytest.mark.parametrize("what", ["evaluation", "bucket_bytes", "optimizer"])
def test_a_rank_that_calls_another_function_axis_or_optimizer(
    ranks: Run, what: str
) -> None:
    """An optimizer fails on its rank alone."""
    disagree = "disagree on.*ranks 0, 1, 3 with .*against rank 2 with "
    for rank, (text, next_step) in enumerate(
        ranks(differs_on_one_rank, range(4), [what] * 4)
    ):
        own = "θ ≠ θ" if rank == BAD else "^None$"
        assert re.search(own if what == "optimizer" else disagree, text, re.S)
        assert_same(next_step, uneven.alone())


def transformed(axis: ps.Axis, rank: int) -> str:
    """A step inside a derivative."""
    slope = torch.func.grad(lambda x: step(axis, sound(rank))[2].loss + x)
    return str(caught(partial(slope, torch.tensor(1.0))))


def test_a_step_of_real_ranks_is_not_recorded(ranks: Run) -> None:
    for text in ranks(transformed, range(4)):
        assert re.search("is not recorded.*ps.VmapAxis", text)


OVERFLOWS = {
    "integers to a negative number": [(2**53, 512), (2**53, 512), (0, 1), (0, 1)],
    "integers to zero": [(2**53, 512)] * 4,
    "integers to a positive number": [
        (2**53, 512),
        (2**53, 512),
        (2**53, 512),
        (2**53, 768),
    ],
    "integers beyond those that are exact": [(2**52, 1), (0, 1), (2**52, 1), (5, 1)],
    "floats to infinity": [(1e308, 1)] * 4,
}
"""The weight of each microbatch's only token, and how many there are, on each rank."""


def overflowing(
    axis: ps.Axis, held: tuple[float, int], normalize: Any
) -> tuple[str, Any]:
    """A step and an evaluation whose count overflows, and then a sound step."""
    weight, number = held
    dtype = torch.float64 if isinstance(weight, float) else torch.int64
    group, weights = [batch(1)] * number, torch.tensor([weight], dtype=dtype)
    arguments = {**sound(0), "microbatches": group, "weight_fn": lambda _: weights}
    error = caught(
        partial(step, axis, {**arguments, "normalize": normalize, "donate": True})
    )
    assert_same(
        (arguments["params"], arguments["opt_state"]), (params(), SGD.init(params()))
    )
    evaluate = ps.make_eval_step(loss_fn, weight_fn=lambda _: weights, axis=axis)
    with pytest.raises(ValueError, match="overflows"):
        evaluate(params(), group)
    return str(error), step(axis, {**sound(0), "microbatches": group[:1]})[2].num_tokens


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("case", OVERFLOWS)
def test_counts_that_overflow_together(ranks: Run, case: str, normalize: str) -> None:
    """No rank's count is too large, and their sum is: an error on every rank."""
    for text, count in ranks(overflowing, OVERFLOWS[case], [normalize] * 4):
        assert "num_tokens, the sum of all weights, overflows" in text
        assert ("more than MAX_EXACT_INT=9007199254740992" in text) == (
            "integers" in case
        )
        assert count == 4


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", [(2**53, 1024), (1e308, 2)])
def test_a_count_that_overflows_on_one_rank(
    held: tuple[float, int], normalize: str
) -> None:
    text, count = overflowing(ps.LocalAxis(), held, normalize)
    assert "num_tokens, the sum of all weights, overflows" in text
    assert count == 1


# What only processes can do to each other


def dies(rank: int, where: str) -> None:
    """A sound step, and one in which rank 1 is killed."""

    arguments: Arguments = sound(BAD)
    step(axis_of_all(), arguments)
    kill = raises_at(where, 1, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    step(axis_of_all(), arguments | (kill(arguments) if rank == 1 else {}))


@pytest.mark.parametrize("where", ["weight_fn", "loss_fn"])
def test_a_rank_that_is_killed(where: str) -> None:
    """Before the first collective, and between microbatches: the others end before the timeout."""
    with World(3, timeout=30) as world:
        first, killed, last = world.run(dies, [where] * 3)
    assert isinstance(killed, DeadRankError)
    assert killed.args == (-signal.SIGKILL,)
    died = r"MeshAxis\('dp', 3 ranks\) failed: most likely another rank has died"
    for error in (first, last):
        assert type(error) is ps.RankError
        assert re.search(
            f"{died}.*start again from the last checkpoint", str(error), re.S
        )


class UnpicklableError(RuntimeError):
    """An error that holds what no other process can have, as those of torch 2.11's compiler do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, lambda: message)


def raises_unpicklable(rank: int) -> None:
    raise UnpicklableError(f"what went wrong on rank {rank}")


def test_an_error_that_cannot_be_pickled_arrives_as_text() -> None:
    with World(1, timeout=30) as world:
        (error,) = world.run(raises_unpicklable)
    assert type(error) is RuntimeError
    assert re.search(
        "what went wrong on rank 0.*in raises_unpicklable", str(error), re.S
    )


def impatient() -> ps.MeshAxis:
    """An axis over all ranks, whose process group waits for two seconds."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    return ps.MeshAxis(
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)), "dp"
    )


def fails_before_its_peer(rank: int) -> None:
    """Rank 0 raises where rank 1 waits for it, inside the loss, in a different process group."""
    axis, other = impatient(), impatient()

    def loss(params: Any, microbatch: Batch) -> Tensor:
        if rank == 0:
            raise ArithmeticError("too soon")
        ps.all_gather(microbatch["x"], other)
        return loss_fn(params, microbatch)

    step(axis, {**sound(0), "loss_fn": loss, "microbatches": [batch(4)]})


def test_a_rank_that_fails_while_a_peer_waits_for_it_elsewhere() -> None:
    """It waits for as long as its group allows, and raises its own error, as the peer does."""
    with World(2, timeout=30) as world:
        first, peer = world.run(fails_before_its_peer)
    assert (type(first), str(first)) == (ArithmeticError, "too soon")
    assert type(peer) is ps.RankError
    assert str(peer).startswith("a collective over MeshAxis('dp', 2 ranks) failed")


def detached_on_one_rank(rank: int, microbatches: int) -> None:
    """Its loss reaches no params, so it has no backward pass, in which all ranks would meet."""
    axis = ps.MeshAxis(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), "dp")

    def loss(p: Any, x: Tensor) -> Tensor:
        losses = (x @ ps.unshard(p["w"])).square()
        return losses.detach() if rank == 1 else losses

    sharded = ps.shard({"w": torch.ones(6)}, axis)
    how: Any = {
        "weight_fn": lambda x: torch.ones(len(x)),
        "axis": axis,
        "gather": "loss",
    }
    step = ps.make_update_step(loss, SGD, **how)
    step(sharded, SGD.init(sharded), [torch.ones(2, 6)] * microbatches)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_a_loss_that_gathers_and_reaches_no_params_raises_at_once(
    microbatches: int,
) -> None:
    """With two microbatches, all ranks waited for the group's timeout."""
    with World(2, timeout=20, strict=False) as world:
        peer, detached = world.run(detached_on_one_rank, [microbatches] * 2)
    assert "do not depend on params" in str(detached)
    assert isinstance(peer, Exception)


# What is left


def run_in_this_process(program: Callable[[ps.Axis], None], ranks: str) -> None:
    """The program on one rank, on two threads, or on a process group of one."""
    if ranks == "local":
        program(ps.LocalAxis())
    elif ranks == "threads":
        axis = ThreadAxis(2)
        axis.map(lambda: program(axis))()
    else:
        with group_of_one():
            program(axis_of_all())


@pytest.mark.parametrize("ranks", ["local", "threads", "mesh"])
@pytest.mark.parametrize("where", ["weights", "loss", "backward", "aux", "evaluation"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ArithmeticError])
def test_a_failed_step_keeps_nothing(
    kind: type[BaseException], where: str, ranks: str
) -> None:
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

    def loss(params: Any, microbatch: Batch) -> ps.LossOutput:
        own = {**params, "w": activation(params["w"] * params["b"])}
        losses = (broken_backward(kind) if where == "backward" else loss_fn)(
            own, microbatch
        )
        fail_at("loss", losses)
        fail_at("evaluation", losses)
        aux = activation(losses.detach())
        return ps.LossOutput(
            losses, aux=aux.as_subclass(Unruly) if where == "aux" else aux.sum()
        )

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


# Where reading a message waits for a device


class ReadsLater(ThreadAxis):
    """Ranks that read what they hear as on a device: when all work is queued."""

    @property
    def on_host(self) -> bool:
        return False


def read_later(bad: Callable[[Arguments], Arguments]) -> list[Any]:
    """What a step raises or returns on each rank, of which one is changed."""
    axis = ReadsLater(4, bucket_bytes=8)

    def program(rank: int) -> Any:
        arguments: Arguments = sound(rank)
        arguments |= bad(arguments) if rank == BAD else {}
        result: list[Any] = []
        error = caught(lambda: result.extend(step(axis, arguments)))
        return str(error) if error else tuple(result)

    return axis.map(program)(range(4))


def test_a_step_that_is_read_later() -> None:
    for rank, (*new, metrics) in enumerate(read_later(lambda _: {})):
        assert_same(tuple(new), uneven.alone()[:2])
        assert metrics.loss == uneven.alone()[2].loss
        assert metrics.num_tokens == 16
        assert metrics.num_tokens.dtype == (
            torch.int64 if uneven.SHARE[rank] else torch.float64
        )


FLOATS = "the weights of 1 ranks of ThreadAxis(4) are floats, those of 2 are integers"
SETTINGS = "disagree on one of params, opt_state"
LATER: dict[str, tuple[Any, str, str]] = {
    "weights": (raises_at("weight_fn", 0), "θ ≠ θ", "rank 2 of "),
    "loss": (raises_at("loss_fn", 0), "θ ≠ θ", "these ranks cannot meet"),
    "settings": (lambda _: {"normalize": "grads"}, SETTINGS, SETTINGS),
    "dtype of weights": (
        lambda _: {"weight_fn": lambda m: ones(m) / 2},
        FLOATS,
        FLOATS,
    ),
}


@pytest.mark.parametrize("what", LATER)
def test_a_fault_that_is_read_later(what: str) -> None:
    change, own, others = LATER[what]
    for rank, text in enumerate(read_later(change)):
        assert (own if rank == BAD else others) in text


# Fingerprints, by which ranks compare trees

PROGRAM = """
import torch, optree, purestep as ps
from purestep.sync.handshake import fingerprint
@optree.dataclasses.dataclass(namespace="purestep")
class Layer:
    w: object
    beside: object = optree.dataclasses.field(pytree_node=False, default=None)
class Mine: pass
def act(x): return x
words = {"a", "bb", "ccc", "dddd"}
beside = [words, act, lambda x: x, Mine(), torch.relu, torch.device("cuda", RANK), {Mine: words}]
print(fingerprint("params", [Layer(torch.ones(2), each) for each in beside]).hash)
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    found = set()
    for rank in range(2):
        command = [sys.executable, "-c", PROGRAM.replace("RANK", str(rank))]
        env = {**os.environ, "PYTHONHASHSEED": str(rank + 1)}
        found.add(subprocess.check_output(command, env=env, timeout=60))
    assert len(found) == 1


def piece(
    length: int, *shape: int, axis: Any = ps.LocalAxis(), dim: int = 0
) -> ps.Shard:
    """A piece of a tensor of this shape."""
    return ps.Shard(torch.ones(length), axis, shape, dim)


ONE, TWO = torch.ones(1), torch.ones(2)
TREES: list[Any] = [
    (), [], None, {"a": ()}, [ONE], (ONE,), [ONE.double()], [TWO], [torch.ones(1, 1)], [1], ["1"],
    {"a": ONE, "b": TWO}, {"a": TWO, "b": ONE}, {"a": {"b": ONE}}, [piece(1, 1)], [piece(1, 2)],
    [piece(1, 1, 2)], [piece(1, 1, 2, dim=1)], [piece(1, 1, axis=ps.VmapAxis(2))],
]  # fmt: skip


def test_fingerprints_differ_where_trees_do() -> None:
    assert len({fingerprint("x", each).hash for each in TREES}) == len(TREES)
    again = [tree.map(lambda leaf: leaf, each) for each in TREES[:-1]]
    assert [fingerprint("x", each) for each in again] == [
        fingerprint("x", x) for x in TREES[:-1]
    ]
    assert fingerprint("x", piece(2, 3)) == fingerprint("x", piece(1, 3)), (
        "pieces of one tensor"
    )
