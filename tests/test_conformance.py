"""Compares verdicts on trainers that need no further package with the published report."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import purestep as ps
from benchmarks.trainers import (
    again,
    by_hand,
    findings,
    report,
    sections,
    with_purestep,
    with_torch,
)
from benchmarks.trainers.column import Column
from benchmarks.trainers.upstream import __main__ as upstream

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


PAGE = Path("benchmarks/CONFORMANCE.md").read_text()
LAWS = findings.cells(REPORT)


def test_the_table_names_laws_and_leads_to_each_project() -> None:
    head = re.search(r"^\| trainer \| (.*) \|$", PAGE, re.M)
    assert head
    assert not re.search(r"T\d", head[1])
    links = {*re.findall(r"^\| \*?\[.*?\]\(#(.*?)\)", PAGE, re.M)}
    headings = {report.anchor(each) for each in re.findall(r"^### (.*)$", PAGE, re.M)}
    assert links == headings == {report.anchor(name) for name in sections.PARAGRAPHS}


def test_a_step_on_a_zero_gradient_is_a_convention_and_nan_is_not() -> None:
    called = {name: findings.finding(it, "T7") for name, it in PUBLISHED.items()}
    assert called["PyTorch loop"] == called["Trainer, Llama"] == "convention"
    assert called["torchtune's recipe"] == called["mlx-lm"] == "wrong"
    assert called["PyTorch loop, sums"] == called["purestep"] == "holds"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_by_design_has_its_sentence_on_the_page(name: str) -> None:
    column = PUBLISHED[name]
    for law in LAWS:
        if findings.finding(column, law) == "by design":
            assert column["promises"][law] in PAGE


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_project_called_wrong_has_numbers_by_hand(name: str) -> None:
    column = PUBLISHED[name]
    if any(findings.finding(column, law) in findings.BROKEN for law in LAWS):
        assert column["biases"]
        paragraph = sections.PARAGRAPHS[column["project"]](REPORT)
        assert re.search(r"What to\s", paragraph)
        assert re.search(r"ends at -?\d|its own run", paragraph)


TITLES = {
    "cut": "T1",
    "ranks": "T2",
    "uneven ranks": findings.UNEVEN,
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
        called = [cell.strip("*").replace("·", "not asked") for cell in cells]
        for name in names.split("; "):
            expected = [findings.finding(PUBLISHED[name], law) for law in laws]
            assert called == expected, name


@pytest.mark.parametrize("page", upstream.FOLDERS)
def test_a_page_for_maintainers_has_a_program_and_what_it_prints(page: str) -> None:
    program, printed = upstream.blocks(page)
    compile(program, page, "exec")
    text = (upstream.HERE / f"{page}.md").read_text()
    assert printed.strip()
    for heading in ("What happens", "Why", "A fix"):
        assert f"## {heading}\n" in text


def test_every_page_for_maintainers_is_run() -> None:
    assert {path.stem for path in upstream.HERE.glob("*.md")} == {*upstream.FOLDERS}
