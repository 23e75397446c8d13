"""Configures the tests of the package, of ``tests`` and of ``proofs``."""

import gc
import os
from multiprocessing import forkserver

import pytest

from purestep.testing.processes import CONTEXT, IMPORTED

collect_ignore = []
if "PURESTEP_TESTS_JAX" not in os.environ:
    # A process that has imported JAX warns when it forks. tests/test_jax.py runs these alone.
    collect_ignore += ["purestep/testing/jax_loops.py", "tests/test_jax_loop.py"]

MANY_TESTS = 200
"""A run of more tests has some that start processes."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets Python look for garbage less often, and starts the process that others are forked from.

    The test modules hold half a million objects. To look through all of them took 7 % of the time.
    They are not frozen: Hypothesis 6.100 then sees no owner of NumPy's generator, and warns.

    The process imports what takes seconds once for all tests, if these are many.
    """
    gc.collect()
    gc.set_threshold(100_000, 50, 1000)
    if len(session.items) > MANY_TESTS:
        CONTEXT.set_forkserver_preload([*IMPORTED, "tests.model_families"])
        forkserver.ensure_running()
