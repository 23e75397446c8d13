"""Compares verdicts on trainers that need no further package with the published report."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import purestep as ps
from benchmarks.trainers import again, by_hand, report, with_purestep, with_torch
from benchmarks.trainers.column import Column

REPORT = json.loads(Path("benchmarks/results/conformance.json").read_text())
PUBLISHED = {column["name"]: column for column in REPORT["columns"]}
COLUMNS = [
    column
    for column in [*with_torch.COLUMNS, *with_purestep.COLUMNS]
    if column.name == "purestep" or column.make().capabilities.ranks == 1
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_verdicts_are_those_published(column: Column) -> None:
    published = PUBLISHED[column.name]
    laws = ["T0", "T1", "T3", "T4", "T7"]
    trainer = column.make()
    verdicts = ps.testing.run_laws(trainer, laws, cases=12, shrink=0)
    findings = {verdict.law.name: verdict.status for verdict in verdicts}
    moved = by_hand.moved_by_momentum(trainer)
    if moved:
        findings["T7"] = "wrong"
    expected = {law: published["verdicts"][law]["finding"] for law in laws}
    assert findings == expected
    assert moved == published["moved_by_momentum"]
    assert by_hand.biases(column) == published["biases"]


def assert_confirmed(checks: Any) -> None:
    """Checks that every wrong cell, by trainer and law, was confirmed without the kit."""
    for laws in checks.values():
        for cell in laws.values():
            assert cell["confirmed"]


def test_wrong_cells_are_wrong_without_the_kit() -> None:
    checks = again.checked([PUBLISHED[column.name] for column in COLUMNS])
    assert {*checks["PyTorch loop"]} == {"by hand", "T1", "T4", "T7", "T14"}
    assert_confirmed(checks)
    assert_confirmed(REPORT["again"])


def test_a_right_cell_that_says_wrong_is_not_confirmed() -> None:
    cell = PUBLISHED["PyTorch loop"]["verdicts"]["T1"]
    capabilities = with_torch.COLUMNS[0].make().capabilities
    right: dict[str, Any] = {"packages": ["torch"], "gives": "equation"}
    check = again.cell(right, cell, capabilities.task.model)
    assert not check["confirmed"]


def test_the_page_is_that_of_the_results() -> None:
    page = Path("benchmarks/CONFORMANCE.md").read_text()
    assert page == report.text(REPORT)


TITLES = {
    "cut": "T1",
    "ranks": "T2",
    "uneven ranks": report.UNEVEN,
    "order": "T3",
    "padding": "T4",
    "no labels": "T7",
}
"""The laws, by the titles of columns."""
TABLE = re.compile(r"(\| \| cut .*)\n.*---.*\n((?:\|.*\n)+)")
"""A table's head, and its rows."""


def table_cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().split("|")[1:-1]]


@pytest.mark.parametrize("page", ["README.md", "docs/pages/why/trainers.md"])
def test_tables_elsewhere_say_the_same(page: str) -> None:
    head, rows = TABLE.findall(Path(page).read_text())[0]
    laws = [TITLES[title] for title in table_cells(head)[1:]]
    for row in rows.strip().split("\n"):
        names, *cells = table_cells(row)
        findings = [cell.strip("*").replace("·", "not asked") for cell in cells]
        for name in names.split("; "):
            expected = [report.finding(PUBLISHED[name], law) for law in laws]
            assert findings == expected, name
