"""The tests draw their cases as the proofs do and run programs on the same ranks; their helpers, too, say what an ``assert`` saw."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import proofs.strategies  # noqa: F401
from proofs.ranks import Run
from proofs.worlds import LARGEST, Ranks, on_processes, on_threads
from purestep.testing.processes import World

HELPERS = "counted_graphs", "held_by_ranks", "modules", "optimizers", "states", "uneven"
pytest.register_assert_rewrite(*(f"tests.{name}" for name in HELPERS))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four ranks that stay up for all tests of a file."""
    with World(LARGEST) as running:
        yield running


@pytest.fixture(scope="module")
def three() -> Iterator[World]:
    """Three that do."""
    with World(3) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a checkpoint is to stand, in a folder of its own."""
    return tmp_path / "state"


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
    def run(
        program: Callable[..., Any], *args: Sequence[Any], bucket_bytes: int = 1 << 20
    ) -> Any:
        return on(Ranks(LARGEST, bucket_bytes), program, *args)

    return run
