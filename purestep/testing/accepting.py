"""Compares verdicts with a list of failures that a project accepts, and writes that list."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from purestep.testing.catalogue import LAWS
from purestep.testing.judging import FAILURES, Verdict, report


class PartVerdict(NamedTuple):
    """Holds the verdict on one part of a law, and the status that is accepted there.

    ``name`` is that of law and part, such as "T1 unequal tokens". ``part`` is "" for a law of one
    part. ``accepted`` is "wrong" or "refuses", or "" if no failure is accepted.
    """

    name: str
    part: str
    verdict: Verdict
    accepted: str = ""

    @property
    def complaint(self) -> str:
        """Describes how the verdict differs from what is accepted; returns "" if it does not.

        A failure that is not accepted is described with its case. For an accepted one that no
        longer occurs, the text says to take it off the list.
        """
        status = self.verdict.status
        if status in FAILURES:
            return "" if status == self.accepted else report(self.verdict)
        if self.accepted:
            return (
                f"{self.name} is accepted as {self.accepted!r}, and {status!r} now: "
                "take it off the list."
            )
        return ""


def split_verdict(verdict: Verdict, accepted: dict[str, str]) -> list[PartVerdict]:
    """Lists the verdicts on the parts of a law, with the status that is accepted for each, or "".

    ``accepted`` is as ``read_accepted`` returns it. A part without a verdict has that of the law.
    So it is in a law with a single part, or in one whose parts were not judged.
    """
    law = verdict.law.name
    verdicts = []
    for part in LAWS[law].parts:
        name = _name_part(law, part)
        part_verdict = verdict.parts.get(part, verdict)
        expected = accepted.get(name, "")
        verdicts.append(PartVerdict(name, part, part_verdict, expected))
    return verdicts


def read_accepted(path: Path) -> dict[str, str]:
    """Reads a file of lines such as ``T1 unequal tokens: wrong  # why``.

    Returns the status by law and part, such as "T1 unequal tokens". Comments and empty lines are
    skipped. Raises ``ValueError`` for an unknown law, part or status.
    """
    names = set()
    for law in LAWS.values():
        for part in law.parts:
            names.add(_name_part(law.name, part))
    accepted = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, status = _parse_line(line)
        if name in names and status in FAILURES:
            accepted[name] = status
        elif name or status:
            raise ValueError(
                f"{path}: the line {line!r} is none of {sorted(names)} with ': wrong' or "
                "': refuses' behind it"
            )
    return accepted


def write_accepted(path: Path, verdicts: Sequence[PartVerdict]) -> None:
    """Writes the failures among the verdicts, each as a line that ``read_accepted`` reads.

    Of an older file it keeps lines that are comments, and lines about parts that are not among the
    verdicts. It also keeps the line of a failure that still occurs with the same status, and the
    comment behind it. Lines of the other failures follow, each with its reason, shortened.
    """
    failures = {}
    for item in verdicts:
        if item.verdict.status in FAILURES:
            failures[item.name] = item.verdict
    judged = {item.name for item in verdicts}
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            name, status = _parse_line(line)
            verdict = failures.get(name)
            if verdict is not None and verdict.status == status:
                del failures[name]
                lines.append(line)
            elif name not in judged:
                lines.append(line)
    for name, verdict in failures.items():
        lines.append(f"{name}: {verdict.status}  # {_shorten(verdict.reason)}")
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _name_part(law: str, part: str) -> str:
    return f"{law} {part}".strip()


def _parse_line(line: str) -> tuple[str, str]:
    """Returns the name and the status of a line: what is before and after its first colon.

    A comment is left out. Both are "" for a comment or an empty line. Nothing is checked:
    without a colon, the status is "".
    """
    code = line.partition("#")[0]
    name, _, status = code.partition(":")
    return name.strip(), status.strip()


def _shorten(reason: str) -> str:
    """Returns the first words of a reason, on one line of at most 80 characters."""
    return textwrap.shorten(reason, 80, placeholder=" ...")
