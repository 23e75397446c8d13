"""Runs the sections, and writes what they find.

python -m benchmarks.gpu                       on a CUDA device, in the root of a checkout
python -m benchmarks.gpu --device cpu --tiny   the same logic on a CPU, at sizes that mean nothing
python -m benchmarks.gpu --only gpt,mlp        some sections
python -m benchmarks.gpu --table FILE          the Markdown table of a gpu.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.entries import Run, describe_error
from benchmarks.gpu.orchestrate import Orchestrator
from benchmarks.gpu.processes import ROOT, Settings
from benchmarks.gpu.report import make_table
from benchmarks.gpu.schedule import SECTIONS, SLOWNESS, TOTAL_SECONDS, select_sections

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    out = os.environ.get("OUT", "build/gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "lazy"])
    parser.add_argument(
        "--tiny", action="store_true", help="sizes for a CPU, to try the logic"
    )
    parser.add_argument("--only", default="", help="sections, joined by commas")
    parser.add_argument("--out", type=Path, default=Path(out), help="where results go")
    parser.add_argument("--seconds", type=float, help="for all sections")
    parser.add_argument(
        "--jobs", type=int, help="sections at once, where several may be"
    )
    parser.add_argument("--table", type=Path, help="print the table of this gpu.json")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def run_section(options: argparse.Namespace) -> int:
    """Runs one section in this process."""
    run = Run(
        options.section,
        device=options.device,
        tiny=options.tiny,
        folder=options.folder,
        seconds=options.seconds,
    )
    try:
        call_section(run)
    except BaseException as error:
        run.add(error=describe_error(error))
        raise
    return 0


def call_section(run: Run) -> None:
    """Calls the function of a section, in this process."""
    (section,) = [section for section in SECTIONS if section.name == run.section]
    module = importlib.import_module(f"benchmarks.gpu.{section.module}")
    getattr(module, f"run_{section.name}")(run)


def run_sections(options: argparse.Namespace) -> int:
    """Runs all sections that are asked for; returns the exit status."""
    sections = select_sections(options.only)
    slowness = SLOWNESS if options.tiny else 1.0
    seconds = options.seconds or slowness * TOTAL_SECONDS
    jobs = options.jobs or (2 if options.tiny else len(SECTIONS))
    with tempfile.TemporaryDirectory(
        prefix="purestep-gpu-", ignore_cleanup_errors=True
    ) as folder:
        settings = Settings(options.device, options.tiny, Path(folder))
        orchestrator = Orchestrator(
            settings, options.out.resolve(), seconds, jobs, slowness
        )
        is_complete = options.device == "cuda" and not options.tiny and not options.only
        if is_complete:
            orchestrator.copies.append(RESULTS)
        signal.signal(signal.SIGTERM, exit_on_signal)
        try:
            orchestrator.run(sections)
        finally:
            orchestrator.stop_all()
            status = orchestrator.print_summary()
    return status


def exit_on_signal(number: int, frame: Any) -> None:
    """Ends the program in the ordinary way, so that results are written."""
    raise SystemExit(f"stopped by signal {number}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status."""
    options = make_parser().parse_args(arguments)
    if options.table:
        print(make_table(json.loads(options.table.read_text())))
        return 0
    if options.section:
        return run_section(options)
    return run_sections(options)


if __name__ == "__main__":
    sys.exit(main())
