"""The conversation between ranks: what it costs, and what it tells; on threads, and on axes made up for it.

What ranks hear of each other's faults is in ``tests/faults.py``, which threads and processes run.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs import worlds
from proofs.strategies import assert_same
from purestep import tree
from purestep.axis.buckets import FIRST_BYTES, Buckets
from purestep.axis.queue import Queue
from purestep.axis.ranks import Ranks, Wait
from purestep.conversation import NUMBER, SQUARE, WIDTH, conversation
from purestep.form import flat
from tests.uneven import BAD, SHARE, Arguments, alone, batch, cut, ones, sound, step

pytestmark = pytest.mark.timeout(60)


class Alike(Ranks):
    """``size`` ranks of which this is one, and the others say the same: sums are products."""

    device = torch.device("cpu")
    rank = 0

    def __init__(self, size: int, bucket_bytes: int = 1 << 20) -> None:
        super().__init__(bucket_bytes)
        self.size = size
        self.met: list[str] = []
        self.sent: list[tuple[torch.dtype, int]] = []

    @property
    def where(self) -> Alike:
        """They meet in the axis itself."""
        return self

    @property
    def meetings(self) -> int:
        """How many collectives have begun."""
        return len(self.met) + len(self.sent)

    def meet(self, law: str, x: Tensor) -> Tensor:
        """The law, of one value on all ranks."""
        self.met.append(law)
        return x * self.size if law == "psum" else x.expand(self.size, *x.shape)

    def launch(self, law: str, x: Tensor, out: Tensor) -> Wait:
        """Sums at once."""
        assert law == "psum"
        self.sent.append((x.dtype, x.numel()))
        x.mul_(self.size)
        return lambda: None

    def across(self, inner: Ranks) -> Ranks:
        """There is no part of it."""
        raise AssertionError(inner)


def calls_of(function: Callable[[], Any]) -> int:
    """How many functions are called, of Python's and of C's."""
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # Whoever listens to it would be counted, too.
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return calls


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("weight", [1, 0.5])
def test_what_a_host_does_does_not_grow_with_the_ranks(weight: float, normalize: str) -> None:
    """Not one call more on 65,536 ranks than on two, no gather, and the count of all."""

    def update(axis: Alike) -> Any:
        how = {"weight_fn": lambda m: ones(m) * weight, "normalize": normalize}
        return step(axis, {**sound(0), **how})

    calls = []
    for size in (2, 65_536):
        axis = Alike(size)
        update(axis)
        calls.append(calls_of(partial(update, axis)))
        assert update(axis)[2].num_tokens == 5 * weight * size
        assert set(axis.met) == {"psum"}  # of aux
    assert calls[0] == calls[1]


def test_one_rank_costs_nothing() -> None:
    """However many leaves there are."""

    def talk(leaves: int) -> int:
        theta = {str(place): torch.ones(1) for place in range(leaves)}
        counted = ps.types.Count(torch.tensor(3), torch.tensor(1))
        params = flat(theta)
        here = ps.types.Sums(params.leaves, torch.tensor(1.0), counted, ())

        def both() -> None:
            with conversation(ps.LocalAxis(), "step") as ranks:
                ranks.agree(counted, microbatches=1, shared={}, params=params, given=())
                assert ranks.sum(here) is here

        return calls_of(both)

    assert talk(1) == talk(1000) < 40


# Buckets


def test_the_first_bucket_is_small() -> None:
    """It begins with the last leaf, whose gradient comes first; a model below ``bucket_bytes`` has more than one."""
    axis = Alike(2, bucket_bytes=25 << 20)
    theta = [torch.zeros(1 << 18) for _ in range(6)]
    queue = Queue(Buckets(axis, dict(enumerate(theta)), [torch.float32] * 6).loads)
    queue.begin()
    queue.ready(5)
    assert axis.sent == [(torch.float32, FIRST_BYTES // 4)]
    for index in (4, 3, 2, 1):
        queue.ready(index)
        assert len(axis.sent) == 1
    queue.ready(0)
    assert axis.sent[1:] == [(torch.float32, 5 << 18)]


@pytest.mark.parametrize("bucket_bytes", [4, 12, 20, 1 << 20])
def test_leaves_of_any_size_in_buckets_of_any_size(bucket_bytes: int) -> None:
    """Empty ones, and those of two dtypes, in any order: each is sent once, and as soon as its bucket is complete."""
    sizes = [3, 0, 7, 1, 0, 5]
    theta = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
    dtypes = [torch.float32, torch.float32, torch.float64] * 2
    for seed in range(20):
        axis = Alike(2, bucket_bytes)
        buckets = Buckets(axis, dict(enumerate(theta)), dtypes)
        queue = Queue(buckets.loads)
        queue.begin()
        for place, total in buckets.sums.items():
            total.fill_(place)
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
        for index in order:
            queue.ready(index)
        sent = len(axis.sent)
        queue.launch()
        queue.wait()
        assert len(axis.sent) == sent
        for place, total in buckets.sums.items():
            assert total.dtype == dtypes[place]
            assert torch.equal(total, torch.full_like(total, 2 * place))
        numbers = [sum(n for dtype, n in axis.sent if dtype == kind) for kind in set(dtypes)]
        assert sorted(numbers) == sorted([3 + 0 + 1 + 0, 7 + 5])


def lines_of(function: Callable[[], Any]) -> int:
    """How many lines of Python run."""
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def test_what_an_announcement_costs() -> None:
    """Not a line more for each bucket that there is."""

    def cost(leaves: int) -> float:
        theta = {index: torch.zeros(2) for index in range(leaves)}
        axis = Alike(2, bucket_bytes=8)
        queue = Queue(Buckets(axis, theta, [torch.float32] * leaves).loads)
        queue.begin()

        def announce() -> None:
            for index in range(leaves - 1):
                queue.ready(index)

        return lines_of(announce) / leaves

    assert cost(1000) < cost(10) + 2


# Who differs


def disagreeing(changes: Sequence[Arguments]) -> list[str]:
    """What each of some ranks hears that take their steps with these settings."""

    def program(axis: ps.Axis, rank: int) -> tuple[str, Any]:
        with pytest.raises(ValueError, match="disagree") as info:
            step(axis, {**sound(rank % 4), **changes[rank]})
        group = cut(batch())[rank] if rank < 4 else []
        return str(info.value), step(axis, {**sound(0), "microbatches": group})

    results = worlds.on_threads(worlds.Ranks(len(changes)), program, range(len(changes)))
    for _, after in results:
        assert_same(after, alone())
    return [text for text, _ in results]


SKIP: Arguments = {"on_nonfinite": "skip"}
WIDE: Arguments = {"accum_dtype": torch.float32}


def test_half_the_ranks_differ() -> None:
    texts = disagreeing([{}, SKIP] * 4)
    assert len(set(texts)) == 1
    assert "disagree on settings, and nothing was updated: ranks 0, 2, 4, 6 with " in texts[0]
    assert " against ranks 1, 3, 5, 7 with settings['on_nonfinite']: 'skip'" in texts[0]


def test_three_kinds_of_ranks() -> None:
    texts = disagreeing([{}, SKIP, WIDE, {}, SKIP])
    assert len(set(texts)) == 1
    first, second, third = texts[0].split(" against ")
    assert "ranks 0, 3 with " in first
    assert second.startswith("ranks 1, 4 with ")
    assert "settings['on_nonfinite']: 'skip'" in second
    assert third.startswith("rank 2 with settings['accum_dtype']: 'torch.float32'")


class Beside(Alike):
    """Ranks of which the others say a number more, and a number less, than the fingerprint of this one."""

    def launch(self, law: str, flat: Tensor, out: Tensor) -> Wait:
        """Adds what the others say to what this one does."""
        self.sent.append((flat.dtype, flat.numel()))
        number = sum(int(part) << 32 * place for place, part in enumerate(flat[NUMBER].tolist()))
        for other in (number - 1, number + 1):
            for parts, value in ((NUMBER, other), (SQUARE, other**2)):
                digits = [value >> 32 * place & 0xFFFFFFFF for place in range(len(flat[parts]))]
                flat[parts] += torch.tensor(digits, dtype=flat.dtype)
        return lambda: None


def test_a_rank_whose_fingerprint_is_the_mean_of_all_decides_like_the_others() -> None:
    """To compare one's own with the mean would find nothing here, and one rank would go on alone."""
    axis = Beside(3)
    with pytest.raises(ValueError, match="disagree"):
        step(axis, sound(0))
    assert axis.sent == [(torch.float64, WIDTH)]
    assert axis.met == ["all_gather"] * 2


def weighed_in(axis: ps.Axis, rank: int, dtypes: Sequence[torch.dtype], normalize: Any) -> Any:
    """A step in which each rank has weights of a dtype of its own."""
    how = {"weight_fn": lambda m: ones(m).to(dtypes[rank]), "normalize": normalize}
    return step(axis, {**sound(rank), **how})


INT, FLOAT = torch.int64, torch.float64


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize(
    "dtypes", [(INT, INT, FLOAT, INT), (FLOAT, INT, INT, INT), (INT, FLOAT, INT, INT)], ids=str
)
def test_counts_in_floats_on_one_rank_and_in_integers_on_others(
    dtypes: Sequence[torch.dtype], normalize: str
) -> None:
    """N is of floats on all of them; of integers where the one holds nothing, as rank 1 does."""
    state = alone()
    for *new, metrics in worlds.on_threads(
        worlds.Ranks(4), weighed_in, range(4), [dtypes] * 4, [normalize] * 4
    ):
        assert_same(tuple(new), state[:2])
        assert metrics.num_tokens == 16
        assert metrics.num_tokens.dtype == (INT if dtypes[1] == FLOAT else FLOAT)


# What is not read at once


class Later(ps.testing.ThreadAxis):
    """Ranks that hear of each other as on a device: when all work is queued."""

    @property
    def on_host(self) -> bool:
        """What is exchanged could not be read without waiting."""
        return False


Program = Callable[[ps.Axis, int], Any]


def later(program: Program, size: int = 4) -> list[Any]:
    """What comes of it on each rank, errors included."""
    axis = Later(size, bucket_bytes=8)

    def caught(rank: int) -> Any:
        try:
            return program(axis, rank)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    return axis.map(caught)(range(size))


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_a_step_that_is_not_read_at_once(dtype: torch.dtype, normalize: str) -> None:
    """Uneven ranks and an empty one, which is told what aux is like: the step of one."""
    expected = alone()
    for rank, result in enumerate(
        later(lambda axis, rank: weighed_in(axis, rank, [dtype] * 4, normalize))
    ):
        assert_same(result[:2], expected[:2])
        assert_same(result[2]._replace(num_tokens=()), expected[2]._replace(num_tokens=()))
        assert result[2].num_tokens == 16
        if SHARE[rank]:
            assert result[2].num_tokens.dtype == tree.accumulation_dtype(dtype)


def bad(change: Arguments) -> Program:
    """A step that one rank takes otherwise."""
    return lambda axis, rank: step(axis, {**sound(rank), **(change if rank == BAD else {})})


def broken(*_: Any) -> Any:
    raise ArithmeticError("mine")


def test_a_failure_that_is_heard_later() -> None:
    """Before the first meeting: the rank raises at once, and the others when they read what it has said."""
    for rank, text in enumerate(later(bad({"weight_fn": broken}))):
        assert text.startswith("ArithmeticError: mine" if rank == BAD else "RankError: rank 2 of ")
        if rank != BAD:
            assert "nothing was updated. Their own output tells why" in text


def test_failures_that_are_heard_later() -> None:
    def program(axis: ps.Axis, rank: int) -> Any:
        return step(axis, {**sound(rank), **({"weight_fn": broken} if rank % 2 == 0 else {})})

    for rank, text in enumerate(later(program)):
        assert text.startswith("ArithmeticError: mine" if rank % 2 == 0 else "RankError: 2 ranks")


def test_a_rank_that_fails_with_nobody_to_hear_it() -> None:
    """Between the meetings it raises alone; here, threads that wait in vain are told."""
    for rank, text in enumerate(later(bad({"loss_fn": broken}))):
        assert text.startswith(
            "ArithmeticError: mine" if rank == BAD else "RankError: these ranks cannot meet"
        )


def test_a_disagreement_that_is_heard_later() -> None:
    """Each says its own part: nobody can be asked while a device may be busy with what does not match."""
    texts = later(bad(SKIP))
    for rank, text in enumerate(texts):
        assert "disagree on one of params, opt_state, settings, and nothing was updated" in text
        assert f"here, it is rank {rank} with the fingerprints params " in text
        assert f"settings['on_nonfinite']: {'skip' if rank == BAD else 'propagate'!r}" in text


def test_weights_of_two_kinds_that_are_heard_of_later() -> None:
    dtypes = [INT, INT, FLOAT, INT]
    for text in later(lambda axis, rank: weighed_in(axis, rank, dtypes, "loss")):
        assert "disagree on the weights, and nothing was updated: those of 1 are floats" in text
        assert "those of 2 integers" in text


def test_a_count_that_overflows_and_is_read_later() -> None:
    def program(axis: ps.Axis, rank: int) -> Any:
        group = [batch(1)] * 512
        how = {"weight_fn": lambda m: ones(m) * 2**53, "microbatches": group}
        return step(axis, {**sound(rank), **how})

    for text in later(program, size=2):
        assert "num_tokens, the sum of all weights, overflows" in text
