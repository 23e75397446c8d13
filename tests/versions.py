"""Runs the tests at the corners of the versions that are claimed, each in its own environment.

python -m tests.versions                  all corners
python -m tests.versions oldest newest    these

It needs Python alone. A corner whose interpreter is not found is named at the end, and the others run. The status is
not zero if a test fails, or an environment cannot be made.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Corner(NamedTuple):
    """A set of versions that are tested together, in the environment that ``make`` makes of their pins."""

    python: str
    environment: str
    pins: str


CORNERS = {
    "oldest": Corner("3.12", ".venv-oldest", "torch and all else at its lower bound"),
    "pinned": Corner("3.11", ".venv", "constraints.txt"),
    "newest": Corner("3.13", ".venv-newest", "constraints.txt with the newest torch"),
}


class Outcome(NamedTuple):
    """The result of a corner; the versions are empty where nothing ran."""

    failed: bool
    tests: str
    python: str = ""
    torch: str = ""
    transformers: str = ""


PRINT_MINOR = "import sys; print('%d.%d' % sys.version_info[:2])"
PRINT_FULL = "import platform; print(platform.python_version())"
PRINT_PACKAGES = """
from importlib.metadata import version
print(version("torch"), version("transformers"))
"""


def find_interpreter(version: str) -> Path | None:
    """Finds a Python of this version that runs and makes environments: on PATH, of pyenv, or of uv."""
    for python in _list_candidates(version):
        # A shim of pyenv's is on PATH for versions that are not active, and fails.
        if (
            _read_output([str(python), "-c", f"import ensurepip; {PRINT_MINOR}"])
            == version
        ):
            return python
    return None


def _list_candidates(version: str) -> Iterator[Path]:
    for folder in os.get_exec_path():
        yield Path(folder) / f"python{version}"
    pyenv_root = _read_output(["pyenv", "root"])
    if pyenv_root:
        yield from Path(pyenv_root).glob(f"versions/{version}*/bin/python{version}")
    uv_python = _read_output(["uv", "python", "find", version])
    if uv_python:
        yield Path(uv_python)


def _read_output(command: list[str]) -> str:
    """Returns what a command prints; nothing where it fails or does not exist."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if result.returncode != 0:
        return ""
    return result.stdout.strip()


def run_corner(corner: Corner, root: Path = ROOT) -> Outcome:
    """Makes the environment of a corner and runs the tests in it."""
    interpreter = find_interpreter(corner.python)
    if interpreter is None:
        reason = f"no Python {corner.python} on PATH, of pyenv or of uv"
        return Outcome(False, f"not run: {reason}")
    environment = root / corner.environment
    python = environment / "bin" / "python"
    if python.exists():
        version = _read_output([str(python), "-c", PRINT_MINOR])
        if version != corner.python:
            reason = f"{environment} has Python {version or '?'}, remove it"
            return Outcome(False, f"not run: {reason}")
    make = ["make", f"{corner.environment}/installed", f"PYTHON={interpreter}"]
    if subprocess.run(make, cwd=root).returncode != 0:
        return Outcome(True, f"not run: {corner.environment} could not be made")

    torch, transformers = _read_output([str(python), "-c", PRINT_PACKAGES]).split()
    tests = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    status, summary = _run_tests(tests, root)
    full_version = _read_output([str(python), "-c", PRINT_FULL])
    return Outcome(status != 0, summary, full_version, torch, transformers)


def _run_tests(command: list[str], root: Path) -> tuple[int, str]:
    """Returns the status of pytest, and its last line: "3 failed, 2000 passed in 300.00s"."""
    summary = "no summary"
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if re.search(r"\d+ (passed|failed|errors?)\b.* in [\d.]+s", line):
                summary = line.strip("= \n")
    return run.returncode, summary


def main(names: Sequence[str]) -> int:
    """Runs these corners, or all; returns 1 if one failed."""
    outcomes = {}
    for name in names or CORNERS:
        corner = CORNERS[name]
        print(f"{name}: Python {corner.python}, {corner.pins}", flush=True)
        outcomes[name] = run_corner(corner)
    row = "{:8} {:10} {:16} {:14} {}"
    print(row.format("", "Python", "torch", "transformers", "tests"))
    for name, outcome in outcomes.items():
        tests = f"FAILED: {outcome.tests}" if outcome.failed else outcome.tests
        versions = (outcome.python, outcome.torch, outcome.transformers)
        print(row.format(name, *versions, tests))
    has_failed = any(outcome.failed for outcome in outcomes.values())
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
