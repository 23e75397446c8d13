"""The laws as a kit: strategies for tests of your own, trainers, and what the laws say of them."""

from purestep.testing.adapters import Loop, Processes, PureTrainer, loop
from purestep.testing.case import Case
from purestep.testing.catalogue import LAWS
from purestep.testing.judging import Verdict, check, judge, laws
from purestep.testing.problem import REGRESSION, Linear, Problem, Task, causal_lm
from purestep.testing.specification import Specification
from purestep.testing.strategies import (
    Padding,
    cuts,
    exact_batches,
    orders,
    padding,
    ranks,
    regrouped,
    weights,
)
from purestep.testing.trainer import (
    Abilities,
    Evaluating,
    Observation,
    Resumable,
    Switchable,
    Trainer,
)

__all__ = [
    "Problem", "Task", "REGRESSION", "Linear", "causal_lm",
    "Abilities", "Observation", "Trainer", "Evaluating", "Resumable", "Switchable",
    "Specification", "PureTrainer", "Loop", "loop", "Processes",
    "Padding", "cuts", "ranks", "orders", "padding", "weights", "exact_batches", "regrouped",
    "LAWS", "Case", "Verdict", "judge", "check", "laws",
]  # fmt: skip
