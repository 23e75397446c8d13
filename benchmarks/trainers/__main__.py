"""Judges all trainers, each in a process of its own, and writes results/conformance.json, its picture, and CONFORMANCE.md."""

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
from benchmarks.trainers.columns import COLUMNS

HERE = Path(__file__).parent.parent
BUILD = HERE.parent / "build"
EXAMPLES = ("heads", "torchtune", "evaluation", "torchopt")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of all packages that are named, wherever they are."""
    sys.path += [
        str(BUILD / folder)
        for folder in sorted({c.folder for c in COLUMNS if c.folder})
    ]
    return {name: metadata.version(name) for name in sorted(packages)}


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
    command = [sys.executable, "-m", "benchmarks.trainers", "--part", what, *numbers]
    try:
        subprocess.run(command, check=True, timeout=options.seconds, env=environment)
    except subprocess.SubprocessError as error:
        return f"{what}: {error}"
    return ""


def part(what: str, options: argparse.Namespace) -> None:
    """In that process: judges, and leaves what it finds."""
    from benchmarks.trainers.work import examples, judged

    found = (
        examples(what)
        if what in EXAMPLES
        else judged(what, options.cases, options.shrink)
    )
    where(what).write_text(json.dumps(found))


def where(what: str) -> Path:
    """What has been found, for the page."""
    folder = BUILD / "conformance"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{''.join(c if c.isalnum() else '_' for c in what)}.json"


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
    columns = [
        about_column(column) | json.loads(where(column.name).read_text())
        for column in COLUMNS
        if where(column.name).exists()
    ]
    about = {
        "limit": options.seconds,
        "seconds": sum(column["seconds"] for column in columns),
        "python": platform.python_version(),
        "versions": versions(
            {name for column in columns for name in column["packages"]}
        ),
        "laws": {
            name: {"title": law.title, "statement": law.statement}
            for name, law in ps.testing.LAWS.items()
        },
        "columns": columns,
        **{which: json.loads(where(which).read_text()) for which in EXAMPLES},
    }
    about["again"] = again.checked(columns)
    path = timing.write(options.out / "results", "conformance", about)
    picture.draw(about, path)
    (options.out / "CONFORMANCE.md").write_text(report.text(about))
    print(f"{time.monotonic() - start:.0f} s; {options.out / 'CONFORMANCE.md'}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
