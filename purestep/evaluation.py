"""The same loss, counted in the same way, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar, cast

import torch
from torch import Tensor

from purestep import hints, tree, validation
from purestep.axis import Axis, LocalAxis
from purestep.counts import count_tokens, label_weights, with_weights
from purestep.grads.accumulate import accumulate, sum_losses
from purestep.grads.backends import GradBackends
from purestep.grads.microbatch import (
    GradAccumulator as Gradients,
    MicrobatchInputs,
    MicrobatchResult,
)
from purestep.objective import denominators, forward_microbatch, weighted_sum
from purestep.sync.session import open_session
from purestep.types import (
    EvalMetrics,
    Gather,
    GradHook,
    LossFn,
    LossOutput,
    Microbatch,
    Params,
    WeightFn,
)

T = TypeVar("T")


def make_eval_step(
    loss_fn: LossFn,
    *,
    weight_fn: WeightFn | None = label_weights,
    axis: Axis = LocalAxis(),
    gather: Gather = "step",
) -> Callable[[Params, Sequence[Microbatch]], EvalMetrics]:
    """Makes a pure function ``eval_step(params, microbatches) -> metrics``.

    It counts tokens as the update does, and computes no gradients. Under a transform of
    ``torch.func`` its loss can be differentiated; otherwise metrics are detached.

    Args:
        loss_fn: as in ``make_update_step``. Leave out dropout and auxiliary losses.
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
    looked_at: list[bool] = []  # whether random draws were looked for
    where: Gather = "loss" if gather == "loss" else "step"
    settings = {
        "weight_fn": "given" if weight_fn else "None",
        "gather": where,
        "evaluation": "yes",
    }

    def eval_step(params: Params, microbatches: Sequence[Microbatch], /) -> EvalMetrics:
        with open_session(axis, where, settings) as session:
            validation.check_params(params, axis)
            is_plain = (
                tree.is_plain_eager()
            )  # A trace can see neither marks nor generators.
            if is_plain and validation.DONATED in tree.leaves(params)[0].__dict__:
                raise validation.reused_donation_error("params")
            group = with_weights(microbatches, weight_fn)
            total = session.all_reduce_counts(
                count_tokens(group), params, (), len(microbatches)
            )
            known = total if weight_fn else None
            wholes = session.params_for_loss(params)
            modes = forward_backend(lambda microbatch: loss_fn(wholes, microbatch))
            is_first = is_plain and not looked_at
            watched = (
                hints.warn_of_random_draws(first_device(params))
                if is_first
                else nullcontext()
            )
            with watched:
                sums = accumulate(
                    loss_fn, (), group, weight_fn=None, total=known, modes=modes
                )
            if is_first:
                looked_at.append(True)
            losses = [sums.loss] if group.microbatches else []
            loss = sum_losses(losses, tree.leaves(params)[0])
            sums = session.all_reduce_grads(sums._replace(loss=loss), ())
        loss = sums.loss
        if known is None:
            total = sums.counts
            loss = (loss / denominators(total).num_tokens).to(loss.dtype)
        return detach_unless_transformed(EvalMetrics(loss, *total, sums.aux))

    return eval_step


def first_device(params: Params) -> torch.device:
    """Returns the device of the first leaf."""
    leaf: Tensor = tree.leaves(params)[0]
    return leaf.device


def forward_backend(
    losses_of: Callable[[Microbatch], Tensor | LossOutput],
) -> GradBackends:
    """The loss of a microbatch, of which nothing is differentiated."""

    def mode(
        inputs: MicrobatchInputs, sums: Gradients, ready: GradHook | None
    ) -> MicrobatchResult:
        part = forward_microbatch(
            lambda _, microbatch: losses_of(microbatch), (), *inputs[2:5]
        )
        terms, cotangents = detach_unless_transformed((part.terms, part.cotangents))
        return MicrobatchResult(
            weighted_sum(terms, cotangents),
            part.weights,
            detach_unless_transformed(part.aux),
            True,
        )

    return GradBackends(mode, mode)


def detach_unless_transformed(values: T) -> T:
    """Detaches a tree, but under transforms: there its derivative would be 0 without a word."""
    return cast("T", tree.detach(values)) if tree.can_write() else values
