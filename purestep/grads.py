"""Reverse mode, summed over a group of microbatches.

    grads = Σₘ Σᵢ (wᵢ/N) ∇ℓᵢ(θ)        over tokens i of microbatches m

1/N enters as the seed of the backward pass: ``weights / N`` is the cotangent of the losses. So there
is no pass over the gradients to scale them, and nothing to forget.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from purestep import tree
from purestep.tokens import checked_weights, count_weights, label_weights
from purestep.tree import accumulation_dtype
from purestep.types import GradAndValue, LossFn, LossTerms, Microbatch, Params, Tree, WeightFn


def grad_and_value(
    func: Callable[..., Any], /, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``torch.func.grad_and_value``, to the bit, in half its memory.

    ``torch.func`` keeps every activation until the whole backward pass is done, ready for a second
    derivative that nobody may ask for. Here each is freed as soon as the pass has used it, as
    ``.backward()`` does; second derivatives and all other transforms work as before.

    Args:
        func: a function to a scalar tensor, or to ``(scalar, aux)`` with ``has_aux``.
        argnums: the positions to differentiate; each argument a tree of floating point tensors.
        has_aux: whether ``func`` returns a tree of tensors beside its value.

    Returns:
        A function to ``(grads, value)``, or to ``(grads, (value, aux))`` with ``has_aux``.

    >>> grads, value = grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([3.0])})
    >>> grads, value
    ({'w': tensor([6.])}, tensor(9.))
    """
    positions = argnums if isinstance(argnums, tuple) else (argnums,)

    @functools.wraps(func)
    def grads_and_value_of(*args: Any, **kwargs: Any) -> Any:
        for position in positions:
            if not -len(args) <= position < len(args):
                raise ValueError(
                    f"argnums={argnums} needs more than the {len(args)} arguments given"
                )
        leaves, structure = tree.flatten(tuple(args[position] for position in positions))
        aux_structure: tree.Structure = None

        def over_leaves(*leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
            nonlocal aux_structure
            filled = list(args)
            for position, argument in zip(
                positions, tree.unflatten(structure, leaves), strict=True
            ):
                filled[position] = argument
            value, aux = _value_and_aux(func(*filled, **kwargs), has_aux)
            aux_leaves, aux_structure = tree.flatten(aux)
            return value, aux_leaves

        vjp: Callable[..., Any] = torch.func.vjp
        value, pull, aux_leaves = vjp(over_leaves, *leaves, has_aux=True)
        grads = tree.unflatten(structure, pull(torch.ones_like(value), retain_graph=False))
        grads = grads if isinstance(argnums, tuple) else grads[0]
        if has_aux:
            return grads, (value, tree.unflatten(aux_structure, aux_leaves))
        return grads, value

    return grads_and_value_of


def _value_and_aux(output: Any, has_aux: bool) -> tuple[Tensor, Tree]:
    if has_aux and not (isinstance(output, tuple) and len(output) == 2):
        raise ValueError(
            f"with has_aux=True the function must return (value, aux), got {type(output).__name__}"
        )
    value, aux = output if has_aux else (output, None)
    if not isinstance(value, Tensor) or value.ndim != 0:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        hint = "" if has_aux else ". Perhaps it returns aux as well: has_aux=True"
        raise ValueError(
            f"only a scalar tensor has a gradient, but the function gave {found}{hint}"
        )
    return value, aux


_own_grad_and_value = grad_and_value


def accumulate(
    loss_fn: LossFn,
    params: Params,
    microbatches: Sequence[Microbatch],
    *,
    weight_fn: WeightFn | None = label_weights,
    num_tokens: Tensor | None = None,
    num_microbatches: Tensor | None = None,
    grad_and_value: GradAndValue = grad_and_value,
    accum_dtype: torch.dtype | None = None,
    out: Sequence[Tensor] | None = None,
    ready: Callable[[int], None] | None = None,
) -> tuple[Tree, Tensor, Tree]:
    """Forward and backward over a group of microbatches: its part of ∇L and of L, without an optimizer.

        loss  = Σₘ ( Σᵢ wᵢ ℓᵢ(θ) / num_tokens  +  [m has tokens] · term(θ) / num_microbatches )
        grads = ∇ loss

    Gradients are added to the sums leaf by leaf, while the backward pass still runs: one tree of them is
    alive, not two. (Under a transform they are added when the pass is done.) No rank hears of any other
    here: ``psum`` what comes out, once.

    Args:
        loss_fn: one loss per token, or ``LossTerms``.
        params: a tree of floating point tensors.
        microbatches: a sequence of microbatches, of any shapes. An empty one gives exact zeros.
        weight_fn: one weight per token; None when ``LossTerms.weights`` brings them.
        num_tokens: the global N; None leaves loss and gradients as plain sums, for you to divide.
        num_microbatches: the global number of non-empty microbatches, for ``LossTerms.microbatch``.
        grad_and_value: anything with the signature of ``torch.func.grad_and_value``. Another one than
            ``ps.grad_and_value`` is free to do what it likes with its inputs (clip per example, say),
            and its gradients are added when they are returned. It differentiates a function of
            ``(leaves, microbatch)``, the params' leaves as a list.
        accum_dtype: the dtype of the sums; None: float32 for half precision, else the params' own.
        out: buffers to add up in, one for each leaf of params, whatever they hold; not under a transform.
        ready: called with a leaf's position when its sum in ``out`` is final, where that is known during
            the last backward pass: communication may begin.

    Returns:
        ``(grads, loss, aux)``; ``aux`` is the sum of ``LossTerms.aux``, or ``()``.

    >>> group = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([6.0])}]
    >>> grads, loss, aux = accumulate(
    ...     lambda w, m: w * m["x"],
    ...     torch.tensor(1.0),
    ...     group,
    ...     weight_fn=lambda m: torch.ones_like(m["x"]),
    ...     num_tokens=torch.tensor(3),
    ... )
    >>> grads, loss
    (tensor(3.), tensor(3.))
    """
    loss_of = partial_loss(loss_fn, weight_fn, num_tokens, num_microbatches)
    leaves, structure = tree.flatten(params)
    dtypes = sum_dtypes(leaves, accum_dtype)

    def loss_of_leaves(leaves: list[Tensor], microbatch: Microbatch) -> tuple[Tensor, Tree]:
        return loss_of(tree.unflatten(structure, leaves), microbatch)

    accumulated = None
    if (
        grad_and_value is _own_grad_and_value
        and not torch.compiler.is_compiling()
        and tree.untransformed(params, num_tokens, num_microbatches)
    ):
        accumulated = _accumulate_in_place(loss_of_leaves, leaves, dtypes, microbatches, out, ready)
    if accumulated is None:
        accumulated = _accumulate_returned(
            loss_of_leaves, leaves, dtypes, microbatches, grad_and_value
        )
    sums, total = accumulated
    loss, aux = total or (no_loss(params), ())
    for index, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if out is None:
            sums[index] = (
                torch.zeros_like(leaf, dtype=dtype) if sums[index] is None else sums[index]
            )
        elif sums[index] is not out[index]:
            if sums[index] is not None and sums[index].requires_grad:
                raise ValueError(
                    "the gradients depend on a tensor beside params that requires grad, and buffers given as "
                    "out= (gradient buckets of ranks, say) cannot record it: detach it, or compute it under "
                    "torch.no_grad()"
                )
            out[index].zero_() if sums[index] is None else out[index].copy_(sums[index])
            sums[index] = out[index]
    return tree.unflatten(structure, sums), loss, aux


LossOfLeaves: TypeAlias = Callable[[list[Tensor], Microbatch], tuple[Tensor, Tree]]
Accumulated: TypeAlias = tuple[list[Any], tuple[Tensor, Tree] | None]
"""The sum of each leaf's gradients, or None where there is none; and the sum of losses and aux."""


def _accumulate_in_place(
    loss_of: LossOfLeaves,
    leaves: list[Tensor],
    dtypes: list[torch.dtype],
    microbatches: Sequence[Microbatch],
    out: Sequence[Tensor] | None,
    ready: Callable[[int], None] | None,
) -> Accumulated | None:
    """Where nobody transforms: autograd's own accumulation, into the ``.grad`` of leaves of our own.

    None where the loss depends on something else that requires grad: somebody is going to differentiate
    what we compute, and autograd must record it.
    """
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    sums: list[Tensor | None] = [None] * len(own)
    remaining = len(microbatches)

    def take(index: int, leaf: Tensor) -> None:
        grad, so_far = leaf.grad, sums[index]
        assert grad is not None
        grad = _dense(grad)
        if so_far is None:
            so_far = grad.to(dtypes[index]) if out is None else out[index].copy_(grad)
        elif so_far is not grad:
            so_far.add_(grad)
        sums[index] = so_far
        # Where autograd can add to the sum itself, it does.
        leaf.grad = so_far if so_far.dtype == leaf.dtype else None
        if ready is not None and remaining == 1:
            ready(index)

    for index, leaf in enumerate(own):
        if out is not None or dtypes[index] != leaf.dtype:
            leaf.register_post_accumulate_grad_hook(functools.partial(take, index))

    total: tuple[Tensor, Tree] | None = None
    for microbatch in microbatches:
        with torch.enable_grad():
            loss, aux = loss_of(own, microbatch)
        if loss.requires_grad:
            if _requires_others(loss, own):
                return None
            torch.autograd.backward(loss, inputs=own)
        total = plus(total, tree.map(Tensor.detach, (loss, aux)))
        del loss, aux
        remaining -= 1
    grads = [
        so_far if leaf.grad is None else _dense(leaf.grad)
        for leaf, so_far in zip(own, sums, strict=True)
    ]
    return grads, total


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _requires_others(loss: Tensor, own: list[Tensor]) -> bool:
    """Whether the loss depends on a tensor that requires grad and is none of our own."""
    known = {id(leaf) for leaf in own}
    seen: set[Any] = {loss.grad_fn}
    stack: list[Any] = [loss.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.next_functions:
                stack.append(node)
            elif id(getattr(node, "variable", None)) not in known:
                return True
    return False


def _accumulate_returned(
    loss_of: LossOfLeaves,
    leaves: list[Tensor],
    dtypes: list[torch.dtype],
    microbatches: Sequence[Microbatch],
    grad_and_value: GradAndValue,
) -> Accumulated:
    """Under a transform, or with a reverse mode of the user's: gradients added when they are returned."""
    sums: list[Tensor | None] = [None] * len(leaves)
    total: tuple[Tensor, Tree] | None = None
    aux_structure: tree.Structure = None

    def loss_and_aux(leaves: list[Tensor], microbatch: Microbatch) -> tuple[Tensor, list[Tensor]]:
        nonlocal aux_structure
        loss, aux = loss_of(leaves, microbatch)
        aux_leaves, aux_structure = tree.flatten(aux)
        return loss, aux_leaves

    differentiate = grad_and_value(loss_and_aux, has_aux=True)
    for microbatch in microbatches:
        grads, (loss, aux_leaves) = differentiate(leaves, microbatch)
        returned = list(grads)
        del grads
        while returned:
            grad, index = returned.pop(), len(returned)
            so_far, grad = sums[index], grad.to(dtypes[index])
            sums[index] = grad if so_far is None else so_far + grad
            del so_far, grad
        total = plus(total, (loss, tree.unflatten(aux_structure, aux_leaves)))
    return sums, total


def sum_dtypes(leaves: Sequence[Tensor], accum_dtype: torch.dtype | None) -> list[torch.dtype]:
    """The dtype in which each leaf's gradients are summed."""
    return [accum_dtype or accumulation_dtype(leaf.dtype) for leaf in leaves]


def evaluate(
    loss_fn: LossFn,
    params: Params,
    microbatches: Sequence[Microbatch],
    *,
    weight_fn: WeightFn | None = label_weights,
    num_tokens: Tensor | None = None,
    num_microbatches: Tensor | None = None,
) -> tuple[Tensor, Tree]:
    """The loss and aux of ``accumulate``, without gradients."""
    loss_of = partial_loss(loss_fn, weight_fn, num_tokens, num_microbatches)
    total: tuple[Tensor, Tree] | None = None
    for microbatch in microbatches:
        total = plus(total, loss_of(params, microbatch))
    return total or (no_loss(params), ())


def partial_loss(
    loss_fn: LossFn,
    weight_fn: WeightFn | None,
    num_tokens: Tensor | None,
    num_microbatches: Tensor | None,
) -> Callable[[Params, Microbatch], tuple[Tensor, Tree]]:
    """A function from params and microbatch to the microbatch's part of L, and its aux.

    The same weights that were counted multiply the losses here, shape against shape, so numerator and
    denominator cannot disagree. A loss at a weight of zero may be anything, even NaN: it is taken away
    by selection, and what flows back to it is exactly zero.
    """

    def loss_of(params: Params, microbatch: Microbatch) -> tuple[Tensor, Tree]:
        terms = loss_terms(loss_fn, params, microbatch)
        weights = weights_of(weight_fn, terms, microbatch)
        losses = terms.tokens.to(accumulation_dtype(terms.tokens.dtype))
        # Divided before it is rounded: a weight need not be a number of the losses' dtype.
        seed = weights if num_tokens is None else weights.to(torch.float64) / divisor(num_tokens)
        seed = seed.to(losses.dtype)
        loss = (torch.where(weights != 0, losses, 0) * seed).sum()
        if terms.microbatch is not None:
            if num_microbatches is None:
                raise ValueError(
                    "LossTerms.microbatch is divided by the number of microbatches, which must be "
                    'known before the backward pass: use normalize="loss" and a weight_fn (in '
                    "accumulate: num_microbatches=), or add the term to LossTerms.tokens"
                )
            term = terms.microbatch.to(losses.dtype)
            present = count_weights(weights).num_tokens > 0
            loss = loss + torch.where(present, term, 0) / divisor(num_microbatches).to(losses)
        return loss, terms.aux

    return loss_of


def counting(loss_fn: LossFn, weight_fn: WeightFn | None) -> LossFn:
    """The same loss, which brings its weights and carries their count as the first part of its aux."""

    def loss_and_count(params: Params, microbatch: Microbatch) -> LossTerms:
        terms = loss_terms(loss_fn, params, microbatch)
        weights = weights_of(weight_fn, terms, microbatch)
        return terms._replace(weights=weights, aux=(count_weights(weights), terms.aux))

    return loss_and_count


def loss_terms(loss_fn: LossFn, params: Params, microbatch: Microbatch) -> LossTerms:
    """What ``loss_fn`` returned, as ``LossTerms``, refused where it cannot be a loss."""
    output = loss_fn(params, microbatch)
    if isinstance(output, tuple) and not isinstance(output, LossTerms):
        raise TypeError(
            f"loss_fn returned a tuple of {len(output)}: return one loss per token, or name the parts as "
            "ps.LossTerms(tokens=losses, aux=...)"
        )
    terms = output if isinstance(output, LossTerms) else LossTerms(output)
    if terms.aux is None:
        terms = terms._replace(aux=())
    if not isinstance(terms.tokens, Tensor) or not terms.tokens.is_floating_point():
        found = terms.tokens.dtype if isinstance(terms.tokens, Tensor) else type(output).__name__
        raise TypeError(
            "loss_fn must return a floating point tensor, one loss per token, or LossTerms "
            f"(tokens=, microbatch=, aux=); got {found}"
        )
    term = terms.microbatch
    if term is not None and (not isinstance(term, Tensor) or term.ndim != 0):
        kind = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
        raise ValueError(
            f"LossTerms.microbatch must be a scalar tensor, got {kind}; what has one value per token "
            "belongs into LossTerms.tokens"
        )
    for path, leaf in zip(tree.paths(terms.aux, "aux"), tree.leaves_of(terms.aux), strict=True):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"LossTerms.{path} must be a tensor, got {type(leaf).__name__}; wrap it in torch.tensor"
            )
    return terms


def weights_of(weight_fn: WeightFn | None, terms: LossTerms, microbatch: Microbatch) -> Tensor:
    """The weights of a microbatch's losses: from ``weight_fn``, or from the loss where that is None."""
    weights = terms.weights if weight_fn is None else weight_fn(microbatch)
    if weights is None:
        raise ValueError("weight_fn=None needs a loss_fn that returns LossTerms(tokens=, weights=)")
    if weight_fn is not None and terms.weights is not None:
        raise ValueError(
            "the weights come twice, from weight_fn and from LossTerms.weights: pass weight_fn=None "
            '(with normalize="grads"), or return no weights'
        )
    weights = checked_weights(weights)
    if terms.tokens.shape != weights.shape:
        hint = (
            "loss_fn must return one loss per token; a scalar is most likely a mean or a sum: take "
            'reduction="none"'
            if terms.tokens.ndim == 0
            else "they are multiplied one by one and never broadcast"
        )
        raise ValueError(
            f"losses of shape {tuple(terms.tokens.shape)} against weights of shape "
            f"{tuple(weights.shape)}: {hint}"
        )
    return weights.to(terms.tokens.device)


def divisor(total: Tensor) -> Tensor:
    """The total, but 1 where it is 0: there is nothing to divide then. Not a clamp: 0.25 stays."""
    return torch.where(total > 0, total, 1)


def no_loss(params: Params) -> Tensor:
    """The loss of no microbatch at all."""
    leaf: Tensor = tree.leaves_of(params)[0]
    return leaf.new_zeros((), dtype=accumulation_dtype(leaf.dtype))


def plus(total: Tree, term: Tree) -> Tree:
    """``total + term`` in the dtype in which each leaf is summed; a ``total`` of None is nothing yet."""

    def add(so_far: Tensor, leaf: Tensor) -> Tensor:
        if so_far.shape != leaf.shape:
            raise ValueError(
                f"LossTerms.aux has a leaf of shape {tuple(so_far.shape)} in one microbatch and "
                f"{tuple(leaf.shape)} in another: it is summed, so return sums over the tokens"
            )
        return so_far + leaf

    if total is None:
        # A copy: what a loss returns may be a view of its inputs, and outputs share no storage with them.
        return tree.map(lambda leaf: leaf.to(accumulation_dtype(leaf.dtype), copy=True), term)
    return tree.map(add, total, term)
