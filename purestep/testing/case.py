"""Describes two runs that must end in the same state, and what a trainer's end in."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.testing.problem import REGRESSION, Batch, Linear, Problem
from purestep.testing.specification import join_group
from purestep.testing.trainer import Evaluating, Group, Observation, Trainer
from purestep.testing.watch import Watch

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

    An act is an update on a group, or "save", "restart" or "look". ``label`` describes the run. If
    ``setting`` is None, the run selects none.
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
    """Holds two runs that must agree, or without ``first`` one that must agree with the equation.

    ``reports`` names what must agree besides the params and averages. Most are reports of the last
    update; "evaluation" is the mean loss on its group afterwards. For it, each row is followed by
    itself, in one row: the mean loss stays, and the length is new. A task with a vocabulary
    evaluates rows as they are. The second run counts ``scale`` times as many tokens as the first.
    ``part`` names the part of the law.
    """

    problem: Problem
    first: Run | None
    second: Run
    reports: tuple[str, ...] = ("loss", "grad_norm", "num_tokens", "evaluation")
    scale: float = 1.0
    part: str = ""

    def describe(self) -> str:
        """Returns the case in words: both labels, SGD's numbers that are not 0, and the updates.

        The updates are those of the run that has more of them. Without ``first``, "the equation"
        stands for its label. The start of a ``Linear`` is described, too.
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
        """Returns a program that does both runs, and prints what is observed at the end of each.

        Its reader must define ``trainer``, ``task`` unless it is ``REGRESSION``, and ``model``
        unless it is ``Linear``. Without ``first``, a ``ReferenceTrainer`` makes the second run
        first.
        """
        task = self.problem.task
        model = self.problem.model
        args = [
            "ps.testing.REGRESSION" if task == REGRESSION else "task",
            repr(model) if isinstance(model, Linear) else "model",
        ]
        numbers = {"learning_rate": 0.0, **_sgd_numbers(self.problem)}
        args += [f"{name}={value}" for name, value in numbers.items()]
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
        """Returns the number of microbatches in the last update, of ranks and of updates.

        These are the second run's; their keys are "microbatches", "ranks" and "updates". "weights"
        is "0 and 1", "whole" or "fractions", as the weights in the first run's last update are.
        Without a first run, it is about the second.
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
    """Reports that a trainer raised, or that its params have other names or another dtype."""


class UnaskedError(Exception):
    """Reports that a trainer shows nothing that a law is about, and says why."""


class DisagreementError(AssertionError):
    """Reports that a law does not hold in a case, and describes the ``case``.

    ``what`` says what differs or has changed. ``size`` is the difference relative to the change of
    the param since the start, or to the value of a report. Where these are 0, it is infinite. It is
    0 if only bits differ, and 1 for data or global state that a run has changed.
    """

    def __init__(self, case: Case, what: str, size: float) -> None:
        super().__init__(f"{what}\n  in this case: {case.describe()}")
        self.case = case
        self.what = what
        self.size = size


FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (\S+)\n(?:    .*\n)*')
CHAINED = re.compile(r"\n\n(?:The above exception was|During handling of)")


def describe_cause(error: BaseException) -> str:
    """Describes the first exception of a chain that was raised, and where, in one line.

    The message ends after 400 characters. If the exception is not ``error`` itself, the type and
    the first line of ``error`` follow. ``error`` must have been raised.
    """
    text = "".join(traceback.format_exception(error))
    # A cause that was made, but not raised, has no frame.
    parts = CHAINED.split(text)
    innermost = next(part for part in parts if FRAME.search(part))
    frame = list(FRAME.finditer(innermost))[-1]
    path, line, function = frame.groups()
    words = innermost[frame.end() :].split()
    message = " ".join(words)[:400]
    file = Path(path).name
    cause = f"{message} ({file}:{line}, in {function})"
    if innermost == parts[-1]:
        return cause
    outermost = f"{type(error).__name__}: {error}".split("\n")[0]
    return f"{cause}; then {outermost}"


def outcome(
    trainer: Trainer, problem: Problem, run: Run, seed: int = 1
) -> Sequence[Observation]:
    """Starts the trainer, does a run on copies of the data, and returns what each rank sees.

    The first observation has an evaluation of the last group, if the trainer can evaluate and a
    token has weight. Its rows are made twice as long, unless the task has a vocabulary. ``changed``
    lists the data and global state that the run has changed. Before the run, ``Watch(seed)`` seeds
    the global generators. Afterwards the global state of this process is put back.

    Raises ``RefusalError`` if the trainer raises an ``Exception``. It also does if params or
    averages have other names than the problem's params, or params another dtype than declared.
    """
    watch = Watch(seed)
    try:
        seen = _do_run(trainer, problem, run, watch)
        changed = watch.changed()
        for observation in seen:
            _check_params(observation, problem, trainer.capabilities.dtype)
    except RefusalError:
        raise
    except Exception as error:
        raise RefusalError(describe_cause(error)) from error
    finally:
        watch.end()
    observations = []
    for observation in seen:
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
    for words, seen in (("observe()", params), ("averages", observation.averages)):
        if seen is not None and set(seen) != set(names):
            raise RefusalError(
                f"{words} has the names {sorted(seen)}, the problem {sorted(names)}: "
                "return the parameters of the problem's module alone, by its names"
            )
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

    First it selects the run's setting, if any. Acts between updates take the group of the last
    update, or of the first one to come. "save" saves and drops the result. "restart" saves, updates
    once more, starts anew, and loads. "look" observes, and evaluates each rank's first microbatch.

    At the end it observes, and evaluates the last group. Its rows are then twice as long, unless
    the task has a vocabulary. Nothing is evaluated if the trainer cannot, or if no token has
    weight.
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
    """Returns each rank's observation; the first one also has the evaluation of a group.

    It does not evaluate if the trainer cannot, or if no token of the group has weight. ``watch``
    calls the evaluation, and notes what it changes in the group.
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
