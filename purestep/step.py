"""The whole flow: microbatches to new parameters.

    N = Σ wᵢ          L(θ) = (1/N) Σ wᵢ ℓᵢ(θ)          (θ′, s′) = optimizer(∇L(θ), s, θ)

The sums run over all tokens of all microbatches on all ranks.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from purestep import hints, tree, validation
from purestep.axis import Axis, LocalAxis
from purestep.compiling import Compiler
from purestep.compiling.steps import set_graph_step
from purestep.counts import label_weights, sum_weights, with_weights
from purestep.grads.accumulate import accumulate_group, profiler_range
from purestep.grads.backends import GradBackends, make_backends
from purestep.grads.grad_and_value import grad_and_value
from purestep.grads.per_microbatch import (
    accept_repeated,
    gather_in_backends,
    pad_microbatches,
)
from purestep.objective import denominators
from purestep.optim.base import (
    Optimizer,
    check_optimizer,
    mask_grads,
    reraise_with_hint,
    update_in_place,
)
from purestep.sync.leaving import KnownLaunches, again_if_gathers_vary
from purestep.sync.replicas import Comparisons, Place, compare_replicas, place_of
from purestep.sync.session import open_session
from purestep.tree import accumulation_dtype, foreach
from purestep.tree.attributes import get_requires_grad
from purestep.types import (
    Gather,
    GradAndValue,
    GradSums,
    LossFn,
    Microbatch,
    OptState,
    Params,
    ParamsT,
    StateT,
    StepMetrics,
    TokenCounts,
    UpdateStep,
    WeightFn,
)

_MISSING: Any = object()
_NO_AXES: frozenset[Any] = frozenset()

Normalize = Literal["loss", "grads"]
OnNonfinite = Literal["propagate", "skip"]


SeenSpecs: TypeAlias = dict[Place, deque[tree.TreeSpec]]
"""The containers of params whose checks are done, the last few of each rank."""


class SeenParams(NamedTuple):
    """Remembers the structures of params that a step has seen on each rank.

    ``checked`` need no more checks, and ``comparisons`` are those that ranks have compared.
    ``launches`` are the gathers of their microbatches. If a rank's loss fails, the rank runs these
    for the others.
    """

    checked: SeenSpecs
    comparisons: Comparisons
    launches: KnownLaunches


@hints.explain_keywords
def make_update_step(
    loss_fn: LossFn[ParamsT],
    optimizer: Optimizer[StateT],
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
) -> UpdateStep[ParamsT, StateT]:
    """Makes a pure function ``update_step(params, opt_state, microbatches)``.

    It takes one optimizer step and returns ``(params, opt_state, metrics)``. Up to rounding,
    the result does not depend on how you cut the tokens into microbatches and ranks, nor on
    padding. ``metrics.num_microbatches`` and ``LossOutput.microbatch_loss`` alone do. Without any
    token, params and state stay as they are, to the bit. All ranks of ``axis`` call it together.

    Raises ``TypeError`` or ``ValueError`` for arguments that it cannot take, or that contradict
    each other. The step raises for params, state or microbatches that do not fit.

    Args:
        loss_fn: ``loss_fn(params, microbatch)`` returns one loss per token, or ``LossOutput``.
        optimizer: a ``ps.optim.Optimizer``; ``optimizer.init(params)`` makes ``opt_state``.
        weight_fn: ``weight_fn(microbatch)`` returns each token's weight. By default a token counts
            unless ``microbatch["labels"]`` is -100. None needs ``normalize="grads"``, and a loss
            that returns ``LossOutput(weights=)``.
        axis: the ranks over which tokens are spread. Tensor-parallel ranks are not among them.
        normalize: "loss" starts the backward pass from weights / N; "grads" divides the sums.
        grad_and_value: any function with the signature of ``torch.func.grad_and_value``.
        accum_dtype: the dtype of the sums. None: float32 for half precision, else that of params.
        gather: sharded params are gathered per "step", per "microbatch", or inside the "loss".
        on_nonfinite: "propagate" an infinite or NaN gradient, or "skip" the step on every rank.
        donate: reuse the memory of ``params`` and ``opt_state``. You must not use them again: old
            tensors hold the new values. To compare, keep ``ps.tree.map(torch.clone, params)``.
        compile: compile what a microbatch runs, by ``torch.compile`` or by a function like it.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> def loss_fn(w, microbatch):
    ...     return (w * microbatch["x"] - microbatch["y"]) ** 2
    >>> update_step = make_update_step(loss_fn, sgd(0.1), weight_fn=lambda m: m["x"] > 0)
    >>> w, x, y = torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])
    >>> one = [{"x": x, "y": y}]
    >>> two = [{"x": x[:1], "y": y[:1]}, {"x": x[1:], "y": y[1:]}]
    >>> [update_step(w, sgd(0.1).init(w), group)[0] for group in (one, two)]
    [tensor(1.8667), tensor(1.8667)]
    """
    validation.check_functions(loss_fn, weight_fn, axis)
    check_optimizer("optimizer must be a ps.optim.Optimizer", optimizer)
    settings = StepSettings(weight_fn, axis, normalize, accum_dtype, gather)
    config = check_settings(settings, on_nonfinite=on_nonfinite)
    config["call"] = "update_step"
    backends = make_backends(accept_repeated(loss_fn, gather), grad_and_value, compile)
    check = functools.partial(_check_inputs, optimizer, axis, donate)
    finish = functools.partial(finish_step, optimizer, on_nonfinite == "skip", donate)
    make = functools.partial(
        make_step,
        gather_in_backends(backends, gather),
        settings,
        config,
        check,
        # A graph gathers without a word to the session.
        notes_launches=compile is False,
    )
    step = make(finish)
    traced = step
    if donate:
        traced = make(functools.partial(finish, writes_in_graph=True))
    set_graph_step(step, traced, _make_graph_check(check, donate))
    return step


class StepSettings(NamedTuple):
    """Holds how a step counts and sums, as ``make_update_step`` says."""

    weight_fn: WeightFn | None
    axis: Axis
    normalize: Normalize
    accum_dtype: torch.dtype | None
    gather: Gather


def make_step(
    backends: GradBackends,
    settings: StepSettings,
    config: Mapping[str, str],
    check: Callable[[Params, OptState, Sequence[Microbatch]], None],
    finish: Callable[..., tuple[Any, Any, StepMetrics]],
    *,
    notes_launches: bool,
) -> UpdateStep[Any, Any]:
    """Makes the step that sums gradients by ``backends``, and returns the results of ``finish``.

    It sums over the ranks of the axis, which call it together.

    Args:
        backends: the gradient backends of the loss.
        settings: how the step counts and sums.
        config: settings as texts by name, such as those of ``check_settings``. An update raises
            ``ValueError`` if ranks differ in them.
        check: ``check(params, opt_state, microbatches)`` raises if the step cannot take these.
            It runs in each update that no compiler traces, until one with microbatches, in plain
            eager mode, has passed all checks for this structure.
        finish: ``finish(sums, total, params, opt_state)`` returns new params, a new state and
            metrics. ``sums`` are divided by N, however ``settings`` normalize. ``total`` has the
            token counts of all ranks. Where ranks run a program each, the step raises as
            ``check_no_graph`` for the new params.
        notes_launches: whether ranks note what each microbatch gathers; without it, a rank that
            fails among gathers raises alone.
    """
    weight_fn, axis, normalize, accum_dtype, gather = settings
    seen = SeenParams({}, {}, {})
    known_launches = seen.launches if notes_launches else None

    def update_step(
        params: Any,
        opt_state: Any,
        microbatches: Sequence[Microbatch] = _MISSING,
        /,
    ) -> tuple[Any, Any, StepMetrics]:
        if microbatches is _MISSING:
            raise TypeError(
                "update_step(params, opt_state, microbatches) got two arguments: perhaps opt_state "
                "is missing, which optimizer.init(params) makes"
            )
        with open_session(axis, gather, config, known_launches) as session:
            leaves, spec = tree.flatten(params)
            shard_specs = tree.shard_specs(spec)
            is_first = needs_checks(seen.checked, session.rank, spec)
            if is_first:
                check(params, opt_state, microbatches)
            with profiler_range("purestep.count"):
                group = with_weights(
                    microbatches, weight_fn if normalize == "loss" else None
                )
                if is_first and weight_fn is label_weights:
                    hints.check_shifted(group.microbatches)
                total = session.all_reduce_counts(
                    group.counts or sum_weights(()),
                    params,
                    opt_state,
                    len(microbatches),
                )
            on_grad_ready = session.grad_hook(params, accum_dtype)
            if gather != "step":
                max_len = session.max_microbatches(len(microbatches))
                group = pad_microbatches(group, max_len, gather, weight_fn)
            visible = session.params_for_loss(params, shard_specs)
            # torch 2.11's compiler does not compare dicts by identity.
            if torch.compiler.is_dynamo_compiling() or visible is not params:
                leaves, spec = tree.flatten(visible)
            sums = accumulate_group(
                backends,
                leaves,
                spec,
                group,
                weight_fn=weight_fn,
                divisors=denominators(total) if normalize == "loss" else None,
                accum_dtype=accum_dtype,
                on_grad_ready=on_grad_ready,
                needs_checks=is_first,
            )
            with profiler_range("purestep.reduce"):
                sums = session.all_reduce_grads(sums, params, shard_specs)

        is_checked = is_first and compare_replicas(
            seen.comparisons, session.rank, params, axis, sums
        )
        if normalize == "grads":
            total = sums.counts
            sums = normalize_sums(sums)
        new_params, new_opt_state, metrics = finish(sums, total, params, opt_state)
        if axis.is_multi_program:
            validation.check_no_graph(new_params, axis)
        # A loss is checked where it runs, and wholly only where nothing is recorded.
        if is_checked and len(microbatches) and tree.is_plain_eager(params, opt_state):
            _mark_as_seen(seen.checked, session.rank, params)
        return new_params, new_opt_state, metrics

    update_step.__qualname__ = "update_step"  # as errors name it
    return update_step if gather == "step" else again_if_gathers_vary(update_step)


def check_settings(settings: StepSettings, **choices: str) -> dict[str, str]:
    """Returns the settings on which all ranks must agree, as texts by name.

    ``choices`` may have one more setting, ``on_nonfinite``. Raises ValueError if a setting is
    invalid, or if settings contradict each other.
    """
    choices |= {"normalize": settings.normalize, "gather": settings.gather}
    allowed = {"normalize": Normalize, "gather": Gather, "on_nonfinite": OnNonfinite}
    for name, value in choices.items():
        validation.check_choice(name, value, allowed[name])
    validation.check_normalize(
        settings.normalize, settings.weight_fn, settings.accum_dtype
    )
    return {
        **choices,
        "weight_fn": "given" if settings.weight_fn else "None",
        "accum_dtype": str(settings.accum_dtype),
    }


def normalize_sums(sums: GradSums) -> GradSums:
    """Divides sums of gradients and losses by N, ``counts.num_tokens``.

    Returns new ``GradSums``; in plain eager mode, gradients in float32 or wider are divided in
    place. An N of 0 counts as 1. Raises ValueError if the host reads an N that is negative,
    infinite or NaN, or no normal number of the loss's dtype.

    >>> from purestep.types import TokenCounts
    >>> counts = TokenCounts(torch.tensor(4), torch.tensor(1))
    >>> normalize_sums(GradSums(torch.tensor(8.0), torch.tensor(2.0), counts, ())).grads
    tensor(2.)
    """
    num_tokens = denominators(sums.counts).num_tokens
    limits = torch.finfo(sums.loss.dtype)
    concrete = tree.concrete_scalar(num_tokens)
    if concrete is not None and not limits.tiny <= concrete <= limits.max:
        raise ValueError(
            f"num_tokens, the sum of all weights, is {concrete}, by which losses in "
            f"{sums.loss.dtype} cannot be divided: scale the weights, which changes nothing else"
        )

    loss = (sums.loss / num_tokens).to(sums.loss.dtype)
    totals = tree.leaves(sums.grads)
    is_wide = all(total.dtype == accumulation_dtype(total.dtype) for total in totals)
    if is_wide and tree.is_plain_eager(sums.grads):
        foreach.divide_(totals, num_tokens)
        return sums._replace(loss=loss)
    # In float32 at least: torch would cast N to float16, where 65,520 is infinite.
    grads = tree.map(
        lambda total: (tree.widen(total) / num_tokens).to(total.dtype), sums.grads
    )
    return sums._replace(grads=grads, loss=loss)


def needs_checks(seen_specs: SeenSpecs, rank: int, spec: tree.TreeSpec) -> bool:
    """Returns whether a rank has yet to check params with the containers of ``spec``.

    False while a compiler traces, and True for containers that cannot be compared.

    >>> one, two = (tree.flatten(params)[1] for params in ([3], [4, 5]))
    >>> seen_specs = {place_of(0, ()): deque([two])}
    >>> [needs_checks(seen_specs, 0, spec) for spec in (one, two)]
    [True, False]
    """
    if torch.compiler.is_dynamo_compiling():
        return False  # Checks read values, which a trace does not have.
    # A node class of the user's may hold what cannot be compared.
    with suppress(Exception):
        if spec in seen_specs.get((rank, _NO_AXES), ()):
            return False
        key = place_of(rank, tree.shard_specs(spec))
        return spec not in seen_specs.get(key, ())
    return True


def _check_inputs(
    optimizer: Optimizer,
    axis: Axis,
    donate: bool,
    params: Params,
    opt_state: OptState,
    microbatches: Sequence[Microbatch],
) -> None:
    """Raises if a step cannot take these arguments; says so if params and opt_state are swapped.

    The errors are those of ``validation.check_inputs``.
    """
    with hints.annotate_swapped_arguments(optimizer.init, params, opt_state):
        validation.check_inputs(params, opt_state, microbatches, axis, donate)


def _make_graph_check(
    check: Callable[[Params, OptState, Sequence[Microbatch]], None], donate: bool
) -> Callable[..., None]:
    """Makes the function that checks arguments of a compiled step: a trace has no values.

    It calls ``check`` until one call has passed. With ``donate``, it does so for each structure of
    params and state that is not among the last eight; a dict of another kind may pass for a known
    one. Leaves that share memory would be written over twice, so with ``donate`` each call compares
    objects. It does nothing unless it gets three arguments.
    """
    seen_specs: deque[tree.TreeSpec] = deque(maxlen=8)

    def check_call(*args: Any) -> None:
        if len(args) != 3 or (seen_specs and not donate):
            return  # The step says what is missing.
        donated: Any = args[:2]
        # By the only structure so far: to make a spec takes three to ten times as long, a tenth of
        # a small step. With several it is made, since a mismatch prints all leaves.
        leaves = None
        if len(seen_specs) == 1:
            leaves = tree.tensors_matching(seen_specs[0], donated)
        if leaves is None:
            # Without ``is_leaf``, which is Python: a small step takes twenty times as long.
            leaves, spec = optree.tree_flatten(donated, namespace=tree.NAMESPACE)
            if spec not in seen_specs:
                check(*args)
                seen_specs.append(spec)
        if donate:
            validation.check_distinct(leaves, *donated)

    return check_call


def _mark_as_seen(seen_specs: SeenSpecs, rank: int, params: Params) -> None:
    """Adds the containers of params that this rank has checked to ``seen_specs``.

    It keeps the last eight of each ``Place``: the rank on the step's axis, and the ranks on the
    axes of shards.
    """
    _, spec = tree.flatten(params)
    key = place_of(rank, tree.shard_specs(spec))
    seen_specs.setdefault(key, deque(maxlen=8)).append(spec)


def finish_step(
    optimizer: Optimizer[StateT],
    skips_nonfinite: bool,
    donate: bool,
    sums: GradSums,
    total: TokenCounts,
    params: ParamsT,
    opt_state: StateT,
    *,
    writes_in_graph: bool = False,
) -> tuple[ParamsT, StateT, StepMetrics]:
    """Returns new params and state, and the metrics; updates only if ``metrics.applied``.

    ``sums`` and ``total`` are those of all ranks. In plain eager mode, an update consumes the
    gradients. With ``donate``, it consumes params and state, too. ``writes_in_graph`` is that of
    ``apply_update``.
    """
    metrics = measure_step(sums, total, skips_nonfinite=skips_nonfinite)
    with profiler_range("purestep.optimizer"):
        new_params, new_opt_state = apply_update(
            optimizer,
            sums.grads,
            opt_state,
            params,
            metrics.applied,
            donate=donate,
            writes_in_graph=writes_in_graph,
        )
    return new_params, new_opt_state, metrics


def measure_step(
    sums: GradSums, total: TokenCounts, *, skips_nonfinite: bool = False
) -> StepMetrics:
    """Computes the metrics of an update, among them whether it is applied.

    They are detached, except under a transform of ``torch.func`` and in forward mode. The update is
    applied if N is positive, and finite where the host cannot read it. With ``skips_nonfinite`` all
    gradients must be finite, too. For a ``Shard``, collectives include all its ranks.
    """
    applied = total.num_tokens > 0
    if tree.concrete_scalar(total.num_tokens) is None:
        # An N that has overflowed, where the host cannot read and refuse it, is not applied.
        applied = applied & total.num_tokens.isfinite()
    if skips_nonfinite:
        applied = applied & tree.all_finite(sums.grads)
    metrics = StepMetrics(
        loss=sums.loss,
        num_tokens=total.num_tokens,
        num_microbatches=total.num_microbatches,
        grad_norm=tree.global_norm(sums.grads),
        applied=applied,
        aux=sums.aux,
    )
    # Under torch.func they keep their derivative: without it, it would be 0 without a word.
    has_graph = metrics.loss.requires_grad or metrics.grad_norm.requires_grad
    if (has_graph or not tree.is_empty(metrics.aux)) and tree.can_write():
        metrics = tree.detach(metrics)
    return metrics


def apply_update(
    optimizer: Optimizer,
    grads: Params,
    opt_state: OptState,
    params: Params,
    applied: Tensor,
    *,
    donate: bool,
    writes_in_graph: bool = False,
) -> tuple[Params, OptState]:
    """Returns updated params and state if ``applied`` is True; else the old values, to the bit.

        (θ′, s′) = optimizer(g, s, θ) if applied else (θ, s)

    Where a transform, a compiler or autograd follows the values, it runs ``optimizer.update`` and
    selects by ``applied``. Where the host reads False, it returns clones instead. With
    ``writes_in_graph``, operations of the graph then copy the results to the caller's buffers.

    In plain eager mode it runs ``update_``: on the caller's buffers with ``donate``, otherwise on
    one copy of them. ``update_`` consumes the gradients. With ``donate``, the first leaves of
    params and state are then marked as donated. The host reads an ``applied`` that lies on it, and
    waits for no device. Raises ``ValueError`` if the first leaf of params or state is marked as
    donated, and with ``donate`` if two of their leaves are one tensor.

    In both modes, an error that a wrong state causes becomes a ``ValueError`` or ``TypeError`` that
    says so.

    >>> import torch
    >>> from purestep.optim import sgd
    >>> params, optimizer = {"w": torch.tensor(1.0)}, sgd(0.5)
    >>> state, no, yes = optimizer.init(params), torch.tensor(False), torch.tensor(True)
    >>> apply_update(optimizer, {"w": torch.tensor(1.0)}, state, params, yes, donate=False)[0]
    {'w': tensor(0.5000)}
    >>> apply_update(optimizer, {"w": torch.tensor(1.0)}, state, params, no, donate=False)[0]
    {'w': tensor(1.)}
    """
    try:
        if not tree.is_plain_eager():
            return _apply_recorded(
                optimizer, grads, opt_state, params, applied, writes_in_graph
            )
        leaves, spec = tree.flatten((params, opt_state))
        params_spec = spec.child(0)
        # The optimizer says which gradients do not match.
        matching_grads = tree.tensors_matching(params_spec, grads) or []
        # By map: an optimizer's leaves are four for each param, and a loop takes twice as long.
        if any(map(get_requires_grad, leaves + matching_grads)):
            return _apply_recorded(
                optimizer, grads, opt_state, params, applied, writes_in_graph
            )
        num_params = params_spec.num_leaves
        has_state = len(leaves) > num_params
        first_leaves = (
            {"params": 0, "opt_state": num_params} if has_state else {"params": 0}
        )
        for name, index in first_leaves.items():
            if validation.DONATED in leaves[index].__dict__:
                raise validation.reused_donation_error(name)
        consumed: list[Tensor] = []
        if donate:
            validation.check_distinct(leaves, params, opt_state)
            consumed = _replace_by_aliases(leaves, first_leaves.values())
        else:
            # On the host, foreach operations are loops, and grouping leaves takes longer.
            on_host = applied.is_cpu
            leaves[:] = map(torch.clone, leaves) if on_host else foreach.clone(leaves)
        params, opt_state = tree.unflatten(spec, leaves)
        if not applied.is_cpu or applied:
            where = None if applied.is_cpu else applied
            update_ = optimizer.update_ or update_in_place(optimizer)
            params, opt_state = update_(grads, opt_state, params, where)
        for leaf in consumed:  # A step that fails has consumed nothing.
            validation.mark_donated(leaf)
        return params, opt_state
    except Exception as error:
        reraise_with_hint(optimizer.init, opt_state, params, error)
        raise


def _replace_by_aliases(leaves: list[Tensor], indices: Iterable[int]) -> list[Tensor]:
    """Replaces the leaves at ``indices`` by aliases, in place, and returns the replaced ones.

    So the donated leaves can be marked, and those that the step returns are not.
    """
    replaced = []
    for index in indices:
        replaced.append(leaves[index])
        leaves[index] = leaves[index].data  # an alias that no operation makes
    return replaced


def _apply_recorded(
    optimizer: Optimizer,
    grads: Params,
    opt_state: OptState,
    params: Params,
    applied: Tensor,
    writes_in_graph: bool,
) -> tuple[Params, OptState]:
    """Updates out of place, so that a transform, a compiler or autograd can follow the values.

    Returns params and state. Where ``applied`` is False, both keep their values. The results are
    new tensors, but if ``writes_in_graph`` a graph writes them to the old ones.
    """
    concrete = tree.concrete(applied)
    if concrete is not None and not concrete.any():  # in no member of an ensemble
        params, opt_state = tree.map(torch.clone, (params, opt_state))
        return params, opt_state
    new = optimizer.update(mask_grads(grads, applied), opt_state, params)
    new_params, new_opt_state = tree.where(applied, new, (params, opt_state))
    if writes_in_graph:
        new_params = tree.copy_(params, new_params, None)
        new_opt_state = tree.copy_(opt_state, new_opt_state, None)
    return new_params, new_opt_state
