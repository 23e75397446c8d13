"""The tests draw their cases as the proofs do, and their helpers, too, say what an ``assert`` saw."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import proofs.strategies  # noqa: F401
from purestep.testing.processes import World
from tests.processes import SIZE

pytest.register_assert_rewrite(
    "tests.faults", "tests.modules", "tests.on_a_device", "tests.optimizers", "tests.programs"
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four ranks that stay up for all tests of a file."""
    with World(SIZE) as running:
        yield running
