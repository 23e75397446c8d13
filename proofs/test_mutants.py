"""Every mutant is rejected, the unchanged source is not, and the table in README.md tells who rejects whom."""

from __future__ import annotations

from string import ascii_lowercase

import pytest

from proofs import mutants
from proofs.mutants import MUTANTS, NOT_YET, README, Mutant


def test_unchanged_source_is_a_satisfying_system() -> None:
    """What mutants are built from satisfies every theorem, as other tests say of purestep: they die of their patches alone."""
    assert mutants.killers(Mutant("0", "none", []), examples=5) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.number)
def test_rejected(mutant: Mutant) -> None:
    """Every theorem that the table names rejects it, and there is at least one."""
    (line,) = (
        line
        for line in README.read_text().splitlines()
        if line.startswith(f"| {mutant.number} | {mutant.bug} |")
    )
    marks = [cell.strip() for cell in line.split("|")[3:-1]]
    named = [name for name, mark in zip(mutants.theorems(), marks, strict=True) if mark == "x"]
    assert named, f"mutant {mutant.number} survives ({mutant.bug}): the proofs have a hole"
    system = mutants.build(mutant.patches)
    for name in named:
        claims = mutants.theorems()[name]
        # A few cases of each claim are nearly always enough, and save the many of a claim that holds.
        assert any(
            claim.rejects(system, examples, draw=draw)
            for draw, examples in enumerate((20, 60, 300))
            for claim in claims
        ), f"{name} does not reject mutant {mutant.number}: run python -m proofs.mutants"


def test_table_is_complete() -> None:
    """Every bug that happened has a mutant, or a reason why it cannot be expressed yet; every mutant has a row."""
    numbers = [mutant.number for mutant in MUTANTS]
    bugs = {int(number.rstrip(ascii_lowercase)) for number in numbers}
    assert bugs | set(map(int, NOT_YET)) >= set(range(1, 44))
    assert not bugs & set(map(int, NOT_YET))
    lines = README.read_text().split("<!-- mutants -->\n")[1].splitlines()[2:]
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert rows == numbers, "run python -m proofs.mutants"
