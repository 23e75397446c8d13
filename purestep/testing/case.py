"""Two ways to write the same training, which must end in the same state; and whether they do."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.testing.bounds import bound
from purestep.testing.problem import Batch, Linear, Problem
from purestep.testing.specification import Specification, together
from purestep.testing.trainer import Evaluating, Group, Observation, Trainer
from purestep.testing.watch import Watch, same

Act: TypeAlias = Literal["restart", "save", "look"] | Group
"""An update on a group; "save": the state is saved; "restart": the same, another update is lost,
and the state is put back after a fresh start; "look": it is observed, and evaluates a part."""

LOOK = 'it.observe(); hasattr(it, "evaluate") and it.evaluate([share[:1] for share in group])'


class Run(NamedTuple):
    """What a trainer is to do: on so many ranks, in one of its settings."""

    acts: Sequence[Act]
    how: str
    ranks: int = 1
    setting: str | None = None

    @property
    def groups(self) -> list[Group]:
        """Of the updates."""
        return [act for act in self.acts if not isinstance(act, str)]


@dataclass(frozen=True, repr=False)
class Case:
    """Two runs that must agree; ``first`` None: the second one and the specification.

    ``reports`` names what the ranks' reports of the last update must agree in, too; "evaluation" is
    of its group with rows twice as long. ``scale`` is how much larger the count of tokens is in the
    second. ``part`` is the law's.
    """

    problem: Problem
    first: Run | None
    second: Run
    reports: tuple[str, ...] = ("loss", "grad_norm", "num_tokens", "evaluation")
    scale: float = 1.0
    part: str = ""

    def words(self) -> str:
        """The case in words, with all its numbers."""
        first = self.first or Run([], "the equation")
        words = [f"{first.how} against {self.second.how}"]
        if isinstance(self.problem.model, Linear):
            words += [
                f"start {name} {_said(p)}" for name, p in self.problem.params().items()
            ]
        words += [
            f"{name.replace('_', ' ')} {n}"
            for name, n in _numbers(self.problem).items()
        ]
        longer = max(first, self.second, key=lambda run: len(run.groups))
        for at, group in enumerate(longer.groups, 1):
            batches = [
                [f"{k} {_said(x)}" for k, x in b.items()]
                for share in group
                for b in share
            ]
            words.append(
                f"update {at}: {' | '.join(map(', '.join, batches)) or 'nothing'}"
            )
        return "; ".join(words)

    def code(self) -> str:
        """The case as a program, for a ``trainer`` of yours."""
        model = self.problem.model
        known = (
            f"ps.testing.REGRESSION, {model!r}"
            if isinstance(model, Linear)
            else "task, model"
        )
        numbers = ", ".join(f"{name}={n}" for name, n in _numbers(self.problem).items())
        lines = ["import torch", "import purestep as ps", ""]
        lines.append(f"problem = ps.testing.Problem({known}, {numbers})")
        one = "trainer" if self.first else "ps.testing.Specification()"
        for trainer, run in (
            (one, self.first or self.second),
            ("trainer", self.second),
        ):
            start = f"it.start(problem, ranks={run.ranks})"
            lines += ["", f"it = {trainer}  # {run.how}"]
            lines += (
                [start] if run.setting is None else [f"it.use({run.setting!r})", start]
            )
            lines += [_group(run.groups[0])] * isinstance(run.acts[0], str)
            for act in run.acts:
                if act == "restart":
                    lines += [
                        "saved = it.save()",
                        "it.update(group)",
                        start,
                        "it.load(saved)",
                    ]
                elif isinstance(act, str):
                    lines += [LOOK if act == "look" else "it.save()"]
                else:
                    lines += [_group(act), "it.update(group)"]
            lines.append("print(it.observe())")
        return "\n".join(lines)

    __repr__ = code

    def coverage(self) -> dict[str, Any]:
        """What kind of case it is, in a few numbers."""
        *_, last = self.second.groups
        batch = _whole((self.first or self.second).groups[-1])
        weights = {*self.problem.weights(batch).flatten().tolist()} if batch else set()
        kind = "whole" if all(w == int(w) for w in weights) else "fractions"
        kind = "0 and 1" if weights <= {0, 1} else kind
        numbers = sum(map(len, last)), self.second.ranks, len(self.second.groups), kind
        return dict(
            zip(("microbatches", "ranks", "updates", "weights"), numbers, strict=True)
        )


def _numbers(problem: Problem) -> dict[str, float]:
    """The numbers of its SGD, but for those that are zero."""
    names = ("learning_rate", "momentum", "weight_decay")
    return {name: getattr(problem, name) for name in names if getattr(problem, name)}


def _said(x: Tensor) -> str:
    return re.sub(r"\.0\b", "", str(x.tolist()))


def _group(group: Group) -> str:
    shares = ", ".join(f"[{', '.join(map(_code, share))}]" for share in group)
    return f"group = [{shares}]"


def _code(batch: Batch) -> str:
    items = [
        f"{k!r}: torch.tensor({x.tolist()}, dtype={x.dtype})" for k, x in batch.items()
    ]
    return re.sub(r"\b(nan|inf)\b", r'float("\1")', f"{{{', '.join(items)}}}")


class RefusalError(Exception):
    """A trainer raised an exception, which is its cause."""


class DisagreementError(AssertionError):
    """Two runs that must agree do not: in this respect, by so much relative to its size."""

    def __init__(self, case: Case, what: str, size: float) -> None:
        super().__init__(f"{what}\n  in this case: {case.words()}")
        self.case, self.what, self.size = case, what, size


FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (\S+)\n(?:    .*\n)*')


def cause(error: BaseException) -> str:
    """The exception behind all others, which a traceback tells first, and where it was raised."""
    told = "".join(traceback.format_exception(error))
    inner = re.split(r"\n\n(?:The above exception was|During handling of)", told)[0]
    *_, frame = FRAME.finditer(inner)
    said = " ".join(inner[frame.end() :].split())[:400]
    then = (
        ""
        if inner == told
        else f"; then {type(error).__name__}: {error}".split("\n")[0]
    )
    return f"{said} ({Path(frame[1]).name}:{frame[2]}, in {frame[3]}){then}"


def outcome(trainer: Trainer, problem: Problem, run: Run) -> Sequence[Observation]:
    """What each rank sees after a run, on copies of the data; the first evaluates, too."""
    watch = Watch()
    try:
        seen = _after(trainer, problem, run, watch)
        changed = watch.changed()
    except Exception as error:
        raise RefusalError(cause(error)) from error
    finally:
        watch.end()
    known, dtype = [*problem.params()], trainer.abilities.dtype
    for each in seen:
        if {*each.params} != {*known}:
            raise ValueError(
                f"observe() has the names {[*each.params]}, the problem {known}"
            )
        if other := [p.dtype for p in each.params.values() if p.dtype != dtype]:
            how = f"declare Abilities(dtype={other[0]}), or compute in {dtype}"
            raise RefusalError(
                f"its parameters are {other[0]}, its abilities say {dtype}: {how}"
            )
    return [each._replace(changed=[*(each.changed or ()), *changed]) for each in seen]


def _after(trainer: Any, problem: Problem, run: Run, watch: Watch) -> list[Observation]:
    def look(group: Group) -> list[Observation]:
        (first, *others), batch = trainer.observe(), _whole(group)
        if isinstance(trainer, Evaluating) and batch and problem.weights(batch).any():
            first = first._replace(evaluation=watch.call(trainer.evaluate, group))
        return [first, *others]

    if run.setting is not None:
        trainer.use(run.setting)
    trainer.start(problem, run.ranks)
    group = run.groups[0]
    for act in run.acts:
        if act == "restart":
            saved = trainer.save()
            watch.call(trainer.update, group)
            trainer.start(problem, run.ranks)
            trainer.load(saved)
        elif isinstance(act, str):
            look([share[:1] for share in group]) if act == "look" else trainer.save()
        else:
            group = act
            watch.call(trainer.update, group)
    if (
        not problem.task.vocabulary
    ):  # Rows that no update has seen, with the same mean loss.
        group = [
            [{key: _twice(x) for key, x in b.items()} for b in share] for share in group
        ]
    return look(group)


def _twice(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else torch.cat([x, x], 1)


def agree(trainer: Trainer, case: Case) -> bool:
    """Whether the two runs agree to the bit; ``DisagreementError`` where they differ by more.

    They agree in their last states and in what they report.
    """
    problem = case.problem
    # The first run has no more in it than has to be computed.
    wholes = [_whole(group) for group in (case.first or case.second).groups]
    tokens = sum(
        problem.weights(b).numel() for g in case.second.groups for s in g for b in s
    )
    allowed = bound(problem, wholes, tokens, trainer.abilities)
    first = outcome(
        trainer if case.first else Specification(), problem, case.first or case.second
    )
    expected, last = first[0], wholes[-1]
    if expected.evaluation is not None and last and "key" in last:
        # Nothing is dropped in evaluation.
        equation = Specification()
        equation.start(problem, 1)
        equation.params = {name: p.double() for name, p in expected.params.items()}
        expected = expected._replace(evaluation=equation.evaluate([[last]]))
    second = outcome(trainer, problem, case.second)
    for seen, scale in ((first, 1.0), (second, case.scale)):
        for rank, each in enumerate(seen):
            on = f" on rank {rank}" if len(seen) > 1 else ""
            for name, want in expected.params.items():
                start = problem.params()[name]
                _close(
                    case,
                    name + on,
                    each.params[name],
                    want,
                    allowed.params[name],
                    start,
                )
            for name in case.reports:
                have, want = getattr(each, name), getattr(expected, name)
                if have is not None and want is not None:
                    factor = scale if name == "num_tokens" else 1.0
                    _close(
                        case,
                        name + on,
                        have,
                        factor * want,
                        factor * allowed.reports[name],
                    )
    params = expected.params.items()
    return all(
        bool(same(each.params[name], p).all()) for each in second for name, p in params
    )


def _whole(group: Group) -> Batch | None:
    return together([batch for share in group for batch in share])


def _close(
    case: Case,
    what: str,
    have: Any,
    want: Any,
    allowed: float,
    start: Tensor | float = 0.0,
) -> None:
    """Each of the two may be off by the bound."""
    have, want = (
        torch.as_tensor(x, dtype=torch.float64).detach() for x in (have, want)
    )
    error = float(torch.where(same(have, want), 0, have - want).norm())
    if not error <= 2 * allowed:
        moved = float((want - start).norm())
        shown, other = (f"{x.tolist()}"[:200] for x in (have, want))
        apart = f"they are {error:.3g} apart, and rounding explains {2 * allowed:.1g}"
        what = f"{what}: {shown} is not {other}; {apart}"
        raise DisagreementError(case, what, error / moved if moved else inf)
