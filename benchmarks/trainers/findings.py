"""Names the verdicts on a column, as cells of the report show them."""

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.trainers import by_hand

UNEVEN = "T2 uneven"
"""T2, where ranks have different numbers of microbatches."""
SIGNS = {
    "wrong": "**wrong**",
    "hangs": "**hangs**",
    "by design": "by design",
    "convention": "convention",
    "refuses": "refuses",
    "not asked": "·",
}
BROKEN = ("wrong", "hangs")
"""Verdicts that no documentation announces."""


def cells(report: Mapping[str, Any]) -> list[str]:
    """The laws, with T2 of uneven ranks beside T2."""
    laws = [*report["laws"]]
    at = laws.index("T2") + 1
    return [*laws[:at], UNEVEN, *laws[at:]]


def title(report: Mapping[str, Any], law: str) -> str:
    """The law's name, in words."""
    return "uneven ranks" if law == UNEVEN else str(report["laws"][law]["title"])


def finding(column: Mapping[str, Any], law: str) -> str:
    """Names a cell's verdict: "by design" where the documentation promises no more than is found.

    An optimizer that steps on a gradient of zero, as torch's do, keeps a "convention"; one that makes its parameters nan does not.
    """
    found = _of_uneven(column) if law == UNEVEN else _of_law(column, law)
    designed = found in BROKEN and law in column["promises"]
    return "by design" if designed else found


def _of_law(column: Mapping[str, Any], law: str) -> str:
    verdict = column["verdicts"][law]
    found = str(verdict["finding"])
    moved = column["moved_by_momentum"]
    numbers = "nan" not in verdict.get("why", "") and not math.isnan(moved or 0.0)
    return "convention" if found == "wrong" and law == "T7" and numbers else found


def _of_uneven(column: Mapping[str, Any]) -> str:
    results = column["uneven"]
    if not results:
        return "not asked"
    wrong = [
        (isinstance(result, str) and result.startswith("ranks differ"))
        or (isinstance(result, float) and abs(result - by_hand.UNEVEN[name][1]) > 1e-6)
        for name, result in results.items()
    ]
    if any(wrong):
        return "wrong"
    if "hangs" in results.values():
        return "hangs"
    refused = any(isinstance(result, str) for result in results.values())
    return "refuses" if refused else "holds"
