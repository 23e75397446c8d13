"""The loss of a group, counted as an update counts it, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

from torch import Tensor

from purestep import hints, tree, validation
from purestep.axis import Axis, LocalAxis
from purestep.counts import (
    WeightedMicrobatches,
    count_tokens,
    label_weights,
    sum_weights,
    with_weights,
)
from purestep.grads.accumulate import add_aux, detach_data, profiler_range, sum_losses
from purestep.grads.per_microbatch import accept_repeated, pad_microbatches
from purestep.objective import denominators, forward_microbatch, weighted_sum
from purestep.sync.leaving import KnownLaunches, again_if_gathers_vary
from purestep.sync.session import open_session
from purestep.types import (
    EvalMetrics,
    Gather,
    GradSums,
    LossFn,
    Microbatch,
    Params,
    TokenCounts,
    Tree,
    WeightFn,
)

T = TypeVar("T")
_MISSING: Any = object()


@hints.explain_keywords
def make_eval_step(
    loss_fn: LossFn,
    *,
    weight_fn: WeightFn | None = label_weights,
    axis: Axis = LocalAxis(),
    gather: Gather = "step",
) -> Callable[[Params, Sequence[Microbatch]], EvalMetrics]:
    """Makes a pure function ``eval_step(params, microbatches) -> metrics``.

    It counts tokens as the update does, and computes no gradients. All ranks of the axis call it
    together, and get the same metrics. ``metrics.loss`` is the weighted mean over all their tokens,
    and 0 without tokens. Under a transform of ``torch.func``, or with dual numbers, it can be
    differentiated; otherwise metrics are detached.

    Raises ``TypeError`` or ``ValueError`` for arguments that it cannot take. ``eval_step`` raises
    them for params or microbatches that do not fit, and for params that were donated.

    Args:
        loss_fn: as in ``make_update_step``. Leave out dropout and auxiliary losses. The first
            evaluation warns of dropout, but not of dropout by keys.
        weight_fn: as in ``make_update_step``. None: the loss returns its weights.
        axis: the ranks over which tokens are spread.
        gather: "loss" if the loss calls ``ps.unshard``. Otherwise params are gathered once.

    >>> import torch
    >>> eval_step = make_eval_step(lambda w, m: w * m["x"], weight_fn=lambda m: m["x"] > 0)
    >>> group = [{"x": torch.tensor([1.0, 3.0])}, {"x": torch.tensor([0.0])}]
    >>> eval_step(torch.tensor(2.0), group).loss
    tensor(4.)
    """
    validation.check_functions(loss_fn, weight_fn, axis)
    validation.check_choice("gather", gather, Gather)
    watched_draws: list[bool] = []  # whether the first evaluation is over
    gather_once: Gather = "loss" if gather == "loss" else "step"
    loss_fn = accept_repeated(loss_fn, gather)
    known_launches: KnownLaunches = {}
    rank_config = {
        "weight_fn": "given" if weight_fn else "None",
        "gather": gather_once,
        "call": "eval_step",
    }

    def eval_step(
        params: Params, microbatches: Sequence[Microbatch], /, *others: object
    ) -> EvalMetrics:
        if others:
            raise TypeError(
                "eval_step(params, microbatches) got more arguments: it takes no opt_state, and "
                "returns metrics alone"
            )
        with open_session(axis, gather_once, rank_config, known_launches) as session:
            validation.check_params(params, axis)
            first_leaf: Tensor = tree.leaves(params)[0]
            # A trace can see neither marks of donated trees nor generators.
            is_plain = tree.is_plain_eager()
            if is_plain and validation.DONATED in first_leaf.__dict__:
                raise validation.reused_donation_error("params")
            group = with_weights(microbatches, weight_fn)
            total = session.all_reduce_counts(
                count_tokens(group), params, (), len(microbatches)
            )
            if gather_once == "loss":
                length = session.max_microbatches(len(microbatches))
                group = pad_microbatches(group, length, gather_once, weight_fn)
            shard_specs = tree.shard_specs(tree.flatten(params)[1])
            full_params = session.params_for_loss(params, shard_specs)
            divides = total if weight_fn else None
            is_first = is_plain and not watched_draws
            device = first_leaf.device
            with hints.warn_of_random_draws(device) if is_first else nullcontext():
                sums = _forward_group(
                    loss_fn,
                    full_params,
                    group,
                    divides,
                    like=first_leaf,
                    is_recorded=not is_plain,
                )
            if is_first:
                watched_draws.append(True)
            sums = session.all_reduce_grads(sums, (), ())
        loss = sums.loss
        if weight_fn is None:
            total = sums.counts
            loss = (loss / denominators(total).num_tokens).to(loss.dtype)
        return _detach_unless_transformed(EvalMetrics(loss, *total, sums.aux))

    return eval_step if gather_once == "step" else again_if_gathers_vary(eval_step)


def _forward_group(
    loss_fn: LossFn,
    params: Params,
    group: WeightedMicrobatches,
    total: TokenCounts | None,
    *,
    like: Tensor,
    is_recorded: bool,
) -> GradSums:
    """Sums weighted losses, counts and aux of a group by forward passes, without gradients.

    ``grads`` of the result is empty. Losses are divided by the counts ``total``; if it is None, by
    nothing. The sum of no losses is a scalar zero on the device of ``like``. Microbatches are not
    detached if ``is_recorded``, nor from the first one on that has a graph. Raises ``ValueError``
    if the group yields more or fewer microbatches than its length, and as ``denominators`` does.
    """
    divisors = None if total is None else denominators(total)
    losses: list[Tensor] = []
    used_weights: list[Tensor] = []
    aux: Tree = ()
    # Not by zip, whose tuple would keep a microbatch alive while the next one is made.
    microbatches = iter(group.microbatches)
    no_weights = [None] * len(group.microbatches)
    for weights in no_weights if group.weights is None else group.weights:
        microbatch = next(microbatches, _MISSING)
        if microbatch is _MISSING:
            raise validation.wrong_length_error(group.microbatches, "fewer")
        microbatch, data, is_recorded = detach_data(microbatch, is_recorded)
        with profiler_range("purestep.microbatch"):
            try:
                output = forward_microbatch(
                    loss_fn, params, microbatch, weights, divisors
                )
            except Exception as error:
                hints.explain_loss_error(error, "params", params, microbatch)
                raise
            weighted = _detach_unless_transformed(output)
            losses.append(weighted_sum(weighted.terms, weighted.cotangents))
        if group.counts is None:
            used_weights.append(weighted.weights)
        if not tree.is_empty(weighted.aux):
            aux = add_aux(aux, weighted.aux)
        del microbatch, data, weights, weighted, output
    if next(microbatches, _MISSING) is not _MISSING:
        raise validation.wrong_length_error(group.microbatches, "more")
    counts = group.counts or sum_weights(used_weights)
    return GradSums((), sum_losses(losses, like), counts, aux)


def _detach_unless_transformed(values: T) -> T:
    """Returns a tree detached; under a transform or dual numbers as it is, with derivatives."""
    return cast("T", tree.detach(values)) if tree.can_write() else values
