"""Judges trainers, each in a separate process, and writes results/conformance.json, its picture, and CONFORMANCE.md.

A column that is not run keeps what results/conformance.json says of it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import purestep as ps
from benchmarks.speed import timing
from benchmarks.trainers import again, picture, report
from benchmarks.trainers.column import Column
from benchmarks.trainers.columns import COLUMNS, PROJECTS

HERE = Path(__file__).parent.parent
BUILD = HERE.parent / "build"
EXAMPLES = ("heads", "torchtune", "evaluation", "torchopt")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of the packages of one column, in the process that runs it."""
    return {name: metadata.version(name) for name in packages}


def ask(what: str, options: argparse.Namespace) -> str:
    """One column or example, in a process that may take so many seconds; what went wrong, in words."""
    folder = next((column.folder for column in COLUMNS if column.name == what), "")
    paths = [os.environ.get("PYTHONPATH", ""), str(BUILD / folder) if folder else ""]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "torch",
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            path for path in [str(HERE.parent), *paths] if path
        ),
    }
    numbers = ["--cases", str(options.cases), "--shrink", str(options.shrink)]
    numbers += ["--by-hand"] * options.by_hand
    command = [sys.executable, "-m", "benchmarks.trainers", "--part", what, *numbers]
    try:
        subprocess.run(command, check=True, timeout=options.seconds, env=environment)
    except subprocess.SubprocessError as error:
        return f"{what}: {error}"
    return ""


def part(what: str, options: argparse.Namespace) -> None:
    """In that process: judges, and leaves what it finds."""
    from benchmarks.trainers.work import by_hand_again, examples, judged

    if what in EXAMPLES:
        where(what).write_text(json.dumps(examples(what)))
        return
    (column,) = [column for column in COLUMNS if column.name == what]
    found = (
        by_hand_again(what)
        if options.by_hand
        else judged(what, options.cases, options.shrink)
        | {"versions": versions(column.packages)}
    )
    where(what).write_text(json.dumps(found))


def where(what: str) -> Path:
    """What has been found, for the page."""
    folder = BUILD / "conformance"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{''.join(c if c.isalnum() else '_' for c in what)}.json"


def published() -> dict[str, Any]:
    """Reads results/conformance.json."""
    path = HERE / "results" / "conformance.json"
    return json.loads(path.read_text()) if path.exists() else {"columns": []}


def found_of(column: Column, before: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of a column: of this run, else of an earlier one, else nothing."""
    known = {each["name"]: each for each in before["columns"]}.get(column.name, {})
    new = where(column.name)
    found: dict[str, Any] = known | (
        json.loads(new.read_text()) if new.exists() else {}
    )
    if not found:
        return {}
    if "versions" not in found:
        found["versions"] = {name: before["versions"][name] for name in column.packages}
    project = next(name for name, columns in PROJECTS.items() if column in columns)
    return {"project": project} | found | about_column(column)


def about_column(column: Column) -> dict[str, Any]:
    """What is known without running it."""
    about = {field.name: getattr(column, field.name) for field in fields(column)}
    return {
        name: value for name, value in about.items() if name not in ("make", "vacuous")
    }


def main() -> None:
    """Everything; or a part of it, and the page of all parts that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--shrink", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=900, help="for each trainer")
    parser.add_argument(
        "--only", nargs="*", help="names of columns and examples; none: the page"
    )
    parser.add_argument(
        "--by-hand", action="store_true", help="the cases by hand alone"
    )
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part(options.part, options)
        return
    start = time.monotonic()
    names = [column.name for column in COLUMNS]
    tasks = [*names, *EXAMPLES] if options.only is None else options.only
    with ThreadPoolExecutor(2) as pool:
        failed = [
            what for what in pool.map(lambda what: ask(what, options), tasks) if what
        ]
    print(*failed, sep="\n", file=sys.stderr)
    before = published()
    columns = [found for column in COLUMNS if (found := found_of(column, before))]
    about = {
        "limit": options.seconds,
        "seconds": sum(column["seconds"] for column in columns),
        "python": platform.python_version(),
        "versions": {
            name: version
            for column in columns
            if not column["folder"]
            for name, version in column["versions"].items()
        },
        "laws": {
            name: {"title": law.title, "statement": law.statement}
            for name, law in ps.testing.LAWS.items()
        },
        "columns": columns,
        **{
            which: json.loads(where(which).read_text())
            if where(which).exists()
            else before[which]
            for which in EXAMPLES
        },
    }
    again.find_folders()
    about["again"] = again.checked(columns)
    path = timing.write(options.out / "results", "conformance", about)
    picture.draw(about, path)
    (options.out / "CONFORMANCE.md").write_text(report.text(about))
    print(f"{time.monotonic() - start:.0f} s; {options.out / 'CONFORMANCE.md'}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
