"""Puts the laws to a trainer of yours, and says where it breaks them."""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from purestep.testing.case import describe_cause
from purestep.testing.catalogue import LAWS
from purestep.testing.judging import Verdict, report, run_laws


def main() -> int:
    """Prints a verdict for each part of each law; returns 1 if there are complaints, else 0.

    A complaint is a failure that is not accepted, or an accepted one that no longer occurs.
    ``--json`` also writes the verdicts to a file. Wrong arguments raise ``SystemExit(2)``.
    """
    parser = _make_parser()
    options = parser.parse_args()
    names = options.laws.split(",")
    try:
        trainer = _load_trainer(options.trainer)
        seed = options.seed if options.seed == "today" else int(options.seed)
        accepted = _read_accepted(options.accept) if options.accept else {}
        # No case yet: this refuses unknown laws, and objects that are no trainers.
        run_laws(trainer, names, cases=0)
    except Exception as error:
        parser.error(describe_cause(error))

    rows: list[dict[str, Any]] = []
    complaints: list[str] = []
    for name in names:
        (verdict,) = run_laws(trainer, [name], cases=options.cases, seed=seed)
        for part in LAWS[name].parts:
            # A law with a single part, or one that is not asked, has no verdicts by part.
            part_verdict = verdict.parts.get(part, verdict)
            expected = accepted.get(_part_name(name, part))
            _print_row(name, part, part_verdict, expected)
            complaints += _find_complaints(name, part, part_verdict, expected)
            row = _verdict_as_dict(part_verdict)
            row |= {"law": name, "parts": part, "accepted": expected, "seed": seed}
            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, allow_nan=False))
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
        type=Path,
        metavar="FILE",
        help="to write the verdicts to",
    )
    parser.add_argument(
        "--accept",
        type=Path,
        metavar="FILE",
        help="failures that you know",
    )
    return parser


def _load_trainer(path: str) -> Any:
    """Imports ``module:trainer``; calls a class or an object without ``update`` to make one."""
    module, _, name = path.partition(":")
    trainer: Any = getattr(importlib.import_module(module), name)
    if isinstance(trainer, type) or not hasattr(trainer, "update"):
        return trainer()
    return trainer


def _part_name(law: str, part: str) -> str:
    return f"{law} {part}".strip()


def _read_accepted(path: Path) -> dict[str, str]:
    """Reads lines such as ``T1 unequal tokens: wrong  # why``, as statuses by law and part.

    Raises ``ValueError`` for an unknown law, part or status.
    """
    accepted = {}
    for line in path.read_text().splitlines():
        code = line.partition("#")[0].strip()
        if code:
            name, status = code.split(": ", 1)
            accepted[name] = status
    names = set()
    for law in LAWS.values():
        for part in law.parts:
            names.add(_part_name(law.name, part))
    unknown = accepted.keys() - names
    unknown |= set(accepted.values()) - {"wrong", "refuses"}
    if unknown:
        raise ValueError(
            f"--accept: {unknown}; a line is one of {sorted(names)}, "
            "': wrong' or ': refuses'"
        )
    return accepted


def _print_row(law: str, part: str, verdict: Verdict, expected: str | None) -> None:
    note = str(verdict.status)
    if expected:
        note += f" (accepted: {expected})"
    about = verdict.reason
    if not about:
        about = f"in {verdict.cases} cases, {verdict.num_bitwise} to the bit"
    name = _part_name(law, part)
    print(f"{name:18} {verdict.law.title:12} {note}: {about}", flush=True)


def _find_complaints(
    law: str, part: str, verdict: Verdict, expected: str | None
) -> list[str]:
    """Returns a text in a list if a verdict differs from the accepted status ``expected``, else [].

    A "wrong" or "refuses" that is not accepted is reported with its case. An accepted one that is
    now neither is to be taken off the list.
    """
    if verdict.status in ("wrong", "refuses"):
        return [] if verdict.status == expected else [report(verdict)]
    if expected:
        return [
            f"{_part_name(law, part)} is accepted as {expected!r}, and "
            f"{verdict.status!r} now: take it off the list."
        ]
    return []


def _verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as JSON has it, which knows no infinite size: None stands for it."""
    row = verdict._asdict()
    case = verdict.case
    row["size"] = verdict.size if math.isfinite(verdict.size) else None
    row["case"] = None if case is None else case.describe()
    row["code"] = None if case is None else case.reproducer()
    return row


if __name__ == "__main__":
    sys.exit(main())
