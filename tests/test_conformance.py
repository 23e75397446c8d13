"""The judgement of other trainers says of those that need no further package what it said when it was published."""

import json
from pathlib import Path

import pytest

import purestep as ps
from benchmarks.conformance import with_purestep, with_torch
from benchmarks.conformance.column import Column

PUBLISHED = json.loads(Path("benchmarks/results/conformance.json").read_text())["columns"]
COLUMNS = [
    column
    for column in [*with_torch.COLUMNS, *with_purestep.COLUMNS]
    if column.make().abilities.ranks == 1 or column.name == "purestep"
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_verdicts_are_those_published(column: Column) -> None:
    (published,) = [each for each in PUBLISHED if each["name"] == column.name]
    laws = ["T0", "T1", "T3", "T4", "T7"]
    found = {
        v.law.name: v.finding for v in ps.testing.judge(column.make(), laws, cases=25, shrink=0)
    }
    assert found == {law: published["verdicts"][law]["finding"] for law in laws}
