"""Tests ``make versions``: which interpreter it takes, and what it reports of each corner."""

import re
import tomllib
from pathlib import Path

import pytest

from purestep.torch_private import NEWEST, OLDEST
from tests import versions
from tests.versions import CORNERS, Corner, find_interpreter, main, run_corner

ROOT = Path(__file__).parent.parent


def write_program(path: Path, text: str) -> Path:
    """Writes a shell program of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts two folders and the shell's on PATH, and returns the first."""
    first = tmp_path / "first"
    monkeypatch.setenv("PATH", f"{first}:{tmp_path / 'second'}:/bin")
    return first


def test_an_interpreter_is_one_that_runs(path: Path, tmp_path: Path) -> None:
    """The first of its name on PATH may be a shim, or of another version."""
    in_pyenv = tmp_path / "pyenv" / "versions" / "9.9.1" / "bin" / "python9.9"
    assert find_interpreter("9.9") is None
    uv = write_program(tmp_path / "python_of_uv", "echo 9.9")
    write_program(path / "uv", f"echo {uv}")
    assert find_interpreter("9.9") == uv
    pyenv = write_program(in_pyenv, "echo 9.9")
    write_program(path / "pyenv", f"echo {tmp_path / 'pyenv'}")
    assert find_interpreter("9.9") == pyenv
    shim = "echo pyenv: python9.9: command not found >&2; exit 127"
    write_program(path / "python9.9", shim)
    assert find_interpreter("9.9") == pyenv
    write_program(path / "python9.9", "echo 9.8")
    assert find_interpreter("9.9") == pyenv
    second = write_program(tmp_path / "second" / "python9.9", "echo 9.9")
    assert find_interpreter("9.9") == second


MAKE = 'echo "$@" > made'
PYTHON = """
case "$2$3" in
    *metadata*) echo 2.0 5.0 ;;
    *platform*) echo 9.9.1 ;;
    *version_info*) echo 9.9 ;;
    pytest*) echo "1 failed, 2 passed in 3.00s"; exit 1 ;;
esac
"""


def test_a_corner_that_cannot_run_says_why(path: Path, tmp_path: Path) -> None:
    corner = Corner("9.9", ".venv-here", "pins")
    write_program(path / "make", MAKE)

    outcome = run_corner(corner, tmp_path)
    assert not outcome.failed
    assert outcome.tests == "not run: no Python 9.9 on PATH, of pyenv or of uv"

    write_program(path / "python9.9", "echo 9.9")
    write_program(tmp_path / ".venv-here" / "bin" / "python", "echo 9.8")
    outcome = run_corner(corner, tmp_path)
    assert outcome.tests.endswith(".venv-here has Python 9.8, remove it")
    assert not (tmp_path / "made").exists()

    write_program(tmp_path / ".venv-here" / "bin" / "python", PYTHON)
    write_program(path / "make", "exit 2")
    outcome = run_corner(corner, tmp_path)
    assert outcome.failed
    assert outcome.tests == "not run: .venv-here could not be made"


def test_a_corner_says_what_ran(path: Path, tmp_path: Path) -> None:
    corner = Corner("9.9", ".venv-here", "pins")
    python = tmp_path / ".venv-here" / "bin" / "python"
    interpreter = write_program(path / "python9.9", "echo 9.9")
    write_program(path / "make", MAKE)

    write_program(python, PYTHON)
    outcome = run_corner(corner, tmp_path)
    assert outcome == (True, "1 failed, 2 passed in 3.00s", "9.9.1", "2.0", "5.0")
    arguments_of_make = (tmp_path / "made").read_text()
    assert arguments_of_make == f".venv-here/installed PYTHON={interpreter}\n"

    without_failure = PYTHON.replace("1 failed, ", "").replace("exit 1", "")
    write_program(python, without_failure)
    assert not run_corner(corner, tmp_path).failed


def test_the_others_run_where_an_interpreter_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(corner: Corner) -> versions.Outcome:
        failed = corner.python == "3.12"
        return versions.Outcome(failed, "3 passed in 1s", "3.12.1", "2.11.0", "5.17.0")

    assert main(["newest"]) == 0
    assert re.search(r"newest +not run: no Python 3.13", capsys.readouterr().out)
    monkeypatch.setattr(versions, "run_corner", run)
    assert main(["newest"]) == 0
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^newest +3.12.1 +2.11.0 +5.17.0 +3 passed", printed, re.M)
    assert re.search(r"^oldest .*FAILED: 3 passed", printed, re.M)


def split_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_corners_are_what_is_claimed() -> None:
    """Each Python that is claimed has a corner.

    The pinned torch lies between the oldest and the newest.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = []
    for classifier in project["classifiers"]:
        if "Python :: 3." in classifier:
            claimed.append(classifier.split()[-1])
    assert claimed == sorted(corner.python for corner in CORNERS.values())
    assert project["requires-python"] == f">={claimed[0]}"
    pins = (ROOT / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^torch==(.*)$", pins, re.M)
    assert split_version(OLDEST) < split_version(pinned) < split_version(NEWEST)
    for page in ("README.md", "docs/pages/start/install.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text()
        assert f"Python {claimed[0]} to {claimed[-1]}" in text
        assert f"torch {OLDEST} to {NEWEST}" in text
