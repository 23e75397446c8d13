"""The theorems of the step hold where ``ps.compile`` makes one graph of it and of a stacked group.

The compiled step is one more system. It runs where a case draws one rank and microbatches of one
shape, in its first few examples, since a graph takes a second; a backend runs the graph as it is.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import purestep as ps
from proofs import (
    test_t01_cut as t01,
    test_t02_ranks as t02,
    test_t03_order as t03,
    test_t04_padding as t04,
    test_t05_weights as t05,
    test_t06_purity as t06,
    test_t07_identity as t07,
    test_t13_donation as t13,
    test_t15_random as t15,
    test_t17_denominators as t17,
)
from purestep.stacked import Stacked
from purestep.torch_private import has_transforms
from support.theorem import System, Theorem

NUM_GRAPHS = 2
MAX_EXAMPLES = 60
THEOREMS: dict[str, Theorem] = {
    "T1": t01.cut_invariance,
    "T1, terms": t01.terms,
    "T2": t02.rank_invariance,
    "T3": t03.order_invariance,
    "T4": t04.padding_invariance,
    "T4, NaN": t04.nan_at_weight_zero,
    "T5": t05.scale_invariance,
    "T6": t06.inputs_untouched,
    "T7": t07.no_tokens,
    "T7, not finite": t07.nonfinite,
    "T15": t15.keyed_dropout,
    "T17": t17.denominators,
}


class CompiledSystem:
    """Makes steps that are compiled where they can be, until there are ``NUM_GRAPHS``."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def make_update_step(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a step that compiles itself for a stacked group on a single rank."""
        step = ps.make_update_step(*args, **kwargs)
        is_alone = isinstance(kwargs.get("axis", ps.LocalAxis()), ps.LocalAxis)
        compiled = ps.compile(step, fullgraph=True, backend="eager")

        def step_or_compiled(params: Any, opt_state: Any, microbatches: Any) -> Any:
            is_stacked = isinstance(microbatches, Stacked) and len(microbatches) > 1
            is_compiled = is_stacked and is_alone and not has_transforms()
            if not is_compiled or self.num_graphs == NUM_GRAPHS:
                return step(params, opt_state, microbatches)
            self.num_graphs += 1
            return compiled(params, opt_state, microbatches)

        return step_or_compiled


@pytest.mark.parametrize("name", THEOREMS)
def test_a_theorem_holds_in_one_graph(name: str) -> None:
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
        if compiled.num_graphs < NUM_GRAPHS:
            theorem.claim(system, case)

    holds()
    assert compiled.num_graphs
