"""Describes two runs that must end in the same state, and checks whether a trainer's do."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.testing.bounds import Bound, compute_bound
from purestep.testing.problem import Batch, Linear, Problem
from purestep.testing.specification import ReferenceTrainer, join_group
from purestep.testing.trainer import Evaluating, Group, Observation, Trainer
from purestep.testing.watch import Watch, equal_or_nan

Act: TypeAlias = Literal["restart", "save", "look"] | Group
"""An update on a group; "save": the state is saved; "restart": the same, another update is lost,
and the state is put back after a fresh start; "look": it is observed, and evaluates a part."""

ACT_CODE = {
    "save": ["it.save()"],
    "look": [
        'it.observe(); hasattr(it, "evaluate") and '
        "it.evaluate([share[:1] for share in group])"
    ],
}


class Run(NamedTuple):
    """Lists what a trainer does, on how many ranks and in which of its settings.

    An act is an update on a group, or "save", "restart" or "look". ``label`` describes the run.
    """

    acts: Sequence[Act]
    label: str
    ranks: int = 1
    setting: str | None = None

    @property
    def groups(self) -> list[Group]:
        """Returns the groups of the updates, without the other acts."""
        return [act for act in self.acts if not isinstance(act, str)]


@dataclass(frozen=True, repr=False)
class Case:
    """Holds two runs that must agree; ``first`` None: ``second`` and the specification.

    ``reports`` names what must agree besides the params. Most are reports of the last update;
    "evaluation" is the mean loss on its group afterwards. For it, rows are made twice as long,
    unless the task has a vocabulary. The second run counts ``scale`` times as many tokens as the
    first. ``part`` names the part of the law.
    """

    problem: Problem
    first: Run | None
    second: Run
    reports: tuple[str, ...] = ("loss", "grad_norm", "num_tokens", "evaluation")
    scale: float = 1.0
    part: str = ""

    def describe(self) -> str:
        """Describes the case in words: both labels, the numbers of SGD, and the updates.

        The updates are those of the run that has more of them. The start of a ``Linear`` is
        described, too.
        """
        first = "the equation" if self.first is None else self.first.label
        words = [f"{first} against {self.second.label}"]
        if isinstance(self.problem.model, Linear):
            for name, p in self.problem.params().items():
                words.append(f"start {name} {_format_tensor(p)}")
        for name, value in _sgd_numbers(self.problem).items():
            words.append(f"{name.replace('_', ' ')} {value}")
        for number, group in enumerate(self._longer_run().groups, 1):
            words.append(f"update {number}: {_describe_group(group)}")
        return "; ".join(words)

    def _longer_run(self) -> Run:
        if self.first is None:
            return self.second
        return max(self.first, self.second, key=lambda run: len(run.groups))

    def reproducer(self) -> str:
        """Returns the case as the text of a program, which needs a ``trainer`` of yours.

        Unless the model is ``Linear``, the program also needs names ``task`` and ``model``.
        """
        model = self.problem.model
        args = ["task", "model"]
        if isinstance(model, Linear):
            args = ["ps.testing.REGRESSION", repr(model)]
        for name, value in _sgd_numbers(self.problem).items():
            args.append(f"{name}={value}")
        lines = [
            "import torch",
            "import purestep as ps",
            "",
            f"problem = ps.testing.Problem({', '.join(args)})",
        ]
        if self.first is None:
            lines += _run_code(self.second, "ps.testing.ReferenceTrainer()")
        else:
            lines += _run_code(self.first, "trainer")
        lines += _run_code(self.second, "trainer")
        return "\n".join(lines)

    __repr__ = reproducer

    def coverage(self) -> dict[str, Any]:
        """Counts the second run's microbatches in the last update, its ranks and its updates.

        The keys are "microbatches", "ranks", "updates" and "weights". "weights" is the kind of the
        first run's weights in its last update: "0 and 1", "whole" or "fractions".
        """
        first = self.first or self.second
        batch = join_group(first.groups[-1])
        last = self.second.groups[-1]
        return {
            "microbatches": sum(len(share) for share in last),
            "ranks": self.second.ranks,
            "updates": len(self.second.groups),
            "weights": _classify_weights(self.problem, batch),
        }


def _classify_weights(problem: Problem, batch: Batch | None) -> str:
    if batch is None:
        return "0 and 1"
    weights = problem.weights(batch).flatten().tolist()
    if all(weight in (0, 1) for weight in weights):
        return "0 and 1"
    if all(weight == int(weight) for weight in weights):
        return "whole"
    return "fractions"


def _sgd_numbers(problem: Problem) -> dict[str, float]:
    """Returns the learning rate, momentum and weight decay that are not zero, by name."""
    names = ("learning_rate", "momentum", "weight_decay")
    values = {name: getattr(problem, name) for name in names}
    return {name: value for name, value in values.items() if value}


def _format_tensor(x: Tensor) -> str:
    return re.sub(r"\.0\b", "", str(x.tolist()))


def _describe_group(group: Group) -> str:
    words = []
    for share in group:
        for batch in share:
            items = [f"{key} {_format_tensor(x)}" for key, x in batch.items()]
            words.append(", ".join(items))
    return " | ".join(words) or "nothing"


def _run_code(run: Run, trainer: str) -> list[str]:
    start = f"it.start(problem, ranks={run.ranks})"
    lines = ["", f"it = {trainer}  # {run.label}"]
    if run.setting is not None:
        lines.append(f"it.select_setting({run.setting!r})")
    lines.append(start)
    if isinstance(run.acts[0], str):  # It takes the group of the update that follows.
        lines.append(_group_code(run.groups[0]))
    for act in run.acts:
        if act == "restart":
            lines += ["saved = it.save()", "it.update(group)", start, "it.load(saved)"]
        elif isinstance(act, str):
            lines += ACT_CODE[act]
        else:
            lines += [_group_code(act), "it.update(group)"]
    lines.append("print(it.observe())")
    return lines


def _group_code(group: Group) -> str:
    shares = []
    for share in group:
        batches = [_batch_code(batch) for batch in share]
        shares.append(f"[{', '.join(batches)}]")
    return f"group = [{', '.join(shares)}]"


def _batch_code(batch: Batch) -> str:
    items = []
    for key, x in batch.items():
        items.append(f"{key!r}: torch.tensor({x.tolist()}, dtype={x.dtype})")
    code = "{" + ", ".join(items) + "}"
    return re.sub(r"\b(nan|inf)\b", r'float("\1")', code)


class RefusalError(Exception):
    """Reports that a trainer raised, or that its params have another dtype than it declares."""


class DisagreementError(AssertionError):
    """Reports two runs that must agree and do not, and describes the ``case``.

    ``what`` says in what they differ. ``size`` is the difference relative to the update, or to the
    value of a report.
    """

    def __init__(self, case: Case, what: str, size: float) -> None:
        super().__init__(f"{what}\n  in this case: {case.describe()}")
        self.case = case
        self.what = what
        self.size = size


FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (\S+)\n(?:    .*\n)*')
CHAINED = re.compile(r"\n\n(?:The above exception was|During handling of)")


def describe_cause(error: BaseException) -> str:
    """Describes the first exception of a chain, and where it was raised, in one line.

    If it is not ``error`` itself, the type and the first line of ``error`` follow. ``error`` must
    have been raised.
    """
    text = "".join(traceback.format_exception(error))
    innermost = CHAINED.split(text)[0]
    frame = list(FRAME.finditer(innermost))[-1]
    path, line, function = frame.groups()
    words = innermost[frame.end() :].split()
    message = " ".join(words)[:400]
    file = Path(path).name
    cause = f"{message} ({file}:{line}, in {function})"
    if innermost == text:
        return cause
    outermost = f"{type(error).__name__}: {error}".split("\n")[0]
    return f"{cause}; then {outermost}"


def outcome(trainer: Trainer, problem: Problem, run: Run) -> Sequence[Observation]:
    """Returns what each rank sees after a run on copies of the data; the first one evaluates, too.

    ``changed`` lists the data and global state that the run has changed. Afterwards, the global
    state of this process is put back.

    Raises ``RefusalError`` if the trainer raises or has params of another dtype than it declares,
    and ``ValueError`` if they have other names than the problem's.
    """
    watch = Watch()
    try:
        seen = _do_run(trainer, problem, run, watch)
        changed = watch.changed()
    except Exception as error:
        raise RefusalError(describe_cause(error)) from error
    finally:
        watch.end()
    observations = []
    for observation in seen:
        _check_params(observation, problem, trainer.capabilities.dtype)
        # Processes have watched their own global state.
        changed_there = list(observation.changed or ())
        observation = observation._replace(changed=changed_there + changed)
        observations.append(observation)
    return observations


def _check_params(
    observation: Observation, problem: Problem, dtype: torch.dtype
) -> None:
    names = list(problem.params())
    params = observation.params
    if set(params) != set(names):
        raise ValueError(f"observe() has the names {list(params)}, the problem {names}")
    for p in params.values():
        if p.dtype != dtype:
            raise RefusalError(
                f"its parameters are {p.dtype}, its capabilities say {dtype}: "
                f"declare Capabilities(dtype={p.dtype}), or compute in {dtype}"
            )


def _do_run(
    trainer: Any, problem: Problem, run: Run, watch: Watch
) -> list[Observation]:
    """Starts the trainer, does the run's acts, and returns what each rank sees at its end.

    The first rank evaluates the last group, as ``_look`` does. Its rows are made twice as long,
    unless the task has a vocabulary. "restart" saves, updates once more, starts anew, and loads.
    """
    if run.setting is not None:
        trainer.select_setting(run.setting)
    trainer.start(problem, run.ranks)
    group = run.groups[0]
    for act in run.acts:
        if act == "restart":
            saved = trainer.save()
            watch.call(trainer.update, group)
            trainer.start(problem, run.ranks)
            trainer.load(saved)
        elif act == "look":
            part = [share[:1] for share in group]
            _look(trainer, problem, part, watch)
        elif act == "save":
            trainer.save()
        else:
            group = act
            watch.call(trainer.update, group)
    if not problem.task.vocabulary:
        # Rows that no update has seen, with the same mean loss.
        group = [[_double_length(batch) for batch in share] for share in group]
    return _look(trainer, problem, group, watch)


def _look(
    trainer: Any, problem: Problem, group: Group, watch: Watch
) -> list[Observation]:
    """Observes a trainer, and lets it evaluate a group if it can and there are tokens.

    The evaluation goes to the first observation.
    """
    first, *others = trainer.observe()
    if isinstance(trainer, Evaluating) and _has_tokens(problem, group):
        evaluation = watch.call(trainer.evaluate, group)
        first = first._replace(evaluation=evaluation)
    return [first, *others]


def _has_tokens(problem: Problem, group: Group) -> bool:
    batch = join_group(group)
    if batch is None:
        return False
    return bool(problem.weights(batch).any())


def _double_length(batch: Batch) -> Batch:
    doubled = {}
    for key, x in batch.items():
        if x.ndim > 1:  # Not "key": one number for each row.
            x = torch.cat([x, x], 1)
        doubled[key] = x
    return doubled


def agree(trainer: Trainer, case: Case) -> bool:
    """Returns whether all ranks of the second run end with the first run's params, to the bit.

    These are the params of the first run's rank 0. Without a first run, the reference trainer does
    the second one.

    Raises ``DisagreementError`` if params or reports of any rank differ by more than rounding
    explains. Raises ``RefusalError`` if the trainer raises.
    """
    reference = case.first or case.second
    # The first run has no more in it than has to be computed.
    batches = [join_group(group) for group in reference.groups]
    tokens = _count_tokens(case.problem, case.second)
    bound = compute_bound(case.problem, batches, tokens, trainer.capabilities)

    first_trainer = trainer if case.first else ReferenceTrainer()
    first = outcome(first_trainer, case.problem, reference)
    expected = _without_dropout(first[0], case.problem, batches[-1])
    second = outcome(trainer, case.problem, case.second)
    _check_ranks(case, first, expected, bound, 1.0)
    _check_ranks(case, second, expected, bound, case.scale)
    return all(
        bool(equal_or_nan(observation.params[name], p).all())
        for observation in second
        for name, p in expected.params.items()
    )


def _count_tokens(problem: Problem, run: Run) -> int:
    return sum(
        problem.weights(batch).numel()
        for group in run.groups
        for share in group
        for batch in share
    )


def _without_dropout(
    observation: Observation, problem: Problem, batch: Batch | None
) -> Observation:
    """Recomputes the evaluation at the observed params by the reference, on the batch.

    This is for a batch that has "key", with which the trainer drops elements: the reference drops
    none. Other observations, and those without an evaluation, stay as they are.
    """
    if observation.evaluation is None or not batch or "key" not in batch:
        return observation
    equation = ReferenceTrainer()
    equation.start(problem, 1)
    for name, p in observation.params.items():
        equation.params[name] = p.double()
    evaluation = equation.evaluate([[batch]])
    return observation._replace(evaluation=evaluation)


def _check_ranks(
    case: Case,
    seen: Sequence[Observation],
    expected: Observation,
    bound: Bound,
    scale: float,
) -> None:
    """Raises ``DisagreementError`` if a rank's params or reports are not those of ``expected``.

    They may differ by rounding. The count of tokens must be ``scale`` times that of ``expected``. A
    report that is None on either side is not compared.
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
