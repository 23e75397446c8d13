"""Judges a trainer by the laws: as an error, as tests, and as a table."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from purestep.testing.case import (
    Case,
    DisagreementError,
    RefusalError,
    UnaskedError,
)
from purestep.testing.catalogue import LAW_NAMES, LAWS, TrainerLaw
from purestep.testing.draws import counterexample
from purestep.testing.trainer import Trainer, Weights

Status: TypeAlias = Literal["holds", "wrong", "refuses", "not asked"]
Names: TypeAlias = Iterable[str]
Seed: TypeAlias = int | Literal["today"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SEVERITY = ("not asked", "holds", "refuses", "wrong")
FAILURES = ("wrong", "refuses")


class Verdict(NamedTuple):
    """Says whether a trainer keeps one law.

    ``status`` "holds" means: in ``cases`` cases, ``num_bitwise`` of them to the bit. "wrong" comes
    with the smallest ``case`` found, a ``reason`` in words, and the ``size`` of the error, as in
    ``DisagreementError``. "refuses" comes with the smallest case that raised an exception, and its
    ``reason``. "not asked" comes with a ``reason``.

    ``parts`` has a verdict for each kind of case, where the law tells them apart. ``coverage``
    counts the cases by their microbatches, ranks, updates and weights.
    """

    law: TrainerLaw
    status: Status
    cases: int = 0
    num_bitwise: int = 0
    case: Case | None = None
    reason: str = ""
    size: float = 0.0
    parts: Mapping[str, Any] = {}
    coverage: Mapping[str, Counter[Any]] = {}

    def __str__(self) -> str:
        law = f"{self.law.name} {self.law.title}"
        if self.status == "not asked":
            return f"{law}: not asked, {self.reason}"
        if self.status != "holds":
            return f"{law}: {self._describe_parts()}. {self.reason}"
        bits = "all" if self.num_bitwise == self.cases else self.num_bitwise
        words = f"{law}: holds in {self.cases} cases, {bits} to the bit"
        return f"{words}; {self._describe_coverage()}"

    def _describe_parts(self) -> str:
        names = defaultdict(list)
        for part, verdict in self.parts.items():
            names[verdict.status].append(part)
        words = [f"{status} for {', '.join(parts)}" for status, parts in names.items()]
        return ", ".join(words) or self.status

    def _describe_coverage(self) -> str:
        words = []
        for what, counts in self.coverage.items():
            if what != "weights":
                least = min(counts)
                most = max(counts)
                span = f"{least}" if least == most else f"{least}-{most}"
                words.append(f"{what} {span}")
        return ", ".join(words)


def run_laws(
    trainer: Trainer,
    laws: Names = LAW_NAMES,
    *,
    cases: int = 100,
    shrink: int = 200,
    seed: Seed = 0,
    progress: Callable[[str], object] | None = None,
) -> list[Verdict]:
    """Returns a verdict for each law. A law says "refuses" only where no number is wrong.

    Raises ``ValueError`` for an unknown law, for less than one case, and for a dtype that rounds
    too much to be judged. It also does for ranks below 1 or unknown weights in ``capabilities``.
    Raises ``TypeError`` for an object without ``capabilities``, and for a class.

    Args:
        trainer: what is judged.
        laws: their names.
        cases: how many are tried for each law; its parts share them.
        shrink: how many more to find a smaller one.
        seed: from which cases are drawn; "today" draws others each day.
        progress: gets a text before each case, such as "T1 equal tokens: case 3 of 25".

    >>> from purestep.testing import ReferenceTrainer
    >>> for verdict in run_laws(ReferenceTrainer(), ["T5", "T16"], cases=10):
    ...     print(verdict)
    T5 weights: holds in 10 cases, 7 to the bit; microbatches 1, ranks 1, updates 1
    T16 resume: not asked, it cannot be saved here
    """
    check_cases(cases)
    if seed == "today":
        seed = date.today().toordinal()
    budget = _Budget(cases, shrink, seed, progress)
    judged = [_find_law(name) for name in laws]
    return [_judge_law(trainer, law, budget) for law in judged]


def check_cases(cases: int) -> None:
    """Raises ``ValueError`` for less than one case: every law would hold."""
    if cases < 1:
        raise ValueError(
            f"cases is {cases}, and every law would hold in none: try 1 or more"
        )


def check_can_be_judged(trainer: Trainer, laws: Names) -> None:
    """Raises as ``run_laws`` does, before any case, for an unknown law or an unfit trainer."""
    for name in laws:
        _judge_law(trainer, _find_law(name), _Budget(0, 0, 0))


def check(
    trainer: Trainer,
    laws: Names = LAW_NAMES,
    *,
    cases: int = 100,
    shrink: int = 200,
    seed: Seed = 0,
) -> None:
    """Raises an ``AssertionError`` for the first law that is wrong or refused.

    The error tells the smallest case in words, and as code to paste. A law that is not asked
    passes. The arguments and the other errors are those of ``run_laws``; an unknown law raises
    ``ValueError`` before any is judged.

    >>> from purestep.testing import ReferenceTrainer
    >>> check(ReferenceTrainer(), ["T1", "T2", "T3"], cases=10)
    """
    names = list(laws)
    for name in names:
        _find_law(name)
    for name in names:
        (verdict,) = run_laws(trainer, [name], cases=cases, shrink=shrink, seed=seed)
        _raise_failure(verdict)


def _raise_failure(verdict: Verdict) -> None:
    """Raises ``AssertionError`` with the report of a law that is wrong or refused."""
    if verdict.case is not None:
        raise AssertionError(report(verdict))


def law_tests(
    make: Callable[[], Trainer],
    laws: Names = LAW_NAMES,
    *,
    cases: int = 100,
    shrink: int = 200,
    seed: Seed = 0,
) -> Callable[[str], None]:
    """Returns a test function for pytest, parametrized by law.

    Assign it to a name that pytest collects: ``test_my_trainer =
    ps.testing.law_tests(make_trainer)``. A law that is not asked is skipped, with the reason.
    ``make`` makes a trainer for each test. The other arguments are those of ``run_laws``; an
    unknown law, or less than one case, raises ``ValueError`` at once.
    """
    import pytest

    check_cases(cases)
    names = list(laws)
    ids = [f"{name}_{_find_law(name).title}" for name in names]

    @pytest.mark.parametrize("law", names, ids=ids)
    def test(law: str) -> None:
        (verdict,) = run_laws(make(), [law], cases=cases, shrink=shrink, seed=seed)
        if verdict.status == "not asked":
            pytest.skip(f"not asked: {verdict.reason}")
        _raise_failure(verdict)

    return test


class _Refusal(NamedTuple):
    """Holds a case in which a claim raised ``RefusalError``, and the error's text."""

    case: Case
    reason: str

    def size(self) -> int:
        """Returns how many characters the program has that reproduces the case."""
        return len(self.case.reproducer())


class _Budget(NamedTuple):
    """Holds how many cases are drawn, how many simpler ones at most, the seed, and a listener."""

    cases: int
    shrink: int
    seed: int
    progress: Callable[[str], object] | None = None

    def report_progress(self, name: str, number: int, num_simpler: int) -> None:
        """Calls ``progress``, unless it is None, with a text that says which case is drawn.

        The text is as "T1 equal tokens: case 3 of 25", where ``name`` is that of law and part. If
        ``num_simpler`` is not 0, it is about the search for a simpler case.
        """
        if self.progress is None:
            return
        text = f"{name}: case {number} of {self.cases}"
        if num_simpler:
            text = f"{name}: wrong; simpler case {num_simpler} of at most {self.shrink}"
        self.progress(text)


def _find_law(name: str) -> TrainerLaw:
    if name not in LAWS:
        raise ValueError(f"there is no law {name!r}: they are {', '.join(LAWS)}")
    return LAWS[name]


def _judge_law(trainer: Trainer, law: TrainerLaw, budget: _Budget) -> Verdict:
    """Judges all parts of a law, and returns the worst of their verdicts.

    The parts share the budget's cases, rounded up. A law that cannot be put to the trainer is "not
    asked", and so is one of which no case shows anything. Raises ``TypeError`` or
    ``ValueError`` for an object that cannot be judged.
    """
    _check_trainer(trainer)
    obstacle = law.find_obstacle(trainer)
    if obstacle:
        return Verdict(law, "not asked", reason=obstacle)
    try:
        return _judge_parts(trainer, law, budget)
    except UnaskedError as unasked:
        return Verdict(law, "not asked", reason=str(unasked))


def _judge_parts(trainer: Trainer, law: TrainerLaw, budget: _Budget) -> Verdict:
    """Judges each part of a law; their verdict is the worst one."""
    if len(law.parts) == 1:
        return _judge_part(trainer, law, law.parts[0], budget)
    per_part = math.ceil(budget.cases / len(law.parts))
    part_budget = budget._replace(cases=per_part)
    verdicts = {}
    for part in law.parts:
        verdicts[part] = _judge_part(trainer, law, part, part_budget)
    return _join_verdicts(verdicts)


def _join_verdicts(verdicts: Mapping[str, Verdict]) -> Verdict:
    """Returns the worst of the verdicts on a law's parts, with all of them in ``parts``.

    ``cases``, ``num_bitwise`` and ``coverage`` are the sums of theirs.
    """
    worst = max(verdicts.values(), key=_severity)
    cases = 0
    exact = 0
    coverage: dict[str, Counter[Any]] = defaultdict(Counter)
    for verdict in verdicts.values():
        cases += verdict.cases
        exact += verdict.num_bitwise
        for what, counts in verdict.coverage.items():
            coverage[what] += counts
    return worst._replace(
        cases=cases,
        num_bitwise=exact,
        parts=verdicts,
        coverage=dict(coverage),
    )


def _severity(verdict: Verdict) -> int:
    return SEVERITY.index(verdict.status)


def _check_trainer(trainer: Any) -> None:
    if isinstance(trainer, type) or not hasattr(trainer, "capabilities"):
        raise TypeError(
            f"{trainer!r} is no trainer: make one by ps.testing.loop(update) of a loop, by "
            "ps.testing.PureTrainer(make, capabilities) of a pure step, or by calling the class"
        )
    can = trainer.capabilities
    if can.dtype not in DTYPES:
        raise ValueError(
            f"{can.dtype} rounds so much that errors could hide in it: judge in {DTYPES}"
        )
    if can.ranks < 1:
        raise ValueError(
            f"capabilities.ranks is {can.ranks}: a trainer runs on 1 or more"
        )
    if can.weights not in get_args(Weights):
        raise ValueError(
            f"capabilities.weights is {can.weights!r}: it is one of {get_args(Weights)}"
        )


def _judge_part(
    trainer: Trainer, law: TrainerLaw, part: str, budget: _Budget
) -> Verdict:
    """Draws cases of one part of a law, and returns the verdict.

    From the first wrong case on, it draws simpler ones, and reports the simplest. A refusal does
    not end the search: the verdict is "refuses" only if no case is wrong. Refused cases count in
    ``coverage``, but not in ``cases``, and so do cases in which the claim raises ``UnaskedError``.
    If every case raises ``UnaskedError``, the first such error is raised. Errors of drawing a case
    are raised, and so are other errors of the claim. Another ``AssertionError`` first begins the
    search for simpler cases, whose error may replace it.
    """
    coverage: dict[str, Counter[Any]] = defaultdict(Counter)
    exact: list[bool] = []
    refused: list[_Refusal] = []
    unasked: list[UnaskedError] = []
    is_shrinking = False
    num_drawn = 0
    num_simpler = 0

    def claim(case: Case) -> None:
        nonlocal is_shrinking, num_drawn, num_simpler
        if is_shrinking:
            num_simpler += 1
        else:
            num_drawn += 1
            for what, number in case.coverage().items():
                coverage[what][number] += 1
        budget.report_progress(f"{law.name} {part}".strip(), num_drawn, num_simpler)
        try:
            is_exact = law.claim(trainer, case)
            if not is_shrinking:
                exact.append(is_exact)
        except RefusalError as refusal:
            refused.append(_Refusal(case, str(refusal)))
        except UnaskedError as nothing:
            unasked.append(nothing)
        except AssertionError:
            # From the first wrong case on, others are drawn to find a smaller one.
            is_shrinking = True
            raise

    error = counterexample(
        lambda draw: law.draw_case(draw, trainer, part),
        claim,
        budget.cases,
        budget.shrink,
        (law.name, part, budget.seed),
    )
    verdict = Verdict(
        law,
        "holds",
        cases=len(exact),
        num_bitwise=sum(exact),
        coverage=dict(coverage),
    )
    if unasked and not (error or refused or exact):
        raise unasked[0]
    return _conclude(verdict, error, refused)


def _conclude(
    verdict: Verdict, error: Exception | None, refused: Sequence[_Refusal]
) -> Verdict:
    """Returns a verdict with the case and the reason of an error, or of the shortest refusal.

    For an error the status is "wrong", and for a refusal "refuses". Without either, the verdict
    stays. Raises another error than ``DisagreementError``.
    """
    if isinstance(error, DisagreementError):
        return verdict._replace(
            status="wrong",
            case=error.case,
            reason=error.what,
            size=error.size,
        )
    if error is not None:
        raise error
    if refused:
        smallest = min(refused, key=_Refusal.size)
        return verdict._replace(
            status="refuses",
            case=smallest.case,
            reason=smallest.reason,
        )
    return verdict


def report(verdict: Verdict) -> str:
    """Returns the law's statement, the reason, and the smallest case of a verdict.

    The case comes in words and as code. A verdict without a case raises ``AssertionError``.
    """
    assert verdict.case is not None
    failure = "does not hold" if verdict.status == "wrong" else "is refused"
    title = verdict.law.title
    if verdict.case.part:
        title = f"{title}, {verdict.case.part}"
    return (
        f"{verdict.law.name} ({title}) {failure}. {verdict.law.statement}\n\n"
        f"  {verdict.reason}\n\n"
        f"  The smallest case found: {verdict.case.describe()}.\n\n"
        f"  To see it with a trainer of yours:\n\n"
        f"{verdict.case.reproducer()}\n"
    )
