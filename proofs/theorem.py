"""A theorem: a claim about any system, the cases it is tried on, and the mutants it must reject."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisWarning
from hypothesis.strategies import SearchStrategy

import purestep as ps
from proofs import parallel


@dataclass(frozen=True)
class System:
    """What a theorem is about: purestep, or a mutant with the same signatures."""

    make_update_step: Callable[..., Any]
    make_eval_step: Callable[..., Any]
    group: Callable[..., Any]
    pack: Callable[..., Any]
    balance: Callable[..., Any]
    prefetch: Callable[..., Any]
    context_parallel_step: Callable[..., Any]
    tensor_parallel_step: Callable[..., Any]
    shard: Callable[..., Any]
    unshard: Callable[..., Any]
    from_module: Callable[..., Any]
    random: Any
    tree: Any
    optim: Any


PURESTEP = System(
    ps.make_update_step,
    ps.make_eval_step,
    ps.group,
    ps.pack,
    ps.balance,
    ps.prefetch,
    parallel.context_parallel_step,
    parallel.tensor_parallel_step,
    ps.shard,
    ps.unshard,
    ps.from_module,
    ps.random,
    ps.tree,
    ps.optim,
)


@dataclass(frozen=True)
class Theorem:
    """``claim(system, case)`` raises ``AssertionError`` where it does not hold."""

    name: str
    cases: SearchStrategy[Any]
    claim: Callable[[System, Any], None]

    def test(
        self, system: System = PURESTEP, where: Callable[[Any], Any] = lambda case: case
    ) -> Callable[[], None]:
        """The test that purestep satisfies the claim; ``where`` brings a case to a device."""

        @given(self.cases)
        def holds(case: Any) -> None:
            self.claim(system, where(case))

        holds.__name__ = holds.__qualname__ = f"test_{self.claim.__name__}"
        holds.__doc__ = self.claim.__doc__
        return holds

    def rejects(self, system: System, max_examples: int = 20) -> bool:
        """Whether some case shows that this system does not satisfy the claim."""

        # A seed of our own: Hypothesis's would follow the text of this function, and the table with it.
        @seed(0)
        @settings(
            max_examples=max_examples,
            derandomize=False,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.cases)
        def holds(case: Any) -> None:
            self.claim(system, case)

        with warnings.catch_warnings():
            # Hypothesis warns of how long it would take to print the case, which nobody reads.
            warnings.simplefilter("ignore", HypothesisWarning)
            try:
                holds()
            except AssertionError:
                return True
        return False


def theorem(
    name: str, cases: SearchStrategy[Any]
) -> Callable[[Callable[[System, Any], None]], Theorem]:
    """Makes a theorem of the claim below it."""
    return lambda claim: Theorem(name, cases, claim)
