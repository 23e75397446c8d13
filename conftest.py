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

USED = ["torch._dynamo.backends.common", "support.ranks", "tests.model_families"]
"""Modules that many tests import in forked processes. ``IMPORTED`` has those of all worlds."""

MANY_TESTS = 200
"""A run of more tests has some that start processes."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets Python look for garbage less often.

    The test modules hold half a million objects. To look through all of them took 7 % of the time.
    They are not frozen: Hypothesis 6.100 then sees no owner of NumPy's generator, and warns.
    """
    del session
    gc.collect()
    gc.set_threshold(100_000, 50, 1000)


@pytest.fixture(scope="session", autouse=True)
def _start_server_of_forks(request: pytest.FixtureRequest) -> None:
    """Starts the process that others are forked from, if there are many tests.

    It imports what takes seconds once for all of them.
    """
    if len(request.session.items) > MANY_TESTS:
        CONTEXT.set_forkserver_preload([*IMPORTED, *USED, "support.frozen"])
        forkserver.ensure_running()
