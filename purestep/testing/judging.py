"""What the laws say of a trainer: as an error, as tests, and as a table."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from purestep.testing.case import Case, RefusalError
from purestep.testing.catalogue import LAWS, TrainerLaw
from purestep.testing.law import Law
from purestep.testing.trainer import Trainer

CASES, SHRINK = 100, 200
"""How many cases are tried for each law, and how many more to find a smaller one."""

Finding: TypeAlias = Literal["holds", "wrong", "refuses", "not asked"]


class Verdict(NamedTuple):
    """What is found out about one law.

    ``finding`` is "holds", in ``cases`` cases, of which so many ``to_the_bit``; "wrong", with the
    smallest ``case`` found, ``why`` in words, and the ``size`` of the error relative to the update;
    "refuses", with the smallest case that raised an exception; or "not asked", and ``why``.
    """

    law: TrainerLaw
    finding: Finding
    cases: int = 0
    to_the_bit: int = 0
    case: Case | None = None
    why: str = ""
    size: float = 0.0

    def __str__(self) -> str:
        law = f"{self.law.name} {self.law.title}"
        if self.finding == "holds":
            bits = "all" if self.to_the_bit == self.cases else f"{self.to_the_bit}"
            return f"{law}: holds in {self.cases} cases, {bits} to the bit"
        if self.finding == "not asked":
            return f"{law}: not asked, {self.why}"
        return f"{law}: {self.finding}. {self.why}"


def judge(
    trainer: Trainer, laws: Iterable[str] = tuple(LAWS), *, cases: int = CASES, shrink: int = SHRINK
) -> list[Verdict]:
    """A verdict for each law. A law says "refuses" only where no number is wrong.

    >>> from purestep.testing import Specification
    >>> for verdict in judge(Specification(), ["T1", "T16"], cases=10):
    ...     print(verdict)
    T1 cut: holds in 10 cases, all to the bit
    T16 resume: not asked, it cannot be saved here
    """
    return [_verdict(trainer, name, cases, shrink) for name in laws]


def check(
    trainer: Trainer, laws: Iterable[str] = tuple(LAWS), *, cases: int = CASES, shrink: int = SHRINK
) -> None:
    """Raises an ``AssertionError`` for the first law that does not hold.

    It tells the smallest case in words, and as code to paste.

    >>> from purestep.testing import Specification
    >>> check(Specification(), ["T1", "T2", "T3"], cases=10)
    """
    for name in laws:
        verdict = _verdict(trainer, name, cases, shrink)
        if verdict.finding in ("wrong", "refuses"):
            raise AssertionError(_report(verdict))


def laws(
    make_trainer: Callable[[], Trainer],
    laws: Sequence[str] = tuple(LAWS),
    *,
    cases: int = CASES,
    shrink: int = SHRINK,
) -> Callable[[str], None]:
    """A test for pytest, once for each law: ``test_my_trainer = ps.testing.laws(make_trainer)``.

    A law that asks for more than the trainer's abilities is skipped, with the reason.
    """
    import pytest

    names = [f"{name}_{_law(name).title}" for name in laws]

    @pytest.mark.parametrize("law", laws, ids=names)
    def test(law: str) -> None:
        trainer = make_trainer()
        if missing := LAWS[law].missing(trainer):
            pytest.skip(f"not asked: {missing}")
        check(trainer, [law], cases=cases, shrink=shrink)

    return test


def _verdict(trainer: Trainer, name: str, cases: int, shrink: int) -> Verdict:
    law = _law(name)
    if isinstance(trainer, type) or not hasattr(trainer, "abilities"):
        raise TypeError(
            f"{trainer!r} is no trainer, which has abilities, start, update and observe: of a loop "
            "make one by ps.testing.loop(update), of a pure step by ps.testing.PureTrainer(make, "
            "abilities), of a class by calling it"
        )
    dtype = trainer.abilities.dtype
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(
            f"{dtype} rounds so much that a wrong number could hide in it: judge the trainer in "
            "torch.float32 or torch.float64"
        )
    if missing := law.missing(trainer):
        return Verdict(law, "not asked", why=missing)
    held: list[bool] = []
    refused: list[tuple[Case, str]] = []

    def claim(trainer: Trainer, case: Case) -> None:
        try:
            held.append(law.claim(trainer, case))
        except RefusalError as refusal:
            refused.append((case, str(refusal)))

    wrong: Any = Law(law.name, law.cases(trainer), claim).broken_by(trainer, cases, shrink)
    if wrong is not None:
        return Verdict(law, "wrong", case=wrong.case, why=wrong.what, size=wrong.size)
    if refused:
        case, why = min(refused, key=lambda each: len(each[0].code()))
        return Verdict(law, "refuses", case=case, why=why)
    return Verdict(law, "holds", cases=len(held), to_the_bit=sum(held))


def _law(name: str) -> TrainerLaw:
    if name not in LAWS:
        raise ValueError(f"there is no law {name!r}: they are {', '.join(LAWS)}")
    return LAWS[name]


def _report(verdict: Verdict) -> str:
    assert verdict.case is not None
    how = "does not hold" if verdict.finding == "wrong" else "is refused"
    return (
        f"{verdict.law.name} ({verdict.law.title}) {how}. {verdict.law.statement}\n\n"
        f"  {verdict.why}\n\n  The smallest case found: {verdict.case.words()}.\n\n"
        f"  To see it with a trainer of yours:\n\n{verdict.case.code()}\n"
    )
