"""Checks whether the two runs of a case agree but for rounding."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from purestep.testing.bounds import Bound, bound_relative_error, compute_bound
from purestep.testing.case import (
    Case,
    DisagreementError,
    RefusalError,
    Run,
    UnaskedError,
    outcome,
)
from purestep.testing.problem import Batch, Problem
from purestep.testing.specification import ReferenceTrainer, join_group
from purestep.testing.trainer import Group, Observation, Trainer
from purestep.testing.watch import equal_or_nan

REPORTS = ("loss", "grad_norm", "num_tokens", "evaluation")
NUDGES = 12
"""How often a start is nudged, each time by other signs."""


def agree(trainer: Trainer, case: Case) -> bool:
    """Returns whether all ranks of the second run end with the first run's params, to the bit.

    With as many ranks in both runs, each rank's bits are compared with those of the same rank; else
    all are compared with rank 0. Zeros of either sign count as equal, and so do all NaN. Without a
    first run, the reference trainer does the second one in its place.

    Up to rounding, all ranks of both runs must agree with rank 0 of the first one. An update that
    is not SGD can enlarge roundings without a bound, as the sign of a gradient near zero does. So
    can one in a coarse dtype. Where such runs differ by more than rounding explains, the first run
    is repeated from starts that ``nudge_start`` moves by the relative bound of rounding. What
    nudges change counts as rounding, too. For such a trainer, ``case.first`` must not be None.

    Raises ``DisagreementError`` if params, averages or the reports in ``case.reports`` differ by
    more, on any rank. Raises ``RefusalError`` where ``outcome`` does, such as if the trainer
    raises.
    """
    reference = case.first or case.second
    # The first run has no more in it than has to be computed.
    batches = [join_group(group) for group in reference.groups]

    first_trainer = trainer if case.first else ReferenceTrainer()
    first = outcome(first_trainer, case.problem, reference)
    # Another seed: what is drawn from global generators differs between the runs.
    second = outcome(trainer, case.problem, case.second, seed=2)
    expected = _expect(first[0], second[0], case, batches[-1])
    if case.first is None:
        first = [expected]
    # Most runs agree to the bit. Their bound, which takes another run, does not matter.
    exact = Bound(dict.fromkeys(expected.params, 0.0), dict.fromkeys(REPORTS, 0.0))
    error = _find_disagreement(case, first, second, expected, exact)
    if error is not None:
        tokens = _count_tokens(case.problem, case.second)
        bound = compute_bound(case.problem, batches, tokens, trainer.capabilities)
        error = _find_disagreement(case, first, second, expected, bound)
    if error is not None and not trainer.capabilities.is_bounded:
        nudge = bound_relative_error(
            case.problem, len(batches), tokens, trainer.capabilities
        )
        moves = _measure_moves(trainer, case, first[0], nudge)
        widened = bound.widened(moves)
        moved = _move_evaluations(case.problem, batches[-1], first[0], second)
        error = _find_disagreement(case, first, moved, expected, widened)
    if error is not None:
        raise error
    likes = first if len(first) == len(second) else [first[0]] * len(second)
    return all(
        _has_bits_of(observation.params, like.params)
        for observation, like in zip(second, likes, strict=True)
    )


def agree_on_reports(trainer: Trainer, case: Case) -> bool:
    """Returns whether the reports of ``case.second`` are those of the equation, to the bit.

    This is for an update that is not SGD, or in a coarse dtype. The equation does not know its
    params, so it takes the trainer's. Loss, gradient norm and tokens are those of the equation at
    the params before the last update. The evaluation is the loss at the averages, or else the
    params, after it. The run has a single rank. A report that is None passes.

    Raises ``DisagreementError`` if a report in ``case.reports`` differs by more than rounding.
    Raises ``UnaskedError`` if the trainer reports nothing about an update with tokens. Raises
    ``RefusalError`` where ``outcome`` does, such as if the trainer raises.
    """
    problem = case.problem
    run = case.second
    group = run.groups[-1]
    before = problem.params()
    if len(run.groups) > 1:
        earlier = run._replace(acts=run.acts[:-1])
        before = dict(outcome(trainer, problem, earlier, seed=2)[0].params)
    (seen,) = outcome(trainer, problem, run, seed=2)
    after = dict(seen.averages or seen.params)
    batch = join_group(group)
    has_tokens = batch is not None and bool(problem.weights(batch).any())
    if has_tokens and all(getattr(seen, name) is None for name in REPORTS):
        raise UnaskedError("its update is not plain SGD, and it reports nothing")

    at_start = replace(problem, model=_move_start(problem, before))
    at_end = replace(problem, model=_move_start(problem, after))
    evaluation = _report_update(at_end, group).loss
    expected = _report_update(at_start, group)._replace(
        params=seen.params, evaluation=evaluation
    )

    tokens = _count_tokens(problem, run)
    allowed = compute_bound(at_start, [batch], tokens, trainer.capabilities)
    bound_at_end = compute_bound(at_end, [batch], tokens, trainer.capabilities)
    # A loss near zero is a difference of larger numbers: those before the update stand for them.
    allowed.reports["evaluation"] = max(
        allowed.reports["loss"], bound_at_end.reports["loss"]
    )
    _check_ranks(case, [seen], expected, allowed, 1.0)
    return all(_is_same_report(seen, expected, name) for name in REPORTS)


def _report_update(problem: Problem, group: Group) -> Observation:
    """Returns what the reference trainer observes after one update from the problem's start."""
    equation = ReferenceTrainer()
    equation.start(problem, 1)
    equation.update(group)
    return equation.observe()[0]


def _is_same_report(seen: Observation, expected: Observation, name: str) -> bool:
    """Returns whether a report is the same number in both, or NaN in both, or missing in one."""
    actual = getattr(seen, name)
    value = getattr(expected, name)
    if actual is None or value is None:
        return True
    pair = [torch.as_tensor(x, dtype=torch.float64) for x in (actual, value)]
    return bool(equal_or_nan(*pair))


def _move_start(problem: Problem, params: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of the problem's model with other parameters, rounded to its dtype."""
    model = problem.module()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params[name])
    return model


def _has_bits_of(params: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return all(bool(equal_or_nan(params[name], p).all()) for name, p in others.items())


def _find_disagreement(
    case: Case,
    first: Sequence[Observation],
    second: Sequence[Observation],
    expected: Observation,
    bound: Bound,
) -> DisagreementError | None:
    """Returns the error of the first rank of either run that is not as expected, or None.

    Each run is compared with ``expected``, and not with the other one. A value and the expected one
    may each be off by ``bound``, so they may be twice as far apart. The second run counts
    ``case.scale`` times as many tokens.
    """
    try:
        _check_ranks(case, first, expected, bound, 1.0)
        _check_ranks(case, second, expected, bound, case.scale)
    except DisagreementError as error:
        return error
    return None


def _measure_moves(
    trainer: Trainer, case: Case, before: Observation, nudge: float
) -> Bound:
    """Measures how far nudges of the start move each param and report of the first run.

    That run must not be None; ``before`` is what its rank 0 has observed. ``nudge`` is as in
    ``nudge_start``. Returns the largest distances of ``NUDGES`` nudges. They are 0 for a trainer
    whose run cannot be repeated to the bit: its differences are no rounding. They stop growing
    where the trainer raises.
    """
    moves = Bound(dict.fromkeys(before.params, 0.0), dict.fromkeys(REPORTS, 0.0))
    assert case.first is not None
    try:
        again = outcome(trainer, case.problem, case.first, seed=3)[0]
        if not _has_bits_of(again.params, before.params):
            return moves
        for seed in range(NUDGES):
            problem = nudge_start(case.problem, nudge, seed)
            after = outcome(trainer, problem, case.first)[0]
            for name, p in before.params.items():
                distance = _distance(after.params[name], p)
                moves.params[name] = max(moves.params[name], distance)
            for name in REPORTS:
                distance = _distance(getattr(after, name), getattr(before, name))
                moves.reports[name] = max(moves.reports[name], distance)
    except RefusalError:
        pass
    return moves


def nudge_start(problem: Problem, nudge: float, seed: int) -> Problem:
    """Returns the problem with each element θ of its start moved by ± nudge · (1 + |θ|).

    With an odd seed, by ± nudge · |θ|, which leaves zeros: LAMB has another rule for a parameter
    whose norm is 0 than for one that is small. The signs are drawn from the seed. The moved start
    is rounded to the model's dtype.
    """
    least = 0.0 if seed % 2 else 1.0
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, p in problem.params().items():
        signs = 2 * torch.randint(0, 2, p.shape, generator=generator) - 1
        moved[name] = p.double() + nudge * signs * (least + p.double().abs())
    return replace(problem, model=_move_start(problem, moved))


def _distance(x: Any, y: Any) -> float:
    """Returns the norm of a difference; 0 if a value is missing or not finite."""
    if x is None or y is None:
        return 0.0
    x = torch.as_tensor(x, dtype=torch.float64).detach()
    y = torch.as_tensor(y, dtype=torch.float64).detach()
    distance = float((x - y).norm())
    return distance if isfinite(distance) else 0.0


def _count_tokens(problem: Problem, run: Run) -> int:
    return sum(
        problem.weights(batch).numel()
        for group in run.groups
        for share in group
        for batch in share
    )


def _expect(
    first: Observation, second: Observation, case: Case, batch: Batch | None
) -> Observation:
    """Returns what both runs have to agree with: the first run's observation.

    If ``case.first`` is None, there is no first run. ``first`` is then what the reference trainer
    observes in the second run. ``batch`` is the last group, joined; None: it is empty. There are
    two exceptions, in which the reference trainer evaluates ``batch``. Its loss then replaces
    ``evaluation``, unless that or ``batch`` is None.

    If ``batch`` has "key", the trainer has dropout in training. The reference evaluates without it,
    at the averages of ``first``, or else its params. If there is no first run, and ``second`` has
    averages, the reference evaluates at these. They also become the ``averages``.
    """
    params = first.params if first.averages is None else first.averages
    if case.first is None and second.averages is not None:
        params = second.averages
        first = first._replace(averages=params)
    elif not batch or "key" not in batch:
        return first
    if first.evaluation is None or batch is None:
        return first
    return first._replace(evaluation=_evaluate_at(case.problem, params, batch))


def _evaluate_at(problem: Problem, params: Mapping[str, Tensor], batch: Batch) -> float:
    """Returns the loss of the equation at these params."""
    equation = ReferenceTrainer()
    equation.start(problem, 1)
    for name, p in params.items():
        equation.params[name] = p.double()
    return equation.evaluate([[batch]])


def _move_evaluations(
    problem: Problem,
    batch: Batch | None,
    first: Observation,
    second: Sequence[Observation],
) -> list[Observation]:
    """Returns ``second`` with each evaluation as if it were at the params of ``first``.

    Rounding moves params, and so their loss. Nudges have few combinations of signs, and may miss
    one that changes the loss more. So the loss by the equation at an observation's params is
    subtracted, and that at those of ``first`` is added. Averages replace params where there are
    any.

    An evaluation stays as it is if ``batch`` is None, or if it or one of these losses is not
    finite.
    """
    moved = []
    for observation in second:
        evaluation = observation.evaluation
        if batch is not None and evaluation is not None and isfinite(evaluation):
            there = _evaluate_at(
                problem, observation.averages or observation.params, batch
            )
            here = _evaluate_at(problem, first.averages or first.params, batch)
            if isfinite(there) and isfinite(here):
                evaluation = evaluation - there + here
                observation = observation._replace(evaluation=evaluation)
        moved.append(observation)
    return moved


def _check_ranks(
    case: Case,
    seen: Sequence[Observation],
    expected: Observation,
    bound: Bound,
    scale: float,
) -> None:
    """Raises ``DisagreementError`` if a rank's params, averages or reports are not as expected.

    They may differ from those of ``expected`` by twice ``bound``. The count of tokens must be
    ``scale`` times that of ``expected``. Of reports, those in ``case.reports`` are compared.
    Averages or a report that is None on either side are not.
    """
    start = case.problem.params()
    for rank, observation in enumerate(seen):
        where = f" on rank {rank}" if len(seen) > 1 else ""
        for name, p in expected.params.items():
            _check_close(
                case,
                name + where,
                observation.params[name],
                p,
                bound.params[name],
                start[name],
            )
        if observation.averages is not None and expected.averages is not None:
            for name, p in expected.averages.items():
                actual = observation.averages[name]
                what = f"average of {name}{where}"
                _check_close(case, what, actual, p, bound.params[name], start[name])
        for name in case.reports:
            actual = getattr(observation, name)
            value = getattr(expected, name)
            if actual is not None and value is not None:
                factor = scale if name == "num_tokens" else 1.0
                allowed = factor * bound.reports[name]
                _check_close(case, name + where, actual, factor * value, allowed)


def _check_close(
    case: Case,
    what: str,
    actual: Tensor | float,
    expected: Tensor | float,
    allowed: float,
    start: Tensor | float = 0.0,
) -> None:
    """Raises ``DisagreementError`` if two values differ by more than twice ``allowed``.

    Each may be off by ``allowed``. NaN equals NaN, and nothing else. The error's ``size`` is
    relative to the norm of ``expected - start``, and infinite if that is 0.
    """
    actual = torch.as_tensor(actual, dtype=torch.float64).detach()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach()
    is_equal = equal_or_nan(actual, expected)
    difference = torch.where(is_equal, 0, actual - expected)
    error = float(difference.norm())
    if not error <= 2 * allowed:  # An error that is NaN is too large, too.
        update_size = float((expected - start).norm())
        text = (
            f"{what}: {str(actual.tolist())[:200]} is not "
            f"{str(expected.tolist())[:200]}; they are {error:.3g} apart, "
            f"and rounding explains {2 * allowed:.1g}"
        )
        raise DisagreementError(case, text, error / update_size if update_size else inf)
