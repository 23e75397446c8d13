"""Steps of ranks that run programs of their own, and what is claimed of them; on threads and on processes alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models, parallel
from proofs.strategies import (
    LAYOUTS,
    OPTIMIZERS,
    Batch,
    Case,
    assert_same,
    cases,
    cut,
    laid_out,
    settings_of_steps,
    shares,
    some_opt_state,
    weights_of,
)
from proofs.theorem import System
from proofs.worlds import Grid, Ranks
from proofs.writings import Cut
from purestep import tree
from purestep.testing.specification import spec

Run = Callable[..., list[Any]]
"""``run(ranks, program, *args)``, on threads or on processes."""

GATHERS = ["step", "microbatch", "loss", "loss, recomputed"]
"""Where a gather may stand; a loss that is computed again gathers twice."""

ShareCase = tuple[Case, list[Cut], int, dict[str, Any]]


@st.composite
def share_cases(draw: st.DrawFn) -> ShareCase:
    """A case, the rows of each rank's microbatches, in any order, the size of buckets, and settings."""
    case = draw(cases())
    order = draw(st.permutations(range(case.rows)))
    share = [[[order[row] for row in rows] for rows in rank] for rank in draw(shares(case.rows))]
    return case, share, draw(st.sampled_from([8, 40, 1 << 20])), draw(settings_of_steps())


def loss_with_aux(
    params: Any, batch: Batch, loss_fn: Callable[..., Tensor] = models.integer_loss
) -> ps.LossTerms:
    """A loss that also counts, in whole numbers and in others."""
    losses = loss_fn(params, batch)
    counts = batch["w"] > 0
    aux = {"zero": (counts & (losses == 0)).sum(), "sum": [torch.where(counts, losses, 0).sum()]}
    return ps.LossTerms(losses, aux=aux)


@dataclass(frozen=True)
class Program:
    """A step and an evaluation of a rank, on the microbatches that it holds.

    ``gather``: of params and state in pieces over its axis, or over one dimension of it.
    """

    make_update_step: Callable[..., Any]
    make_eval_step: Callable[..., Any]
    shard: Callable[..., Any]
    unshard: Callable[..., Any]
    loss_fn: Callable[..., Any]
    recipe: str
    settings: dict[str, Any]
    gather: str = ""

    def __call__(self, axis: Any, params: Any, opt_state: Any, microbatches: list[Batch]) -> Any:
        """The whole state, and the metrics."""
        inner, own = (axis.second, axis.both) if isinstance(axis, Grid) else (axis, axis)
        how: dict[str, Any] = {"weight_fn": weights_of, "axis": own}
        loss_fn = self.loss_fn
        if self.gather:
            params, opt_state = self.shard((params, opt_state), inner)
            how["gather"], *recomputed = self.gather.split(", ")
            if how["gather"] == "loss":
                loss_fn = lambda p, m: self.loss_fn(self.unshard(p), m)  # noqa: E731
                loss_fn = ps.remat(loss_fn) if recomputed else loss_fn
        evaluation = self.make_eval_step(loss_fn, **how)(params, microbatches)
        step = self.make_update_step(loss_fn, OPTIMIZERS[self.recipe], **how, **self.settings)
        donated = own.own_programs and self.settings.get("donate")
        buffers = addresses(params) if donated else []
        *new, metrics = step(params, opt_state, microbatches)
        assert not donated or addresses(new[0]) == buffers, "the buffers of params are used again"
        return *self.unshard(tuple(new)), metrics, evaluation


def addresses(params: Any) -> list[int]:
    """Where leaves lie in memory."""
    return [leaf.data_ptr() for leaf in tree.leaves_of(params)]


def program_of(
    system: System, case: Case, loss_fn: Any, settings: dict[str, Any], gather: str = ""
) -> Program:
    """That of this system."""
    makers = system.make_update_step, system.make_eval_step, system.shard, system.unshard
    return Program(*makers, loss_fn, case.recipe, settings, gather)


def alone(
    system: System,
    case: Case,
    groups: Sequence[list[Batch]],
    loss_fn: Callable[..., Tensor] = models.integer_loss,
    *,
    aux: bool = True,
) -> Any:
    """The state of the one big batch, and the metrics of one rank that holds it all."""
    state, _, _ = spec(loss_fn, case.optimizer.update, case.params, case.opt_state, case.batch)
    loss = partial(loss_with_aux, loss_fn=loss_fn) if aux else loss_fn
    found = program_of(system, case, loss, {})(ps.LocalAxis(), *copied(case), [case.batch])
    held = torch.tensor(sum(bool(part["w"].sum() > 0) for group in groups for part in group))
    return *state, *(metrics._replace(num_microbatches=held) for metrics in found[2:])


def copied(case: Case) -> tuple[Any, Any]:
    """A copy of the state, to be given away."""
    copy: tuple[Any, Any] = tree.map(torch.clone, (case.params, case.opt_state))
    return copy


def check_ranks(
    run: Run,
    system: System,
    case: Case,
    groups: Sequence[list[Batch]],
    bucket_bytes: int,
    settings: dict[str, Any],
    program: Callable[..., Any] | None = None,
    *,
    gather: str = "",
    rows: int = 0,
    columns: int = 1,
    loss_fn: Callable[..., Tensor] = models.integer_loss,
) -> list[Any]:
    """Every rank has the state of the one big batch, and the metrics of one rank that holds it all.

    A ``program`` for a grid, whose ``columns`` hold the same tokens, has the loss in another form.
    """
    # Ranks without any microbatch cannot return an aux like that of the others.
    aux = program is None and all(groups)
    expected = alone(system, case, groups, loss_fn, aux=aux)
    if gather.startswith("loss"):
        groups = evened(groups, case)
    if program is None:
        loss = partial(loss_with_aux, loss_fn=loss_fn) if aux else loss_fn
        program = program_of(system, case, loss, settings, gather)
    else:
        groups = [group for group in groups for _ in range(columns)]
    layouts = [LAYOUTS[(case.seed + rank) % 3] for rank in range(len(groups))]
    states = [laid_out(copied(case), layout) for layout in layouts]
    ranks = Ranks(len(groups), bucket_bytes, rows)
    results = run(ranks, program, *zip(*states, strict=True), groups)
    for result, state in zip(results, states, strict=True):
        assert_same(result, expected[: len(result)])
        if not (gather or rows or settings["donate"]):
            strides = [torch.empty_like(leaf).stride() for leaf in tree.leaves_of(state)]
            assert [leaf.stride() for leaf in tree.leaves_of(result[:2])] == strides
    return results


def evened(groups: Sequence[list[Batch]], case: Case) -> list[list[Batch]]:
    """As many microbatches on each rank, with weights of zero where there were none."""
    ignored = {**case.batch, "w": torch.zeros_like(case.batch["w"])}
    most = max(map(len, groups))
    return [[*group, *[ignored] * (most - len(group))] for group in groups]


# On a grid of two rows


def in_two(share: list[Cut]) -> list[Cut]:
    """The same microbatches on two ranks."""
    first, *others = share
    return [first, [part for rank in others for part in rank]]


def context_parallel_step(
    make_program: Any, make_update_step: Any, recipe: str, settings: Any, grid: Grid, *rank: Any
) -> Any:
    """One step of a rank that holds a part of each sequence."""
    step = make_program(make_update_step, grid, optimizer=OPTIMIZERS[recipe], **settings)
    return step(*rank)


def check_context_parallel(run: Run, system: System, drawn: ShareCase) -> None:
    """Sequences split over the grid's second dimension: the step of the whole sequences."""
    case, share, bucket_bytes, settings = drawn
    # Squares of gradients as large as these do not add up exactly.
    recipe = "adamw" if case.recipe == "clipped" else case.recipe
    params = parallel.attention_params(case.generator)
    opt_state = some_opt_state(recipe, params, case.generator)
    batch = {key: torch.cat([value, value], 1) for key, value in case.batch.items()}
    case = replace(case, params=params, recipe=recipe, opt_state=opt_state, batch=batch)
    state, _, loss = spec(parallel.attention_loss, case.optimizer.update, params, opt_state, batch)
    groups = [
        [parallel.context_piece(part, place, 2) for part in cut(batch, rows)]
        for rows in in_two(share)
        for place in range(2)
    ]
    makers = system.context_parallel_step, system.make_update_step
    program = partial(context_parallel_step, *makers, case.recipe, settings)
    states = zip(*(copied(case) for _ in groups), strict=True)
    for *new, metrics in run(Ranks(4, bucket_bytes, rows=2), program, *states, groups):
        assert_same((*new, metrics.loss), (*state, loss))
        assert metrics.num_tokens == batch["w"].sum()


def tensor_parallel_step(
    make_program: Any, make_update_step: Any, shard: Any, unshard: Any, recipe: str, settings: Any,
    grid: Grid, params: Any, opt_state: Any, microbatches: list[Batch],
) -> Any:  # fmt: skip
    """One step of a rank of a grid, with a layer in pieces over the columns; with ``gather`` the rest over the rows."""

    def piece(leaf: Tensor) -> Any:
        if leaf.ndim and leaf.shape[-1] == models.HIDDEN:
            return shard(leaf, grid.second, -1)
        return shard(leaf, grid.first) if "gather" in settings else leaf.clone()

    step = make_program(make_update_step, grid, optimizer=OPTIMIZERS[recipe], **settings)
    *new, metrics = step(*tree.map(piece, (params, opt_state)), microbatches)
    return *unshard(tuple(new)), metrics


def tensor_parallel(system: System, drawn: ShareCase, gather: str) -> Callable[..., Any]:
    """That of this system."""
    case, _, _, settings = drawn
    settings = {**settings, "gather": gather} if gather else settings
    makers = system.tensor_parallel_step, system.make_update_step, system.shard, system.unshard
    return partial(tensor_parallel_step, *makers, case.recipe, settings)


def check_tensor_parallel(
    run: Run, system: System, drawn: ShareCase, gather: str, columns: int
) -> None:
    """Layers spread over the grid's second dimension: norms are those of the whole."""
    case, share, *_ = drawn
    groups = [cut(case.batch, rows) for rows in in_two(share)]
    program = tensor_parallel(system, drawn, gather)
    how: Any = {"rows": 2, "columns": columns}
    check_ranks(run, system, case, groups, *drawn[2:], program, **how)


def check_pieces(
    run: Run, system: System, drawn: ShareCase, gather: str, grid: tuple[int, int]
) -> None:
    """Params and state spread over the ranks that split the tokens, or along the rows of a grid of them."""
    (case, share, *_), (rows, size) = drawn, grid
    share = share + [[]] * (-len(share) % size)
    groups = [cut(case.batch, rank) for rank in share]
    check_ranks(run, system, case, groups, *drawn[2:], gather=gather, rows=rows)
