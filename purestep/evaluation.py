"""The same loss, counted in the same way, without gradients."""

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from purestep import checks, tree
from purestep.accumulate import plus, total_loss
from purestep.axis import Axis, Gather, LocalAxis
from purestep.objective import divisors_of, part_of, value
from purestep.step import is_new
from purestep.types import Count, EvalMetrics, LossFn, Microbatch, Params, Sums, Tree, WeightFn
from purestep.weights import Group, count, count_of, label_weights, weigh


def make_eval_step(
    loss_fn: LossFn,
    *,
    weight_fn: WeightFn | None = label_weights,
    axis: Axis = LocalAxis(),
    gather: Gather = "step",
) -> Callable[[Params, Sequence[Microbatch]], EvalMetrics]:
    """A pure function ``eval_step(params, microbatches) -> metrics``: the same loss and count.

    Args:
        loss_fn: as in ``make_update_step``; leave out what belongs to training only (dropout, an
            auxiliary loss).
        weight_fn: as in ``make_update_step``; None when the loss returns its weights.
        axis: where the tokens are spread.
        gather: "loss" where the loss calls ``ps.unshard``; otherwise params are gathered once.

    >>> import torch
    >>> eval_step = make_eval_step(lambda w, m: w * m["x"], weight_fn=lambda m: m["x"] > 0)
    >>> group = [{"x": torch.tensor([1.0, 3.0])}, {"x": torch.tensor([0.0])}]
    >>> eval_step(torch.tensor(2.0), group).loss
    tensor(4.)
    """
    checks.check_functions(loss_fn, weight_fn, axis)
    checks.check_choice("gather", gather, Gather)
    where: Gather = "loss" if gather == "loss" else "step"
    settings = {"weight_fn": "given" if weight_fn else "None", "gather": where, "evaluation": "yes"}
    checked: dict[int, list[tree.Structure]] = {}

    def eval_step(params: Params, microbatches: Sequence[Microbatch], /) -> EvalMetrics:
        with axis.session(where, settings) as ranks:
            checks.check_params(params, axis)
            group = weigh(microbatches, weight_fn)
            total = ranks.agree(count(group), params, (), len(microbatches))
            known = total if weight_fn else None
            wholes = ranks.whole(params, new=is_new(checked, ranks.rank, params))
            sums = ranks.sum(evaluate(loss_fn, wholes, group, known), ())
        loss = sums.loss
        if known is None:
            total = sums.counted
            loss = (loss / divisors_of(total).num_tokens).to(loss.dtype)
        return cast("EvalMetrics", tree.detached(EvalMetrics(loss, *total, sums.aux)))

    return eval_step


def evaluate(loss_fn: LossFn, params: Params, group: Group, total: Count | None) -> Sums:
    """This rank's part of L, and its sums beside it."""
    divisors = total and divisors_of(total)
    losses: list[Tensor] = []
    asked: list[Tensor] = []
    aux: Tree = ()
    given: Sequence[Tensor | None] = group.weights or [None] * len(group.microbatches)
    for microbatch, weights in zip(group.microbatches, given, strict=True):
        # A loss that marks its data, by requires_grad_() say, does not mark the caller's.
        data = tree.detached(microbatch) if tree.eager(microbatch) else microbatch
        part = part_of(loss_fn, params, data, weights, divisors)
        losses.append(value(*tree.detached(part[:2])))
        asked.append(part.weights)
        if part.aux != ():
            aux = plus(aux, tree.detached(part.aux))
        del microbatch, weights, data, part
    loss = total_loss(losses, tree.leaves_of(params)[0])
    return Sums((), loss, group.counted or count_of(asked), aux)
