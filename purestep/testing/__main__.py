"""Puts the laws to a trainer of yours, and says where it breaks them."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from purestep.testing.case import cause
from purestep.testing.catalogue import LAWS
from purestep.testing.judging import judge, report


def main() -> int:
    """0: each law holds, or fails as accepted; 1: one does not; 2: the arguments are wrong."""
    parser = argparse.ArgumentParser("python -m purestep.testing", description=__doc__)
    parser.add_argument(
        "trainer", metavar="MODULE:TRAINER", help="a trainer, or what makes one"
    )
    parser.add_argument(
        "--laws", default=",".join(LAWS), help="some of them, such as T1,T4"
    )
    parser.add_argument("--cases", type=int, default=100, help="for each law")
    parser.add_argument(
        "--seed", default="0", help='a number; or "today", for others each day'
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="to write the verdicts to"
    )
    parser.add_argument(
        "--accept", type=Path, metavar="FILE", help="failures that are known"
    )
    given = parser.parse_args()
    module, _, name = given.trainer.partition(":")
    try:
        trainer: Any = getattr(importlib.import_module(module), name)
        if isinstance(trainer, type) or not hasattr(trainer, "update"):
            trainer = trainer()
        seed = given.seed if given.seed == "today" else int(given.seed)
        accepted = _accepted(given.accept.read_text()) if given.accept else {}
        judge(trainer, given.laws.split(","), cases=0)
    except Exception as error:
        parser.error(cause(error))
    rows: list[dict[str, Any]] = []
    told: list[str] = []
    for law in given.laws.split(","):
        (whole,) = judge(trainer, [law], cases=given.cases, seed=seed)
        for part, verdict in (
            whole.parts or dict.fromkeys(LAWS[law].parts, whole)
        ).items():
            key, now = f"{law} {part}".strip(), verdict.finding
            was = accepted.get(key)
            about = (
                verdict.why
                or f"in {verdict.cases} cases, {verdict.to_the_bit} to the bit"
            )
            note = f"{now} (accepted: {was})" if was else now
            print(f"{key:18} {verdict.law.title:12} {note}: {about}", flush=True)
            if now in ("wrong", "refuses"):
                told += [] if now == was else [report(verdict)]
            elif was:
                told.append(
                    f"{key} is accepted as {was!r}, and {now!r} now: take it off the list."
                )
            row = verdict._asdict() | {
                "law": law,
                "parts": part,
                "accepted": was,
                "seed": seed,
            }
            case = verdict.case
            rows.append(
                row | {"case": case and case.words(), "code": case and case.code()}
            )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    print("", *told, sep="\n")
    return int(bool(told))


def _accepted(text: str) -> dict[str, str]:
    """Lines such as ``T1 unequal tokens: wrong  # why``."""
    known = {
        f"{name} {part}".strip() for name, law in LAWS.items() for part in law.parts
    }
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    accepted = dict(line.split(": ", 1) for line in lines if line)
    if wrong := ({*accepted} - known) | ({*accepted.values()} - {"wrong", "refuses"}):
        raise ValueError(
            f"--accept: {wrong}; a line is one of {sorted(known)}, ': wrong' or ': refuses'"
        )
    return accepted


if __name__ == "__main__":
    sys.exit(main())
