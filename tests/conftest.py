"""The tests draw their cases as the proofs do and run programs on the same ranks; their helpers, too, say what an ``assert`` saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

import proofs.strategies  # noqa: F401
from proofs.ranks import Run
from proofs.worlds import LARGEST, Ranks, on_processes, on_threads
from purestep.testing.processes import World

pytest.register_assert_rewrite(
    "tests.faults", "tests.laws", "tests.modules", "tests.on_a_device", "tests.optimizers"
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four ranks that stay up for all tests of a file."""
    with World(LARGEST) as running:
        yield running


@pytest.fixture
def processes(world: World) -> Run:
    """Runs a program on four processes: ``processes(program, *what each rank gets)``."""
    return _on_four(partial(on_processes, world))


@pytest.fixture(params=["threads", "processes"])
def ranks(request: pytest.FixtureRequest) -> Run:
    """Runs a program on four ranks: on threads, and once more in processes."""
    if request.param == "threads":
        return _on_four(on_threads)
    run: Run = request.getfixturevalue("processes")
    return run


def _on_four(on: Run) -> Run:
    def run(program: Callable[..., Any], *args: Sequence[Any], bucket_bytes: int = 1 << 20) -> Any:
        return on(Ranks(LARGEST, bucket_bytes), program, *args)

    return run
