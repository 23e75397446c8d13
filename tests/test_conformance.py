"""The judgement of other trainers says of those that need no further package what it said when it was published."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import purestep as ps
from benchmarks.conformance import again, by_hand, report, with_purestep, with_torch
from benchmarks.conformance.column import Column

REPORT = json.loads(Path("benchmarks/results/conformance.json").read_text())
PUBLISHED = {column["name"]: column for column in REPORT["columns"]}
COLUMNS = [
    column
    for column in [*with_torch.COLUMNS, *with_purestep.COLUMNS]
    if column.make().abilities.ranks == 1 or column.name == "purestep"
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_verdicts_are_those_published(column: Column) -> None:
    published, trainer = PUBLISHED[column.name], column.make()
    laws = ["T0", "T1", "T3", "T4", "T7"]
    found = {
        v.law.name: v.finding
        for v in ps.testing.judge(trainer, laws, cases=12, shrink=0)
    }
    moved = by_hand.moved_by_momentum(trainer)
    if moved:
        found["T7"] = "wrong"
    assert found == {law: published["verdicts"][law]["finding"] for law in laws}
    assert moved == published["moved_by_momentum"]
    assert by_hand.biases(column) == published["biases"]


def test_wrong_cells_are_wrong_without_the_kit() -> None:
    found = again.checked([PUBLISHED[column.name] for column in COLUMNS])
    assert {*found["PyTorch loop"]} == {"by hand", "T1", "T4", "T7", "T14"}
    assert all(each["confirmed"] for laws in found.values() for each in laws.values())
    assert all(
        each["confirmed"] for laws in REPORT["again"].values() for each in laws.values()
    )


def test_a_right_cell_that_says_wrong_is_not_confirmed() -> None:
    cell = PUBLISHED["PyTorch loop"]["verdicts"]["T1"]
    model = with_torch.COLUMNS[0].make().abilities.task.model
    right: dict[str, Any] = {"packages": ["torch"], "gives": "equation"}
    assert not again.cell(right, cell, model)["confirmed"]


def test_the_page_is_that_of_the_results() -> None:
    assert Path("benchmarks/CONFORMANCE.md").read_text() == report.text(REPORT)


@pytest.mark.parametrize("page", ["README.md", "docs/pages/why/trainers.md"])
def test_tables_elsewhere_say_the_same(page: str) -> None:
    (head, rows) = re.findall(
        r"(\| \| cut .*)\n.*---.*\n((?:\|.*\n)+)", Path(page).read_text()
    )[0]
    laws = {
        "cut": "T1", "ranks": "T2", "uneven ranks": report.UNEVEN, "order": "T3", "padding": "T4", "no labels": "T7",
    }  # fmt: skip
    asked = [laws[title.strip()] for title in head.split("|")[2:-1]]
    for row in rows.strip().split("\n"):
        names, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        for name in names.split("; "):
            said = [report.finding(PUBLISHED[name], law) for law in asked]
            told = [cell.strip("*").replace("·", "not asked") for cell in cells]
            assert told == said, name
