"""Runs the tests of trainers in JAX in a process of their own, which may not fork once it has JAX."""

import os
from pathlib import Path

from support.programs import run_program

ROOT = Path(__file__).parent.parent
FILES = ["tests/test_jax_loop.py", "purestep/testing/jax_loops.py"]


def test_trainers_in_jax() -> None:
    # purestep is imported before pytest starts.
    options = ["-qp", "no:cacheprovider", "-W", "ignore:Module already imported"]
    command = ["-m", "pytest", *options, *FILES]
    variables = {**os.environ, "PURESTEP_TESTS_JAX": "1"}
    run = run_program(command, ROOT, variables)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
