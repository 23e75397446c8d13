"""Tests what the command line of the kit writes beside its table: lists, pages, and progress."""

import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import purestep as ps
from purestep.testing import __main__ as command_line
from purestep.testing.accepting import PartVerdict, read_accepted, write_accepted
from purestep.testing.html_report import render_report
from purestep.testing.progress import CLEAR, Progress
from support.programs import run_program
from tests.judged_programs import MEAN_OF_MEANS

ROOT = Path(__file__).parent.parent
COMMAND = ["mine:trainer", "--laws", "T1,T3", "--cases", "40"]


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a folder, with pipes for its output."""
    command = ["-m", "purestep.testing", *arguments]
    return run_program(command, folder, {"PYTHONPATH": str(ROOT)})


def test_failures_of_today_are_written_and_accepted(tmp_path: Path) -> None:
    """With the list of one run, the next one passes; with another failure, it does not."""
    mine = tmp_path / "mine.py"
    mine.write_text(MEAN_OF_MEANS)
    written = run_command(
        tmp_path, *COMMAND, "--write-accept", "list.txt", "--html", "page.html"
    )
    assert written.returncode == 0, written.stderr
    assert written.stderr == "", "progress is for terminals"
    lines = (tmp_path / "list.txt").read_text().splitlines()
    accepted = {line.partition("  # ")[0] for line in lines}
    parts = ("unequal rows", "unequal tokens", "empty ones")
    assert accepted == {f"T1 {part}: wrong" for part in parts}
    assert "mine:trainer and the laws" in (tmp_path / "page.html").read_text()

    passed = run_command(tmp_path, *COMMAND, "--accept", "list.txt", "--progress")
    assert passed.returncode == 0, passed.stdout
    assert passed.stderr.startswith("T1 equal tokens: case 1 of 10\n")
    assert CLEAR not in passed.stderr

    # A new mistake: the first microbatch counts twice.
    text = mine.read_text().replace(
        "in microbatches:", "in [microbatches[0], *microbatches]:"
    )
    mine.write_text(text)
    failed = run_command(
        tmp_path, *COMMAND, "--accept", "list.txt", "--json", "new.json"
    )
    assert failed.returncode == 1
    assert "T1 (cut, equal tokens) does not hold" in failed.stdout
    assert "T1 (cut, unequal rows) does not hold" not in failed.stdout
    rows = json.loads((tmp_path / "new.json").read_text())
    new = [
        row["parts"] for row in rows if row["status"] != (row["accepted"] or "holds")
    ]
    assert new == ["equal tokens", ""]


def test_both_lists_at_once_are_refused(tmp_path: Path) -> None:
    """In a new interpreter, which imports the command line first."""
    trainer = "purestep.testing:ReferenceTrainer"
    command = [sys.executable, "-m", "purestep.testing", trainer]
    refused = subprocess.run(
        [*command, "--accept", "a", "--write-accept", "a"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 2
    assert "not allowed with argument" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "0"], "cases is 0"),
        (["--seed", "tomorrow"], "seed is 'tomorrow'"),
        (["--json", "none/x.json"], "No such file"),
        (["--html", "none/x.html"], "No such file"),
        (["--write-accept", "none/x.txt"], "No such file"),
        (["--json", "."], "is a folder"),
    ],
)
def test_wrong_options_end_before_a_law_is_judged(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = "purestep.testing:ReferenceTrainer"
    monkeypatch.setattr(sys, "argv", ["purestep.testing", trainer, *options])
    with pytest.raises(SystemExit, match="2"):
        command_line.main()
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def make_verdict(name: str, status: Any) -> PartVerdict:
    """Makes a verdict on a law as a whole."""
    law, _, part = name.partition(" ")
    verdict = ps.testing.Verdict(ps.testing.LAWS[law], status, reason="why\nindeed")
    return PartVerdict(name, part, verdict)


def test_a_list_keeps_its_reasons(tmp_path: Path) -> None:
    """Of laws that are not asked now, and of failures that are the same."""
    path = tmp_path / "list.txt"
    old = [
        "# what we know",
        "",
        "T3: wrong  # by intention",
        "T4: wrong  # until the next release",
        "T5: refuses  # without weights",
        "T7: wrong",
    ]
    path.write_text("\n".join(old))
    statuses = {"T4": "wrong", "T5": "wrong", "T7": "holds", "T1 empty ones": "refuses"}
    write_accepted(path, [make_verdict(*item) for item in statuses.items()])
    new = ["T5: wrong  # why indeed", "T1 empty ones: refuses  # why indeed"]
    assert path.read_text().splitlines() == old[:4] + new
    assert read_accepted(path) == {
        "T3": "wrong",
        "T4": "wrong",
        "T5": "wrong",
        "T1 empty ones": "refuses",
    }


@pytest.mark.parametrize("line", ["T1: wrong", "T3: holds", "T3", ": wrong"])
def test_a_line_that_names_no_failure_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(line)
    with pytest.raises(
        ValueError, match=rf"list.txt: the line '{line}' .*'T1 empty ones'"
    ):
        read_accepted(path)


class Tags(HTMLParser):
    """Lists the tags that are open, what they link to, and the texts of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_needs_nothing_else() -> None:
    """It loads no file, its links lead to its own sections, and it shows text as it is."""

    class Wrong(ps.testing.ReferenceTrainer):
        def observe(self) -> list[ps.testing.Observation]:
            (seen,) = super().observe()
            return [seen._replace(loss=7.0)]

    verdicts = ps.testing.run_laws(Wrong(), ["T0", "T16"], cases=3)
    parts = [PartVerdict(each.law.name, "", each, "") for each in verdicts]
    page = render_report("<mine>", "python & others", parts)
    tags = Tags(page)
    assert tags.open == []
    assert not re.search(r"https?:|src=|url\(|@import", page)
    targets = {value for name, value in tags.attributes if name == "id"}
    links = {value for name, value in tags.attributes if name == "href"}
    assert links == {f"#{target}" for target in targets} == {"#T0"}
    text = "".join(tags.texts)
    assert "<mine> and the laws" in text
    assert "python & others" in text
    assert verdicts[0].reason in text
    assert verdicts[0].case is not None
    assert verdicts[0].case.reproducer() in text
    assert "wrong: 1, not asked: 1. Not as expected: 1." in text
    accepted = render_report("", "", [parts[0]._replace(accepted="wrong")])
    assert "wrong: 1. Not as expected: 0." in accepted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals() -> None:
    """It takes one line there, and none elsewhere, unless that is asked for."""
    for stream, enabled, expected in [
        (Terminal(), None, f"{CLEAR}first{CLEAR}"),
        (Terminal(), False, ""),
        (io.StringIO(), None, ""),
        (io.StringIO(), True, "first\n"),
    ]:
        progress = Progress(stream, enabled)
        progress.show("first")
        progress.show("too soon")
        progress.clear()
        assert stream.getvalue() == expected


def test_progress_names_law_part_and_case() -> None:
    texts: list[str] = []
    ps.testing.run_laws(
        ps.testing.ReferenceTrainer(), ["T1"], cases=8, progress=texts.append
    )
    assert texts[:3] == [
        "T1 equal tokens: case 1 of 2",
        "T1 equal tokens: case 2 of 2",
        "T1 unequal rows: case 1 of 2",
    ]
    assert len(texts) == 8
