"""Sessions of an update, without a step: over one rank, simulated ranks, threads and processes.

The gradient of a leaf is a whole number times its positions, in dtypes that hold all sums exactly.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
from proofs.strategies import assert_same
from proofs.worlds import Grid, Ranks, on_processes, on_threads
from purestep import tree
from purestep.axis.agreement import described
from purestep.axis.buckets import Buckets
from purestep.axis.whole import whole
from purestep.testing import ThreadAxis
from purestep.testing.processes import World
from purestep.types import Count, Sums

pytestmark = pytest.mark.timeout(60)

SHARE = [[2, 3], [], [1, 1, 2], [7]]
"""The tokens of each microbatch of each rank: uneven, and one rank with none."""
HELD = [[2, 3], [1], [1, 1, 2], [7]]
BAD = 2
TOTAL = 16
SETTINGS = {"normalize": "loss"}


def params() -> dict[str, Any]:
    """Leaves of several shapes, dtypes and strides; one is empty."""
    return {
        "a": torch.ones(2, 3, dtype=torch.float64),
        "b": torch.tensor(1.0),
        "c": torch.ones(3, 4).T,
        "d": torch.ones(5, dtype=torch.bfloat16),
        "e": torch.ones(0, 2),
    }


def gradient(leaf: Tensor, tokens: float) -> Tensor:
    """That of all entries of a leaf, from so many tokens."""
    dtype = tree.accumulation_dtype(leaf.dtype)
    return tokens * (1 + torch.arange(leaf.numel(), dtype=dtype)).view(leaf.shape)


def count(tokens: Sequence[float]) -> Count:
    """Of microbatches with so many tokens each."""
    total = torch.tensor(sum(tokens))
    return Count(total if tokens else torch.tensor(0), torch.tensor(len(tokens)))


def update(
    axis: ps.Axis,
    tokens: Sequence[float],
    *,
    theta: Any = None,
    opt_state: Any = (),
    settings: dict[str, str] = SETTINGS,
    gather: Any = "step",
    early: bool = True,
    aux: Any = (),
    loss_dtype: torch.dtype = torch.float32,
    at: Callable[[str], None] = lambda place: None,
) -> tuple[Count, Sums]:
    """One update of replicated params; ``at`` is called in several places of it."""
    theta = params() if theta is None else theta
    leaves, structure = tree.flatten(theta)
    with axis.session(gather, settings) as ranks:
        at("before")
        ready = ranks.buckets(theta, None)
        total = ranks.agree(count(tokens), theta, opt_state, len(tokens))
        ranks.whole(theta)
        grads = [torch.zeros(x.shape, dtype=tree.accumulation_dtype(x.dtype)) for x in leaves]
        at("between")
        for position, number in enumerate(tokens):
            for index in reversed(range(len(leaves))):
                if index == 0:
                    at("backward")
                grads[index].add_(gradient(leaves[index], number))
                if position == len(tokens) - 1 and ready and early:
                    grads[index] = ready(index, grads[index])
        held = aux if tokens else ()
        loss = torch.tensor(float(sum(tokens)), dtype=loss_dtype if tokens else None)
        here = Sums(tree.unflatten(structure, grads), loss, count(tokens), held)
        result = ranks.sum(here, theta)
        at("after")
    return total, result


def check(result: tuple[Count, Sums], tokens: float = TOTAL, microbatches: int = 6) -> None:
    """The sums of all ranks, laid out as params are."""
    total, sums = result
    counted = Count(torch.tensor(tokens), torch.tensor(microbatches))
    assert_same(total, counted)
    assert_same(sums.counted, counted)
    assert_same(sums.grads, {name: gradient(leaf, tokens) for name, leaf in params().items()})
    strides = tree.map(Tensor.stride, params())
    assert tree.map(Tensor.stride, sums.grads) == strides
    assert sums.loss == tokens


class Raised(NamedTuple):
    """What a rank has raised, as a result."""

    error: BaseException


def caught(program: Callable[[], Any]) -> Any:
    """What comes of it, or its error."""
    try:
        return program()
    except BaseException as error:
        return Raised(error)


def opened(results: Sequence[Any]) -> list[Any]:
    """Results, and errors as they are."""
    return [each.error if isinstance(each, Raised) else each for each in results]


@pytest.fixture(name="on_ranks")
def _on_ranks(ranks: Run) -> Run:
    """Runs a program on four ranks, and shows what each has raised."""
    return lambda *args, **how: opened(ranks(*args, **how))


# One rank, and simulated ranks


def test_one_rank_answers_what_it_is_asked() -> None:
    theta, axis = params(), ps.LocalAxis()
    here = count([1, 2])
    sums = Sums(theta, torch.tensor(3.0), here, {"n": torch.tensor(1)})
    with axis.session("step", SETTINGS) as ranks:
        assert ranks.agree(here, theta, (), 2) is here
        assert whole(theta, axis, "step") is theta
        assert ranks.buckets(theta, None) is None
        assert ranks.rounds(2) == 2
        assert ranks.sum(sums, theta) is sums


def test_one_rank_costs_the_same_for_any_number_of_leaves() -> None:
    def calls(number: int) -> int:
        theta = {str(i): torch.ones(1) for i in range(number)}
        here, calls = count([1]), 0
        sums = Sums(theta, torch.tensor(1.0), here, ())

        def profile(*_: Any) -> None:
            nonlocal calls
            calls += 1

        gc.disable()
        sys.setprofile(profile)
        try:
            with ps.LocalAxis().session("step", SETTINGS) as ranks:
                ranks.agree(here, theta, (), 1)
                ranks.sum(sums, theta)
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    assert calls(1) == calls(1000) < 80


@pytest.mark.parametrize("axis", [ps.LocalAxis(), ThreadAxis(1)])
@pytest.mark.parametrize("tokens", [float("inf"), -1])
def test_a_count_that_overflows(axis: Any, tokens: float) -> None:
    program = partial(update, axis, [tokens])
    with pytest.raises(ValueError, match="num_tokens, the sum of all weights, overflows"):
        axis.map(program)() if isinstance(axis, ThreadAxis) else program()


def test_an_error_goes_through_the_session_of_one_rank() -> None:
    with pytest.raises(KeyError), ps.LocalAxis().session("step", {}):
        raise KeyError


@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_a_shard_over_one_rank_is_the_whole(gather: Any) -> None:
    axis = ps.LocalAxis()
    theta = {"a": ps.Shard(torch.ones(3), axis, (3,)), "b": torch.ones(2)}
    here = Sums({"a": torch.arange(3.0), "b": torch.zeros(2)}, torch.tensor(1.0), count([1]), ())
    with axis.session(gather, {}) as ranks:
        expected = torch.ones(3) if gather == "step" else theta["a"]
        assert_same(whole(theta, axis, gather)["a"], expected)
        sums = ranks.sum(here, theta)
    assert tree.flatten(sums.grads)[1] == tree.flatten(theta)[1]
    assert_same(sums.grads["a"].piece, torch.arange(3.0))


@pytest.mark.parametrize("gather", ["step", "loss"])
def test_simulated_ranks(gather: Any) -> None:
    """Replicated, sharded over the axis, and over another one."""
    axis, tp = ps.VmapAxis(3), ps.VmapAxis(2)

    def rank(number: Tensor) -> Any:
        piece, other = torch.zeros(2), torch.zeros(2)
        theta = {
            "p": ps.Shard(piece, axis, (5,)),
            "r": torch.ones(4),
            "t": ps.Shard(other, tp, (4,)),
        }
        whole = (axis.index + 1) * torch.arange(5.0 if gather == "step" else 2.0)
        grads = {"p": whole, "r": number * torch.ones(4), "t": number * torch.ones(2)}
        here = Count(number, torch.tensor(1))
        with axis.session(gather, SETTINGS) as ranks:
            assert ranks.buckets(theta, None) is None
            total = ranks.agree(here, theta, (), 1)
            return total, ranks.sum(Sums(grads, number * 1.0, here, [number]), theta)

    mapped = axis.map(rank)(torch.tensor([1, 2, 4]))
    total, sums = mapped
    assert total.num_tokens.tolist() == [7] * 3
    assert sums.loss.tolist() == [7.0] * 3
    assert sums.aux[0].tolist() == [7] * 3
    assert sums.grads["r"].eq(7).all()
    assert sums.grads["t"].piece.eq(7).all()
    expected = [[0, 6], [12, 18], [24, 0]] if gather == "step" else [[0, 1], [0, 2], [0, 3]]
    assert sums.grads["p"].piece.tolist() == expected


def test_simulated_ranks_under_a_transform() -> None:
    """The derivative of the sums by what one rank adds."""
    axis = ps.VmapAxis(3)

    def total(x: Tensor) -> Tensor:
        def rank(x: Tensor) -> Tensor:
            with axis.session("step", {}) as ranks:
                total = ranks.agree(count([1]), {"w": x}, (), 1)
                sums = ranks.sum(Sums({"w": x * x}, x.sum(), count([1]), ()), {"w": x})
            return sums.grads["w"].sum() / total.num_tokens

        return axis.map(rank, out_dims=None)(x)

    x = torch.tensor([1.0, 2.0, 3.0])
    assert_same(torch.func.grad(total)(x), 2 * x / 3)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", ["local", "vmap"])
def test_a_session_is_part_of_one_graph(way: str) -> None:
    def rank(axis: ps.Axis, x: Tensor) -> Tensor:
        with axis.session("step", {}) as ranks:
            here = Count(torch.tensor(2), torch.tensor(1))
            total = ranks.agree(here, {"w": x}, (), 1)
            sums = ranks.sum(Sums({"w": x}, x.sum(), here, ()), {"w": x})
        return sums.grads["w"] / total.num_tokens

    axis: Any = ps.LocalAxis() if way == "local" else ps.VmapAxis(2)
    program = partial(rank, axis) if way == "local" else axis.map(partial(rank, axis))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        assert_same(compiled(torch.ones(2, 2)), program(torch.ones(2, 2)))


# Real ranks


@pytest.mark.parametrize("bucket_bytes", [8, 40, 1 << 20])
@pytest.mark.parametrize("early", [True, False])
def test_uneven_ranks(on_ranks: Run, bucket_bytes: int, early: bool) -> None:
    program = partial(update, early=early)
    for result in on_ranks(program, SHARE, bucket_bytes=bucket_bytes):
        check(result)
        assert result[1].loss.dtype == torch.float32


def test_no_data_anywhere(on_ranks: Run) -> None:
    for result in on_ranks(update, [[]] * 4):
        check(result, tokens=0, microbatches=0)
        assert result[1].aux == ()


def mixed(axis: ps.Axis, tokens: list[float], dtype: torch.dtype) -> Any:
    return update(axis, tokens, loss_dtype=dtype)


def test_counts_and_losses_of_two_dtypes(on_ranks: Run) -> None:
    """Floats on one rank and integers on others are summed in float64, and so are losses."""
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float32]
    for total, sums in on_ranks(mixed, [[2, 3], [], [0.5, 0.25], [7]], dtypes):
        assert_same(total.num_tokens, torch.tensor(12.75, dtype=torch.float64))
        assert_same(sums.loss, torch.tensor(12.75, dtype=torch.float64))


def test_large_counts_are_exact(on_ranks: Run) -> None:
    theta = {"w": torch.zeros(1)}
    tokens = [[2**51 + 1], [], [2**50 + 3], [5]]
    for total, sums in on_ranks(partial(update, theta=theta), tokens):
        assert total.num_tokens == sums.counted.num_tokens == 2**51 + 2**50 + 9


def too_many(axis: ps.Axis, tokens: list[float]) -> Any:
    return caught(lambda: update(axis, tokens, theta={"w": torch.zeros(1)}))


def test_counts_that_float64_rounds_are_refused(on_ranks: Run) -> None:
    """Integers alone: sums of floats are rounded anyway."""
    for error in on_ranks(too_many, [[2**52], [], [2**52], [5]]):
        assert "overflows: over " in str(error)
        assert "more than EXACT=9007199254740992" in str(error)
    for total, _ in on_ranks(too_many, [[2.0**52], [], [2.0**52], [4.0]]):
        assert total.num_tokens == 2**53 + 4


def with_aux(axis: ps.Axis, tokens: list[float], aux: Any) -> Any:
    return caught(lambda: update(axis, tokens, aux=aux)[1].aux)


def test_aux_is_summed(on_ranks: Run) -> None:
    aux = {"n": torch.tensor(3), "x": [torch.ones(2, 2).T, torch.ones(1).double()]}
    for result in on_ranks(with_aux, HELD, [aux] * 4):
        assert_same(result, tree.map(lambda leaf: 4 * leaf, aux))


def test_aux_beside_an_empty_rank_is_refused(on_ranks: Run) -> None:
    for error in on_ranks(with_aux, SHARE, [[torch.tensor(1)]] * 4):
        assert isinstance(error, ValueError)
        assert "which 1 of its 4 ranks cannot, as they hold no microbatch" in str(error)
        assert "whose weights are zero" in str(error)


def test_aux_that_differs(on_ranks: Run) -> None:
    aux: list[Any] = [{"n": torch.tensor(1)} for _ in range(4)]
    aux[BAD] = ()
    for error in on_ranks(with_aux, HELD, aux):
        text = "disagree on LossTerms.aux, and nothing was updated: ranks 0, 1, 3 with "
        assert text + "LossTerms.aux['n']: torch.int64 of shape () against rank 2 with " in str(
            error
        )


def evaluated(axis: ps.Axis, tokens: list[float]) -> Any:
    with axis.session("step", {"evaluation": "yes"}) as ranks:
        total = ranks.agree(count(tokens), params(), (), len(tokens))
        loss = torch.tensor(float(sum(tokens)))
        return total, ranks.sum(Sums((), loss, count(tokens), ()), ())


def test_an_evaluation(on_ranks: Run) -> None:
    for total, sums in on_ranks(evaluated, SHARE):
        assert total.num_tokens == sums.loss == TOTAL
        assert sums.grads == ()


def furthest(axis: ps.Axis, tokens: list[float]) -> int:
    with axis.session("microbatch", {}) as ranks:
        ranks.agree(count(tokens), params(), (), len(tokens))
        rounds = ranks.rounds(len(tokens))
        ranks.sum(Sums((), torch.tensor(0.0), count(tokens), ()), ())
    return rounds


def test_the_most_microbatches_of_any_rank(on_ranks: Run) -> None:
    assert on_ranks(furthest, SHARE) == [3] * 4


# Ranks that go wrong


def raising(axis: ps.Axis, rank: int, tokens: list[float], how: dict[str, Any]) -> Any:
    """An update, and what comes of it; then a sound one."""
    how = dict(how)
    if "fails" in how:
        place, error = how.pop("fails")

        def at(here: str) -> None:
            if here == place:
                raise error

        how["at"] = at
    result = caught(lambda: update(axis, tokens, **how))
    check(update(axis, SHARE[rank]))
    return result


@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
@pytest.mark.parametrize("place", ["before", "between", "backward"])
@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
def test_a_failure_reaches_all_ranks(
    on_ranks: Run, place: str, kind: Any, bucket_bytes: int
) -> None:
    """And the ranks go on with the next update."""
    how: list[Any] = [{}] * 4
    how[BAD] = {"fails": (place, kind("mine"))}
    results = on_ranks(raising, range(4), SHARE, how, bucket_bytes=bucket_bytes)
    assert type(results[BAD]) is kind
    for rank in {0, 1, 3}:
        assert type(results[rank]) is ps.RankError
        text = "failed, and the step with it on every rank; nothing was updated. rank 2: "
        assert f"{text}{kind.__name__}: mine" in str(results[rank])
        assert str(results[rank]).startswith("rank 2 of ")


def test_two_failures(on_ranks: Run) -> None:
    how: list[Any] = [{}] * 4
    how[1], how[3] = ({"fails": ("before", ValueError(name))} for name in "xy")
    results = on_ranks(raising, range(4), SHARE, how)
    for rank in (0, 2):
        assert str(results[rank]).startswith("ranks 1, 3 of ")
        assert str(results[rank]).endswith("rank 1: ValueError: x; rank 3: ValueError: y")


def test_a_failure_after_the_sum_stays_on_its_rank(on_ranks: Run) -> None:
    how: list[Any] = [{}] * 4
    how[BAD] = {"fails": ("after", ArithmeticError("mine"))}
    results = on_ranks(raising, range(4), SHARE, how)
    assert type(results[BAD]) is ArithmeticError
    for rank in {0, 1, 3}:
        check(results[rank])


def test_a_failure_in_the_sum(on_ranks: Run) -> None:
    """Gradients that do not fit are found before any rank waits for the sums."""
    how: list[Any] = [{}] * 4
    how[BAD] = {"aux": ["not a tensor"]}
    results = on_ranks(raising, range(4), HELD, how)
    for result in results:
        assert "disagree on LossTerms.aux" in str(result)


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "structure": (
        {"theta": {**params(), "f": torch.ones(1)}},
        "params, and nothing was updated: ranks 0, 1, 3 with the structure {'a': *, 'b': *, 'c': *,"
        " 'd': *, 'e': *} against rank 2 with params['f']: torch.float32 of shape (1,)",
    ),
    "containers": (
        {"opt_state": []},
        "opt_state, and nothing was updated: ranks 0, 1, 3 with the structure () against rank 2 "
        "with the structure []",
    ),
    "dtype": (
        {"theta": {**params(), "b": torch.tensor(1.0).double()}},
        "ranks 0, 1, 3 with params['b']: torch.float32 of shape () against rank 2 with "
        "params['b']: torch.float64 of shape ()",
    ),
    "state": (
        {"opt_state": {"step": 1}},
        "opt_state, and nothing was updated: ranks 0, 1, 3 with the structure () against rank 2 "
        "with opt_state['step']: int, no tensor",
    ),
    "settings": (
        {"settings": {"normalize": "grads"}},
        "settings, and nothing was updated: ranks 0, 1, 3 with settings['normalize']: 'loss' "
        "against rank 2 with settings['normalize']: 'grads'",
    ),
    "gather": (
        {"gather": "loss"},
        "ranks 0, 1, 3 with settings['gather']: 'step' against rank 2 with "
        "settings['gather']: 'loss'",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_disagree(on_ranks: Run, name: str) -> None:
    change, text = DIFFERENCES[name]
    how: list[Any] = [{}] * 4
    how[BAD] = change
    results = on_ranks(raising, range(4), SHARE, how)
    for result in results:
        assert type(result) is ValueError
        assert "disagree on " in str(result)
        assert text in str(result)
        assert str(result) == str(results[0])


def recorded(axis: ps.Axis, rank: int, what: str) -> Any:
    theta = {"w": torch.ones(2, requires_grad=what == "requires grad")}
    program = partial(update, axis, [1], theta=theta)
    if what == "transform":
        return caught(lambda: torch.func.grad(lambda x: program()[1].loss + x)(torch.tensor(1.0)))
    return caught(program)


@pytest.mark.parametrize("what", ["requires grad", "transform"])
def test_a_recorded_step_is_refused(on_ranks: Run, what: str) -> None:
    for error in on_ranks(recorded, range(4), [what] * 4):
        assert type(error) is ValueError
        assert "is not recorded" in str(error)
        assert "ps.VmapAxis" in str(error)


# Sharded leaves


def on_grid(
    ranks: str, request: pytest.FixtureRequest, program: Any, *args: Any, bytes_: int
) -> None:
    if ranks == "threads":
        on_threads(Ranks(4, bytes_, grid=True), program, *args)
    else:
        world: World = request.getfixturevalue("world")
        on_processes(world, Ranks(4, bytes_, grid=True), program, *args)


def part_program(axis: Any, rank: int, tokens: list[float], gather: Any) -> None:
    own, part = axis.both, axis.second
    shapes = {"a": (5, 3), "b": (2, 6), "c": (6, 3), "d": (7,), "r": (4,)}
    over: dict[str, Any] = {"a": (own, 0), "b": (part, 1), "c": (part, 0), "d": (own, 0)}
    check_sharded(own, {own: (), part: axis.first}, shapes, over, tokens, gather)


def own_and_other(axis: Grid, rank: int, tokens: list[float], gather: Any) -> None:
    """Over the step's own axis, and over one whose ranks hold the same tokens."""
    own, other = axis.first, axis.second
    shapes = {"a": (5, 3), "c": (3, 2), "d": (7,), "r": (4,)}
    over: dict[str, Any] = {"a": (own, 1), "c": (other, 1), "d": (own, 0)}
    check_sharded(own, {own: (), other: own}, shapes, over, SHARE[2 * (rank // 2)], gather)


def check_sharded(
    own: Any, beside: dict[Any, Any], shapes: Any, over: Any, tokens: Any, gather: Any
) -> None:
    """The pieces of the sums over all ranks; of pieces that are summed already, as they are."""
    theta: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    theta |= {name: ps.shard(theta[name], *place) for name, place in over.items()}
    grads, expected = {}, {}
    for name, shape in shapes.items():
        axis, dim = over.get(name, (None, 0))
        is_own = axis is not None and beside[axis] is not own
        grad = gradient(torch.zeros(shape), sum(tokens))
        remaining = own if axis is None or gather == "step" else beside[axis]
        number = torch.tensor(float(sum(tokens)))
        if remaining != ():
            number = ps.psum(number, remaining)
        total = gradient(torch.zeros(shape), float(number))
        expected[name] = total if axis is None else ps.shard(total, axis, dim)
        keeps = axis is None or (is_own and gather == "step")
        grads[name] = grad if keeps else ps.shard(grad, axis, dim).piece
    # Pieces of a sum over all ranks stay where they are; where they are not, they travel.
    summed = {name for name in over if beside[over[name][0]] == () and gather != "step"}
    with own.session(gather, SETTINGS) as ranks:
        ready = ranks.buckets(theta, torch.float32)
        # A loss that gathers wants equally many microbatches on all ranks.
        ranks.agree(count(tokens), theta, (), 1 if gather == "loss" else len(tokens))
        assert ready
        for at, name in enumerate(theta):
            taken = ready(at, grads[name])
            assert (taken is grads[name]) == (name in summed)
            grads[name] = taken
        sums = ranks.sum(Sums(grads, torch.tensor(0.0), count(tokens), ()), theta)
    assert tree.flatten(sums.grads)[1] == tree.flatten(theta)[1]
    assert_same(tree.leaves_of(sums.grads), tree.leaves_of(expected))
    for leaf, piece in zip(*map(tree.leaves_of, (theta, sums.grads)), strict=True):
        assert leaf.stride() == piece.stride()


@pytest.mark.parametrize("where", ["threads", "processes"])
@pytest.mark.parametrize("bytes_", [8, 1 << 20])
@pytest.mark.parametrize("gather", ["step", "microbatch", "loss"])
@pytest.mark.parametrize("program", [part_program, own_and_other])
def test_sharded_leaves(
    request: pytest.FixtureRequest, where: str, bytes_: int, gather: str, program: Any
) -> None:
    on_grid(where, request, program, range(4), SHARE, [gather] * 4, bytes_=bytes_)


def broken_shards(axis: ps.Axis, rank: int, gather: Any) -> Any:
    """A rank fails in its backward pass."""
    theta = {"a": ps.shard(torch.zeros(8), axis), "r": torch.zeros(3)}

    def program() -> None:
        with axis.session(gather, SETTINGS) as ranks:
            ready = ranks.buckets(theta, None)
            ranks.agree(count([1]), theta, (), 1)
            if rank == BAD:
                raise ArithmeticError("mine")
            assert ready
            ready(1, torch.zeros(3))
            grads = {"a": torch.zeros(8 if gather == "step" else 2), "r": torch.zeros(3)}
            ranks.sum(Sums(grads, torch.tensor(0.0), count([1]), ()), theta)

    return caught(program)


def test_a_failure_beside_sharded_leaves(on_ranks: Run) -> None:
    for rank, error in enumerate(on_ranks(broken_shards, range(4), ["step"] * 4)):
        assert type(error) is (ArithmeticError if rank == BAD else ps.RankError)


def test_a_rank_says_nothing_where_the_others_wait_for_its_loss() -> None:
    """Threads that wait for a rank which has ended get an error."""
    axis = ThreadAxis(4)
    results = opened(axis.map(partial(broken_shards, axis))(range(4), ["loss"] * 4))
    for rank, error in enumerate(results):
        text = "mine" if rank == BAD else "these ranks cannot meet"
        assert text in str(error)


# Buckets


class Log(ThreadAxis):
    """Threads that note the sizes of what the first rank launches, before and after the sum."""

    def __init__(self, size: int, bucket_bytes: int) -> None:
        super().__init__(size, bucket_bytes=bucket_bytes)
        self.sent: list[int] = []

    def launch(self, x: Tensor, law: str = "psum") -> Any:
        if self.rank == 0:
            self.sent.append(x.numel())
        return super().launch(x, law)


def launched(
    bucket_bytes: int, theta: list[Tensor], order: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """What has left after each leaf that is ready, and in all, by number of elements."""
    axis = Log(2, bucket_bytes)
    early: list[list[int]] = []

    def program(rank: int) -> Any:
        with axis.session("step", {}) as ranks:
            ready = ranks.buckets(theta, None)
            ranks.agree(count([1]), theta, (), 1)
            assert ready
            if rank == 0:
                del axis.sent[:]
            for index in order:
                ready(index, torch.full_like(theta[index], rank + 1))
                if rank == 0:
                    early.append([*axis.sent])
            grads = [torch.full_like(leaf, rank + 1) for leaf in theta]
            sums = ranks.sum(Sums(grads, torch.tensor(0.0), count([1]), ()), theta)
            assert_same(sums.grads, [torch.full_like(leaf, 3) for leaf in theta])

    axis.map(program)(range(2))
    return early, axis.sent


def test_buckets_leave_in_one_order_as_soon_as_they_are_full() -> None:
    """A leaf is in one bucket, however large; the last leaf leaves first."""
    theta = [torch.zeros(3), torch.zeros(0), torch.zeros(2), torch.zeros(6), torch.zeros(1)]
    early, sent = launched(16, theta, (2, 4, 0, 1, 3))
    assert early == [[], [1], [1], [1], [1, 6, 2, 3]]
    assert sent == [1, 6, 2, 3, 16]


def test_each_dtype_has_buckets() -> None:
    theta = [torch.zeros(2), torch.zeros(4).double(), torch.zeros(1), torch.zeros(2).double()]
    early, sent = launched(64, theta, (3, 2, 1))
    assert early == [[], [], [6]]
    assert sent == [6, 3, 16]


def test_the_first_bucket_is_small() -> None:
    axis = Log(1, bucket_bytes=25 << 20)
    theta = {at: torch.zeros(1 << 18) for at in range(4)}

    def program() -> None:
        buckets = Buckets(axis, theta, [torch.float32] * 4)
        buckets.ready(3, theta[3])
        buckets.launch()
        buckets.wait()

    axis.map(program)()
    assert axis.sent == [1 << 18, 3 << 18]


def test_a_leaf_is_ready_once() -> None:
    """Its bucket may have left."""
    axis = ThreadAxis(1)

    def program() -> None:
        buckets = Buckets(axis, {0: torch.zeros(2)}, [torch.float32])
        buckets.ready(0, torch.ones(2))
        buckets.ready(0, torch.ones(2))

    with pytest.raises(RuntimeError, match="given a gradient twice"):
        axis.map(program)()


def meets(axis: Any, rank: int) -> Any:
    """A loss that meets the others in its backward pass, before any bucket has left."""
    theta = [torch.zeros(2), torch.zeros(2)]
    with axis.session("step", {}) as ranks:
        ready = ranks.buckets(theta, None)
        ranks.agree(count([1]), theta, (), 1)
        ps.psum(torch.ones(2), axis)
        if rank % 2:
            ready(1, torch.full((2,), 2.0))
        found = ps.psum(torch.ones(2), axis)
        if rank % 2 == 0:
            ready(1, torch.full((2,), 2.0))
        ready(0, torch.ones(2))
        grads = [torch.ones(2), torch.full((2,), 2.0)]
        return found, ranks.sum(Sums(grads, torch.tensor(0.0), count([1]), ()), theta).grads


def test_a_loss_that_meets_over_the_axis_is_not_mixed_up(on_ranks: Run) -> None:
    for found, grads in on_ranks(meets, range(4), bucket_bytes=8):
        assert_same([found, *grads], [torch.full((2,), x) for x in (4.0, 4.0, 8.0)])


def meets_late(axis: Any, rank: int) -> Any:
    """A loss that meets the others when a bucket has left on some ranks."""
    theta = [torch.zeros(2), torch.zeros(2)]

    def program() -> Any:
        with axis.session("step", {}) as ranks:
            ready = ranks.buckets(theta, None)
            ranks.agree(count([1]), theta, (), 1)
            if rank:
                ready(1, torch.ones(2))
            ps.psum(torch.ones(2), axis)
            grads = [torch.ones(2), torch.ones(2)]
            ranks.sum(Sums(grads, torch.tensor(0.0), count([1]), ()), theta)

    return caught(program)


def test_buckets_that_crossed_a_collective_of_the_loss_are_refused(on_ranks: Run) -> None:
    """One rank sums a vector of the loss's, where the others sum a bucket: both of one shape."""
    for error in on_ranks(meets_late, range(4), bucket_bytes=8):
        assert "disagree on the buckets that have left before a collective inside" in str(error)


def test_gradients_that_are_elsewhere_are_copied(on_ranks: Run) -> None:
    for grads in on_ranks(elsewhere, range(4)):
        assert_same(grads, [torch.full((3,), 6.0), torch.full((2, 2), 4.0), torch.full((3,), 6.0)])


def elsewhere(axis: ps.Axis, rank: int) -> Any:
    """One leaf is ready, one lies column by column, and of one the sum is sparse."""
    theta = [torch.zeros(3), torch.zeros(2, 2).T, torch.zeros(3)]
    with axis.session("step", {}) as ranks:
        ready = ranks.buckets(theta, None)
        ranks.agree(count([1]), theta, (), 1)
        assert ready
        last = ready(2, torch.full((3,), float(rank)).to_sparse())
        grads = [torch.full((3,), float(rank)), torch.ones(2, 2).T, last]
        return ranks.sum(Sums(grads, torch.tensor(0.0), count([1]), ()), theta).grads


# A device


class Later(ThreadAxis):
    """Ranks that read what they hear as on a device: when all work is queued."""

    @property
    def on_host(self) -> bool:
        return False


def later(how: Sequence[dict[str, Any]], share: Any = SHARE) -> list[Any]:
    axis = Later(4, bucket_bytes=8)

    def program(rank: int) -> Any:
        at = how[rank].get("at", lambda place: None)
        rest = {name: value for name, value in how[rank].items() if name != "at"}
        return caught(lambda: update(axis, share[rank], at=at, **rest))

    return opened(axis.map(program)(range(4)))


def fails_at(place: str) -> Callable[[str], None]:
    def at(here: str) -> None:
        if here == place:
            raise ArithmeticError("mine")

    return at


def test_an_update_that_is_read_later() -> None:
    for rank, (total, sums) in enumerate(later([{}] * 4)):
        assert total.num_tokens == sums.counted.num_tokens == sums.loss == TOTAL
        assert total.num_tokens.dtype == (torch.int64 if SHARE[rank] else torch.float64)
        grads = {name: gradient(leaf, TOTAL) for name, leaf in params().items()}
        assert_same(sums.grads, grads)


@pytest.mark.parametrize(
    ("change", "others", "own"),
    [
        ({"at": fails_at("before")}, "rank 2 of ", "mine"),
        ({"at": fails_at("between")}, "these ranks cannot meet", "mine"),
        ({"settings": {"normalize": "x"}}, "disagree on one of params, opt_state", "disagree on"),
    ],
)
def test_what_goes_wrong_is_read_later(change: Any, others: str, own: str) -> None:
    how: list[Any] = [{}] * 4
    how[BAD] = change
    for rank, error in enumerate(later(how)):
        assert (own if rank == BAD else others) in str(error)


def test_weights_of_two_dtypes_that_are_read_later() -> None:
    for error in later([{}] * 4, [[2], [], [0.5], [7]]):
        assert "the weights of 1 ranks of ThreadAxis(4) are floats, those of 2 are" in str(error)
        assert "return one dtype from weight_fn" in str(error)


# Fingerprints

PROGRAM = """
import torch, optree, purestep as ps
from purestep import tree
from purestep.axis.agreement import described
@optree.dataclasses.dataclass(namespace="purestep")
class Layer:
    w: object
    beside: object = optree.dataclasses.field(pytree_node=False, default=None)
class Mine: pass
def act(x): return x
words = {"a", "bb", "ccc", "dddd"}
beside = [words, act, lambda x: x, Mine(), torch.relu, torch.device("cuda", RANK), {Mine: words}]
print(described("params", [Layer(torch.ones(2), each) for each in beside]).number)
"""


def test_fingerprints_are_the_same_in_every_process() -> None:
    found = set()
    for rank in range(3):
        command = [sys.executable, "-c", PROGRAM.replace("RANK", str(rank))]
        env = {**os.environ, "PYTHONHASHSEED": str(rank + 1)}
        found.add(
            subprocess.run(command, env=env, capture_output=True, check=True, timeout=60).stdout
        )
    assert len(found) == 1


TREES: list[Any] = [
    (),
    [],
    None,
    {"a": ()},
    [torch.ones(1)],
    (torch.ones(1),),
    [torch.ones(1).double()],
    [torch.ones(2)],
    [torch.ones(1, 1)],
    [1],
    ["1"],
    {"a": torch.ones(1), "b": torch.ones(2)},
    {"a": torch.ones(2), "b": torch.ones(1)},
    {"a": {"b": torch.ones(1)}},
    [ps.Shard(torch.ones(1), ps.LocalAxis(), (1,))],
    [ps.Shard(torch.ones(1), ps.LocalAxis(), (2,))],
    [ps.Shard(torch.ones(1), ps.LocalAxis(), (1, 2), 0)],
    [ps.Shard(torch.ones(1), ps.LocalAxis(), (1, 2), 1)],
    [ps.Shard(torch.ones(1), ps.VmapAxis(2), (1,))],
]


def test_fingerprints_differ_where_trees_do() -> None:
    assert len({described("x", each).number for each in TREES}) == len(TREES)
    again = [tree.map(lambda leaf: leaf, each) for each in TREES]
    assert [described("x", each) for each in TREES[:-1]] == [described("x", x) for x in again[:-1]]


def test_pieces_of_one_tensor_are_alike() -> None:
    axis = ps.LocalAxis()
    one, two = (ps.Shard(torch.ones(length), axis, (3,)) for length in (2, 1))
    assert described("x", one) == described("x", two)
