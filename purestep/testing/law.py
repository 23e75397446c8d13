"""A law: a claim about any subject, and the cases on which it is tried."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky, HypothesisWarning
from hypothesis.strategies import SearchStrategy

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Law(Generic[Subject]):
    """``claim(subject, case)`` raises ``AssertionError`` where it does not hold."""

    name: str
    cases: SearchStrategy[Any]
    claim: Callable[[Subject, Any], Any]

    def test(
        self, subject: Subject, where: Callable[[Any], Any] = lambda case: case
    ) -> Callable[[], None]:
        """The test that the subject satisfies the claim; ``where`` brings a case to a device."""

        @given(self.cases)
        def holds(case: Any) -> None:
            self.claim(subject, where(case))

        holds.__name__ = holds.__qualname__ = f"test_{self.claim.__name__}"
        holds.__doc__ = self.claim.__doc__
        return holds

    def broken_by(
        self, subject: Subject, max_examples: int = 20, shrink: int = 0, *, draw: int = 0
    ) -> AssertionError | None:
        """What the claim says of the smallest case found in which it fails; None: it held in all.

        Args:
            subject: what the claim is about.
            max_examples: how many cases are tried.
            shrink: on how many further cases a smaller one is sought.
            draw: the seed that the cases are drawn from.
        """
        tried = 0
        seen: dict[str, AssertionError] = {}
        last: AssertionError | None = None

        # A seed of our own: Hypothesis's would follow the text of this function.
        @seed(draw)
        @settings(
            max_examples=max_examples,
            derandomize=False,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.cases)
        def holds(case: Any) -> None:
            nonlocal tried, last
            key = repr(case) if shrink else ""
            if key not in seen:
                tried += 1
                if shrink and tried > max_examples + shrink:
                    return
                try:
                    self.claim(subject, case)
                    return
                except AssertionError as error:
                    seen[key] = error
            last = seen[key]
            # From one place, whatever went wrong: Hypothesis takes it for one and the same.
            raise _BrokenError

        with warnings.catch_warnings():
            # Hypothesis warns that it takes long to print the case, which is printed elsewhere.
            warnings.simplefilter("ignore", HypothesisWarning)
            try:
                holds()
            except (_BrokenError, Flaky):
                # A subject that remembers may be right the second time. Once wrong is enough.
                return last
        return None


class _BrokenError(Exception):
    """The claim does not hold."""
