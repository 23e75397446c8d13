"""A theorem: a claim about any system, and the cases it is tried on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

import purestep as ps
from proofs import parallel
from purestep.testing.law import Law


@dataclass(frozen=True)
class System:
    """What a theorem is about: purestep, as it is or watched on a device."""

    make_update_step: Callable[..., Any] = ps.make_update_step
    make_eval_step: Callable[..., Any] = ps.make_eval_step
    group: Callable[..., Any] = ps.group
    pack: Callable[..., Any] = ps.pack
    balance: Callable[..., Any] = ps.balance
    prefetch: Callable[..., Any] = ps.prefetch
    context_parallel_step: Callable[..., Any] = parallel.context_parallel_step
    tensor_parallel_step: Callable[..., Any] = parallel.tensor_parallel_step
    shard: Callable[..., Any] = ps.shard
    unshard: Callable[..., Any] = ps.unshard
    from_module: Callable[..., Any] = ps.from_module
    random: Any = ps.random
    tree: Any = ps.tree
    optim: Any = ps.optim


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
