"""Collects the public names of the kit: trainers, and the laws that judge them."""
# isort: skip_file

from purestep.testing.adapters import Loop, Processes, PureTrainer, loop
from purestep.testing.case import Case
from purestep.testing.catalogue import LAWS
from purestep.testing.jax_loops import jax_loop
from purestep.testing.judging import Verdict, check, run_laws, law_tests
from purestep.testing.problem import REGRESSION, Linear, Problem, Task, causal_lm
from purestep.testing.specification import ReferenceTrainer
from purestep.testing.trainer import Capabilities, Evaluating, Observation
from purestep.testing.trainer import Resumable, Switchable, Trainer

__all__ = [
    "Problem",
    "Task",
    "REGRESSION",
    "Linear",
    "causal_lm",
    "Capabilities",
    "Observation",
    "Trainer",
    "Evaluating",
    "Resumable",
    "Switchable",
    "ReferenceTrainer",
    "PureTrainer",
    "Loop",
    "loop",
    "jax_loop",
    "Processes",
    "LAWS",
    "Case",
    "Verdict",
    "run_laws",
    "check",
    "law_tests",
]
