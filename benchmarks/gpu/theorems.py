"""The theorems and the tests of devices, on this device, by pytest."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.entries import Run
from benchmarks.gpu.processes import ROOT

FILES = ["proofs/test_devices.py", "tests/test_device.py"]
TINY_FILES = ["proofs/test_devices.py"]
TINY_TESTS = "T3 or T15"

WORKERS = 7
SECONDS_FOR_A_TEST = 100
SECONDS_TO_STOP = 5
"""What is left for the entries when pytest is ended."""

OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>[A-Z]+) (?P<name>.+?)"
    r"|(?P<alone>\S+::.+?) (?P<last>[A-Z]+))"
    r"(?: +\[ *\d+%\]| \(.*\))?\s*$"
)
"""A line of ``pytest -v``, with workers or without."""

SECTION = re.compile(r"^_{3,} (?P<title>.+?) _{3,}$")
"""What stands above the traceback of a test."""

PASSED = {"PASSED", "SKIPPED", "XFAIL"}


def run_theorems(run: Run) -> None:
    """Runs them until they are through, and adds each outcome when it is there."""
    with tempfile.TemporaryDirectory() as scratch:
        log = (run.folder or Path(scratch)) / "pytest.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                make_command(run),
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PURESTEP_DEVICE": run.device,
                },
            )
        while process.poll() is None and run.seconds_left() > SECONDS_TO_STOP:
            add_outcomes(run, log.read_text(errors="replace"))
            time.sleep(0.5)
        if process.poll() is None:
            process.kill()
            run.add("pytest", error="no time was left for the other theorems")
        status = process.wait()
        text = log.read_text(errors="replace")
        add_outcomes(run, text)
        run.add("pytest", status=status, summary=last_line(text))
        if status not in (0, 1) and "error" not in run.entries["pytest"]:
            run.add("pytest", error=text[-1500:])
        print(text)


def make_command(run: Run) -> list[str]:
    """Returns the call of pytest, which takes plugins where they are installed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rN",
        "--tb=short",
        "--show-capture=no",
    ]
    command += ["-p", "no:cacheprovider"]
    # Warnings of another torch are not errors.
    command += ["-o", "addopts=", "-o", "filterwarnings=default", "--disable-warnings"]
    if run.tiny:
        return [*command, "-p", "no:xdist", "-k", TINY_TESTS, *TINY_FILES]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(WORKERS), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", str(SECONDS_FOR_A_TEST)]
    return [*command, *FILES]


def add_outcomes(run: Run, log: str) -> None:
    """Adds the outcome of each test that stands in a log, and the reasons of failures."""
    outcomes = read_outcomes(log)
    reasons = read_reasons(log)
    run.add(
        passed=sum(outcome in PASSED for outcome in outcomes.values()),
        tests=len(outcomes),
    )
    for name, outcome in outcomes.items():
        if outcome in PASSED:
            run.add("outcomes", name, outcome=outcome.lower())
        else:
            reason = reasons.get(name.split("::")[-1], "")
            run.add("outcomes", name, error=f"{outcome.lower()}: {reason}")


def read_outcomes(log: str) -> dict[str, str]:
    """Returns the outcome of each test in the log of ``pytest -v``.

    >>> log = "[gw1] [ 50%] FAILED a.py::test_b[T1 c] \\na.py::test_d PASSED      [100%]"
    >>> read_outcomes(log)
    {'a.py::test_b[T1 c]': 'FAILED', 'a.py::test_d': 'PASSED'}
    """
    outcomes: dict[str, str] = {}
    for line in log.splitlines():
        match = OUTCOME.match(line)
        if match:
            name = match["name"] or match["alone"]
            outcomes[name.strip()] = match["first"] or match["last"]
    return outcomes


def read_reasons(log: str) -> dict[str, str]:
    """Returns the first lines of the error of each test that failed, by the test's name.

    >>> read_reasons("___ test_b ___\\na.py:1: in b\\nE   assert 1 == 2\\nE   more")
    {'test_b': 'assert 1 == 2 more'}
    """
    reasons: dict[str, str] = {}
    title = ""
    for line in log.splitlines():
        match = SECTION.match(line)
        if match:
            title = match["title"]
        elif line.startswith("E  ") and title:
            reasons[title] = f"{reasons.get(title, '')} {line[1:].strip()}".strip()[
                :600
            ]
    return reasons


def last_line(text: str) -> str:
    """Returns the last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip("= ") if lines else ""
