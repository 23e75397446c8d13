"""The whole flow: microbatches to new parameters.

    N = Σ wᵢ          L(θ) = (1/N) Σ wᵢ ℓᵢ(θ)          (θ′, s′) = optimizer(∇L(θ), s, θ)

The sums run over all tokens of all microbatches on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, cast, get_args

import torch
from torch import Tensor

from purestep import tree
from purestep.axis import Axis, LocalAxis, check_axis, pvary
from purestep.compiler import Compiler
from purestep.conversation import conversation
from purestep.grads import Group, accumulate_passes, grad_and_value, microbatch_pass, sum_dtypes
from purestep.objective import divisor, evaluate, partial_loss
from purestep.optim.base import Optimizer, check_optimizer
from purestep.optim.transition import check_buffers, checked_as_they_come, transition
from purestep.tokens import count_all, held, label_weights, no_count, weigh, weighed
from purestep.torch_internals import holds_tensors
from purestep.types import (
    Count,
    EvalMetrics,
    GradAndValue,
    LossFn,
    Microbatch,
    OptState,
    Params,
    StepMetrics,
    Sums,
    Tree,
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
        grad_and_value: any function with the signature of ``torch.func.grad_and_value``.
        accum_dtype: the dtype in which gradients are summed and reduced; None: float32 for
            half-precision params, else the params' own.
        on_nonfinite: what an infinite or NaN gradient does: "propagate", or "skip" the step, on every
            rank alike, leaving params, moments and step counter as they were.
        donate: whether ``params`` and ``opt_state`` are given away: their buffers hold the results, and the
            old values must not be used again. No two leaves may overlap in memory, nor a leaf and a
            microbatch. Ignored where the step is recorded.
        compile: whether ``torch.compile`` takes what a microbatch runs, once for any number of them, and what the
            optimizer runs beside kernels. Ragged shapes become dynamic at the second one; large float32 products on
            a CPU go to oneDNN. Where it cannot make one graph, a warning says why. Or a function of yours instead, such
            as ``functools.partial(torch.compile, mode="max-autotune")``. Ignored under a transform.

    Returns:
        ``update_step``. ``params`` is a tree of floating point tensors (``None`` is an empty subtree and comes
        back as it is; keep integers in the microbatch, or close over them), ``opt_state`` comes from
        ``optimizer.init(params)``, and ``microbatches`` is a sequence of microbatches of any shapes; see
        ``StepMetrics`` for the rest, which is cut off from autograd and outer transforms: differentiate
        the new parameters, not the metrics.

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
    over or is given. Inside of ``torch.func.functional_call`` that would be the module's own parameters, so it is refused
    (but not where a compiler makes one graph of it, which is right).

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
    _check_functions(loss_fn, weight_fn, axis)
    check_optimizer("optimizer must be a ps.optim.Optimizer", optimizer)
    _check_callable("grad_and_value", grad_and_value)
    _check_choice("normalize", normalize, Normalize)
    _check_choice("on_nonfinite", on_nonfinite, OnNonfinite)
    if weight_fn is None and normalize == "loss":
        raise ValueError(
            'weight_fn=None means that the forward pass brings the weights, but normalize="loss" counts '
            'them before it: pass normalize="grads", or a weight_fn'
        )
    if accum_dtype is not None and accum_dtype not in tree.SUM_DTYPES:
        raise ValueError(
            f"{accum_dtype=} must be a floating point dtype for sums: one of "
            + ", ".join(map(str, tree.SUM_DTYPES))
        )
    run = microbatch_pass(partial_loss(loss_fn), grad_and_value, weight_fn, compile=compile)
    counted_first = weight_fn if normalize == "loss" else None
    settings = {
        "normalize": normalize,
        "weight_fn": "given" if weight_fn else "None",
        "accum_dtype": str(accum_dtype),
        "on_nonfinite": on_nonfinite,
    }
    transit = transition(optimizer, donate=donate, compile=compile)

    def update_step(
        params: Params, opt_state: OptState, microbatches: Sequence[Microbatch], /
    ) -> tuple[Params, OptState, StepMetrics]:
        shared = {"params": params, "opt_state": opt_state, "settings": settings}
        donated = (params, opt_state) if donate else ()
        with conversation(axis) as ranks:
            mine, data, weights, counted = _held(params, microbatches, counted_first, donated)
            number, leaves = len(mine if weights is None else weights), tree.leaves_of(params)
            total = ranks.agree(
                counted,
                microbatches=number,
                shared=shared,
                given=(params, data),
                gradients=(leaves, sum_dtypes(leaves, accum_dtype)),
            )
            known = total if counted_first else (None, None)
            theta = pvary(params, axis)
            pairs = weighed(mine, weight_fn, weights)
            if not isinstance(mine, list | tuple):
                pairs = checked_as_they_come(pairs, donated)
            group = Group(pairs, number)
            here = accumulate_passes(
                run, theta, group, known, accum_dtype=accum_dtype, out=ranks.out, ready=ranks.ready
            )
            grads, loss, counted, aux = ranks.sum(_sums(*here))
        total = total if counted_first else counted

        grad_scale = None if counted_first else divisor(total.num_tokens).to(torch.float64)
        grad_norm = _over(tree.global_norm(grads), grad_scale)
        # An N that has overflowed is no count: the host refuses it, and a device does not apply it.
        applied = (total.num_tokens > 0) & total.num_tokens.isfinite()
        if on_nonfinite == "skip":
            applied = applied & tree.all_finite(grads)
        new_params, new_opt_state = transit(
            grads, opt_state, params, grad_scale=grad_scale, applied=applied
        )

        metrics = StepMetrics(
            loss=_over(loss, grad_scale),
            num_tokens=total.num_tokens,
            num_microbatches=total.num_microbatches,
            grad_norm=grad_norm,
            applied=applied,
            aux=aux,
        )
        return new_params, new_opt_state, tree.map(Tensor.detach, metrics)

    return update_step


def make_eval_step(
    loss_fn: LossFn,
    *,
    weight_fn: WeightFn | None = label_weights,
    axis: Axis = LocalAxis(),
) -> Callable[[Params, Sequence[Microbatch]], EvalMetrics]:
    """A pure function ``eval_step(params, microbatches) -> metrics``: the same loss, counted the same way.

    Args:
        loss_fn: as in ``make_update_step``; whatever belongs to training only (dropout, an auxiliary loss)
            is for you to leave out of it.
        weight_fn: as in ``make_update_step``; None when the loss returns its weights.
        axis: where the tokens are spread.

    >>> import torch
    >>> eval_step = make_eval_step(lambda w, m: w * m["x"], weight_fn=lambda m: m["x"] > 0)
    >>> eval_step(torch.tensor(2.0), [{"x": torch.tensor([1.0, 3.0])}, {"x": torch.tensor([0.0])}]).loss
    tensor(4.)
    """
    _check_functions(loss_fn, weight_fn, axis)
    part = partial_loss(loss_fn)
    settings = {"weight_fn": "given" if weight_fn else "None", "evaluation": "yes"}

    def eval_step(params: Params, microbatches: Sequence[Microbatch], /) -> EvalMetrics:
        shared = {"params": params, "settings": settings}
        with conversation(axis) as ranks:
            mine, data, weights, counted = _held(params, microbatches, weight_fn)
            number = len(mine if weights is None else weights)
            total = ranks.agree(counted, microbatches=number, shared=shared, given=(params, data))
            known = total if weight_fn else None
            group = weighed(mine, weight_fn, weights)
            here = evaluate(part, params, group, *known or ())
            _, loss, counted, aux = ranks.sum(_sums((), *here))
        total = known or counted

        metrics = EvalMetrics(
            loss=_over(loss, None if known else divisor(total.num_tokens).to(torch.float64)),
            num_tokens=total.num_tokens,
            num_microbatches=total.num_microbatches,
            aux=aux,
        )
        return cast("EvalMetrics", tree.map(Tensor.detach, metrics))

    return eval_step


def _over(value: Tensor, scale: Tensor | None) -> Tensor:
    return value if scale is None else (value / scale).to(value.dtype)


def _check_functions(loss_fn: LossFn, weight_fn: WeightFn | None, axis: Axis) -> None:
    _check_callable("loss_fn", loss_fn)
    if weight_fn is not None:
        _check_callable("weight_fn", weight_fn)
    check_axis(axis)


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(
            f"{name}={value!r} must be one of {', '.join(map(repr, get_args(choices)))}"
        )


def _held(
    params: Params,
    microbatches: Sequence[Microbatch],
    weight_fn: WeightFn | None,
    donated: Tree = (),
) -> tuple[Sequence[Microbatch], Sequence[Microbatch], Sequence[Tensor] | None, Count]:
    """The group, those of it that are at hand; its weights and its count, where they are known before the loss."""
    device = _check_arguments(params, microbatches)
    group = held(microbatches) if weight_fn else microbatches
    # Of a group that is on its way, each is looked at when it comes.
    data = group if isinstance(group, list | tuple) else ()
    check_buffers(donated, data)
    weights = weigh(group, weight_fn) if weight_fn else None
    return group, data, weights, count_all(weights or (), device)


def _sums(grads: Tree, loss: Tensor, carried: Tree) -> Sums:
    return Sums(grads, loss, *(carried or (no_count(loss.device), ())))


def _refuse_kind(path: str, leaf: Tensor) -> NoReturn:
    """Floating point tensors that look like any other, and are not."""
    if leaf.dtype not in tree.SUM_DTYPES:
        raise TypeError(
            f"{path} is {leaf.dtype}, in which neither gradients nor updates can be computed: keep params in "
            "bfloat16 or wider, and cast inside loss_fn"
        )
    raise TypeError(
        f"{path} is a {type(leaf).__name__}, which holds its values on several ranks or in several tensors: params are "
        "plain tensors. Of a DTensor, as fully_shard and distribute_tensor make them, pass leaf.full_tensor(), and "
        "say by axis=ps.MeshAxis(mesh, ...) where the tokens are spread"
    )


def _check_arguments(params: Params, microbatches: Sequence[Microbatch]) -> torch.device:
    """Refuses what is not params or not microbatches; returns where the params are."""
    leaves = tree.leaves_of(params)
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is a module, {type(params).__name__}: pass its parameters, "
            "{name: p.detach() for name, p in module.named_parameters()}, and call it in loss_fn through "
            "torch.func.functional_call"
        )
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            plain = type(leaf) is Tensor or not holds_tensors(leaf)
            if leaf.dtype not in tree.SUM_DTYPES or not plain:
                _refuse_kind(tree.paths(params, "params")[position], leaf)
        else:
            found = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"{tree.paths(params, 'params')[position]} is {found}, which has no gradient: params are "
                "floating point tensors in containers that optree knows; keep other data in the "
                "microbatch or close over it, and register classes of your own in purestep.tree.NAMESPACE"
            )
    if not leaves:
        raise ValueError("params holds no tensors, so there is nothing to update")
    device: torch.device = leaves[0].device
    if others := tree.devices(leaves) - {device}:
        places = zip(tree.paths(params, "params"), leaves, strict=True)
        other, where = next((path, leaf.device) for path, leaf in places if leaf.device in others)
        raise ValueError(
            f"{tree.paths(params, 'params')[0]} is on {device}, but {other} is on {where}: the params of a step are "
            "on one device; move them there"
        )
    if device.type == "mps":
        raise ValueError(
            f"params are on {device}, which has no float64, and losses and counts are summed in it: move params and "
            "microbatches to the CPU"
        )
    if not isinstance(microbatches, Sequence) or hasattr(microbatches, "_fields"):
        raise TypeError(
            f"microbatches must be a sequence of microbatches, got {type(microbatches).__name__}: "
            "cut a stacked batch with ps.split(batch, k), wrap a single microbatch in a list, and "
            "gather an iterator into one"
        )
    return device
