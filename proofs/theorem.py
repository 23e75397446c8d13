"""A theorem: a claim about any system, and the cases it is tried on."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis.strategies import SearchStrategy

import purestep as ps
from purestep.testing.law import Law


class System(NamedTuple):
    """What a theorem is about: purestep, as it is or watched on a device."""

    make_update_step: Callable[..., Any] = ps.make_update_step
    make_eval_step: Callable[..., Any] = ps.make_eval_step


PURESTEP = System()


class Theorem(Law[System]):
    """``claim(system, case)`` raises ``AssertionError`` where it does not hold."""

    def test(
        self, subject: System = PURESTEP, where: Callable[[Any], Any] = lambda case: case
    ) -> Callable[[], None]:
        """The test that purestep satisfies the claim."""
        return super().test(subject, where)


def theorem(
    name: str, cases: SearchStrategy[Any]
) -> Callable[[Callable[[System, Any], None]], Theorem]:
    """Makes a theorem of the claim below it."""
    return lambda claim: Theorem(name, cases, claim)


def as_tests(module: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """The test of each theorem of a module, under its name."""
    return {f"test_{name}": one.test() for name, one in module.items() if isinstance(one, Theorem)}
