"""Fixtures of the tests, which draw cases as the proofs do and run programs on the same ranks.

Asserts in the helpers are rewritten as well, so that they print the values that they compared.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import support.strategies  # noqa: F401
from purestep.testing.processes import IMPORTED, World
from support.ranks import Run
from support.worlds import NUM_PROCESSES, Ranks, on_processes, on_threads

pytest.register_assert_rewrite(
    "tests.counted_graphs",
    "tests.sharded_checkpoints",
    "tests.module_kinds",
    "tests.optimizers",
    "tests.checkpoint_states",
    "tests.uneven_ranks",
)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forgets what has been compiled, before the test and after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Starts four ranks, which stay up for all tests of a file."""
    # The models of transformers take seconds to import.
    imported = [*IMPORTED, "tests.model_families"]
    with World(NUM_PROCESSES, imported=imported) as running:
        yield running


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    """Starts three ranks, which stay up for all tests of a file."""
    with World(3) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Names a checkpoint in a new folder."""
    return tmp_path / "state"


@pytest.fixture
def processes(world: World) -> Run:
    """Runs a program on four processes: ``processes(program, *what each rank gets)``."""
    return _with_four_ranks(partial(on_processes, world))


@pytest.fixture(params=["threads", "processes"])
def ranks(request: pytest.FixtureRequest) -> Run:
    """Runs a program on four ranks: on threads, and once more in processes."""
    if request.param == "threads":
        return _with_four_ranks(on_threads)
    run: Run = request.getfixturevalue("processes")
    return run


def _with_four_ranks(run: Run) -> Run:
    def run_on_four(
        program: Callable[..., Any], *args: Sequence[Any], bucket_bytes: int = 1 << 20
    ) -> Any:
        return run(Ranks(NUM_PROCESSES, bucket_bytes), program, *args)

    return run_on_four
