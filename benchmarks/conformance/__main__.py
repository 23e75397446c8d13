"""Judges all trainers, two at a time, and writes results/conformance.json, its picture, and CONFORMANCE.md."""

import argparse
import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import purestep as ps
from benchmarks import timing
from benchmarks.conformance import picture, report
from benchmarks.conformance.columns import COLUMNS
from benchmarks.conformance.work import examples, judged

HERE = Path(__file__).parent.parent


def versions(columns: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of all packages that are named."""
    names = sorted({name for column in columns for name in column["packages"]})
    return {name: metadata.version(name) for name in names}


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--shrink", type=int, default=80)
    parser.add_argument("--only", nargs="*", help="names of columns")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    start = time.monotonic()
    names = [c.name for c in COLUMNS if not options.only or c.name in options.only]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(judged, name, options.cases, options.shrink) for name in names]
        worked = {
            which: pool.submit(examples, which)
            for which in ("biases", "heads", "torchtune", "evaluation", "torchopt")
        }
        columns = [task.result() for task in tasks]
        found = {which: task.result() for which, task in worked.items()}
    about = {
        "cases": options.cases,
        "seconds": time.monotonic() - start,
        "python": platform.python_version(),
        "versions": versions(columns),
        "laws": {
            name: {"title": law.title, "statement": law.statement}
            for name, law in ps.testing.LAWS.items()
        },
        "columns": columns,
        **found,
    }
    path = timing.write(options.out / "results", "conformance", about)
    picture.draw(about, path)
    (options.out / "CONFORMANCE.md").write_text(report.text(about))
    print(f"{about['seconds']:.0f} s; {options.out / 'CONFORMANCE.md'}")


if __name__ == "__main__":
    main()
