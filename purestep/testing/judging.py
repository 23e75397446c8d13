"""What the laws say of a trainer: as an error, as tests, and as a table."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from purestep.testing.case import Case, RefusalError
from purestep.testing.catalogue import LAWS, TrainerLaw
from purestep.testing.draws import counterexample
from purestep.testing.trainer import Trainer

Finding: TypeAlias = Literal["holds", "wrong", "refuses", "not asked"]
Names: TypeAlias = Iterable[str]
Seed: TypeAlias = int | Literal["today"]
SEVERITY = ("not asked", "holds", "refuses", "wrong")


class Verdict(NamedTuple):
    """What is found out about one law.

    ``finding`` is "holds", in ``cases`` cases, of which so many ``to_the_bit``; "wrong", with the
    smallest ``case`` found, ``why`` in words, and the ``size`` of the error relative to the update;
    "refuses", with the smallest case that raised an exception; or "not asked", and ``why``.

    ``parts`` has a verdict for each kind of case, where the law tells them apart. ``coverage``
    counts the cases by their microbatches, ranks, updates and weights.
    """

    law: TrainerLaw
    finding: Finding
    cases: int = 0
    to_the_bit: int = 0
    case: Case | None = None
    why: str = ""
    size: float = 0.0
    parts: Mapping[str, Any] = {}
    coverage: Mapping[str, Counter[Any]] = {}

    def __str__(self) -> str:
        law, parts = f"{self.law.name} {self.law.title}", defaultdict(list)
        for part, verdict in self.parts.items():
            parts[verdict.finding].append(part)
        if self.finding == "not asked":
            return f"{law}: not asked, {self.why}"
        if self.finding != "holds":
            said = [
                f"{finding} for {', '.join(names)}" for finding, names in parts.items()
            ]
            return f"{law}: {', '.join(said) or self.finding}. {self.why}"
        spans = [
            f"{what} {'-'.join(dict.fromkeys([str(min(numbers)), str(max(numbers))]))}"
            for what, numbers in self.coverage.items()
            if what != "weights"
        ]
        bits = "all" if self.to_the_bit == self.cases else f"{self.to_the_bit}"
        return (
            f"{law}: holds in {self.cases} cases, {bits} to the bit; {', '.join(spans)}"
        )


def judge(
    trainer: Trainer,
    laws: Names = LAWS,
    *,
    cases: int = 100,
    shrink: int = 200,
    seed: Seed = 0,
) -> list[Verdict]:
    """A verdict for each law. A law says "refuses" only where no number is wrong.

    Args:
        trainer: what is judged.
        laws: their names.
        cases: how many are tried for each law.
        shrink: how many more to find a smaller one.
        seed: from which cases are drawn; "today" draws others each day.

    >>> from purestep.testing import Specification
    >>> for verdict in judge(Specification(), ["T5", "T16"], cases=10):
    ...     print(verdict)
    T5 weights: holds in 10 cases, 7 to the bit; microbatches 1, ranks 1, updates 1
    T16 resume: not asked, it cannot be saved here
    """
    if seed == "today":
        seed = date.today().toordinal()
    return [_verdict(trainer, _law(name), cases, shrink, seed) for name in laws]


def check(trainer: Trainer, laws: Names = LAWS, **how: Any) -> None:
    """Raises an ``AssertionError`` for the first law that does not hold.

    It tells the smallest case in words, and as code to paste. ``how`` is the rest of ``judge``.

    >>> from purestep.testing import Specification
    >>> check(Specification(), ["T1", "T2", "T3"], cases=10)
    """
    for name in laws:
        (verdict,) = judge(trainer, [name], **how)
        if verdict.case is not None:
            raise AssertionError(report(verdict))


def laws(
    make: Callable[[], Trainer], laws: Names = LAWS, **how: Any
) -> Callable[[str], None]:
    """A test for pytest, once for each law: ``test_my_trainer = ps.testing.laws(make_trainer)``.

    A law that asks for more than the trainer's abilities is skipped, with the reason. ``how`` is
    the rest of ``judge``.
    """
    import pytest

    @pytest.mark.parametrize(
        "law", [*laws], ids=[f"{name}_{_law(name).title}" for name in laws]
    )
    def test(law: str) -> None:
        trainer = make()
        if missing := LAWS[law].missing(trainer):
            pytest.skip(f"not asked: {missing}")
        check(trainer, [law], **how)

    return test


def _verdict(
    trainer: Trainer, law: TrainerLaw, cases: int, shrink: int, seed: int
) -> Verdict:
    if isinstance(trainer, type) or not hasattr(trainer, "abilities"):
        raise TypeError(
            f"{trainer!r} is no trainer: make one by ps.testing.loop(update) of a loop, by "
            "ps.testing.PureTrainer(make, abilities) of a pure step, or by calling the class"
        )
    dtypes = (
        [torch.float64, torch.float32] if trainer.abilities.sgd else [torch.float64]
    )
    if (dtype := trainer.abilities.dtype) not in dtypes:
        raise ValueError(
            f"{dtype} rounds so much that errors could hide in it: judge in {dtypes}"
        )
    if missing := law.missing(trainer):
        return Verdict(law, "not asked", why=missing)
    most = -(-cases // len(law.parts))
    found = {
        part: _of_part(trainer, law, part, most, shrink, seed) for part in law.parts
    }
    worst = max(found.values(), key=lambda verdict: SEVERITY.index(verdict.finding))
    counts = [verdict.coverage for verdict in found.values()]
    coverage = {
        at: sum((count[at] for count in counts), Counter()) for at in worst.coverage
    }
    cases, bits = (
        sum(getattr(v, at) for v in found.values()) for at in ("cases", "to_the_bit")
    )
    parts = found if len(found) > 1 else {}
    return worst._replace(cases=cases, to_the_bit=bits, parts=parts, coverage=coverage)


def _of_part(
    trainer: Trainer, law: TrainerLaw, part: str, cases: int, shrink: int, seed: int
) -> Verdict:
    tried: list[dict[str, Any]] = []
    held: list[bool] = []
    refused: list[tuple[Case, str]] = []
    wrong: list[Any] = []

    def claim(case: Case) -> None:
        tried.extend([] if wrong else [case.coverage()])
        try:
            held.append(law.claim(trainer, case))
        except RefusalError as refusal:
            refused.append((case, str(refusal)))
        except AssertionError as error:
            wrong.append(error)
            raise

    broken: Any = counterexample(
        lambda draw: law.cases(draw, trainer, part),
        claim,
        cases,
        shrink,
        (law.name, part, seed),
    )
    counts = {at: Counter(each[at] for each in tried) for at in (tried or [{}])[0]}
    verdict = Verdict(law, "holds", len(held), sum(held), coverage=counts)
    if broken:
        about = {"case": broken.case, "why": broken.what, "size": broken.size}
        return verdict._replace(finding="wrong", **about)
    case, why = min(refused, key=lambda each: len(each[0].code()), default=(None, ""))
    return verdict._replace(finding="refuses", case=case, why=why) if case else verdict


def _law(name: str) -> TrainerLaw:
    if name not in LAWS:
        raise ValueError(f"there is no law {name!r}: they are {', '.join(LAWS)}")
    return LAWS[name]


def report(verdict: Verdict) -> str:
    """The smallest case in which a law does not hold, in words and as code."""
    assert verdict.case is not None
    how = "does not hold" if verdict.finding == "wrong" else "is refused"
    title = ", ".join(filter(None, (verdict.law.title, verdict.case.part)))
    return (
        f"{verdict.law.name} ({title}) {how}. {verdict.law.statement}\n\n"
        f"  {verdict.why}\n\n  The smallest case found: {verdict.case.words()}.\n\n"
        f"  To see it with a trainer of yours:\n\n{verdict.case.code()}\n"
    )
