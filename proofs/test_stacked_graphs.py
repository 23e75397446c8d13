"""The theorems of the step hold where ``ps.compile`` makes one graph of it and of a stacked group.

The compiled step is one more system. It runs in the first example with one rank, microbatches of
one shape, and params that share no memory: a graph takes seconds. A backend runs it as it is.
Other tests compile stacked groups under T10, T15, and by inductor: ``tests/test_stacked.py``.
"""

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
    test_t17_denominators as t17,
)
from purestep import tree
from purestep.stacked import Stacked
from purestep.torch_private import has_transforms
from support.theorem import System, Theorem

MAX_EXAMPLES = 60
THEOREMS: dict[str, Theorem] = {
    "T1": t01.cut_invariance,
    "T1, terms": t01.terms,
    "T3": t03.order_invariance,
    "T4": t04.nan_at_weight_zero,
    "T5": t05.scale_invariance,
    "T6": t06.inputs_untouched,
    "T7": t07.no_tokens,
    "T17": t17.denominators,
}


def share_memory(params: Any) -> bool:
    """Returns whether two leaves lie in one storage, which no body of a loop takes."""
    leaves = tree.leaves(params)
    return len({leaf.untyped_storage().data_ptr() for leaf in leaves}) < len(leaves)


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
            is_plain = is_alone and not has_transforms() and not share_memory(params)
            if not is_stacked or not is_plain:
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

    @seed(0)
    @settings(
        max_examples=MAX_EXAMPLES,
        derandomize=False,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(theorem.cases)
    def holds(case: Any) -> None:
        if not compiled.has_compiled:
            theorem.claim(system, case)

    holds()
    assert compiled.has_compiled
