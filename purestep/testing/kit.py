"""The laws as a kit: trainers, and what the laws say of them."""
# isort: skip_file

from purestep.testing.adapters import Loop, Processes, PureTrainer, loop
from purestep.testing.case import Case
from purestep.testing.catalogue import LAWS
from purestep.testing.judging import Verdict, check, judge, laws
from purestep.testing.problem import REGRESSION, Linear, Problem, Task, causal_lm
from purestep.testing.specification import Specification
from purestep.testing.trainer import Abilities, Evaluating, Observation
from purestep.testing.trainer import Resumable, Switchable, Trainer

__all__ = [
    "Problem", "Task", "REGRESSION", "Linear", "causal_lm", "Abilities", "Observation", "Trainer",
    "Evaluating", "Resumable", "Switchable", "Specification", "PureTrainer", "Loop", "loop",
    "Processes", "LAWS", "Case", "Verdict", "judge", "check", "laws",
]  # fmt: skip
