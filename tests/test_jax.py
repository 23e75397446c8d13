"""Runs the tests of trainers in JAX in a process of their own, which may not fork once it has JAX."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = ["tests/test_jax_loop.py", "purestep/testing/jax_loops.py"]


def test_trainers_in_jax() -> None:
    command = [sys.executable, "-m", "pytest", "-qp", "no:cacheprovider", *FILES]
    env = {**os.environ, "PURESTEP_TESTS_JAX": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=env, timeout=100, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
