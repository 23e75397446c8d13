"""A theorem: a claim about any system, and the cases it is tried on."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

import purestep as ps


class System(NamedTuple):
    """What a theorem is about: purestep, as it is or watched on a device."""

    make_update_step: Callable[..., Any] = ps.make_update_step
    make_eval_step: Callable[..., Any] = ps.make_eval_step


PURESTEP = System()


@dataclass(frozen=True)
class Theorem:
    """``claim(subject, case)`` raises ``AssertionError`` where it does not hold."""

    name: str
    cases: SearchStrategy[Any]
    claim: Callable[[System, Any], Any]

    def test(
        self,
        subject: System = PURESTEP,
        where: Callable[[Any], Any] = lambda case: case,
    ) -> Callable[[], None]:
        """The test that purestep satisfies the claim; ``where`` brings a case to a device."""

        @given(self.cases)
        def holds(case: Any) -> None:
            self.claim(subject, where(case))

        holds.__name__ = holds.__qualname__ = f"test_{self.claim.__name__}"
        holds.__doc__ = self.claim.__doc__
        return holds

    def broken_by(
        self, subject: System, max_examples: int = 20
    ) -> AssertionError | None:
        """What the claim says of a case in which it fails; None: it holds in so many."""
        broken: AssertionError | None = None

        # A seed of our own: Hypothesis's would follow the text of this function.
        @seed(0)
        @settings(
            max_examples=max_examples,
            derandomize=False,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.cases)
        def holds(case: Any) -> None:
            nonlocal broken
            if broken is None:
                try:
                    self.claim(subject, case)
                except AssertionError as error:
                    broken = error
            if broken is not None:
                # From one place, whatever went wrong: Hypothesis takes it for one and the same.
                raise _BrokenError

        with contextlib.suppress(_BrokenError):
            holds()
        return broken


class _BrokenError(Exception):
    """The claim does not hold."""


def theorem(
    name: str, cases: SearchStrategy[Any]
) -> Callable[[Callable[[System, Any], None]], Theorem]:
    """Makes a theorem of the claim below it."""
    return lambda claim: Theorem(name, cases, claim)


def as_tests(module: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """The test of each theorem of a module, under its name."""
    return {
        f"test_{name}": one.test()
        for name, one in module.items()
        if isinstance(one, Theorem)
    }
