"""Runs the page about continuous integration from top to bottom, in an empty folder.

Its environment has what pip finds there, but not purestep: that comes from the wheel of the page.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "pages" / "howto" / "ci.md").read_text()
INDENTED = re.compile(r"(?:^    .*\n)+", re.M)
BLOCKS = {
    language: re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    for language in ("python", "yaml", "toml")
}
FAILS = {"python -m purestep.testing mine:trainer"}
"""Commands that say what is wrong; all others end well."""


class Folder(NamedTuple):
    """Holds an empty folder, and the variables under which commands run there."""

    path: Path
    env: dict[str, str]

    def run(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as GitHub does: by bash, which ends where a line fails."""
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.path,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )


def write_program(path: Path, *command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
    path.chmod(0o755)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Makes an environment with all packages but purestep, and a checkout in the home folder."""
    home = tmp_path_factory.mktemp("home")
    checkout = home / "purestep"
    no_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "purestep", checkout / "purestep", ignore=no_cache)
    for name in ("pyproject.toml", "README.md", "LICENSE", "pytest_purestep.py"):
        shutil.copy(ROOT / name, checkout)

    venv = home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = (venv / "lib").glob("*/site-packages")
    for entry in Path(torch.__file__).parent.parent.iterdir():
        if "purestep" not in entry.name and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    python = str(venv / "bin" / "python")
    write_program(venv / "bin" / "pip", python, "-m", "pip")
    # As the program does, which is installed with pytest: without the folder in sys.path.
    write_program(venv / "bin" / "pytest", python, "-P", "-m", "pytest")
    env = {
        "HOME": str(home),
        "PATH": f"{venv / 'bin'}:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # Means that there is no isolation.
        "PIP_NO_COMPILE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    empty = home / "empty"
    empty.mkdir()
    return Folder(empty, env)


def find_commands() -> list[str]:
    """Lists the commands of the page, in order."""
    commands = []
    for block in INDENTED.findall(re.sub(r"^```.*?^```", "", PAGE, flags=re.S | re.M)):
        for line in block.splitlines():
            if re.match(r"    (python|pip|pytest) ", line):
                commands.append(line.strip())
    return commands


def find_output() -> list[str]:
    """Lists the lines of the page that are what a command prints or writes."""
    lines = []
    for block in INDENTED.findall(re.sub(r"^```.*?^```", "", PAGE, flags=re.S | re.M)):
        for line in block.splitlines():
            if line.strip() not in find_commands():
                lines.append(line.strip())
    return lines


def find_workflow_commands() -> list[str]:
    (workflow,) = BLOCKS["yaml"]
    steps = yaml.safe_load(workflow)["jobs"]["laws"]["steps"]
    return [step["run"] for step in steps if "run" in step]


@pytest.mark.timeout(600)  # It judges a trainer four times, and makes an environment.
def test_the_page_runs_in_an_empty_folder(folder: Folder) -> None:
    (program,) = BLOCKS["python"]
    (folder.path / "mine.py").write_text(program)
    commands = find_commands()
    assert len(commands) == 5
    install, *judges = find_workflow_commands()
    workflow = yaml.safe_load(BLOCKS["yaml"][0])

    # The wheel comes first: in CI, the workflow installs it.
    (wheel,) = [command for command in commands if command.startswith("pip wheel")]
    built = folder.run(wheel)
    assert built.returncode == 0, built.stdout
    assert len([*(folder.path / "wheels").glob("purestep-*.whl")]) == 1
    missing = folder.run("python -c 'import purestep'")
    assert "No module named 'purestep'" in missing.stdout
    installed = folder.run(install, **workflow["jobs"]["laws"]["env"])
    assert installed.returncode == 0, installed.stdout

    (judge,) = judges
    (accept,) = [command for command in commands if " --accept " in command]
    assert accept in judge, "which runs it below"
    printed = ""
    for command in commands:
        if command not in (wheel, accept):
            # The same cases as above would take as long again.
            few = " --cases 25" if " --write-accept " in command else ""
            run = folder.run(command + few)
            assert run.returncode == (1 if command in FAILS else 0), run.stdout
            printed += run.stdout
    printed += (folder.path / "accepted.txt").read_text()
    for line in find_output():
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        assert re.search(f"^{pattern}$", printed, re.M), line

    judge_few = judge.replace("--seed", "--cases 25 --seed")
    run = folder.run(judge_few, GITHUB_EVENT_NAME="push")
    assert run.returncode == 0, run.stdout
    assert "holds" in (folder.path / "laws.html").read_text(encoding="utf-8")
    # Its cases would be others each day.
    named = judge.replace("python -m purestep.testing", "echo")
    run = folder.run(named, GITHUB_EVENT_NAME="schedule")
    assert "--seed today" in run.stdout


def test_options_of_pytest_are_those_of_the_command() -> None:
    """In ``pyproject.toml`` they mean what they mean behind ``pytest``, which the test above runs."""
    (text,) = BLOCKS["toml"]
    (command,) = [each for each in find_commands() if each.startswith("pytest ")]
    addopts = tomllib.loads(text)["tool"]["pytest"]["ini_options"]["addopts"]
    assert ["pytest", *addopts] == re.sub(r"(--\S+) (?=[^-])", r"\1=", command).split()
