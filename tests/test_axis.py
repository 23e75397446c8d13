"""Axes beside the laws of T11: what they refuse, worlds within worlds, and threads that cannot meet."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_threads
from purestep import tree
from purestep.testing import ThreadAxis
from tests.uneven import SGD, Batch, cut, sound, step

pytestmark = pytest.mark.timeout(60)

X = torch.ones(2)
LAWS: list[Any] = [ps.psum, ps.pmean, ps.pvary, ps.all_gather, ps.psum_scatter]


@pytest.mark.parametrize("make", [ps.VmapAxis, ThreadAxis])
def test_outside_of_map(make: Any) -> None:
    """Also after an error inside, which leaves the axis usable."""
    axis = make(2)

    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        axis.map(fails)(X)
    way_out = rf"{make.__name__}\(2\) has ranks only while it maps: .*axis\.map\(fn"
    for use in (
        lambda: ps.psum(X, axis),
        lambda: axis.index,
        lambda: step(axis, sound(0)),
    ):
        with pytest.raises(RuntimeError, match=way_out):
            use()
    assert [*axis.map(lambda x: ps.psum(x, axis))(X)] == [2, 2]


register: Any = optree.dataclasses.dataclass


@register(namespace=tree.NAMESPACE)
class Pair:
    """A class of our own, and so a node of trees."""

    a: Any
    b: Any


def test_dims_are_trees() -> None:
    axis, pair = ps.VmapAxis(2), cast("Any", Pair)
    x, y = torch.arange(6).view(3, 2), torch.tensor(10)
    run = axis.map(
        lambda p: pair(ps.psum(p.a, axis), p.a + p.b), (pair(1, None),), pair(None, 1)
    )
    assert_same(run(pair(x, y)), pair(x.sum(1), x + 10))


NAMES: list[Any] = ["dp", ("dp", "cp"), cast("Any", dist.ProcessGroup)(0, 1)]


@pytest.mark.parametrize(
    "axis",
    [*NAMES, None, 4, ps.VmapAxis, ()],
    ids=lambda axis: str(axis).partition(" object")[0],
)
def test_what_is_no_axis(axis: Any) -> None:
    """Names of a mesh or its dimensions are told from what is no axis at all."""
    mesh = r'as in ps\.MeshAxis\(mesh, "dp"\)'
    message = (
        mesh
        if axis in NAMES
        else r"axis must be an axis object, got .*: take ps\.LocalAxis"
    )
    attempts: list[Callable[[], Any]] = [
        lambda: ps.make_update_step(lambda p, m: p * m, ps.optim.sgd(0.1), axis=axis),
        lambda: ps.make_eval_step(lambda p, m: p * m, axis=axis),
        *(partial(law, X, axis) for law in LAWS),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match=message):
            attempt()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("law", [ps.psum, ps.psum_scatter])
def test_integers_are_summed_in_int64_on_every_axis(
    law: Any, dtype: torch.dtype
) -> None:
    x, axis = torch.ones(1, 1, dtype=dtype), ps.VmapAxis(1)
    program = partial(law, axis=axis)
    sums = (
        axis.map(program)(x),
        axis.map(program, None)(x[0]),
        law(x[0], ps.LocalAxis()),
    )
    assert [each.dtype for each in sums] == [torch.int64] * 3


FOUR, TWO, THREADS = ThreadAxis(4), ps.VmapAxis(2), ThreadAxis(2)


def scatter(tiled: bool) -> Any:
    """Three entries on each of two ranks."""
    return TWO.map(lambda x: ps.psum_scatter(x, TWO, tiled=tiled))(torch.ones(2, 3))


def inside(w: Tensor) -> Any:
    """Threads in a transform."""
    return sum(THREADS.map(lambda x: w * x)([1, 2]))


whole, halves = "an axis has a whole number of ranks", FOUR.split(2, 2)[0]
REFUSED: list[tuple[Callable[..., Any], list[Any], str]] = [
    (ps.VmapAxis, [0, -1, 2.0, "2"], rf"VmapAxis\(size=.*\): {whole}"),
    (ThreadAxis, [0, -1, 2.0, "2"], rf"ThreadAxis\(size=.*\): {whole}"),
    (lambda size: ThreadAxis(2, bucket_bytes=size), [0, -8, 8.0, None], "bucket_bytes=.* must be a whole number"),
    (lambda sizes: FOUR.split(*sizes), [(), (3,), (2, 3), (4, 0)], r"\(4\)\.split\(.* multiply to 4"),
    (lambda x: THREADS.map(lambda a, b: a)([1, 2], x), [[1, 2, 3]],
     r"argument 1 has 3 entries, but ThreadAxis\(2\) takes one for each rank"),
    (halves.map(lambda x: x), [[1, 2]], "map over the axis that was split"),
    (TWO.map(lambda x: x, out_dims=None), [torch.arange(2)], "not the same on all 2 ranks: psum it"),
    (TWO.map(lambda x: x, in_dims=({"b": 0},)), [{"a": X}], r"in_dims=\(\{'b': 0\},\) does not fit .*'a'"),
    (TWO.map(lambda x: x, out_dims=(0, 0)), [X], "out_dims="),
    (scatter, [False], r"along dim=0 needs exactly 2 entries .*\(3,\)"),
    (scatter, [True], r"along dim=0 needs a multiple of 2 entries .*\(3,\)"),
    (torch.func.grad(inside), [X[0]], "transform inside fn"),
    (THREADS.map(lambda x: THREADS.map(lambda y: y)([x, x])), [[1, 2]], "no other map"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "values", "message"), REFUSED)
def test_refused(call: Callable[..., Any], values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises((ValueError, RuntimeError), match=message):
            call(value)


# Threads


def test_what_is_launched_is_handed_over_at_once() -> None:
    """What is written to the buffer later is lost, as it may be between processes."""

    def program(axis: Any, rank: int) -> Any:
        flats = [torch.full((2,), 10.0**place * (rank + 1)) for place in range(3)]
        waits = [axis.launch(flat) for flat in flats]
        begun = axis.meetings
        for flat in flats:
            flat.fill_(-1.0)
        for wait in waits[::-1] if rank else waits:
            wait()
        return begun, axis.meetings, [flat.tolist() for flat in flats]

    sums = [[6.0] * 2, [60.0] * 2, [600.0] * 2]
    assert on_threads(Ranks(3), program, range(3)) == [(3, 3, sums)] * 3


def test_what_comes_out_is_each_ranks_own() -> None:
    """To write into, say."""
    axis = ThreadAxis(3)
    for law, total in ((ps.psum, 3), (ps.all_gather, 1)):
        results = axis.map(lambda rank, law=law: law(X, axis).add_(rank))(range(3))
        assert [float(result.flatten()[0]) for result in results] == [
            total,
            total + 1,
            total + 2,
        ]


def errors_of(axis: ThreadAxis, *programs: Callable[[], Any]) -> list[str]:
    """What ranks raise that run these programs and cannot meet."""

    def error_of(program: Callable[[], Any]) -> str:
        try:
            return str(program())
        except ps.RankError as error:
            return str(error)

    return axis.map(error_of)(programs)


def test_a_skipped_collective_or_step_is_an_error() -> None:
    axis = ThreadAxis(3)
    for call, name in (
        (lambda: ps.psum(X, axis), "psum of torch.float32 (2,)"),
        (lambda: step(axis, sound(0)), "psum of torch.float64 (10,)"),
    ):
        errors = errors_of(axis, call, lambda: None, call)
        assert errors[1] == "None"
        for rank in (0, 2):
            assert errors[rank].startswith("these ranks cannot meet: ")
            assert f"rank {rank} calls {name} over ThreadAxis(3)" in errors[rank]
            assert "rank 1 has returned" in errors[rank]


def test_an_error_does_not_wait_for_those_who_still_compute() -> None:
    axis, raised = ThreadAxis(3), threading.Event()

    def program(rank: int) -> bool:
        if rank == 0:
            with pytest.raises(
                ps.RankError, match="rank 1 has returned; rank 2 still computes"
            ):
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
    axis, (law, x) = ThreadAxis(2), OTHERS[call]
    one, other = errors_of(axis, lambda: ps.psum(X, axis), lambda: law(x, axis))
    assert one == other
    calls = [
        f"rank 0 calls psum of torch.float32 (2,) over {axis}",
        f"rank 1 calls {call} over",
    ]
    assert one.startswith(f"these ranks cannot meet: {calls[0]}; {calls[1]}")


def test_a_ring_of_waiting_ranks_is_an_error() -> None:
    """Along two axes: each waits for the next, and no two of them are in the same group."""
    world = ThreadAxis(4)
    first, second = world.split(2, 2)
    axes = [first, second, second, first]
    errors = errors_of(world, *(lambda axis=axis: ps.psum(X, axis) for axis in axes))
    assert len(set(errors)) == 1
    for rank, axis in enumerate(axes):
        assert (
            f"rank {rank} calls psum of torch.float32 (2,) over {axis!r}" in errors[0]
        )


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
    """That of a rank that misses another only where there is nothing else; and the axis goes on."""
    axis = ThreadAxis(2)

    def program(rank: int) -> None:
        if rank:
            with pytest.raises(ps.RankError) as info:
                ps.psum(X, axis)
            assert end in str(info.value)
            raise info.value
        if mine is not None:
            raise mine

    for _ in range(2):
        with pytest.raises(KeyError if mine else ps.RankError) as info:
            axis.map(program)(range(2))
        assert info.value is mine or mine is None
        assert info.value.__notes__[-1] == f"raised by rank {0 if mine else 1} of 2"
        assert axis.map(lambda x: ps.psum(x, axis))(torch.arange(2)) == [1, 1]


@pytest.mark.parametrize(
    ("axis", "calls"), [(ps.VmapAxis(4), 1), (ThreadAxis(4), 4)], ids=str
)
def test_one_axis_in_many_threads(axis: Any, calls: int) -> None:
    """Each ``map`` has its own ranks, while others map over the same axis."""
    barrier = threading.Barrier(3 * calls)

    def rank(x: Tensor) -> Tensor:
        barrier.wait(timeout=30)
        return ps.psum(x, axis)

    def work(number: int) -> list[int]:
        mine = number * torch.tensor([1, 10, 100, 1000])
        return [int(x) for _ in range(20) for x in axis.map(rank)(mine)]

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(work, range(3))] == [
            [number * 1111] * 80 for number in range(3)
        ]


def test_a_world_inside_of_a_rank() -> None:
    outer, inner = ThreadAxis(2), ThreadAxis(2)

    def program(x: Tensor) -> Tensor:
        parts = inner.map(lambda y: ps.psum(y, inner))([x, x + 1])
        return ps.psum(parts[0], outer)

    assert outer.map(program)([torch.tensor(1), torch.tensor(10)]) == [24, 24]


def test_thirty_runs_are_one() -> None:
    """With numbers that round: in which order threads arrive does not matter."""
    numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    groups = cut({"x": numbers[:, :3], "y": numbers[:, 3]})
    state = {"b": torch.tensor(0.1), "w": torch.tensor([0.2, 0.3, 0.4])}

    def program(axis: ps.Axis, group: list[Batch]) -> Any:
        own = {"params": state, "opt_state": SGD.init(state), "microbatches": group}
        return step(axis, {**sound(0), **own})

    runs = [on_threads(Ranks(4, 8), program, groups) for _ in range(30)]
    assert_same(runs, [[runs[0][0]] * 4] * 30)
