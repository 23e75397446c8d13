"""The theorems of the step hold where ``ps.compile`` makes one graph of it and of a stacked group.

The compiled step is one more system. It runs in the first example with one rank, microbatches of
one shape, and params that share no memory: a graph takes seconds. A backend runs it as it is. T10
has a claim for such graphs, and ``tests/`` have ranks (T2), keys (T15), and graphs of inductor.
"""

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import purestep as ps
from proofs import (
    test_t01_cut as t01,
    test_t03_order as t03,
    test_t04_padding as t04,
    test_t05_weights as t05,
    test_t06_purity as t06,
    test_t07_identity as t07,
    test_t13_donation as t13,
    test_t17_denominators as t17,
)
from purestep import tree
from purestep.stacked import Stacked
from purestep.torch_private import has_transforms
from support.strategies import Setup
from support.theorem import System, Theorem

THEOREMS: dict[str, Theorem] = {
    "T1": t01.cut_invariance,
    "T1, terms": t01.terms,
    "T3": t03.order_invariance,
    "T4": t04.nan_at_weight_zero,
    "T5": t05.scale_invariance,
    "T6": t06.inputs_untouched,
    "T7": t07.no_tokens,
    "T13": t13.donation,
    "T17": t17.denominators,
}


def share_memory(params: Any) -> bool:
    """Returns whether two leaves lie in one storage, which no body of a loop takes."""
    leaves = tree.leaves(params)
    return len({leaf.untyped_storage().data_ptr() for leaf in leaves}) < len(leaves)


def can_be_compiled(drawn: Any) -> bool:
    """Returns whether a drawn case has one rank, and several microbatches of one shape in a stack.

    It must use no bridge, and its params must share no memory. A case of T13 must keep its params
    finite: torch's compiler makes another graph for a NaN.
    """
    to_infinity = t13.SECOND_GROUPS[-1]
    if any(part is to_infinity for part in drawn):
        return False
    step_case = drawn if isinstance(drawn[1], Setup) else drawn[0]
    case, setup, groups = step_case
    shapes = {str(tree.map(lambda x: x.shape, batch)) for batch in groups[0]}
    has_loop = len(groups[0]) > 1 and len(shapes) == 1
    is_stacked = setup.stacks and not setup.bridge and setup.axis == "one"
    return has_loop and is_stacked and not share_memory(case.params)


class _StopError(Exception):
    """Ends the search for cases."""


class CompiledSystem:
    """Makes steps that are compiled where they can be, until one has run."""

    has_compiled = False

    def make_update_step(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a step that compiles itself for a stacked group on a single rank."""
        step = ps.make_update_step(*args, **kwargs)
        is_alone = isinstance(kwargs.get("axis", ps.LocalAxis()), ps.LocalAxis)
        compiled = ps.compile(step, fullgraph=True, backend="eager")

        def step_or_compiled(params: Any, opt_state: Any, microbatches: Any) -> Any:
            is_stacked = isinstance(microbatches, Stacked) and len(microbatches) > 1
            if not is_stacked or not is_alone or has_transforms():
                return step(params, opt_state, microbatches)
            result = compiled(params, opt_state, microbatches)
            self.has_compiled = True
            return result

        return step_or_compiled


@pytest.mark.parametrize("name", THEOREMS)
def test_a_theorem_holds_in_one_graph(name: str) -> None:
    """Tries cases until one has been compiled."""
    torch.compiler.reset()
    theorem = THEOREMS[name]
    compiled = CompiledSystem()
    system = System(compiled.make_update_step)
    failures: list[AssertionError] = []

    @seed(0)
    @settings(
        max_examples=300,
        derandomize=False,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(theorem.cases.filter(can_be_compiled))
    def holds(case: Any) -> None:
        if not compiled.has_compiled:
            try:
                theorem.claim(system, case)
            except AssertionError as error:
                failures.append(error)
        if failures or compiled.has_compiled:
            raise _StopError  # Drawing cases takes longer than a graph.

    with suppress(_StopError):
        holds()
    if failures:
        raise failures[0]
    assert compiled.has_compiled
