"""``make versions``: which interpreter it takes, and what it says of each corner."""

import re
import tomllib
from pathlib import Path

import pytest

from purestep.torch_private import NEWEST, OLDEST
from tests import versions
from tests.versions import CORNERS, Corner, find_interpreter, main, run_corner

ROOT = Path(__file__).parent.parent


def program(path: Path, text: str) -> Path:
    """A shell program of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder on PATH; a second one follows, and the shell's."""
    first = tmp_path / "first"
    monkeypatch.setenv("PATH", f"{first}:{tmp_path / 'second'}:/bin")
    return first


def test_an_interpreter_is_one_that_runs(path: Path, tmp_path: Path) -> None:
    """Not the first of its name on PATH: that may be a shim, or of another version."""
    assert find_interpreter("9.9") is None
    uv = program(tmp_path / "python_of_uv", "echo 9.9")
    program(path / "uv", f"echo {uv}")
    assert find_interpreter("9.9") == uv
    pyenv = program(
        tmp_path / "pyenv" / "versions" / "9.9.1" / "bin" / "python9.9", "echo 9.9"
    )
    program(path / "pyenv", f"echo {tmp_path / 'pyenv'}")
    assert find_interpreter("9.9") == pyenv
    program(
        path / "python9.9", "echo pyenv: python9.9: command not found >&2; exit 127"
    )
    assert find_interpreter("9.9") == pyenv
    program(path / "python9.9", "echo 9.8")
    assert find_interpreter("9.9") == pyenv
    second = program(tmp_path / "second" / "python9.9", "echo 9.9")
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


def test_a_corner_says_what_ran(path: Path, tmp_path: Path) -> None:
    corner = Corner("9.9", ".venv-here", "pins")
    interpreter, own = path / "python9.9", tmp_path / ".venv-here" / "bin" / "python"
    program(path / "make", MAKE)
    assert run_corner(corner, tmp_path)[:2] == (
        False, "not run: no Python 9.9 on PATH, of pyenv or of uv",
    )  # fmt: skip
    program(interpreter, "echo 9.9")
    program(own, "echo 9.8")
    assert run_corner(corner, tmp_path).tests.endswith(
        ".venv-here has Python 9.8, remove it"
    )
    assert not (tmp_path / "made").exists()
    program(own, PYTHON)
    ran = run_corner(corner, tmp_path)
    assert ran == (True, "1 failed, 2 passed in 3.00s", "9.9.1", "2.0", "5.0")
    assert (
        tmp_path / "made"
    ).read_text() == f".venv-here/installed PYTHON={interpreter}\n"
    program(own, PYTHON.replace("1 failed, ", "").replace("exit 1", ""))
    assert not run_corner(corner, tmp_path).failed
    program(path / "make", "exit 2")
    assert run_corner(corner, tmp_path)[:2] == (
        True,
        "not run: .venv-here could not be made",
    )


def test_the_others_run_where_an_interpreter_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(corner: Corner) -> versions.Outcome:
        failed = corner.python == "3.12"
        return versions.Outcome(failed, "3 passed in 1s", "3.12.1", "2.11.0", "5.17.0")

    assert main(["newest"]) == 0
    assert re.search(r"newest +not run: no Python 3.13", capsys.readouterr().out)
    monkeypatch.setattr(versions, "run_corner", run)
    assert (main(["newest"]), main([])) == (0, 1)
    printed = capsys.readouterr().out
    assert re.search(r"^newest +3.12.1 +2.11.0 +5.17.0 +3 passed", printed, re.M)
    assert re.search(r"^oldest .*FAILED: 3 passed", printed, re.M)


def test_the_corners_are_what_is_claimed() -> None:
    """Each Python that is claimed has one, and the pinned torch lies between the oldest and the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = [
        each.split()[-1] for each in project["classifiers"] if "Python :: 3." in each
    ]
    assert claimed == sorted(corner.python for corner in CORNERS.values())
    assert project["requires-python"] == f">={claimed[0]}"
    pins = (ROOT / "constraints.txt").read_text()
    pinned = re.findall(r"^torch==(.*)$", pins, re.M)
    oldest, between, newest = (
        tuple(map(int, v.split("."))) for v in (OLDEST, *pinned, NEWEST)
    )
    assert oldest < between < newest
    for page in ("README.md", "docs/pages/start/install.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text()
        assert f"Python {claimed[0]} to {claimed[-1]}" in text
        assert f"torch {OLDEST} to {NEWEST}" in text
