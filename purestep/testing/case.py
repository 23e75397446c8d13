"""Two ways to write the same training, which must end in the same state; and whether they do."""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purestep.testing.bounds import Bound, bound
from purestep.testing.problem import Batch, Linear, Problem
from purestep.testing.specification import Specification, together
from purestep.testing.trainer import Evaluating, Group, Observation, Resumable, Switchable, Trainer

Act: TypeAlias = Literal["restart"] | Group
"""An update on a group; or "restart": the state is saved, and put back after a fresh start."""


class Run(NamedTuple):
    """What a trainer is to do: on so many ranks, in one of its settings."""

    acts: Sequence[Act]
    how: str
    ranks: int = 1
    setting: str | None = None

    @property
    def groups(self) -> list[Group]:
        """Of the updates."""
        return [act for act in self.acts if act != "restart"]


@dataclass(frozen=True, repr=False)
class Case:
    """Two runs that must agree; ``first`` None: the second one and the specification.

    ``reports`` names what the ranks' reports of the last update must agree in, too. ``scale`` is
    how much larger the count of tokens is in the second.
    """

    problem: Problem
    first: Run | None
    second: Run
    reports: tuple[str, ...] = ("loss", "grad_norm", "num_tokens")
    scale: float = 1.0

    def __repr__(self) -> str:
        return self.code()

    def words(self) -> str:
        """The case in words."""
        first = "the equation" if self.first is None else self.first.how
        words = [f"{name.replace('_', ' ')} {n}" for name, n in _numbers(self.problem).items()]
        batch = together([part for share in self.second.groups[-1] for part in share])
        if batch is not None:
            weights = self.problem.weights(batch)
            listed = (weights.to(torch.int64) if weights.dtype == torch.bool else weights).tolist()
            words.append(f"weights of the last update's rows in this order {listed}")
        return f"{first} against {self.second.how}; {', '.join(words)}"

    def code(self) -> str:
        """The case as a program, for a ``trainer`` of yours."""
        model = self.problem.model
        known = f"ps.testing.REGRESSION, {model!r}" if isinstance(model, Linear) else "task, model"
        numbers = ", ".join(f"{name}={n}" for name, n in _numbers(self.problem).items())
        lines = [
            "import torch",
            "import purestep as ps",
            "",
            f"problem = ps.testing.Problem({known}, {numbers})",
        ]
        one = "trainer" if self.first else "ps.testing.Specification()"
        for trainer, run in ((one, self.first or self.second), ("trainer", self.second)):
            start = f"it.start(problem, ranks={run.ranks})"
            lines += ["", f"it = {trainer}  # {run.how}"]
            lines += [start] if run.setting is None else [f"it.use({run.setting!r})", start]
            for act in run.acts:
                if act == "restart":
                    lines += ["saved = it.save()", start, "it.load(saved)"]
                else:
                    shares = ", ".join(f"[{', '.join(map(_code, share))}]" for share in act)
                    lines.append(f"it.update([{shares}])")
            lines.append("print(it.observe())")
        return "\n".join(lines)


def _numbers(problem: Problem) -> dict[str, float]:
    """The numbers of its SGD, but for those that are zero."""
    names = ("learning_rate", "momentum", "weight_decay")
    return {name: getattr(problem, name) for name in names if getattr(problem, name)}


def _code(batch: Batch) -> str:
    items = []
    for key, value in batch.items():
        numbers = re.sub(r"\b(nan|inf)\b", r'float("\1")', str(value.tolist()))
        shape = "" if value.numel() else f".view{tuple(value.shape)}"
        items.append(f"{key!r}: torch.tensor({numbers}, dtype={value.dtype}){shape}")
    return f"{{{', '.join(items)}}}"


class RefusalError(Exception):
    """A trainer raised an exception, which is its cause."""


class DisagreementError(AssertionError):
    """Two runs that must agree do not: in this respect, by so much relative to its size."""

    def __init__(self, case: Case, what: str, size: float) -> None:
        super().__init__(f"{what}\n  in this case: {case.words()}")
        self.case, self.what, self.size = case, what, size


def outcome(
    trainer: Trainer, problem: Problem, run: Run, *, copied: bool = True
) -> Sequence[Observation]:
    """What each rank sees after a run, on copies of the data unless you say otherwise."""
    try:
        if run.setting is not None:
            assert isinstance(trainer, Switchable)
            trainer.use(run.setting)
        trainer.start(problem, run.ranks)
        for act in run.acts:
            if act == "restart":
                assert isinstance(trainer, Resumable)
                saved = trainer.save()
                trainer.start(problem, run.ranks)
                trainer.load(saved)
            else:
                trainer.update(copy.deepcopy(act) if copied else act)
        seen = trainer.observe()
    except Exception as error:
        raise RefusalError(f"{type(error).__name__}: {error}".split("\n")[0]) from error
    known = problem.params().keys()
    for each in seen:
        if {*each.params} != {*known}:
            raise ValueError(
                f"observe() of {type(trainer).__name__} names the parameters {[*each.params]}, but "
                f"the problem's module has {[*known]}: give them the names of the problem's"
            )
    return seen


def agree(trainer: Trainer, case: Case) -> bool:
    """Whether the two runs agree to the bit; ``DisagreementError`` where they differ by more.

    They agree in their last states and in what they report.
    """
    # The first run has no more in it than has to be computed.
    whole = _wholes(case.first or case.second)
    tokens = sum(case.problem.weights(b).numel() for b in _wholes(case.second) if b is not None)
    allowed = bound(case.problem, whole, tokens, trainer.abilities.dtype)
    if case.first is None:
        (expected,) = outcome(Specification(), case.problem, case.second._replace(setting=None))
    else:
        first = outcome(trainer, case.problem, case.first)
        expected = first[0]
        _compare(case, first, expected, allowed)
    second = outcome(trainer, case.problem, case.second)
    _compare(case, second, expected, allowed, case.scale)
    if isinstance(trainer, Evaluating) and "loss" in case.reports:
        last = whole[-1]
        if last is not None and case.problem.weights(last).any():
            _compare_evaluations(trainer, case, allowed)
    return all(
        bool(_same(each.params[name], expected.params[name]).all())
        for each in second
        for name in expected.params
    )


def _wholes(run: Run) -> list[Batch | None]:
    return [together([part for share in group for part in share]) for group in run.groups]


def _compare_evaluations(trainer: Any, case: Case, allowed: Bound) -> None:
    """Both groups are evaluated with the parameters at hand."""
    group = case.second.groups[-1]
    try:
        if case.first is None:
            specification = Specification()
            specification.start(case.problem, 1)
            trainer.start(case.problem, len(group))
            want = specification.evaluate(group)
        else:
            want = trainer.evaluate(case.first.groups[-1])
        have = trainer.evaluate(group)
    except Exception as error:
        raise RefusalError(f"evaluation: {type(error).__name__}: {error}") from error
    _compare_numbers(case, "the loss in evaluation", have, want, allowed.evaluation)


def _compare(
    case: Case,
    seen: Sequence[Observation],
    expected: Observation,
    allowed: Bound,
    scale: float = 1.0,
) -> None:
    for rank, each in enumerate(seen):
        on = f" on rank {rank}" if len(seen) > 1 else ""
        for name, want in expected.params.items():
            have = each.params[name].detach().to(torch.float64)
            want = want.detach().to(torch.float64)
            error = float(torch.where(_same(have, want), 0, have - want).norm())
            # Each of the two may be off by the bound.
            if not error <= 2 * allowed.params[name]:
                moved = float((want - case.problem.params()[name].to(torch.float64)).norm())
                raise DisagreementError(
                    case,
                    f"{name}{on}: {_shown(have)} is not {_shown(want)}; they are {error:.3g} "
                    f"apart, and rounding explains {2 * allowed.params[name]:.1g}",
                    error / moved if moved else inf,
                )
        bounds = {"loss": allowed.loss, "grad_norm": allowed.grad_norm, "num_tokens": 0.0}
        for name in case.reports:
            number, other = getattr(each, name), getattr(expected, name)
            if number is not None and other is not None:
                other = float(other) * (scale if name == "num_tokens" else 1.0)
                _compare_numbers(case, f"{name}{on}", float(number), other, bounds[name])


def _compare_numbers(case: Case, what: str, have: float, want: float, allowed: float) -> None:
    """Two that are infinite alike, or no numbers, are equal."""
    same = have == want or (isnan(have) and isnan(want))
    if not same and not abs(have - want) <= 2 * allowed:
        size = abs(have - want) / abs(want) if want else inf
        raise DisagreementError(case, f"{what}: {have} is not {want}", size)


def _same(have: Tensor, want: Tensor) -> Tensor:
    """Where they are equal. What is no number in both runs is the same in both."""
    return (have == want) | (have.isnan() & want.isnan())


def _shown(value: Tensor) -> Any:
    return value.tolist() if value.numel() <= 8 else f"{value.flatten()[:4].tolist()}..."
