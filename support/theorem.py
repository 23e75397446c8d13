"""Defines theorems: claims about any system, each with the cases it is tried on."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

import purestep as ps


class System(NamedTuple):
    """The subject of a theorem: purestep, as it is or watched on a device."""

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
        move: Callable[[Any], Any] = lambda case: case,
    ) -> Callable[[], None]:
        """Returns the test that a system satisfies the claim; ``move`` brings a case to a device."""

        @given(self.cases)
        def holds(case: Any) -> None:
            self.claim(subject, move(case))

        holds.__name__ = holds.__qualname__ = f"test_{self.claim.__name__}"
        holds.__doc__ = self.claim.__doc__
        return holds

    def broken_by(
        self, subject: System, max_examples: int = 20
    ) -> AssertionError | None:
        """Returns the claim's error in a case in which it fails; None if it holds in ``max_examples``."""
        broken: AssertionError | None = None

        # Hypothesis would derive the seed from the text of this function.
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
                # Hypothesis tells failures apart by where they are raised: this makes all one.
                raise _BrokenError

        with contextlib.suppress(_BrokenError):
            holds()
        return broken


class _BrokenError(Exception):
    """Signals that the claim does not hold."""


def theorem(
    name: str, cases: SearchStrategy[Any]
) -> Callable[[Callable[[System, Any], None]], Theorem]:
    """Decorates a claim, which becomes a theorem."""
    return lambda claim: Theorem(name, cases, claim)


def as_tests(module: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Returns the tests of a module's theorems, by their names."""
    return {
        f"test_{name}": value.test()
        for name, value in module.items()
        if isinstance(value, Theorem)
    }
