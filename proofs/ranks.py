"""Programs for ranks that differ, and what is claimed of them; on threads and on processes alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from proofs import models, parallel
from proofs.strategies import (
    OPTIMIZERS,
    Batch,
    Case,
    assert_same,
    capture,
    cases,
    cut,
    integer_batch,
    shares,
    some_opt_state,
    weights_of,
)
from proofs.theorem import System
from proofs.worlds import Grid, Ranks
from purestep import tree
from purestep.testing.specification import spec
from purestep.testing.strategies import Cut

Run = Callable[..., list[Any]]
"""``run(ranks, program, *args)``, on threads or on processes."""

SETTINGS: list[dict[str, Any]] = [
    {},
    {"normalize": "grads"},
    {"on_nonfinite": "skip"},
    {"donate": True},
]


def loss_with_aux(
    params: Any, batch: Batch, loss_fn: Callable[..., Tensor] = models.integer_loss
) -> ps.LossTerms:
    """A loss that also counts, in whole numbers and in others."""
    losses = loss_fn(params, batch)
    counts = batch["w"] > 0
    aux = {"zero": (counts & (losses == 0)).sum(), "sum": [torch.where(counts, losses, 0).sum()]}
    return ps.LossTerms(losses, aux=aux)


def one_step(
    make_update_step: Callable[..., Any],
    axis: Any,
    params: Any,
    opt_state: Any,
    microbatches: list[Batch],
    recipe: str,
    settings: dict[str, Any],
    loss_fn: Callable[..., Any] = loss_with_aux,
) -> Any:
    """One step of a rank, on the microbatches that it holds."""
    step = make_update_step(
        loss_fn, OPTIMIZERS[recipe], weight_fn=weights_of, axis=axis, **settings
    )
    return step(params, opt_state, microbatches)


ShareCase = tuple[Case, list[Cut], int, dict[str, Any]]


@st.composite
def share_cases(draw: st.DrawFn) -> ShareCase:
    """A case, what each rank holds of it, the size of buckets, and settings; the rows of a leaf may be the same."""
    case = draw(cases())
    if draw(st.booleans()):
        hidden = case.params["hidden"]
        repeated = hidden["weight"][:1].repeat(models.FEATURES, 1)
        case = replace(case, params={**case.params, "hidden": {**hidden, "weight": repeated}})
    bucket_bytes = draw(st.sampled_from([8, 40, 1 << 20]))
    return case, draw(shares(case.rows)), bucket_bytes, draw(st.sampled_from(SETTINGS))


def check_ranks(
    run: Run,
    system: System,
    case: Case,
    groups: Sequence[list[Batch]],
    bucket_bytes: int,
    settings: dict[str, Any],
    program: Callable[..., Any] | None = None,
    *,
    grid: bool = False,
    loss_fn: Callable[..., Tensor] = models.integer_loss,
) -> list[Any]:
    """Every rank has the state of the one big batch, and the metrics of one rank that holds it all.

    The program is ``one_step`` of the loss, or one that has this loss in a form of its own.
    """
    state, _, _ = spec(loss_fn, case.optimizer.update, case.params, case.opt_state, case.batch)
    # Ranks without any microbatch cannot return an aux like that of the others.
    has_aux = all(groups)
    step = partial(
        one_step, loss_fn=partial(loss_with_aux, loss_fn=loss_fn) if has_aux else loss_fn
    )
    alone = step(
        system.make_update_step, ps.LocalAxis(), *_own(case), [case.batch], case.recipe, {}
    )[2]
    size = len(groups)
    generator, donate = case.generator, "donate" in settings
    states = [in_any_order(_own(case), generator, overlapping=not donate) for _ in groups]
    results = run(
        Ranks(size, bucket_bytes, grid),
        partial(program or step, system.make_update_step),
        [params for params, _ in states],
        [opt_state for _, opt_state in states],
        groups,
        [case.recipe] * size,
        [settings] * size,
    )
    held = sum(bool(part["w"].sum() > 0) for group in groups for part in group)
    for *actual, metrics in results:
        assert_same(tuple(actual), state)
        assert_same(metrics, alone._replace(num_microbatches=torch.tensor(held)), "metrics")
    return results


def _own(case: Case) -> tuple[Any, Any]:
    """A copy of the state, to be given away."""
    copied: tuple[Any, Any] = tree.map(torch.clone, (case.params, case.opt_state))
    return copied


def in_any_order(state: Any, generator: torch.Generator, overlapping: bool) -> Any:
    """The same values, each leaf in some order in memory: transposed, in steps, or one row for all that are alike."""

    def laid_out(leaf: Tensor) -> Tensor:
        backwards = tuple(range(leaf.ndim)[::-1])
        steps = tuple(slice(None, None, 2) for _ in leaf.shape)
        ways = [
            leaf,
            leaf.permute(backwards).contiguous().permute(backwards),
            leaf.new_zeros([2 * size for size in leaf.shape])[steps].copy_(leaf),
        ]
        if overlapping and leaf.ndim > 1 and torch.equal(leaf, leaf[:1].expand_as(leaf)):
            ways.append(leaf[:1].expand_as(leaf))
        return ways[int(torch.randint(len(ways), (), generator=generator))]

    return tree.map(laid_out, state)


def shuffled(case: Case, share: list[Cut], seed: int) -> list[list[Batch]]:
    """Ranks, their microbatches and the rows in them in another order."""
    generator = torch.Generator().manual_seed(seed)

    def permuted(values: list[Any]) -> list[Any]:
        return [values[i] for i in torch.randperm(len(values), generator=generator)]

    return [
        cut(case.batch, [permuted(rows) for rows in permuted(rank)]) for rank in permuted(share)
    ]


def padded(case: Case, share: list[Cut], seed: int) -> list[list[Batch]]:
    """Ignored microbatches of any shape, on some of the ranks."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for rank in share:
        rows, length, more = torch.randint(1, 4, (3,), generator=generator).tolist()
        ignored = case.batch["w"].new_zeros(rows, length)
        padding = [integer_batch(ignored, generator) for _ in range(more - 1)]
        groups.append([*padding, *cut(case.batch, rank)])
    return groups


def parallel_step(
    make_program: Callable[..., Any],
    make_update_step: Callable[..., Any],
    grid: Grid,
    params: Any,
    opt_state: Any,
    microbatches: list[Batch],
    recipe: str,
) -> Any:
    """One step of a rank of a grid, by one of the programs of ``parallel``."""
    step = make_program(make_update_step, grid, optimizer=_optimizer(recipe))
    return step(params, opt_state, microbatches)


def _optimizer(recipe: str) -> ps.optim.Optimizer:
    return capture() if recipe == "capture" else OPTIMIZERS[recipe]


GridCase = tuple[Case, list[Cut], int]


@st.composite
def grid_cases(draw: st.DrawFn) -> GridCase:
    """A case whose sequences have an even length, cut over two rows of a grid, and the size of buckets."""
    case = draw(cases(fractional=False, optimizers=["sgd", "momentum", "adamw"]))
    batch = {key: torch.cat([value, value], 1) for key, value in case.batch.items()}
    case = Case(case.params, batch, case.recipe, case.opt_state, case.seed)
    rows = list(range(case.rows))
    edge = draw(st.integers(0, case.rows))
    share = [[rows[:edge]], [rows[edge:]]]
    return case, share, draw(st.sampled_from([8, 40, 1 << 20]))


def check_context_parallel(run: Run, system: System, drawn: GridCase) -> None:
    """Sequences split over the grid's second dimension: the step of the whole sequences."""
    case, share, bucket_bytes = drawn
    params = parallel.attention_params(case.generator)
    opt_state = some_opt_state(case.recipe, params, case.generator)
    (state, _, loss) = spec(
        parallel.attention_loss, case.optimizer.update, params, opt_state, case.batch
    )
    groups = [
        [parallel.context_piece(part, place, 2) for part in cut(case.batch, rows)]
        for rows in share
        for place in range(2)
    ]
    results = _on_grid(
        run,
        system,
        system.context_parallel_step,
        [params] * 4,
        [opt_state] * 4,
        groups,
        case,
        bucket_bytes,
    )
    for *actual, metrics in results:
        assert_same(tuple(actual), state)
        assert metrics.num_tokens == case.batch["w"].sum()
        assert_same(metrics.loss, loss, "loss")


def check_tensor_parallel(run: Run, system: System, drawn: GridCase) -> None:
    """The hidden layer split over the grid's second dimension: the pieces of the whole layer's step."""
    case, share, bucket_bytes = drawn
    state, _, loss = spec(
        models.integer_loss, case.optimizer.update, case.params, case.opt_state, case.batch
    )
    groups = [cut(case.batch, rows) for rows in share for _ in range(2)]
    pieces = [
        parallel.tensor_piece((case.params, case.opt_state), rank % 2, 2) for rank in range(4)
    ]
    results = _on_grid(
        run, system, system.tensor_parallel_step,
        [piece[0] for piece in pieces], [piece[1] for piece in pieces], groups, case, bucket_bytes,
    )  # fmt: skip
    for rank, (*actual, metrics) in enumerate(results):
        assert_same(tuple(actual), parallel.tensor_piece(state, rank % 2, 2))
        assert metrics.num_tokens == case.batch["w"].sum()
        assert_same(metrics.loss, loss, "loss")


def _on_grid(
    run: Run,
    system: System,
    program: Callable[..., Any],
    params: list[Any],
    opt_states: list[Any],
    groups: list[list[Batch]],
    case: Case,
    bucket_bytes: int,
) -> list[Any]:
    make = partial(parallel_step, program, system.make_update_step)
    return run(
        Ranks(4, bucket_bytes, grid=True), make, params, opt_states, groups, [case.recipe] * 4
    )
