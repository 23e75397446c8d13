"""The same loss, counted in the same way, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import cast

from torch import Tensor

from purestep import tree
from purestep.arguments import check_choice, check_functions, checked_group, checked_params
from purestep.axis import Axis, LocalAxis
from purestep.conversation import conversation
from purestep.gathering import Gather, Gathering
from purestep.objective import (
    Worth,
    denominators,
    divisor,
    over,
    partial_loss,
    plus,
    sums_of,
    value,
)
from purestep.tokens import Group, count_of, grouped, label_weights
from purestep.types import Count, EvalMetrics, LossFn, Microbatch, Params, Sums, WeightFn


def make_eval_step(
    loss_fn: LossFn,
    *,
    weight_fn: WeightFn | None = label_weights,
    axis: Axis = LocalAxis(),
    gather: Gather = "step",
) -> Callable[[Params, Sequence[Microbatch]], EvalMetrics]:
    """A pure function ``eval_step(params, microbatches) -> metrics``: the same loss, counted the same way.

    Args:
        loss_fn: as in ``make_update_step``; whatever belongs to training only (dropout, an auxiliary loss)
            is for you to leave out of it.
        weight_fn: as in ``make_update_step``; None when the loss returns its weights.
        axis: where the tokens are spread.
        gather: as in ``make_update_step``.

    >>> import torch
    >>> eval_step = make_eval_step(lambda w, m: w * m["x"], weight_fn=lambda m: m["x"] > 0)
    >>> eval_step(torch.tensor(2.0), [{"x": torch.tensor([1.0, 3.0])}, {"x": torch.tensor([0.0])}]).loss
    tensor(4.)
    """
    check_functions(loss_fn, weight_fn, axis)
    check_choice("gather", gather, Gather)
    evaluate = evaluator(loss_fn)
    settings = {
        "weight_fn": "given" if weight_fn else "None",
        "gather": gather,
        "evaluation": "yes",
    }

    def eval_step(params: Params, microbatches: Sequence[Microbatch], /) -> EvalMetrics:
        shared = {"params": params, "settings": settings}
        with conversation(axis, gather) as ranks:
            flat_params = checked_params(params, axis)
            leaves = flat_params.leaves
            group = grouped(checked_group(microbatches), weight_fn, True, leaves[0].device)
            counted = ranks.agree(
                group.counted or count_of((), leaves[0].device),
                microbatches=group.length,
                shared=shared,
                params=flat_params,
                given=group.at_hand,
            )
            known = counted if weight_fn else None
            sums = ranks.sum(evaluate(ranks.gathering, group, known))
        total = known or sums.counted

        metrics = EvalMetrics(
            loss=over(sums.loss, None if known else divisor(total.num_tokens)),
            num_tokens=total.num_tokens,
            num_microbatches=total.num_microbatches,
            aux=sums.aux,
        )
        return cast("EvalMetrics", tree.map(Tensor.detach, metrics))

    return eval_step


def evaluator(loss_fn: LossFn) -> Callable[[Gathering, Group, Count | None], Sums]:
    """What a group gives, without gradients."""
    part_of = partial_loss(loss_fn)

    def evaluate(gathering: Gathering, group: Group, total: Count | None, /) -> Sums:
        total = total and denominators(total)
        given: Worth | None = None
        for microbatch, weights in group.weighed:
            with gathering as (params, sums):
                gathers = gathering.loss_gathers
                own = params.leaves
                with gathers.microbatch(own, sums) if gathers else nullcontext():
                    part = part_of(params.tree(), microbatch, weights, total)
            here = tree.detached((value(*part[:2]), part.num_tokens, part.aux))
            given = plus(given, *here)
            del params, own, part
        return sums_of(gathering.gradients(), given, group.counted, gathering.given.leaves[0])

    return evaluate
