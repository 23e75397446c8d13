"""Tests models of transformers in units on processes: a part of the cases of ``tests.families_on_ranks``."""

import pytest

from purestep.testing.processes import World
from tests.families_on_ranks import (
    MAX_DISTANCE,
    Case,
    find_distance,
    list_cases,
    name_case,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("case", [*list_cases()][::13], ids=name_case)
def test_units_on_processes(world: World, case: Case) -> None:
    assert find_distance(world, case) <= MAX_DISTANCE
