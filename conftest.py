"""Configures the tests of the package, of ``tests`` and of ``proofs``."""

import gc
import os
import sys
from multiprocessing import forkserver

import pytest
from hypothesis import find
from hypothesis.strategies import just

import support.quick_processes  # noqa: F401
from purestep.testing.processes import CONTEXT, IMPORTED
from support.torch_private import skip_timing_of_guards

collect_ignore = []
if "PURESTEP_TESTS_JAX" not in os.environ:
    # A process that has imported JAX warns when it forks. tests/test_jax.py runs these alone.
    collect_ignore += ["purestep/testing/jax_loops.py", "tests/test_jax_loop.py"]

USED = ["torch._dynamo.backends.common", "support.ranks", "tests.model_families"]
"""Modules that many tests import in forked processes. ``IMPORTED`` has those of all worlds."""

MANY_TESTS = 200
"""A run of more tests has some that start processes."""


def pytest_collection_finish() -> None:
    """Freezes what was imported: each test that looks for garbage looks through what is not frozen.

    Hypothesis notes NumPy's generator first. Later, version 6.100 sees no owner of it, and warns.
    """
    find(just(None), lambda _: True)
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Freezes what is left, through which pytest looks for garbage five times as it ends.

    What is garbage by then is found here.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _start_server_of_forks(request: pytest.FixtureRequest) -> None:
    """Starts the process that others are forked from, if there are many tests.

    It imports what takes seconds once for all of them. This process imports torch's compiler, too.
    """
    if len(request.session.items) > MANY_TESTS:
        skip_timing_of_guards()
        preload = ["support.quick_processes", *IMPORTED, *USED, "support.frozen"]
        CONTEXT.set_forkserver_preload(preload)
        forkserver.ensure_running()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Lets the interpreter free what is frozen, which takes seconds, where Triton complains of what is left."""
    if "triton" in sys.modules:
        gc.unfreeze()
