"""``ThreadAxis``: worlds within worlds, axes of a grid, and errors where ranks cannot meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from proofs.worlds import Ranks, on_threads
from tests.uneven import SGD, Batch, alone, batch, cut, sound, step

pytestmark = pytest.mark.timeout(60)


def test_what_is_launched_is_handed_over_at_once() -> None:
    """What is written to the buffer later is lost, as it may be between processes."""

    def program(axis: Any, rank: int) -> tuple[list[int], list[Any]]:
        flats = [torch.full((2,), 10.0**place * (rank + 1)) for place in range(3)]
        waits = [axis.launch(flat) for flat in flats]
        begun = axis.meetings
        for flat in flats:
            flat.fill_(-1.0)
        for wait in waits[::-1] if rank else waits:
            wait()
        return [begun, axis.meetings], [flat.tolist() for flat in flats]

    for begun, sums in on_threads(Ranks(3), program, range(3)):
        assert begun == [3, 3]
        assert sums == [[6.0] * 2, [60.0] * 2, [600.0] * 2]


def errors_of(axis: ps.testing.ThreadAxis, *programs: Callable[[], Any]) -> list[str]:
    """What ranks hear that run these programs and cannot meet."""

    def caught(program: Callable[[], Any]) -> str:
        try:
            program()
        except ps.RankError as error:
            return str(error)
        return "nothing"

    return axis.map(caught)(programs)


def test_a_skipped_collective_is_an_error() -> None:
    axis = ps.testing.ThreadAxis(3)
    x = torch.ones(2)
    heard = errors_of(axis, lambda: ps.psum(x, axis), lambda: None, lambda: ps.psum(x, axis))
    assert heard[1] == "nothing"
    for rank in (0, 2):
        assert heard[rank].startswith("these ranks cannot meet: ")
        assert f"rank {rank} calls psum of torch.float32 (2,) over ThreadAxis(3)" in heard[rank]
        assert "rank 1 has returned" in heard[rank]


def test_an_error_does_not_wait_for_those_who_still_compute() -> None:
    axis, told = ps.testing.ThreadAxis(3), threading.Event()

    def program(rank: int) -> bool:
        if rank == 0:
            with pytest.raises(ps.RankError, match="rank 1 has returned; rank 2 still computes"):
                ps.psum(torch.ones(2), axis)
            told.set()
        return rank == 1 or told.wait(timeout=10)

    assert all(axis.map(program)(range(3)))


def test_what_comes_out_is_each_ranks_own() -> None:
    """To write into, say."""
    axis = ps.testing.ThreadAxis(3)
    for law, total in ((ps.psum, 3), (ps.all_gather, 1)):
        results = axis.map(lambda rank, law=law: law(torch.ones(2), axis).add_(rank))(range(3))
        assert [float(result.flatten()[0]) for result in results] == [total, total + 1, total + 2]


def test_a_skipped_step_is_an_error() -> None:
    axis = ps.testing.ThreadAxis(2)
    heard = errors_of(axis, lambda: step(axis, sound(0)), lambda: None)
    assert "rank 0 calls psum of torch.float64 (16,) over ThreadAxis(2)" in heard[0]
    assert "rank 1 has returned" in heard[0]


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ([(ps.psum, torch.ones(2)), (ps.all_gather, torch.ones(2))], ["psum of", "all_gather of"]),
        ([(ps.psum, torch.ones(2)), (ps.psum, torch.ones(3))], ["(2,)", "(3,)"]),
        (
            [(ps.psum, torch.ones(2)), (ps.psum, torch.ones(2).double())],
            ["torch.float32", "torch.float64"],
        ),
    ],
    ids=["law", "shape", "dtype"],
)
def test_collectives_that_do_not_match(calls: Any, named: list[str]) -> None:
    axis = ps.testing.ThreadAxis(2)
    heard = errors_of(axis, *(lambda law=law, x=x: law(x, axis) for law, x in calls))
    assert heard[0] == heard[1]
    first, second = heard[0].removeprefix("these ranks cannot meet: ").split("; ")
    assert first.startswith("rank 0 calls")
    assert second.startswith("rank 1 calls")
    assert named[0] in first
    assert named[1] in second


def test_a_ring_of_waiting_ranks_is_an_error() -> None:
    """Along two axes: each waits for the next, and no two of them are in the same group."""
    world = ps.testing.ThreadAxis(4)
    first, second = world.split(2, 2)
    axes = [first, second, second, first]
    heard = errors_of(world, *(lambda axis=axis: ps.psum(torch.ones(1), axis) for axis in axes))
    assert len(set(heard)) == 1
    for rank, axis in enumerate(axes):
        assert f"rank {rank} calls psum of torch.float32 (1,) over {axis!r}" in heard[0]


def test_an_exception_comes_out_as_it_is_with_its_rank() -> None:
    axis, mine, heard = ps.testing.ThreadAxis(3), KeyError("mine"), []

    def program(rank: int) -> None:
        if rank == 1:
            raise mine
        try:
            ps.psum(torch.ones(2), axis)
        except ps.RankError as error:
            heard.append(str(error))
            raise

    with pytest.raises(KeyError) as info:
        axis.map(program)(range(3))
    assert info.value is mine
    assert mine.__notes__ == ["raised by rank 1 of 3"]
    assert len(heard) == 2
    assert all("rank 1 has raised KeyError: 'mine'" in text for text in heard)


def test_ranks_that_only_miss_each_other_raise_rank_error() -> None:
    axis = ps.testing.ThreadAxis(2)
    with pytest.raises(ps.RankError, match="rank 0 has returned") as info:
        axis.map(lambda rank: rank and ps.psum(torch.ones(2), axis))(range(2))
    assert info.value.__notes__ == ["raised by rank 1 of 2"]


def test_usable_again_after_an_error() -> None:
    axis = ps.testing.ThreadAxis(2)
    for _ in range(3):
        with pytest.raises(ps.RankError):
            axis.map(lambda rank: rank and ps.psum(torch.ones(2), axis))(range(2))
        assert axis.map(lambda x: ps.psum(x, axis))([torch.tensor(1), torch.tensor(2)]) == [3, 3]


@pytest.mark.parametrize("bucket_bytes", [0, -8, 8.0, None])
def test_bucket_bytes(bucket_bytes: Any) -> None:
    with pytest.raises(ValueError, match=rf"bucket_bytes={bucket_bytes} must be a whole number"):
        ps.testing.ThreadAxis(2, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3), (4, 0)])
def test_split_must_multiply_to_the_size(sizes: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"ThreadAxis\(4\)\.split\(.*: the sizes must multiply to 4"
    ):
        ps.testing.ThreadAxis(4).split(*sizes)


def test_map_takes_an_entry_for_each_rank() -> None:
    axis = ps.testing.ThreadAxis(2)
    with pytest.raises(
        ValueError, match=r"argument 1 has 3 entries, but ThreadAxis\(2\) takes one for each rank"
    ):
        axis.map(lambda a, b: a)([1, 2], [1, 2, 3])


def test_map_where_no_thread_can_follow() -> None:
    axis = ps.testing.ThreadAxis(2)
    first, _ = ps.testing.ThreadAxis(4).split(2, 2)
    with pytest.raises(RuntimeError, match="transform inside fn"):
        torch.func.grad(lambda w: sum(axis.map(lambda x: w * x)([1.0, 2.0])))(torch.tensor(3.0))
    with pytest.raises(RuntimeError, match="no other map"):
        axis.map(lambda x: axis.map(lambda y: y)([x, x]))([1, 2])
    with pytest.raises(ValueError, match="map over the axis that was split"):
        first.map(lambda x: x)([1, 2])


def test_one_axis_in_many_threads() -> None:
    """Each ``map`` is a world of its own; so are the parts of an axis that was split."""
    axis = ps.testing.ThreadAxis(4)
    rows, columns = axis.split(2, 2)
    begin = threading.Barrier(3)

    def program(x: Tensor) -> list[Tensor]:
        return [ps.psum(x, part) for _ in range(20) for part in (rows, columns, axis)]

    def mapped(number: int) -> None:
        begin.wait(timeout=30)
        results[number] = axis.map(program)([torch.tensor(number * 10**rank) for rank in range(4)])

    results: dict[int, Any] = {}
    callers = [threading.Thread(target=mapped, args=(number,), daemon=True) for number in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    for number in (1, 2, 3):
        for rank, sums in enumerate(results[number]):
            row, column = divmod(rank, 2)
            expected = [101 * 10**column, 11 * 100**row, 1111]
            assert sums == [number * total for total in expected] * 20


def test_a_world_inside_of_a_rank() -> None:
    outer, inner = ps.testing.ThreadAxis(2), ps.testing.ThreadAxis(2)

    def program(x: Tensor) -> Tensor:
        parts: list[Tensor] = inner.map(lambda y: ps.psum(y, inner))([x, x + 1])
        total: Tensor = ps.psum(parts[0], outer)
        return total

    assert outer.map(program)([torch.tensor(1), torch.tensor(10)]) == [24, 24]


def test_replicas_along_another_axis_are_not_counted() -> None:
    world = ps.testing.ThreadAxis(4)
    dp, tp = world.split(2, 2)
    places = world.map(lambda: (dp.rank, tp.rank, int(dp.index), int(tp.index)))()
    assert places == [(0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)]
    assert (dp.size, tp.size) == (2, 2)
    groups = cut(batch(), [[3, 2], [8, 1, 1, 1]])
    results = world.map(lambda: step(dp, {**sound(0), "microbatches": groups[dp.rank]}))()
    for result in results:
        assert_same(result, alone())


def test_thirty_runs_are_one() -> None:
    """With numbers that round: in which order threads arrive does not matter."""
    numbers = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    groups = cut({"x": numbers[:, :3], "y": numbers[:, 3]})

    def program(axis: ps.Axis, group: list[Batch]) -> Any:
        state = {"b": torch.tensor(0.1), "w": torch.tensor([0.2, 0.3, 0.4])}
        return step(
            axis,
            {**sound(0), "params": state, "opt_state": SGD.init(state), "microbatches": group},
        )

    first, *runs = (on_threads(Ranks(4, 8), program, groups) for _ in range(30))
    for run in [first, *runs]:
        assert_same(run, [first[0]] * 4)
