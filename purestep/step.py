"""The whole flow: microbatches to new parameters.

    N = Σ wᵢ          L(θ) = (1/N) Σ wᵢ ℓᵢ(θ)          (θ′, s′) = optimizer(∇L(θ), s, θ)

The sums run over all tokens of all microbatches on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from purestep import tree
from purestep.arguments import (
    check_callable,
    check_choice,
    check_functions,
    checked_group,
    checked_params,
)
from purestep.axis import Axis, LocalAxis
from purestep.compiler import Compiler
from purestep.conversation import conversation
from purestep.donation import apart
from purestep.form import flat
from purestep.gathering import Gather
from purestep.grads import accumulator, check_undivided, check_whole, sum_dtypes
from purestep.objective import divisor, over
from purestep.optim.base import Optimizer, check_optimizer
from purestep.optim.transition import transition
from purestep.reverse_mode import grad_and_value
from purestep.tokens import count_of, grouped, label_weights
from purestep.types import (
    GradAndValue,
    LossFn,
    Microbatch,
    OptState,
    Params,
    ReverseMode,
    StepMetrics,
    UpdateStep,
    WeightFn,
)

Normalize = Literal["loss", "grads"]
OnNonfinite = Literal["propagate", "skip"]


def make_update_step(
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    weight_fn: WeightFn | None = label_weights,
    axis: Axis = LocalAxis(),
    normalize: Normalize = "loss",
    grad_and_value: GradAndValue = grad_and_value,
    accum_dtype: torch.dtype | None = None,
    gather: Gather = "step",
    on_nonfinite: OnNonfinite = "propagate",
    donate: bool = False,
    compile: bool | Compiler = False,
) -> UpdateStep:
    """A pure function ``update_step(params, opt_state, microbatches) -> (params, opt_state, metrics)``.

    It takes one optimizer step on a group of microbatches, whose tokens may be spread over the ranks of
    an axis. How the group was cut (into which microbatches, over which ranks, with what padding, in what
    order) does not matter: only its tokens do. No tokens at all is the identity, to the bit.

    Args:
        loss_fn: ``loss_fn(params, microbatch)`` gives one loss per token, or ``LossTerms``.
        optimizer: a ``ps.optim.Optimizer``.
        weight_fn: ``weight_fn(microbatch)`` gives each token's weight, in the losses' shape; the default
            counts ``microbatch["labels"] != -100``. It is asked once for each microbatch, so the weights that
            multiply are those that were counted. None: the loss returns ``LossTerms(weights=)``.
        axis: where the tokens are spread. Only dimensions that split tokens: no tensor-parallel ones.
        normalize: "loss" counts N first and seeds the backward pass with weights / N. "grads" learns N
            with the gradients, from the forward pass, and divides where the optimizer reads them.
        grad_and_value: any function with the signature of ``torch.func.grad_and_value``, or a ``ReverseMode``, such
            as ``ps.per_example`` gives.
        accum_dtype: the dtype in which gradients are summed and reduced; None: float32 for
            half-precision params, else the params' own.
        gather: when params in pieces over the step's own axis are whole: once a "step", once a "microbatch", or where the
            "loss" itself calls ``ps.unshard``; a rank whose loss fails there cannot tell the others, and should end.
        on_nonfinite: what an infinite or NaN gradient does: "propagate", or "skip" the step, on every
            rank alike, leaving params, moments and step counter as they were.
        donate: whether ``params`` and ``opt_state`` are given away: their buffers hold the results, and the
            old values must not be used again. No two leaves may overlap in memory, nor a leaf and a
            microbatch. Ignored where the step is recorded.
        compile: whether ``torch.compile`` takes what a microbatch runs, once for any number of them, and what the
            optimizer runs beside kernels. Ragged shapes become dynamic at the second one; large float32 products on
            a CPU go to the faster of MKL and oneDNN. Where it cannot make one graph, a warning says why. Or a function of yours instead, such
            as ``functools.partial(ps.compile, mode="max-autotune")``. Ignored under a transform. For all of a small network's step in
            one graph, wrap it in ``ps.compile``.

    Returns:
        ``update_step``. ``params`` is a tree of floating point tensors (``None`` is an empty subtree and comes
        back as it is; keep integers in the microbatch, or close over them), ``opt_state`` comes from
        ``optimizer.init(params)``, and ``microbatches`` is a sequence of microbatches of any shapes; see
        ``StepMetrics`` for the rest, which is cut off from autograd and outer transforms: differentiate
        the new parameters, not the metrics.

    **Pieces.** Where ``params`` has a ``Shard``, the loss is given a tensor: its piece, or all of it where the axis is
    the step's own, or some of its dimensions. ``grad_norm``, clipping and ``on_nonfinite`` are about the whole. ``gather="step"`` gathers
    once, sums whole gradients, and scatters their sums while the last backward pass runs; "microbatch" gathers for each, and
    scatters each gradient as soon as it is there, so that sums are pieces; with "loss", the loss is given every such ``Shard`` as it is
    and gathers what it needs when it needs it. What ``ps.unshard_each`` gathers is gathered again for the backward pass. Then all ranks
    must hold equally many microbatches, and gather the same in each.

    **What is recorded.** A step is recorded for autograd where params, state, a microbatch or a learning rate require
    grad, or under a transform. Then the new parameters require grad, and the graph grows from step to step:
    start from detached parameters if you do not want that. Otherwise nothing is recorded: what the loss closes over
    is a constant, whether it requires grad or not, and its ``.grad`` is not written. To differentiate by it, put
    it into the microbatch, or use ``torch.func``.

    **What a loss may do.** The tensors that it is given live for one microbatch: hooks on them, or a
    ``.backward()`` inside, act there and never on the sums. It may differentiate by its own inputs, with
    ``torch.autograd.grad(..., create_graph=True)`` or ``torch.func``. It is refused where it writes to params, or where
    its losses do not depend on them while there are tokens (which ``torch.compile`` of a whole step cannot tell).
    Activation checkpoints (``use_reentrant=False``) compute again with what the checkpointed function closes
    over or is given. In a module, ``ps.from_module`` makes that right. Inside of ``torch.func.functional_call`` it would be
    the module's own parameters, so it is refused (but not where a compiler makes one graph of it, which is right).

    A weight of zero takes a token's loss away and sends exactly zero back to it. Where the loss of such a
    token has no finite derivative (a NaN target, say), zero times that is NaN: mend it inside ``loss_fn``,
    with ``torch.where`` on what goes in.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> def loss_fn(w, microbatch):
    ...     return (w * microbatch["x"] - microbatch["y"]) ** 2
    >>> update_step = make_update_step(loss_fn, sgd(0.1), weight_fn=lambda m: torch.ones_like(m["x"]))
    >>> w = torch.tensor(0.0)
    >>> opt_state = sgd(0.1).init(w)
    >>> x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])
    >>> one = [{"x": x, "y": y}]
    >>> two = [{"x": x[:1], "y": y[:1]}, {"x": x[1:], "y": y[1:]}]
    >>> update_step(w, opt_state, one)[0], update_step(w, opt_state, two)[0]
    (tensor(1.8667), tensor(1.8667))
    """
    check_functions(loss_fn, weight_fn, axis)
    check_optimizer("optimizer must be a ps.optim.Optimizer", optimizer)
    check_callable("grad_and_value", grad_and_value)
    check_choice("normalize", normalize, Normalize)
    check_choice("gather", gather, Gather)
    check_choice("on_nonfinite", on_nonfinite, OnNonfinite)
    if weight_fn is None and normalize == "loss":
        raise ValueError(
            'weight_fn=None means that the forward pass brings the weights, but normalize="loss" counts '
            'them before it: pass normalize="grads", or a weight_fn'
        )
    check_undivided(grad_and_value, divided=normalize == "loss")
    if accum_dtype is not None and accum_dtype not in tree.SUM_DTYPES:
        raise ValueError(
            f"{accum_dtype=} must be a floating point dtype for sums: one of "
            + ", ".join(map(str, tree.SUM_DTYPES))
        )
    accumulate = accumulator(
        loss_fn,
        weight_fn=weight_fn,
        grad_and_value=grad_and_value,
        compile=compile,
    )
    counted_first = normalize == "loss"
    begin = grad_and_value.begin if isinstance(grad_and_value, ReverseMode) else None
    settings = {
        "normalize": normalize,
        "weight_fn": "given" if weight_fn else "None",
        "accum_dtype": str(accum_dtype),
        "gather": gather,
        "on_nonfinite": on_nonfinite,
    }
    transit = transition(optimizer, donate=donate, compile=compile)

    def update_step(
        params: Params, opt_state: OptState, microbatches: Sequence[Microbatch], /
    ) -> tuple[Params, OptState, StepMetrics]:
        shared = {"params": params, "opt_state": opt_state, "settings": settings}
        with conversation(axis, gather) as ranks:
            if begin is not None:
                text, of_sum = begin()
                shared["settings"] = {**settings, "grad_and_value": text}
            flat_params, flat_state = checked_params(params, axis), flat(opt_state)
            leaves, spread = flat_params.leaves, flat_params.form.spread
            check_whole(grad_and_value, spread)
            dtypes = sum_dtypes(flat_params.form, accum_dtype)
            group = grouped(checked_group(microbatches), weight_fn, counted_first, leaves[0].device)
            group = apart(group, flat_params, flat_state) if donate else group
            counted = ranks.agree(
                group.counted or count_of((), leaves[0].device),
                microbatches=group.length,
                shared=shared,
                params=flat_params,
                given=group.at_hand,
                dtypes=dtypes,
            )
            known = counted if counted_first else None
            here = accumulate(ranks.gathering, group, known)
            sums = ranks.sum(here)
        total = known or sums.counted
        if begin is not None:
            sums = sums._replace(grads=of_sum(sums.grads))

        grad_scale = None if counted_first else divisor(total.num_tokens)
        grad_norm = over(tree.norm_of(sums.grads, spread), grad_scale)
        applied = total.num_tokens > 0
        # An N that has overflowed is no count: the host refuses it, and a device does not apply it.
        if total.num_tokens.is_floating_point():
            applied = applied & total.num_tokens.isfinite()
        if on_nonfinite == "skip":
            applied = applied & tree.are_finite(sums.grads, spread)
        new_params, new_opt_state = transit(
            sums.grads, flat_state, flat_params, grad_scale=grad_scale, applied=applied
        )

        metrics = StepMetrics(
            loss=over(sums.loss, grad_scale),
            num_tokens=total.num_tokens,
            num_microbatches=total.num_microbatches,
            grad_norm=grad_norm,
            applied=applied,
            aux=sums.aux,
        )
        if (
            not tree.untransformed()
            or tree.any_requires_grad(metrics[:5])
            or not tree.is_empty(metrics.aux)
        ):
            metrics = tree.map(Tensor.detach, metrics)
        return new_params, new_opt_state, metrics

    return update_step
