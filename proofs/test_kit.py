"""The kit sees every bug that a black box can show, in a loop by hand, and accepts the loop without it."""

from __future__ import annotations

from string import ascii_lowercase

import pytest

import purestep as ps
from proofs.plain_loop import PlainLoop
from proofs.plain_mutants import BUGS, UNSEEN, Bug, build
from purestep.testing import LAWS

test_plain_loop = ps.testing.laws(PlainLoop, [name for name in LAWS if name != "T17"])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.number)
def test_bug_is_found(bug: Bug) -> None:
    """By the law that it breaks."""
    (verdict,) = ps.testing.judge(build(bug), [bug.law], cases=60, shrink=0)
    assert verdict.finding == ("refuses" if bug.number == "38" else "wrong"), verdict


def test_catalogue_is_complete() -> None:
    """Every bug that happened is put into the loop, or there is a reason why it cannot be seen."""
    put_in = {int(bug.number.rstrip(ascii_lowercase)) for bug in BUGS}
    assert put_in | {*map(int, UNSEEN)} == set(range(1, 54))
    assert not put_in & {*map(int, UNSEEN)}
