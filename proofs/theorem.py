"""A theorem: a claim about any system, and the cases it is tried on."""

from __future__ import annotations

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
