"""Puts the laws to a trainer of yours, and says where it breaks them."""

import argparse
import gc
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from purestep.testing.accepting import (
    PartVerdict,
    read_accepted,
    split_verdict,
    write_accepted,
)
from purestep.testing.case import describe_cause
from purestep.testing.catalogue import LAWS
from purestep.testing.html_report import render_report
from purestep.testing.judging import check_cases, run_laws
from purestep.testing.loading import load_trainer, parse_laws, parse_seed, writable_path
from purestep.testing.progress import Progress


def main() -> int:
    """Prints a verdict for each part of each law; returns 1 if there are complaints, else 0.

    The trainer and all options come from the command line. A complaint is a failure that the file
    of ``--accept`` does not list, or one in that list that no longer occurs. ``--json`` and
    ``--html`` also write the verdicts to files. ``--write-accept`` writes the failures, as accepted
    from now on, and returns 0. Wrong arguments raise ``SystemExit(2)``, and so does a trainer that
    cannot be loaded.
    """
    parser = _make_parser()
    options = parser.parse_args()
    names = parse_laws(options.laws)
    try:
        check_cases(options.cases)
        trainer = load_trainer(options.trainer, names)
        seed = parse_seed(options.seed)
        accepted = read_accepted(options.accept) if options.accept else {}
    except Exception as error:
        parser.error(describe_cause(error))

    # Else Python looks for garbage among all that was imported, for a sixth of the time.
    gc.freeze()
    progress = Progress(sys.stderr, options.progress)
    verdicts: list[PartVerdict] = []
    for name in names:
        (verdict,) = run_laws(
            trainer, [name], cases=options.cases, seed=seed, progress=progress.show
        )
        progress.clear()
        for part_verdict in split_verdict(verdict, accepted):
            _print_row(part_verdict)
            verdicts.append(part_verdict)
    # To free what is frozen takes half a second. Triton alone complains of what is left.
    if "triton" in sys.modules:
        gc.unfreeze()
    _write_files(options, verdicts)
    if options.write_accept:
        return 0
    complaints = [item.complaint for item in verdicts if item.complaint]
    print("", *complaints, sep="\n")
    return 1 if complaints else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m purestep.testing", description=__doc__)
    parser.add_argument(
        "trainer",
        metavar="MODULE:TRAINER",
        help="a trainer, or a class or function that makes one",
    )
    parser.add_argument(
        "--laws",
        default=",".join(LAWS),
        help="some of them, such as T1,T4",
    )
    parser.add_argument(
        "--cases",
        type=int,
        default=100,
        help="for each law",
    )
    parser.add_argument(
        "--seed",
        default="0",
        help='a number; or "today", for others each day',
    )
    parser.add_argument(
        "--json",
        type=writable_path,
        metavar="FILE",
        help="to write the verdicts to",
    )
    parser.add_argument(
        "--html",
        type=writable_path,
        metavar="FILE",
        help="to write the verdicts to, as a page",
    )
    accepting = parser.add_mutually_exclusive_group()
    accepting.add_argument(
        "--accept",
        type=Path,
        metavar="FILE",
        help="failures that you know",
    )
    accepting.add_argument(
        "--write-accept",
        type=writable_path,
        metavar="FILE",
        help="to write the failures to, for --accept",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="on standard error; left out: if that is a terminal",
    )
    return parser


def _print_row(part_verdict: PartVerdict) -> None:
    verdict = part_verdict.verdict
    note = str(verdict.status)
    if part_verdict.accepted:
        note += f" (accepted: {part_verdict.accepted})"
    about = verdict.reason
    if not about:
        about = f"in {verdict.cases} cases, {verdict.num_bitwise} to the bit"
    title = verdict.law.title
    print(f"{part_verdict.name:18} {title:12} {note}: {about}", flush=True)


def _write_files(options: argparse.Namespace, verdicts: Sequence[PartVerdict]) -> None:
    """Writes the files that ``--json``, ``--html`` and ``--write-accept`` name, if they are set."""
    if options.json:
        rows = [_verdict_as_dict(item, options.seed) for item in verdicts]
        options.json.write_text(json.dumps(rows, indent=1, allow_nan=False))
    if options.html:
        command = ["python -m purestep.testing", *sys.argv[1:]]
        page = render_report(options.trainer, " ".join(command), verdicts)
        options.html.write_text(page, encoding="utf-8")
    if options.write_accept:
        write_accepted(options.write_accept, verdicts)


def _verdict_as_dict(part_verdict: PartVerdict, seed: str) -> dict[str, Any]:
    """Returns the fields of a verdict as a dict for JSON, with the case as text and code.

    "law" is the law's name, and "parts" the name of the part; "accepted" and "seed" are added. None
    stands for a size that is not finite, which JSON does not know. It also stands for a case that
    is not there, and where no failure is accepted.
    """
    verdict = part_verdict.verdict
    row = verdict._asdict()
    case = verdict.case
    row["law"] = verdict.law.name
    row["parts"] = part_verdict.part
    row["accepted"] = part_verdict.accepted or None
    row["seed"] = parse_seed(seed)
    row["size"] = verdict.size if math.isfinite(verdict.size) else None
    row["case"] = None if case is None else case.describe()
    row["code"] = None if case is None else case.reproducer()
    return row


if __name__ == "__main__":
    sys.exit(main())
