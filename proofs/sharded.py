"""Steps whose state is spread over an axis, and what is claimed of them; on simulated ranks, threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.ranks import SETTINGS, Run, check_ranks, loss_with_aux, one_step, share_cases
from proofs.strategies import OPTIMIZERS, Batch, Case, assert_same, cases, cut, simulate, weights_of
from proofs.theorem import System
from proofs.worlds import Grid, Ranks
from purestep import tree
from purestep.testing.strategies import Cut, cuts


class ShardCase(NamedTuple):
    """A case, what each of two rows of a grid holds of it, how many columns there are, settings, the size of buckets."""

    case: Case
    share: list[Cut]
    columns: int
    settings: dict[str, Any]
    bucket_bytes: int


@st.composite
def shard_cases(draw: st.DrawFn, columns: tuple[int, ...] = (1, 2, 3)) -> ShardCase:
    """Of any optimizer. A layer of four in three pieces leaves one of them empty."""
    case = draw(cases())
    edge = draw(st.integers(0, case.rows))
    share = [
        [[first + row for row in part] for part in draw(cuts(last - first, 3))]
        for first, last in [(0, edge), (edge, case.rows)]
    ]
    settings, size = draw(st.sampled_from(SETTINGS)), draw(st.sampled_from([8, 40, 1 << 20]))
    return ShardCase(case, share, draw(st.sampled_from(columns)), settings, size)


def alone(system: System, drawn: ShardCase) -> Any:
    """One step of one rank that holds all of the state and all of the tokens."""
    case, share, *_ = drawn
    step = system.make_update_step(models.integer_loss, case.optimizer, weight_fn=weights_of)
    *state, metrics = step(case.params, case.opt_state, [case.batch])
    held = sum(bool(part["w"].sum() > 0) for rows in share for part in cut(case.batch, rows))
    return tuple(state), metrics._replace(num_microbatches=torch.tensor(held))


class Sharding(NamedTuple):
    """A system's way from whole tensors to pieces and back."""

    shard: Callable[..., Any]
    unshard: Callable[..., Any]


def sharding(system: System) -> Sharding:
    """That of this system."""
    return Sharding(system.shard, system.unshard)


def pieces_of(shard: Callable[..., Any], state: Any, axis: Any) -> Any:
    """The state, with the hidden layer, and what the optimizer keeps for it, in pieces."""

    def piece(leaf: Tensor) -> Any:
        wide = leaf.ndim > 0 and leaf.shape[-1] == models.HIDDEN
        return shard(leaf, axis, -1) if wide else leaf.clone()

    return tree.map(piece, state)


def sharded_step(
    sharding: Sharding,
    make_program: Callable[..., Any],
    make_update_step: Callable[..., Any],
    grid: Grid,
    params: Any,
    opt_state: Any,
    microbatches: list[Batch],
    recipe: str,
    settings: dict[str, Any],
) -> Any:
    """One step of a rank of a grid on pieces of the state; and the state that the new pieces are of."""
    step = make_program(make_update_step, grid, optimizer=OPTIMIZERS[recipe], **settings)
    state = pieces_of(sharding.shard, (params, opt_state), grid.second)
    *new, metrics = step(*state, microbatches)
    return sharding.unshard(tuple(new)), metrics


class Gathering(NamedTuple):
    """Where the gather stands, and a loss to which that makes no difference."""

    gather: str
    sharding: Sharding
    recomputed: bool = False
    has_aux: bool = True

    @property
    def loss_fn(self) -> Callable[..., Any]:
        """It gathers what it needs, once more in the backward pass if it is computed again there."""
        loss: Any = loss_with_aux if self.has_aux else models.integer_loss
        if self.gather != "loss":
            return loss

        def loss_fn(params: Any, batch: Batch) -> Any:
            return loss(self.sharding.unshard(params), batch)

        return ps.remat(loss_fn) if self.recomputed else loss_fn


def gathered_by(system: System, gather: str) -> Gathering:
    """That of this system."""
    recomputed = gather == "loss, twice"
    return Gathering("loss" if recomputed else gather, sharding(system), recomputed)


def evened(groups: list[list[Batch]], case: Case) -> list[list[Batch]]:
    """As many microbatches on each rank, with weights of zero where there were none."""
    ignored = {**case.batch, "w": torch.zeros_like(case.batch["w"])}
    most = max(map(len, groups))
    return [[*group, *[ignored] * (most - len(group))] for group in groups]


def sharded_params_step(
    gathering: Gathering,
    make_update_step: Callable[..., Any],
    axis: Any,
    params: Any,
    opt_state: Any,
    microbatches: list[Batch],
    recipe: str,
    settings: dict[str, Any],
) -> Any:
    """One step of a rank whose params and state are spread over the axis that splits tokens, or over one dimension of it."""
    inner, whole = (axis.second, axis.both) if isinstance(axis, Grid) else (axis, axis)
    shard, unshard = gathering.sharding
    mine, kept = shard((params, opt_state), inner)
    settings = {**settings, "gather": gathering.gather}
    how = make_update_step, whole, mine, kept, microbatches, recipe, settings
    *new, metrics = one_step(*how, gathering.loss_fn)
    return *unshard(tuple(new)), metrics


class HeldCase(NamedTuple):
    """A case, what each rank holds of it, the size of buckets, settings, and where the gather stands."""

    case: Case
    share: list[Cut]
    bucket_bytes: int
    settings: dict[str, Any]
    gather: str


@st.composite
def held_cases(draw: st.DrawFn) -> HeldCase:
    """Ranks that hold what they hold, or nothing."""
    gather = draw(st.sampled_from(["step", "microbatch", "loss", "loss, twice"]))
    return HeldCase(*draw(share_cases()), gather)


def check_sharded_params(
    run: Run, system: System, drawn: HeldCase, *, grid: bool = False, size: int = 0
) -> list[Any]:
    """Every rank has the state of the one big batch; on a grid with two rows too, of ``size`` ranks if that is given."""
    case, share, bucket_bytes, settings, gather = drawn
    gathering = gathered_by(system, gather)
    if grid:
        share = share + [[]] * (size - len(share) if size else len(share) % 2)
    groups = [cut(case.batch, rank) for rank in share]
    groups = evened(groups, case) if gathering.gather == "loss" else groups
    program = partial(sharded_params_step, gathering._replace(has_aux=all(groups)))
    how = case, groups, bucket_bytes, settings, program
    return check_ranks(run, system, *how, grid=grid)


def check_sharded(run: Run, system: System, drawn: ShardCase) -> None:
    """Every rank has pieces of the state of one rank that holds it all, and that rank's metrics."""
    case, share, columns, settings, bucket_bytes = drawn
    size = 2 * columns
    results = run(
        Ranks(size, bucket_bytes, grid=True),
        partial(
            sharded_step, sharding(system), system.tensor_parallel_step, system.make_update_step
        ),
        [case.params] * size,
        [case.opt_state] * size,
        [cut(case.batch, rows) for rows in share for _ in range(columns)],
        [case.recipe] * size,
        [settings] * size,
    )
    for result in results:
        assert_same(result, alone(system, drawn))


def simulated(axis: ps.VmapAxis, fn: Callable[..., Any], **dims: Any) -> Callable[..., Any]:
    """``axis.map``, for which it is a failure of the claim that ranks differ."""

    def run(*args: Any) -> Any:
        try:
            return axis.map(fn, **dims)(*args)
        except ValueError as error:
            raise AssertionError("the ranks end up in different states") from error

    return run


def check_sharded_on_one_program(system: System, drawn: ShardCase) -> None:
    """The same of ranks that are dimensions of ``torch.vmap``, whose pieces are filled up."""
    case, share, columns, settings, _ = drawn
    rows, columns_ = ps.VmapAxis(2), ps.VmapAxis(columns)
    grid = Grid(rows, columns_, rows)

    def rank(params: Any, opt_state: Any, group: list[Batch]) -> Any:
        how = (case.recipe, settings)
        programs = sharding(system), system.tensor_parallel_step, system.make_update_step
        return sharded_step(*programs, grid, params, opt_state, group, *how)

    on_columns = columns_.map(rank, in_dims=None, out_dims=None)
    on_grid = simulated(rows, on_columns, in_dims=(None, None, 0), out_dims=None)
    result = on_grid(case.params, case.opt_state, simulate(case, share))
    assert_same(result, alone(system, drawn))


@st.composite
def infinite_cases(draw: st.DrawFn) -> tuple[int, int, str]:
    """How many ranks there are, where one input is infinite, and an optimizer."""
    place = draw(st.integers(0, models.HIDDEN - 1))
    return draw(st.sampled_from([2, 3])), place, draw(st.sampled_from([*OPTIMIZERS]))


def infinite_step(
    sharding: Sharding, make_update_step: Callable[..., Any], axis: Any, place: int, recipe: str
) -> Any:
    """A step that one element of the gradient forbids, which one rank holds: the state before and after it."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        here: Tensor = (params["w"] * sharding.shard(x, axis).piece).sum() + params["b"]
        return ps.psum(here[None], axis)

    x = torch.ones(models.HIDDEN, dtype=torch.float64)
    x[place] = torch.inf
    whole = {"w": torch.ones_like(x), "b": x[:1].new_ones(())}
    params = {"w": sharding.shard(whole["w"], axis), "b": whole["b"].clone()}
    optimizer = OPTIMIZERS[recipe]
    step = make_update_step(
        loss_fn, optimizer, weight_fn=lambda x: torch.ones(1), on_nonfinite="skip"
    )
    *new, metrics = step(params, optimizer.init(params), [x])
    return sharding.unshard(tuple(new)), (whole, optimizer.init(whole)), metrics.applied
