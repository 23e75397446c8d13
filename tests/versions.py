"""Runs the tests at the corners of the versions that are claimed, each in an environment of its own.

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
    """Versions that are tested together, in the environment that ``make`` makes of their pins."""

    python: str
    environment: str
    pins: str


CORNERS = {
    "oldest": Corner("3.12", ".venv-oldest", "torch and all else at its lower bound"),
    "pinned": Corner("3.11", ".venv", "constraints.txt"),
    "newest": Corner("3.13", ".venv-newest", "constraints.txt with the newest torch"),
}


class Outcome(NamedTuple):
    """What came of a corner; the versions are empty where nothing ran."""

    failed: bool
    tests: str
    python: str = ""
    torch: str = ""
    transformers: str = ""


def find_interpreter(version: str) -> Path | None:
    """Finds a Python of this version that runs and makes environments: on PATH, of pyenv, or of uv."""
    for python in _candidates(version):
        # A shim of pyenv's is on PATH for versions that are not active, and fails.
        code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
        if _read_output([str(python), "-c", code]) == version:
            return python
    return None


def _candidates(version: str) -> Iterator[Path]:
    for folder in os.get_exec_path():
        yield Path(folder) / f"python{version}"
    if root := _read_output(["pyenv", "root"]):
        yield from Path(root).glob(f"versions/{version}*/bin/python{version}")
    if found := _read_output(["uv", "python", "find", version]):
        yield Path(found)


def _read_output(command: list[str]) -> str:
    """What a command prints; nothing where it fails or does not exist."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def run_corner(corner: Corner, root: Path = ROOT) -> Outcome:
    """Makes the environment of a corner and runs the tests in it."""
    interpreter = find_interpreter(corner.python)
    if interpreter is None:
        return Outcome(
            False, f"not run: no Python {corner.python} on PATH, of pyenv or of uv"
        )
    python = root / corner.environment / "bin" / "python"
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    if (
        python.exists()
        and (other := _read_output([str(python), "-c", code])) != corner.python
    ):
        environment = python.parent.parent
        return Outcome(
            False, f"not run: {environment} has Python {other or '?'}, remove it"
        )
    make = ["make", f"{corner.environment}/installed", f"PYTHON={interpreter}"]
    if subprocess.run(make, cwd=root).returncode != 0:
        return Outcome(True, f"not run: {corner.environment} could not be made")
    names = "torch", "transformers"
    code = (
        f"import importlib.metadata as m; print(*[m.version(name) for name in {names}])"
    )
    torch, transformers = _read_output([str(python), "-c", code]).split()
    tests = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    status, summary = _run_tests(tests, root)
    full = _read_output(
        [str(python), "-c", "import platform; print(platform.python_version())"]
    )
    return Outcome(status != 0, summary, full, torch, transformers)


def _run_tests(command: list[str], root: Path) -> tuple[int, str]:
    """The status of pytest, and its last line, such as "3 failed, 2000 passed in 300.00s"."""
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
    for name, (failed, tests, *versions) in outcomes.items():
        print(row.format(name, *versions, f"FAILED: {tests}" if failed else tests))
    return int(any(outcome.failed for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
