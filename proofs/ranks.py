"""Drawn steps, taken: on one rank, on simulated ones, on threads and on processes; and what is claimed of them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from proofs import models, parallel
from proofs.strategies import (
    CAPTURE,
    LAYOUTS,
    OPTIMIZERS,
    Batch,
    Case,
    Drawn,
    Groups,
    How,
    RealDrawn,
    assert_same,
    copied,
    laid_out,
    side_by_side,
    some_opt_state,
    weights_of,
)
from proofs.theorem import System
from proofs.worlds import Grid, Ranks, on_threads
from purestep import tree
from purestep.testing.bounds import gamma
from purestep.testing.specification import spec

Run = Callable[..., list[Any]]
"""``run(ranks, program, *args)``, on threads or on processes."""


@dataclass(frozen=True)
class Program:
    """A step of a rank on the microbatches that it holds, in whatever way; and an evaluation, if that is asked for.

    Processes find the optimizer by its name.
    """

    system: System
    how: How
    loss_fn: Callable[..., Any]
    optimizer: ps.optim.Optimizer | str
    weight_fn: Any = weights_of
    evaluates: bool = False

    def __call__(
        self, axis: Any, params: Any, opt_state: Any, microbatches: list[Batch]
    ) -> Any:
        """The whole state, the metrics, and the metrics of the evaluation."""
        inner, own = (
            (axis.second, axis.both) if isinstance(axis, Grid) else (axis, axis)
        )
        how: dict[str, Any] = {"weight_fn": self.weight_fn, "axis": own}
        loss_fn, optimizer = self.loss_fn, self.optimizer
        if self.how.gather:
            params, opt_state = ps.shard((params, opt_state), inner)
            how["gather"], *recomputed = self.how.gather.split(", ")
            if how["gather"] == "loss":
                loss_fn = lambda p, m: self.loss_fn(ps.unshard(p), m)  # noqa: E731
                loss_fn = ps.remat(loss_fn) if recomputed else loss_fn
        evaluate = (
            self.system.make_eval_step(loss_fn, **how) if self.evaluates else None
        )
        evaluation = [evaluate(params, microbatches)] if evaluate else []
        optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        step = self.system.make_update_step(
            loss_fn, optimizer, **how, **self.how.settings
        )
        if not own.is_multi_program:
            *new, metrics = step(params, opt_state, microbatches)
            return *ps.unshard(tuple(new)), metrics, *evaluation
        given = params, opt_state, microbatches
        before, places, order = copied(given), addresses(given[:2]), strides(given[:2])
        *new, metrics = step(*given)
        if not self.how.settings.get("donate"):
            came, was = tree.map(torch.nan_to_num, (given, before))
            assert_same(came, was, "what a rank brings")
            assert not {*addresses(new)} & {*places}, (
                "an output lives in an input's storage"
            )
            assert strides(new) == order, "another order in memory"
        else:
            assert addresses(new[0]) == addresses(params), "params lie where they lay"
        return *ps.unshard(tuple(new)), metrics, *evaluation


def addresses(state: Any) -> list[int]:
    """Where leaves lie in memory."""
    return [leaf.data_ptr() for leaf in tree.leaves(state) if leaf.numel()]


def strides(state: Any) -> list[tuple[int, ...]]:
    """In which order their elements lie there, without gaps."""
    return [torch.empty_like(leaf).stride() for leaf in tree.leaves(state)]


def step_of(
    system: System,
    how: How,
    state: Any,
    groups: Groups,
    loss_fn: Callable[..., Any],
    optimizer: ps.optim.Optimizer | str,
    weight_fn: Any = weights_of,
    *,
    evaluates: bool = False,
    run: Run = on_threads,
) -> Any:
    """``(params, opt_state, metrics)`` of one step in this way, on which all ranks agree; and an evaluation's metrics."""
    on_host = tree.leaves(state)[0].device.type == "cpu"
    # The host waits for a device where threads meet, and where pieces are made.
    how = how if on_host or how.axis == "one" else How("simulated", how.settings)
    program = Program(system, how, loss_fn, optimizer, weight_fn, evaluates)
    own = copied(state) if how.settings.get("donate") else state
    if how.axis == "one":
        params, opt_state = own
        return program(ps.LocalAxis(), params, opt_state, [*itertools.chain(*groups)])
    if how.axis == "simulated":
        axis = ps.VmapAxis(len(groups))
        return simulated(axis, program, (None, None, 0))(*own, side_by_side(groups))
    groups = groups + [[]] * (-len(groups) % how.grid[1])
    parts = [*itertools.chain(*groups)]
    if how.gather.startswith("loss") and parts:
        # As many microbatches on each rank, with weights of zero where there were none.
        empty = {key: torch.zeros_like(leaf) for key, leaf in parts[0].items()}
        most = max(map(len, groups))
        groups = [[*group, *[empty] * (most - len(group))] for group in groups]
    states = [laid_out(copied(own), LAYOUTS[rank % 3]) for rank in range(len(groups))]
    ranks = Ranks(len(groups), how.bucket_bytes, how.grid[0])
    first, *others = run(ranks, program, *zip(*states, strict=True), groups)
    for other in others:
        one, same = tree.map(torch.nan_to_num, (first, other))
        assert_same(same, one, "what a rank returns")
    return first


def simulated(
    axis: ps.VmapAxis,
    program: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = None,
) -> Callable[..., Any]:
    """The program on simulated ranks, for which it is a failure of the claim that they differ, as on threads."""

    def on_ranks(*args: Any) -> Any:
        try:
            return axis.map(partial(program, axis), in_dims, out_dims)(*args)
        except ValueError as error:
            raise AssertionError("the ranks cannot go on together") from error

    return on_ranks


def check_step(
    system: System,
    how: How,
    case: Case,
    groups: Groups,
    loss_fn: Callable[..., Any] | None = None,
    plain: Callable[..., Any] | None = None,
    **more: Any,
) -> Any:
    """The state is that of ``spec`` on the one big batch, to the bit, and so are the metrics.

    ``loss_fn`` computes what ``plain`` does.
    """
    state = case.params, case.opt_state
    loss_fn = loss_fn or case.loss_fn

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        return case.optimizer.update(summed_in(how, grads), opt_state, params)

    expected, grads, loss = spec(plain or loss_fn, update, *state, case.batch)
    found = step_of(system, how, state, groups, loss_fn, case.recipe, **more)
    metrics = found[2]
    assert_same(found[:2], expected)
    assert metrics.loss == loss, f"loss: {metrics.loss} is not {loss}"
    assert metrics.loss.dtype == tree.accumulation_dtype(case.batch["x"].dtype)
    assert metrics.num_tokens == case.batch["w"].sum()
    parts = itertools.chain(*groups)
    assert metrics.num_microbatches == sum(bool(part["w"].any()) for part in parts)
    assert metrics.applied
    squares = torch.stack([leaf.double().square().sum() for leaf in tree.leaves(grads)])
    roundings = gamma(4 * squares.numel() + 64, metrics.grad_norm.dtype)
    assert (
        metrics.grad_norm - squares.sum().sqrt()
    ).abs() <= roundings * metrics.grad_norm
    return found


def summed_in(how: How, grads: Any) -> Any:
    """Gradients in the dtype in which a step sums them."""
    asked = how.settings.get("accum_dtype")
    return tree.map(lambda g: g.to(asked or tree.accumulation_dtype(g.dtype)), grads)


def check_metrics(system: System, drawn: Drawn, **more: Any) -> None:
    """The step is right, and so are an aux that looks at the tokens that count, and evaluation, on all ranks."""
    case, how, groups = drawn
    # Ranks without any microbatch cannot return an aux like that of the others.
    ignored = {key: torch.zeros_like(leaf) for key, leaf in case.batch.items()}
    groups = [
        group or [ignored] for group in groups + [[]] * (-len(groups) % how.grid[1])
    ]
    loss_fn = partial(loss_with_aux, loss_fn=case.loss_fn)
    more = {"evaluates": True, **more}
    *_, metrics, evaluation = check_step(
        system, how, case, groups, loss_fn, case.loss_fn, **more
    )
    expected = system.make_eval_step(loss_fn, weight_fn=weights_of)(
        case.params, [case.batch]
    )
    assert_same(metrics.aux, expected.aux, "aux")
    held = evaluation._replace(num_microbatches=expected.num_microbatches)
    assert_same(held, expected, "evaluation")


def loss_with_aux(
    params: Any, batch: Batch, loss_fn: Callable[..., Tensor] = models.integer_loss
) -> ps.LossOutput:
    """A loss that also counts, in whole numbers and in others."""
    losses = loss_fn(params, batch)
    counts = batch["w"] > 0
    aux = {
        "zero": (counts & (losses == 0)).sum(),
        "sum": [torch.where(counts, losses, 0).sum()],
    }
    return ps.LossOutput(losses, aux=aux)


def check_within_bound(
    system: System,
    drawn: RealDrawn,
    loss_fn: Callable[..., Any] = models.transformer_loss,
    weight_fn: Any = weights_of,
    extra_roundings: int = 0,
) -> None:
    """For the transformer: the exact gradient and loss, but for rounding."""
    case, how, groups = drawn
    state = case.params, tree.zeros_like(case.params)
    _, grads, metrics = step_of(system, how, state, groups, loss_fn, CAPTURE, weight_fn)
    # Each weight, their sum and their quotient round, and each sum of two microbatches.
    case.assert_within_bound(grads, extra_roundings + 3 + sum(map(len, groups)))
    case.assert_loss_within_bound(metrics.loss)


# On a grid of two rows


def check_context_parallel(run: Run, drawn: Drawn) -> None:
    """Sequences split over the grid's second dimension: the step of the whole sequences."""
    case, how, groups = drawn
    # Squares of gradients as large as these do not add up exactly.
    recipe = "adamw" if case.recipe == "clipped" else case.recipe
    params = parallel.attention_params(case.generator)
    opt_state = some_opt_state(recipe, params, case.generator)
    batch = twice(case.batch)
    case = replace(case, params=params, recipe=recipe, opt_state=opt_state, batch=batch)
    state, _, loss = spec(
        parallel.attention_loss, case.optimizer.update, params, opt_state, batch
    )
    pieces = [
        [parallel.context_piece(twice(part), place, 2) for part in group]
        for group in groups
        for place in range(2)
    ]
    program = partial(parallel.context_parallel_step, recipe, how.settings)
    states = zip(*(copied((params, opt_state)) for _ in pieces), strict=True)
    for *new, metrics in run(
        Ranks(4, how.bucket_bytes, rows=2), program, *states, pieces
    ):
        assert_same((*new, metrics.loss), (*state, loss))
        assert metrics.num_tokens == batch["w"].sum()


def twice(batch: Batch) -> Batch:
    """Each sequence with itself behind it."""
    return {key: torch.cat([value, value], 1) for key, value in batch.items()}


def check_tensor_parallel(run: Run, drawn: Drawn, columns: int) -> None:
    """Layers spread over the grid's second dimension: norms are those of the whole."""
    case, how, groups = drawn
    expected = alone(case, how, groups)
    program = partial(parallel.tensor_parallel_step, case.recipe, how)
    groups = [group for group in groups for _ in range(columns)]
    state = case.params, case.opt_state
    states = [laid_out(copied(state), LAYOUTS[i % 3]) for i in range(len(groups))]
    ranks = Ranks(len(groups), how.bucket_bytes, 2)
    for found in run(ranks, program, *zip(*states, strict=True), groups):
        assert_same(found, expected)


def alone(case: Case, how: How, groups: Groups) -> Any:
    """What the step on whole params gives, which is right."""
    return check_step(
        System(), How("one", {**how.settings, "donate": False}), case, groups
    )
