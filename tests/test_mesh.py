"""``MeshAxis`` over real processes: what travels, what happens when a rank goes wrong, transforms and compilers.

The programs are those of ``tests/faults.py`` and ``tests/programs.py``, where threads run them. Here one group of four gloo
processes stays up for the whole file; only tests that kill a rank start their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from math import ceil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import purestep as ps
from purestep import tree
from purestep.conversation import WIDTH
from purestep.gathering import Gather
from purestep.testing.processes import DeadRankError, World, values
from tests.faults import (
    BAD,
    COMPUTED,
    FAULTS,
    SGD,
    Aftermath,
    Batch,
    alone,
    batch,
    check_fault,
    check_faulty_derivative,
    cut,
    faulty_derivative,
    faulty_step,
    loss_fn,
    loss_with_aux,
    ones,
    params,
    same,
    sound,
    step,
)
from tests.programs import (
    ACCUM_DTYPES,
    LAWS,
    LIFETIMES,
    OPTIMIZERS,
    OVERFLOWS,
    aux_without_zeros,
    backward_through_two_steps,
    blocks,
    check_aux_without_zeros,
    check_counted,
    check_differentiated_by_data,
    check_history,
    check_laid_out,
    check_launched,
    check_law,
    counted_in,
    differentiated_by_data,
    evaluated,
    forward_and_pulled,
    groups_of_two_steps,
    laid_out_step,
    launched_by_then,
    meets_in_its_loss,
    on_few,
    overflowing,
    until_the_end,
    with_aux_of_its_own,
)
from tests.torch_internals import TorchDispatchMode

pytestmark = pytest.mark.timeout(120)

SIZE = 4


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four ranks that stay up."""
    with World(SIZE) as running:
        yield running


@cache
def mesh() -> DeviceMesh:
    """All ranks of the process's world along one dimension."""
    size = torch.distributed.get_world_size()
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",))


@cache
def grid() -> DeviceMesh:
    """Four ranks, two by two."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))


def on_all(rank: int, program: Callable[..., Any], bucket_bytes: int, *args: Any) -> Any:
    """``program(axis, *args)`` on the axis over all ranks."""
    return program(ps.MeshAxis(mesh(), "dp", bucket_bytes=bucket_bytes), *args)


def processes(
    world: World, program: Callable[..., Any], *args: Sequence[Any], bucket_bytes: int = 1 << 20
) -> list[Any]:
    """What ``program(axis, *args of its rank)`` returns on every process."""
    every = world.size
    return values(world.run(on_all, [program] * every, [bucket_bytes] * every, *args))


def settings_step(axis: ps.Axis, rank: int, settings: dict[str, Any]) -> Any:
    """The sound step, with these settings."""
    return step(axis, {**sound(rank), **settings})


# What a rank holds


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 20])
def test_uneven_ranks_take_the_step_of_one(world: World, bucket_bytes: int, normalize: str) -> None:
    settings = [{"normalize": normalize}] * SIZE
    for result in processes(world, settings_step, range(SIZE), settings, bucket_bytes=bucket_bytes):
        assert same(result, alone())


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_an_empty_rank_reports_what_the_others_do(world: World, normalize: str) -> None:
    expected = on_few(ps.LocalAxis(), -1, normalize)
    for result in processes(world, on_few, range(SIZE), [normalize] * SIZE):
        assert same(result, expected)


def test_evaluation_with_empty_ranks(world: World) -> None:
    expected = evaluated(ps.LocalAxis(), -1)
    for result in processes(world, evaluated, range(SIZE)):
        assert same(result, expected)


def test_no_data_anywhere_is_the_identity(world: World) -> None:
    for result in processes(world, settings_step, range(SIZE), [{"microbatches": []}] * SIZE):
        assert same(result[:2], (params(), SGD.init(params())))
        assert not result[2].applied


def test_data_that_runs_out_at_different_steps(world: World) -> None:
    groups = [[group] for group in cut(batch(7), LIFETIMES)]
    check_history(processes(world, until_the_end, groups))


@pytest.mark.parametrize("dtype", ACCUM_DTYPES)
def test_counts_and_losses_are_exact_in_any_dtype_of_gradients(
    world: World, dtype: torch.dtype
) -> None:
    check_counted(processes(world, counted_in, range(SIZE), [dtype] * SIZE))


# Pieces


def as_dtensors(axis: ps.MeshAxis) -> list[bool]:
    """What holds of trees that go to DTensors and back: one row of pieces too few, or all alike, or along another dimension."""
    found = []
    for shape, dim in (((6, 2), 0), ((8,), 0), ((2, 5), 1), ((3, 2), 0)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        given = {"w": ps.shard(whole, axis, dim), "scale": torch.ones(())}
        made = ps.to_dtensor(given)
        back = ps.from_dtensor(made, axis)
        theirs = distribute_tensor(whole, axis.mesh, [Shard(dim)])
        taken = ps.from_dtensor({"w": theirs, "scale": torch.ones(())}, axis)
        found += [
            made["w"].placements == theirs.placements and made["w"].shape == theirs.shape,
            torch.equal(made["w"].full_tensor(), whole),
            tree.flatten(back)[1] == tree.flatten(given)[1] == tree.flatten(taken)[1],
            back["w"].piece.data_ptr() == given["w"].piece.data_ptr(),
            torch.equal(taken["w"].piece, given["w"].piece),
            torch.equal(ps.unshard(taken)["w"], whole),
        ]
    replicated = distribute_tensor(torch.ones(3), axis.mesh, [Replicate()])
    return [*found, type(ps.from_dtensor(replicated, axis)) is Tensor]


def test_pieces_are_those_of_dtensors(world: World) -> None:
    """Without a copy there and back; the last ranks of four hold less, or nothing."""
    for found in processes(world, as_dtensors):
        assert all(found), found


def on_a_part(rank: int) -> list[str]:
    """With what DTensors on another mesh, and a Shard on none, are refused."""
    told = []
    theirs = distribute_tensor(torch.ones(4, 4), grid(), [Shard(0), Shard(1)])
    for call in (
        lambda: ps.from_dtensor({"w": theirs}, ps.MeshAxis(grid(), "dp")),
        lambda: ps.from_dtensor(theirs.redistribute(placements=[Shard(0), Replicate()]), ps.MeshAxis(mesh(), "dp")),
        lambda: ps.to_dtensor(ps.shard(torch.ones(2), ps.LocalAxis())),
    ):  # fmt: skip
        try:
            call()
        except (TypeError, ValueError) as error:
            told.append(str(error))
    same_axis = ps.MeshAxis(grid(), "cp") == ps.MeshAxis(grid(), "cp") != ps.MeshAxis(grid(), "dp")
    return [*told, str(same_axis)]


def test_other_dtensors_are_refused(world: World) -> None:
    for two, part, local, same_axis in values(world.run(on_a_part)):
        assert "spread over one axis" in two
        assert "spread over one axis" in part
        assert "Shard over LocalAxis() cannot be a DTensor" in local
        assert same_axis == "True"


# What travels


class Traffic(TorchDispatchMode):
    """The bytes that are handed to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            sent = sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree.leaves_of(args[0])
                if isinstance(leaf, Tensor)
            )
            name = func.__name__.split(".")[0]
            self.bytes[name] = self.bytes.get(name, 0) + sent
        return func(*args, **(kwargs or {}))


MIXED = {
    "a": torch.ones(30),
    "b": torch.ones(5).double(),
    "c": torch.ones(7, 3),
    "d": torch.ones(()),
}
"""One leaf in float64, three of 52 numbers in float32."""


def mixed_loss(params: Any, microbatch: Tensor) -> Tensor:
    """Every leaf takes part."""
    total = sum(leaf.double().sum() for leaf in params.values())
    return microbatch * torch.as_tensor(total)


def traffic(
    axis: ps.Axis, microbatches: int, aux: bool, settings: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int], Any]:
    """How many collectives a step calls by name, the bytes they are handed, and the new params."""
    from torch.distributed.tensor.debug import CommDebugMode  # takes a second to import

    def loss(params: Any, microbatch: Tensor) -> ps.LossTerms:
        losses = mixed_loss(params, microbatch)
        return ps.LossTerms(losses, aux={"n": torch.tensor(1), "m": torch.tensor(2)} if aux else ())

    optimizer = ps.optim.sgd(0.5)
    run = ps.make_update_step(loss, optimizer, weight_fn=torch.ones_like, axis=axis, **settings)
    state = optimizer.init(MIXED)
    group = [torch.ones(2).double()] * microbatches
    with CommDebugMode() as calls:
        new_params, _, _ = run(MIXED, state, group)
    with Traffic() as sent:
        run(MIXED, state, group)
    counts = {str(op).split(".")[-1]: n for op, n in calls.get_comm_counts().items()}
    return counts, sent.bytes, new_params


SMALL, LARGE = 52 * 4, 5 * 8
"""Bytes of the gradients in each dtype."""

MESSAGES = 2 * WIDTH * 8
"""Bytes of what ranks say before they compute and after."""


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("bucket_bytes", [8, 24, 64, 1 << 20])
def test_traffic_of_a_step(world: World, bucket_bytes: int, normalize: str) -> None:
    """Two short messages and each gradient once, however many microbatches: 1, 4, 16, or none on a rank."""
    for numbers in ([1] * 4, [4] * 4, [16] * 4, [4, 0, 16, 1]):
        results = processes(
            world, traffic, numbers, [False] * SIZE, [{"normalize": normalize}] * SIZE,
            bucket_bytes=bucket_bytes,
        )  # fmt: skip
        for counts, sent, new_params in results:
            buckets = ceil(SMALL / bucket_bytes) + ceil(LARGE / bucket_bytes)
            assert counts == {"allreduce_": 2 + buckets}
            assert sent == {"allreduce_": MESSAGES + SMALL + LARGE}
            assert same(new_params, results[0][2])


def test_aux_travels_in_one_collective_more(world: World) -> None:
    """Two integers; and where a rank is empty, the others tell it their form, and it tells them that it has it."""
    gathered = {"all_gather_into_tensor": 2}
    for numbers, told in (([1, 4, 16, 2], {}), ([1, 4, 0, 2], gathered)):
        for counts, sent, _ in processes(world, traffic, numbers, [True] * SIZE, [{}] * SIZE):
            assert counts == {"allreduce_": 2 + 2 + bool(told), "all_reduce": 1, **told}
            assert sent["all_reduce"] == 2 * 8


# What goes wrong


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_on_every_rank(world: World, name: str, bucket_bytes: int) -> None:
    """And the same process group goes on. Nothing waits for its timeout, which is longer than the world's."""
    aftermaths: list[Aftermath] = processes(
        world, faulty_step, range(SIZE), [name] * SIZE, [False] * SIZE, bucket_bytes=bucket_bytes
    )
    check_fault(name, aftermaths, "MeshAxis('dp', 4 ranks)")


def faulty_step_in_pieces(axis: ps.Axis, rank: int, name: str, gather: str) -> Aftermath:
    """The same, of params and state in pieces."""
    return faulty_step(axis, rank, name, True, gather=gather)


@pytest.mark.parametrize("gather", ["step", "microbatch"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_params_are_in_pieces(world: World, name: str, gather: str) -> None:
    """The others go on with their gathers, and the rank that failed joins them."""
    aftermaths: list[Aftermath] = processes(
        world, faulty_step_in_pieces, range(SIZE), [name] * SIZE, [gather] * SIZE
    )
    check_fault(name, aftermaths, "MeshAxis('dp', 4 ranks)")


@pytest.mark.parametrize("name", COMPUTED)
def test_a_fault_is_told_where_somebody_differentiates(world: World, name: str) -> None:
    check_faulty_derivative(name, processes(world, faulty_derivative, range(SIZE), [name] * SIZE))


@pytest.mark.parametrize("bucket_bytes", [8, 32, 1 << 20])
def test_a_loss_that_meets_over_the_same_axis(world: World, bucket_bytes: int) -> None:
    used, unused = (
        processes(
            world, meets_in_its_loss, range(SIZE), [everywhere] * SIZE, bucket_bytes=bucket_bytes
        )
        for everywhere in (True, False)
    )
    for result in unused:
        assert same(result, used[0])


@pytest.mark.parametrize("meets", [False, True])
def test_buckets_leave_during_the_backward_pass(world: World, meets: bool) -> None:
    results = processes(world, launched_by_then, [meets] * SIZE, bucket_bytes=24)
    check_launched(results, meets)


@pytest.mark.parametrize("bucket_bytes", [8, 64, 1 << 20])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_order_is_nobodys_business(world: World, name: str, bucket_bytes: int) -> None:
    results = processes(world, laid_out_step, range(SIZE), [name] * SIZE, bucket_bytes=bucket_bytes)
    check_laid_out(name, results)


def test_aux_that_an_empty_rank_cannot_be_told(world: World) -> None:
    for text in processes(world, with_aux_of_its_own, cut(batch())):
        assert "make it of containers that can be pickled" in text


def test_aux_that_an_empty_rank_cannot_make(world: World) -> None:
    check_aux_without_zeros(processes(world, aux_without_zeros, range(SIZE)))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("held", OVERFLOWS.values(), ids=list(OVERFLOWS))
def test_counts_that_overflow_together(
    world: World, held: list[tuple[float, int]], normalize: str
) -> None:
    for untouched, count in processes(world, overflowing, held, [normalize] * SIZE):
        assert untouched
        assert count == SIZE


def evaluates_while_others_train(axis: ps.Axis, rank: int) -> tuple[str, Any]:
    """Another function altogether on rank 1, with the same params."""
    with pytest.raises(ValueError, match="disagree") as info:
        _ = evaluated(axis, rank) if rank == 1 else step(axis, sound(rank))
    return str(info.value), step(axis, sound(rank))


def test_a_rank_that_evaluates_while_others_train(world: World) -> None:
    for text, next_step in processes(world, evaluates_while_others_train, range(SIZE)):
        assert "ranks 0, 2, 3 with " in text
        assert "against rank 1 with " in text
        assert same(next_step, alone())


def dies(rank: int, where: str) -> None:
    """A step in which rank 1 is killed."""

    def killed(function: Callable[..., Any]) -> Callable[..., Any]:
        def kills(*args: Any) -> Any:
            if rank == 1 and len(args[-1]["y"]) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args)

        return kills

    arguments = {**sound(0), "microbatches": [batch(1), batch(2), batch(1)]}
    step(ps.MeshAxis(mesh(), "dp"), {**arguments, where: killed(arguments[where])})


def last_words(world: World, program: Callable[..., Any], *args: Any) -> list[Any]:
    """What comes of a program that ends a world which has taken a step."""
    processes(world, settings_step, [0] * world.size, [{}] * world.size)
    return world.run(program, *([arg] * world.size for arg in args))


@pytest.mark.parametrize("where", ["weight_fn", "loss_fn"])
def test_a_rank_that_is_killed(where: str) -> None:
    """Before the first collective, and between the microbatches: the others end long before the group's timeout."""
    with World(3, timeout=30) as world:
        first, killed, last = last_words(world, dies, where)
    assert isinstance(killed, DeadRankError)
    assert killed.args == (-signal.SIGKILL,)
    for error in (first, last):
        assert type(error) is ps.RankError
        assert "over MeshAxis('dp', 3 ranks) failed: most likely another rank has died" in str(
            error
        )
        assert "start again from the last checkpoint" in str(error)


def impatient() -> list[ps.MeshAxis]:
    """Two axes over all ranks, whose process groups wait for two seconds."""
    ranks = list(range(dist.get_world_size()))
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=2)) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)) for group in groups]
    return [ps.MeshAxis(mesh, "dp") for mesh in meshes]


def fails_before_its_peer(rank: int) -> None:
    """Rank 0 raises where rank 1 waits for it, inside the loss, in a different process group."""
    axis, other = impatient()

    def loss(params: Any, microbatch: Batch) -> Tensor:
        if rank == 0:
            raise ArithmeticError("too soon")
        ps.all_gather(microbatch["x"], other)
        return loss_fn(params, microbatch)

    step(axis, {**sound(0), "loss_fn": loss, "microbatches": [batch(4)]})


def test_a_rank_that_fails_while_a_peer_waits_for_it_elsewhere() -> None:
    """It waits for as long as its group allows, and raises its own error; the peer learns that it waits in vain."""
    with World(2, timeout=30) as world:
        first, peer = last_words(world, fails_before_its_peer)
    assert (type(first), str(first)) == (ArithmeticError, "too soon")
    assert type(peer) is ps.RankError
    assert str(peer).startswith("a collective over MeshAxis('dp', 2 ranks) failed")


def fails_early(axis: ps.Axis, rank: int) -> tuple[str, Any]:
    """A rank fails long before the others come to their loss; what each hears, and a sound step."""

    def loss(params: Any, microbatch: Batch) -> ps.LossTerms:
        if rank == BAD:
            raise ArithmeticError("a bad sample")
        time.sleep(1.5)
        return loss_with_aux(params, microbatch)

    with pytest.raises((ArithmeticError, ps.RankError)) as info:
        step(axis, {**sound(rank), "loss_fn": loss, "microbatches": [batch(2)]})
    return str(info.value), step(axis, sound(rank))


def test_a_rank_that_fails_early(world: World) -> None:
    """It waits, all learn why, and the group goes on."""
    for text, next_step in processes(world, fails_early, range(SIZE)):
        assert "a bad sample" in text
        assert same(next_step, alone())


# The axis itself


def construction(rank: int) -> dict[str, Any]:
    """Axes over two dimensions and over one, and what is refused."""
    refused = {}
    for name, arguments, bucket_bytes in [
        ("unknown", (grid(), "tp"), 1),
        ("out of order", (grid(), ("cp", "dp")), 1),
        ("twice", (grid(), ("dp", "dp")), 1),
        ("none", (grid(), ()), 1),
        ("nameless", (DeviceMesh("cpu", list(range(SIZE))), "dp"), 1),
        ("bucket_bytes", (grid(), "dp"), 0),
        ("whole bytes", (grid(), "dp"), 8.0),
    ]:
        try:
            ps.MeshAxis(*arguments, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
        except ValueError as error:
            refused[name] = str(error)
    axes = [ps.MeshAxis(grid(), dims) for dims in (("dp", "cp"), "dp", "cp", ["cp"])]
    return {
        "refused": refused,
        "axes": [(repr(axis), axis.size, axis.rank, int(axis.index)) for axis in axes],
        "order": ps.all_gather(torch.tensor(rank), axes[0]),
        "sums": [ps.psum(torch.tensor(10**rank), axis) for axis in axes],
    }


def test_construction(world: World) -> None:
    for rank, result in enumerate(values(world.run(construction))):
        dp, cp = divmod(rank, 2)
        assert result["axes"] == [
            ("MeshAxis('dp', 'cp', 4 ranks)", 4, rank, rank),
            ("MeshAxis('dp', 2 ranks)", 2, dp, dp),
            ("MeshAxis('cp', 2 ranks)", 2, cp, cp),
            ("MeshAxis('cp', 2 ranks)", 2, cp, cp),
        ]
        assert result["order"].tolist() == [0, 1, 2, 3]
        assert result["sums"] == [1111, 101 * 10**cp, 11 * 100**dp, 11 * 100**dp]
        refused = result["refused"]
        for name, dims in {
            "unknown": "('tp',)",
            "out of order": "('cp', 'dp')",
            "twice": "('dp', 'dp')",
            "none": "()",
        }.items():
            assert refused.pop(name) == (
                f"MeshAxis(dims={dims}) must name one or several different dimensions of the mesh, "
                "in its order: ('dp', 'cp')"
            )
        assert 'mesh_dim_names=("dp",)' in refused.pop("nameless")
        assert refused.pop("bucket_bytes").startswith("bucket_bytes=0 must be a whole number")
        assert refused.pop("whole bytes").startswith("bucket_bytes=8.0 must be a whole number")
        assert not refused


# Transforms and compilers


@pytest.mark.parametrize("law", LAWS)
def test_transpose(world: World, law: str) -> None:
    x, y = blocks(law, SIZE)
    check_law(law, processes(world, forward_and_pulled, [law] * SIZE, list(x), list(y)))


def test_backward_through_steps(world: World) -> None:
    expected = backward_through_two_steps(ps.LocalAxis(), [[batch(8)], [batch(8, 1)]])
    for result in processes(world, backward_through_two_steps, groups_of_two_steps()):
        assert same(result, expected)


def test_derivatives_by_the_data(world: World) -> None:
    groups = cut(batch(8), [[2, 1], [1], [2], [1, 1]])
    check_differentiated_by_data(processes(world, differentiated_by_data, groups))


def moved(axis: ps.Axis, group: list[Batch], theta: Any) -> Any:
    """The parameters after a step from these."""
    return step(axis, {**sound(0), "params": theta, "microbatches": group})[0]


def ensemble(axis: ps.Axis, group: list[Batch]) -> Any:
    """``vmap`` over three sets of parameters."""
    many = tree.map(lambda leaf: torch.stack([leaf, leaf + 1, leaf - 2]), params())
    return torch.vmap(lambda theta: moved(axis, group, theta))(many)


def meta_gradient(axis: ps.Axis, group: list[Batch]) -> Any:
    """``torch.func.grad`` through the step."""

    def outer(theta: Any) -> Tensor:
        after: dict[str, Tensor] = moved(axis, group, theta)
        return (after["w"] ** 2).sum() * 3 + after["b"]

    return torch.func.grad(outer)(params())


def tangent(axis: ps.Axis, group: list[Batch]) -> Any:
    """``torch.func.jvp`` through the step."""
    return torch.func.jvp(lambda theta: moved(axis, group, theta), (params(),), (params(),))


def ensemble_of_meta_gradients(axis: ps.Axis, group: list[Batch]) -> Any:
    """``vmap`` of ``grad`` of the step, over learning rates."""

    def after(rate: Tensor) -> Tensor:
        optimizer = ps.optim.sgd(rate)
        arguments = {"optimizer": optimizer, "opt_state": optimizer.init(params())}
        new_params, *_ = step(axis, {**sound(0), **arguments, "microbatches": group})
        total: Tensor = (new_params["w"] ** 2).sum()
        return total

    rates = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    return torch.vmap(torch.func.grad(after))(rates)


def ensemble_of_counts(axis: ps.Axis, group: list[Batch]) -> Any:
    """``vmap`` over weights, so that every member has a count of its own."""

    def member(weight: Tensor) -> Any:
        arguments = {**sound(0), "weight_fn": lambda m: ones(m) * weight, "microbatches": group}
        new_params, _, metrics = step(axis, arguments)
        return new_params, metrics.num_tokens

    return torch.vmap(member)(torch.tensor([1, 2, 4]))


TRANSFORMED = [ensemble, ensemble_of_counts, meta_gradient, tangent, ensemble_of_meta_gradients]


@pytest.mark.parametrize("program", TRANSFORMED)
def test_transforms_of_a_step(world: World, program: Callable[..., Any]) -> None:
    """On every rank what one rank gets that holds the whole batch."""
    groups = cut(batch(8), [[2, 1], [1], [2], [1, 1]])
    expected = program(ps.LocalAxis(), [batch(8)])
    for result in processes(world, program, groups):
        assert same(result, expected)


def transformed_with_an_empty_rank(axis: ps.Axis, group: list[Batch]) -> str:
    with pytest.raises(ValueError, match="holds no microbatch") as info:
        meta_gradient(axis, group)
    return str(info.value)


def test_a_transform_with_an_empty_rank_is_refused_everywhere(world: World) -> None:
    groups = cut(batch(4), [[1], [2], [], [1]])
    for text in processes(world, transformed_with_an_empty_rank, groups):
        assert "a rank of MeshAxis('dp', 4 ranks) holds no microbatch" in text
        assert "give it a microbatch whose weights are zero" in text


@cache
def pair() -> DeviceMesh:
    """Two ranks of four."""
    return DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))


def on_pair(rank: int, program: Callable[..., Any], *args: Any) -> Any:
    """``program(axis, *args)`` on two ranks: compilers take their time."""
    part = pair()
    return program(ps.MeshAxis(part, "dp"), *args) if rank < 2 else None


def compiled_law(axis: ps.Axis, law: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A collective and its gradient, each compiled whole."""
    run = torch.compile(forward_and_pulled, fullgraph=True, backend="aot_eager")
    result: tuple[Tensor, Tensor] = run(axis, law, x, y)
    return result


@pytest.mark.parametrize("law", LAWS)
def test_compiled_collectives(world: World, law: str) -> None:
    x, y = blocks(law, 2)
    xs, ys = (list(value) + [None] * 2 for value in (x, y))
    results = world.run(on_pair, [compiled_law] * SIZE, [law] * SIZE, xs, ys)
    check_law(law, values(results)[:2])


def compiled_step(axis: ps.Axis, group: list[Batch]) -> Any:
    """The step compiled whole, and as it is."""
    run = ps.make_update_step(loss_with_aux, SGD, weight_fn=ones, axis=axis)
    arguments = params(), SGD.init(params()), group
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    return compiled(*arguments), run(*arguments)


def test_compiled_step(world: World) -> None:
    groups = [*cut(batch(8), [[5], [2, 1]]), [], []]
    results = values(world.run(on_pair, [compiled_step] * SIZE, groups))
    expected = step(ps.LocalAxis(), {**sound(0), "microbatches": cut(batch(8), [[5, 2, 1]])[0]})
    for compiled, eager in results[:2]:
        assert same(eager, expected)
        assert same(compiled, expected)


def compiled_without_microbatches(rank: int) -> str | None:
    """A step compiled whole, of a rank that holds none."""
    if rank:
        return None
    axis = ps.MeshAxis(DeviceMesh("cpu", [0], mesh_dim_names=("alone",)), "alone")
    run = ps.make_update_step(loss_with_aux, SGD, weight_fn=ones, axis=axis)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="holds no microbatch") as info:
        compiled(params(), SGD.init(params()), [])
    return str(info.value)


def test_a_compiled_step_with_an_empty_rank_is_refused() -> None:
    """It cannot be told what the others have."""
    with World(1) as world:
        (text,) = values(world.run(compiled_without_microbatches))
    assert "give it a microbatch whose weights are zero" in text


def summed_through_local_parts(rank: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [distribute_tensor(torch.zeros(2), mesh, [Replicate()]) for _ in range(3)]

    def loss_fn(p: list[Any], m: dict[str, Tensor]) -> Tensor:
        stacked = torch.stack([leaf.to_local() for leaf in p])
        return (m["x"] * stacked.sum(0)).sum(1)

    group = [{"x": torch.ones(1, 2)}] * 3
    grads, *_ = ps.accumulate(loss_fn, params, group, weight_fn=lambda m: torch.ones(len(m["x"])))
    return [grad.to_local().tolist() for grad in grads]


def test_distributed_params_that_share_the_memory_of_their_gradients(world: World) -> None:
    for result in values(world.run(summed_through_local_parts)):
        assert result == [[3, 3]] * 3


def compiled_gathers(axis: ps.Axis, rank: int, gather: Gather, whole: bool) -> Any:
    """A step over pieces, compiled by what compiles calls of kernels, too, which cannot compile those of a process group."""
    params = {"w": ps.shard(torch.arange(12.0).view(6, 2).double() - 5, axis)}
    loss_fn: Any = lambda p, x: (x @ ps.unshard(p)["w"]).square().sum(-1)  # noqa: E731
    how: Any = {"weight_fn": lambda x: torch.ones(len(x)), "axis": axis, "gather": gather}
    step = ps.make_update_step(loss_fn, SGD, compile=not whole, **how)
    eager = ps.make_update_step(loss_fn, SGD, **how)
    step = ps.compile(step, fullgraph=True) if whole else step
    given = params, SGD.init(params), [torch.eye(6).double()[rank : rank + 1]]
    return ps.unshard(step(*given)), ps.unshard(eager(*given))


@pytest.mark.parametrize(("gather", "whole"), [("loss", False), ("microbatch", True)])
def test_compiled_gathers(world: World, gather: Gather, whole: bool) -> None:
    for compiled, eager in processes(
        world, compiled_gathers, range(SIZE), [gather] * SIZE, [whole] * SIZE
    ):
        assert same(compiled[:2], eager[:2])
        assert torch.equal(compiled[2].loss, eager[2].loss)
