"""Tests ``pytest --trainer``: in processes, as every run of pytest loads the plugin."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import run_program

ROOT = Path(__file__).parent.parent
MINE = """
import purestep as ps

def divided_once(model, optimizer, microbatches, problem):
    optimizer.zero_grad()
    count = sum(problem.weights(batch).sum() for batch in microbatches)
    for batch in microbatches:
        losses = problem.losses(model, batch) * problem.weights(batch)
        (losses.sum() / count).backward()
    if count:
        optimizer.step()

def mean_of_means(model, optimizer, microbatches, problem):
    optimizer.zero_grad()
    for batch in microbatches:
        counts = problem.weights(batch)
        mean = (problem.losses(model, batch) * counts).sum() / counts.sum()
        (mean / len(microbatches)).backward()
    optimizer.step()

right = ps.testing.loop(divided_once)
wrong = ps.testing.loop(mean_of_means)
on_ranks = ps.testing.loop(divided_once, None, ps.testing.Capabilities(ranks=2))

def make_right():
    return right
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds mine.py alone, as a project without tests."""
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def run_python(
    folder: Path, program: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program that, as ``pytest`` does, imports nothing from the folder by itself."""
    command = ["-c", program, *arguments]
    return run_program(command, folder, {"PYTHONPATH": str(ROOT)}, timeout=240)


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the program ``pytest`` with the plugin."""
    main = "import sys, pytest; sys.exit(pytest.main())"
    return run_python(folder, main, "-p", "pytest_purestep", *arguments)


def read_outcomes(output: str) -> dict[str, str]:
    """Returns the outcomes of ``-v``, by the names of tests."""
    return dict(re.findall(r"^(\S+::\S+) ([A-Z]+)\b", output, re.M))


def test_each_law_is_a_test(folder: Path) -> None:
    run = run_pytest(
        folder, "--trainer", "mine:make_right", "--trainer-cases", "4", "-v"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    outcomes = read_outcomes(run.stdout)
    passed = ["T0_equation", "T1_cut", "T3_order", "T4_padding", "T5_weights"]
    passed += ["T6_purity", "T7_identity", "T14_repartition"]
    skipped = ["T2_ranks", "T15_randomness", "T16_resume", "T17_settings"]
    expected = dict.fromkeys(passed, "PASSED") | dict.fromkeys(skipped, "SKIPPED")
    assert outcomes == {f"mine:make_right::{name}": expected[name] for name in expected}
    assert "collected 12 items" in run.stdout


def test_names_options_and_other_tests_fit(folder: Path) -> None:
    """A failure shows what the kit reports, and ``--lf`` runs it again."""
    (folder / "test_others.py").write_text("def test_others(): pass\n")
    options = [
        "--trainer",
        "mine:wrong",
        "--trainer-laws",
        "T1, T3,T5",
        "--trainer-cases",
        "20",
    ]
    run = run_pytest(folder, *options, "-v", "-k", "cut or order or others")
    assert run.returncode == 1, run.stdout + run.stderr
    assert read_outcomes(run.stdout) == {
        "test_others.py::test_others": "PASSED",
        "mine:wrong::T1_cut": "FAILED",
        "mine:wrong::T3_order": "PASSED",
    }
    assert "collected 4 items / 1 deselected / 3 selected" in run.stdout
    for text in (
        "T1 (cut, unequal rows) does not hold",
        "T1 (cut, empty ones) does not hold",
        "The smallest case found: rows [0",
    ):
        assert text in run.stdout
    assert "pytest_laws.py" not in run.stdout, "the plugin's own lines explain nothing"

    again = run_pytest(folder, *options, "-v", "--lf")
    assert read_outcomes(again.stdout) == {"mine:wrong::T1_cut": "FAILED"}


def test_accepted_failures_are_expected(folder: Path) -> None:
    accepted = folder / "accepted.txt"
    parts = ["unequal rows", "unequal tokens", "empty ones"]
    lines = [f"T1 {part}: wrong" for part in parts]
    options = [
        "--trainer",
        "mine:wrong",
        "--trainer-laws",
        "T1,T3",
        "--trainer-cases",
        "40",
    ]
    options += ["--trainer-accept", "accepted.txt", "-v", "-rx"]

    accepted.write_text("\n".join(lines))
    run = run_pytest(folder, *options)
    assert run.returncode == 0, run.stdout + run.stderr
    cut, order = read_outcomes(run.stdout).values()
    assert (cut, order) == ("XFAIL", "PASSED")
    assert "accepted: T1 unequal rows: wrong, T1 unequal tokens: wrong" in run.stdout

    accepted.write_text("\n".join([*lines[1:], "T3: refuses"]))
    run = run_pytest(folder, *options)
    assert {*read_outcomes(run.stdout).values()} == {"FAILED"}
    assert "T1 (cut, unequal rows) does not hold" in run.stdout
    assert "T1 (cut, unequal tokens) does not hold" not in run.stdout
    assert "T3 is accepted as 'refuses', and 'holds' now" in run.stdout


REFUSED = {
    "mine:nothing": "AttributeError: module 'mine' has no attribute 'nothing'",
    "mine": "'mine' is not of the form MODULE:TRAINER",
    "mine:right --trainer-laws T8": "there is no law 'T8': they are T0",
    "mine.py:right": "'mine.py:right' is not of the form MODULE:TRAINER",
    "mine:__name__": "mine:__name__ is str, neither a trainer nor a function",
    "mine:divided_once": "missing a required argument.*ps.testing.loop",
    "mine:right --trainer-cases few": "cases is 'few', which is no whole number",
    "mine:right --trainer-cases 0": "cases is 0, and every law would hold in none",
    "mine:right --trainer-seed tomorrow": "seed is 'tomorrow': it is a whole number",
    "mine:right --trainer-accept none.txt": "No such file.*none.txt",
}
REFUSE = f"""
import pytest

for options in {[*REFUSED]}:
    status = pytest.main(["-p", "pytest_purestep", "--trainer", *options.split()])
    assert status == pytest.ExitCode.USAGE_ERROR, options
"""


def test_wrong_options_are_refused(folder: Path) -> None:
    """One process tries them in turn, as torch is imported once there."""
    run = run_python(folder, REFUSE)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    errors = re.findall("^ERROR: --trainer (.*)", run.stderr, re.M)
    for (options, message), error in zip(REFUSED.items(), errors, strict=True):
        trainer, *_ = options.split()
        assert re.match(f"{trainer}: .*({message})", error)


@pytest.mark.parametrize(
    "options", [["mine:on_ranks"], ["mine:right", "-n", "1"]], ids=["ranks", "workers"]
)
def test_processes_import_the_module(folder: Path, options: list[str]) -> None:
    """Those of a trainer on several ranks do, and the workers of pytest-xdist."""
    cases = ["--trainer-laws", "T0,T6", "--trainer-cases", "3"]
    run = run_pytest(folder, "--trainer", *options, *cases)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


LIGHT = """
import sys

def test_others():
    roots = {name.partition(".")[0] for name in sys.modules}
    assert not roots & {"torch", "purestep"}
    assert "pytest_purestep" in sys.modules
"""


def test_without_the_option_nothing_is_imported(folder: Path) -> None:
    """In a new interpreter, which has imported nothing before."""
    (folder / "test_others.py").write_text(LIGHT)
    command = [sys.executable, "-P", "-m", "pytest", "-p", "pytest_purestep", "-v"]
    run = subprocess.run(
        [*command, "-p", "no:hypothesispytest"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert read_outcomes(run.stdout) == {"test_others.py::test_others": "PASSED"}
    assert len(run.stdout.splitlines()) < 12
