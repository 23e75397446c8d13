"""Axes beside the laws of T11: what they refuse, worlds within worlds, and threads that cannot meet."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, cast

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.axis.collectives import is_subaxis
from purestep.testing import ThreadAxis
from support.strategies import assert_same
from support.worlds import Ranks, on_threads
from tests.uneven_ranks import SGD, Batch, cut_batch, make_arguments, run_step

pytestmark = pytest.mark.timeout(60)

X = torch.ones(2)
COLLECTIVES: list[Any] = [
    ps.psum,
    ps.pmean,
    ps.pvary,
    ps.all_gather,
    ps.psum_scatter,
]


@pytest.mark.parametrize("make_axis", [ps.VmapAxis, ThreadAxis])
def test_an_axis_outside_of_map_is_refused(make_axis: Any) -> None:
    """Also after an error inside, which leaves the axis usable."""
    axis = make_axis(2)

    def fail(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        axis.map(fail)(X)

    name = make_axis.__name__
    way_out = rf"{name}\(2\) has ranks only while it maps: .*axis\.map\(fn"
    uses: list[Callable[[], Any]] = [
        lambda: ps.psum(X, axis),
        lambda: axis.index,
        lambda: run_step(axis, make_arguments(0)),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=way_out):
            use()

    sums = axis.map(lambda x: ps.psum(x, axis))(X)
    assert list(sums) == [2, 2]


register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Pair:
    """Holds two leaves; a registered class, and so a node of trees."""

    a: Any
    b: Any


def test_dims_are_trees() -> None:
    axis = ps.VmapAxis(2)
    pair = cast("Any", Pair)
    x = torch.arange(6).view(3, 2)
    y = torch.tensor(10)

    def program(p: Any) -> Any:
        return pair(ps.psum(p.a, axis), p.a + p.b)

    in_dims = (pair(1, None),)
    out_dims = pair(None, 1)
    result = axis.map(program, in_dims, out_dims)(pair(x, y))
    assert_same(result, pair(x.sum(1), x + 10))


def test_results_of_ranks_lie_along_the_last_dimension() -> None:
    """As those of ``torch.vmap`` with these dimensions."""
    axis = ps.VmapAxis(2)
    x = torch.arange(12).view(2, 2, 3)
    for dim in (2, -1):
        result = axis.map(torch.neg, in_dims=0, out_dims=dim)(x)
        assert_same(result, -x.permute(1, 2, 0))


def test_ranks_along_the_last_dimension_are_gathered_in_front() -> None:
    axis = ps.VmapAxis(2)
    x = torch.arange(12).view(2, 3, 2)
    result = axis.map(lambda x: ps.all_gather(x, axis), in_dims=2, out_dims=None)(x)
    assert_same(result, x.permute(2, 0, 1))


GROUP: Any = cast("Any", dist.ProcessGroup)(0, 1)
NAMES: list[Any] = ["dp", ("dp", "cp"), GROUP]


@pytest.mark.parametrize(
    "axis",
    [*NAMES, None, 4, ps.VmapAxis, ()],
    ids=lambda axis: str(axis).partition(" object")[0],
)
def test_what_is_no_axis_is_refused(axis: Any) -> None:
    """Names of a mesh or its dimensions are told from what is no axis at all."""
    if axis in NAMES:
        message = r'as in ps\.MeshAxis\(mesh, "dp"\)'
    else:
        message = r"axis must be an axis object, got .*: take ps\.LocalAxis"

    def loss_fn(p: Any, m: Any) -> Any:
        return p * m

    attempts: list[Callable[[], Any]] = [
        lambda: ps.make_update_step(loss_fn, ps.optim.sgd(0.1), axis=axis),
        lambda: ps.make_eval_step(loss_fn, axis=axis),
    ]
    attempts += [partial(collective, X, axis) for collective in COLLECTIVES]
    for attempt in attempts:
        with pytest.raises(TypeError, match=message):
            attempt()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("collective", [ps.psum, ps.psum_scatter])
def test_integers_are_summed_in_int64_on_every_axis(
    collective: Any, dtype: torch.dtype
) -> None:
    axis = ps.VmapAxis(1)
    x = torch.ones(1, dtype=dtype)
    program = partial(collective, axis=axis)

    mapped = axis.map(program)(x[None])
    unmapped = axis.map(program, None)(x)
    local = collective(x, ps.LocalAxis())

    for result in (mapped, unmapped, local):
        assert result.dtype == torch.int64


FOUR = ThreadAxis(4)
HALVES = FOUR.split(2, 2)[0]
TWO = ps.VmapAxis(2)
THREADS = ThreadAxis(2)


def scatter(tiled: bool) -> Any:
    """Scatters three entries on each of two ranks."""
    program = TWO.map(lambda x: ps.psum_scatter(x, TWO, tiled=tiled))
    return program(torch.ones(2, 3))


def map_threads(w: Tensor) -> Any:
    """Maps over threads, for a transform around them."""
    return sum(THREADS.map(lambda x: w * x)([1, 2]))


def map_with_second(second: Any) -> Any:
    """Maps a function of two arguments, the second of any length."""
    return THREADS.map(lambda a, b: a)([1, 2], second)


NOT_A_SIZE = "an axis has a whole number of ranks"
REFUSED: list[tuple[Callable[..., Any], list[Any], str]] = [
    (ps.VmapAxis, [0, -1, 2.0, "2"], rf"VmapAxis\(size=.*\): {NOT_A_SIZE}"),
    (ThreadAxis, [0, -1, 2.0, "2"], rf"ThreadAxis\(size=.*\): {NOT_A_SIZE}"),
    (
        lambda size: ThreadAxis(2, bucket_bytes=size),
        [0, -8, 8.0, None],
        "bucket_bytes=.* must be a whole number",
    ),
    (
        lambda sizes: FOUR.split(*sizes),
        [(), (3,), (2, 3), (4, 0)],
        r"\(4\)\.split\(.* multiply to 4",
    ),
    (
        map_with_second,
        [[1, 2, 3]],
        r"argument 1 has 3 entries, but ThreadAxis\(2\) takes one for each rank",
    ),
    (
        HALVES.map(lambda x: x),
        [[1, 2]],
        "map over the axis that was split",
    ),
    (
        TWO.map(lambda x: x, out_dims=None),
        [torch.arange(2)],
        "not the same on all 2 ranks: psum it",
    ),
    (
        TWO.map(lambda x: x, in_dims=({"b": 0},)),
        [{"a": X}],
        r"in_dims=\(\{'b': 0\},\) does not fit .*'a'",
    ),
    (
        TWO.map(lambda x: x, out_dims=(0, 0)),
        [X],
        "out_dims=",
    ),
    (scatter, [False], r"along dim=0 needs exactly 2 entries .*\(3,\)"),
    (scatter, [True], r"along dim=0 needs a multiple of 2 entries .*\(3,\)"),
    (TWO.map(lambda x: ps.psum_scatter(x, TWO)), [X], "no dimensions"),
    (torch.func.grad(map_threads), [X[0]], "transform inside fn"),
    (
        THREADS.map(lambda x: THREADS.map(lambda y: y)([x, x])),
        [[1, 2]],
        "no other map",
    ),
]


@pytest.mark.parametrize(("call", "values", "message"), REFUSED)
def test_refused(call: Callable[..., Any], values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises((ValueError, RuntimeError, IndexError), match=message):
            call(value)


# Threads


@pytest.mark.timeout(60)
def test_a_scatter_of_too_many_parts_ends_on_all_threads() -> None:
    """No rank has a result then, and none waits for one."""

    def scatter_three(x: Tensor) -> Tensor:
        part: Tensor = THREADS.apply("psum_scatter", x)
        return part

    with pytest.raises(ValueError, match="zip"):
        THREADS.map(scatter_three)([torch.ones(3, 1)] * 2)


def test_launch_sends_the_buffer_as_it_is_then() -> None:
    """Writes to the buffer after the launch are lost, as they may be between processes."""

    def program(axis: Any, rank: int) -> Any:
        values = [10.0**i * (rank + 1) for i in range(3)]
        buffers = [torch.full((2,), value) for value in values]
        waits = [axis.launch(buffer) for buffer in buffers]
        meetings_before = axis.num_collectives
        for buffer in buffers:
            buffer.fill_(-1.0)
        if rank > 0:
            waits.reverse()
        for wait in waits:
            wait()
        sums = [buffer.tolist() for buffer in buffers]
        return meetings_before, axis.num_collectives, sums

    results = on_threads(Ranks(3), program, range(3))
    sums = [[6.0, 6.0], [60.0, 60.0], [600.0, 600.0]]
    assert results == [(3, 3, sums)] * 3


@pytest.mark.parametrize(
    ("collective", "first"),
    [(ps.psum, 3), (ps.all_gather, 1)],
)
def test_ranks_get_results_that_share_no_memory(collective: Any, first: int) -> None:
    """Each may write into its own."""
    axis = ThreadAxis(3)

    def add_rank(rank: int) -> Tensor:
        empty = torch.ones(0, 2)
        assert collective(empty, axis) is not empty
        result: Tensor = collective(X, axis)
        return result.add_(rank)

    results = axis.map(add_rank)(range(3))

    for rank, result in enumerate(results):
        assert result.flatten()[0] == first + rank


def errors_of(axis: ThreadAxis, *programs: Callable[[], Any]) -> list[str]:
    """Runs one program on each rank; returns the texts of the errors that they raise."""

    def error_of(program: Callable[[], Any]) -> str:
        try:
            return str(program())
        except ps.RankError as error:
            return str(error)

    return axis.map(error_of)(programs)


def test_a_skipped_collective_or_step_is_an_error() -> None:
    axis = ThreadAxis(3)
    calls: dict[str, Callable[[], Any]] = {
        "psum of torch.float32 (2,)": lambda: ps.psum(X, axis),
        "psum of torch.float64 (13,)": lambda: run_step(axis, make_arguments(0)),
    }
    for name, call in calls.items():
        errors = errors_of(axis, call, lambda: None, call)
        assert errors[1] == "None"
        for rank in (0, 2):
            assert errors[rank].startswith("these ranks cannot meet: ")
            assert f"rank {rank} calls {name} over ThreadAxis(3)" in errors[rank]
            assert "rank 1 has returned" in errors[rank]


def test_an_error_does_not_wait_for_ranks_that_still_compute() -> None:
    axis = ThreadAxis(3)
    raised = threading.Event()

    def program(rank: int) -> bool:
        if rank == 0:
            message = "rank 1 has returned; rank 2 still computes"
            with pytest.raises(ps.RankError, match=message):
                ps.psum(X, axis)
            raised.set()
        return rank == 1 or raised.wait(timeout=10)

    assert all(axis.map(program)(range(3)))


OTHERS = {
    "all_gather of torch.float32 (2,)": (ps.all_gather, X),
    "psum of torch.float32 (3,)": (ps.psum, torch.ones(3)),
    "psum of torch.float64 (2,)": (ps.psum, X.double()),
}


@pytest.mark.parametrize("call", OTHERS)
def test_collectives_that_do_not_match(call: str) -> None:
    axis = ThreadAxis(2)
    collective, x = OTHERS[call]

    errors = errors_of(
        axis,
        lambda: ps.psum(X, axis),
        lambda: collective(x, axis),
    )

    assert errors[0] == errors[1]
    first = f"rank 0 calls psum of torch.float32 (2,) over {axis}"
    second = f"rank 1 calls {call} over"
    assert errors[0].startswith(f"these ranks cannot meet: {first}; {second}")


def test_a_ring_of_waiting_ranks_is_an_error() -> None:
    """Along two axes: each waits for the next, and no two of them are in the same group."""
    world = ThreadAxis(4)
    first, second = world.split(2, 2)
    axes = [first, second, second, first]

    errors = errors_of(world, *[partial(ps.psum, X, axis) for axis in axes])

    assert len(set(errors)) == 1
    for rank, axis in enumerate(axes):
        call = f"rank {rank} calls psum of torch.float32 (2,) over {axis!r}"
        assert call in errors[0]


@pytest.mark.parametrize(
    ("mine", "end"),
    [
        (KeyError("mine"), "rank 0 has raised KeyError: 'mine'"),
        (None, "rank 0 has returned"),
    ],
)
def test_an_exception_comes_out_as_it_is_with_its_rank(
    mine: Exception | None, end: str
) -> None:
    """A RankError comes out only where no other error does; and the axis goes on."""
    axis = ThreadAxis(2)

    def program(rank: int) -> None:
        if rank == 1:
            with pytest.raises(ps.RankError) as info:
                ps.psum(X, axis)
            assert end in str(info.value)
            raise info.value
        if mine is not None:
            raise mine

    for _ in range(2):
        with pytest.raises(KeyError if mine else ps.RankError) as info:
            axis.map(program)(range(2))
        if mine is None:
            assert info.value.__notes__[-1] == "raised by rank 1 of 2"
        else:
            assert info.value is mine
            assert info.value.__notes__[-1] == "raised by rank 0 of 2"
        sums = axis.map(lambda x: ps.psum(x, axis))(torch.arange(2))
        assert sums == [1, 1]


@pytest.mark.parametrize(
    ("axis", "num_calls"),
    [(ps.VmapAxis(4), 1), (ThreadAxis(4), 4)],
    ids=str,
)
def test_one_axis_in_many_threads(axis: Any, num_calls: int) -> None:
    """Each ``map`` has its own ranks, while others map over the same axis."""
    barrier = threading.Barrier(3 * num_calls)

    def program(x: Tensor) -> Tensor:
        barrier.wait(timeout=30)
        return ps.psum(x, axis)

    def map_often(thread: int) -> list[int]:
        numbers = thread * torch.tensor([1, 10, 100, 1000])
        sums: list[int] = []
        for _ in range(20):
            sums += [int(x) for x in axis.map(program)(numbers)]
        return sums

    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(map_often, range(3)))

    for thread in range(3):
        assert sums[thread] == [thread * 1111] * 80


def test_a_world_inside_of_a_rank() -> None:
    outer = ThreadAxis(2)
    inner = ThreadAxis(2)

    def program(x: Tensor) -> Tensor:
        sums = inner.map(lambda y: ps.psum(y, inner))([x, x + 1])
        return ps.psum(sums[0], outer)

    sums = outer.map(program)([torch.tensor(1), torch.tensor(10)])
    assert sums == [24, 24]


def test_thirty_runs_are_one() -> None:
    """With numbers that round: in which order threads arrive does not matter."""
    numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    groups = cut_batch({"x": numbers[:, :3], "y": numbers[:, 3]})
    params = {"b": torch.tensor(0.1), "w": torch.tensor([0.2, 0.3, 0.4])}

    def program(axis: ps.Axis, group: list[Batch]) -> Any:
        arguments = make_arguments(0)
        arguments["params"] = params
        arguments["opt_state"] = SGD.init(params)
        arguments["microbatches"] = group
        return run_step(axis, arguments)

    runs = [on_threads(Ranks(4, 8), program, groups) for _ in range(30)]

    first_rank_of_first_run = runs[0][0]
    assert_same(runs, [[first_rank_of_first_run] * 4] * 30)


class RanksOnly(NamedTuple):
    """Has of an axis what ``is_subaxis`` reads."""

    global_ranks: frozenset[int]


@pytest.mark.parametrize(
    ("inner", "axis", "expected"),
    [
        ({0, 1}, {0, 1, 2}, True),
        ({0, 3}, {0, 1, 2}, False),
        ({0}, {0}, True),
        ({0}, {0, 1}, False),
        (set(), {0, 1}, False),
    ],
)
def test_an_axis_within_another_has_two_ranks_or_more(
    inner: set[int], axis: set[int], expected: bool
) -> None:
    inner_axis: Any = RanksOnly(frozenset(inner))
    outer_axis: Any = RanksOnly(frozenset(axis))
    assert is_subaxis(inner_axis, outer_axis) == expected


def test_a_part_of_a_mesh_is_split_within_each_of_its_groups() -> None:
    world = ThreadAxis(8)
    rows, _ = world.split(4, 2)
    outer, inner = rows.split(2, 2)

    def sums(x: Tensor) -> list[int]:
        axes = (rows, outer, inner)
        return [int(axis.apply("psum", x)) for axis in axes]

    powers = [torch.tensor(10**rank) for rank in range(8)]
    of_rank_0, of_rank_1, *_, of_rank_7 = world.map(sums)(powers)

    assert of_rank_0 == [1010101, 10001, 101]
    assert of_rank_1 == [10101010, 100010, 1010]
    assert of_rank_7 == [10101010, 10001000, 10100000]
