"""Tests that every mutant is rejected, and that the table in README.md has a line for every bug."""

import re

import pytest

from proofs import mutants
from proofs.mutants import BUGS, MUTANTS, Mutant
from support.theorem import PURESTEP

EXAMPLES = 600
"""At most this many cases are tried; nearly every mutant fails one of the first few."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.number))
def test_rejected(mutant: Mutant) -> None:
    """The claim that the mutant names rejects it, and not the source without it."""
    claim = mutants.claim(mutant.claim)
    with mutants.planted(mutant):
        broken = claim.broken_by(PURESTEP, EXAMPLES)
    assert broken, (
        f"mutant {mutant.number} survives ({mutant.description}): the proofs have a hole"
    )
    assert not claim.broken_by(PURESTEP, 2), "the source stays changed"


def test_other_words_are_an_error() -> None:
    """Checks that words that the source does not have are refused."""
    mutant = Mutant(0, "", "", "step", "no such words", "")
    refused = pytest.raises(ValueError, match="does not have these words exactly once")
    with refused, mutants.planted(mutant):
        pass


def test_table_is_complete() -> None:
    """Checks that README.md has the current table, with one line for each bug, in order."""
    assert mutants.README.read_text() == mutants.written(), (
        "run python -m proofs.mutants"
    )
    rows = re.findall(r"^\| (\d+) \|", mutants.table(), re.MULTILINE)
    assert [*map(int, rows)] == [*range(1, len(rows) + 1)]
    assert len(rows) >= len(BUGS)
