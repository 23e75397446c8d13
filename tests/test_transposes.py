"""Each collective on ranks of both kinds: what comes out, and what its derivative sends back."""

from __future__ import annotations

import pytest

from proofs.ranks import Run
from tests.laws import LAWS, blocks, check_law, forward_and_pulled

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("law", LAWS)
def test_transpose(ranks: Run, law: str) -> None:
    x, y = blocks(law, 4)
    check_law(law, ranks(forward_and_pulled, [law] * 4, list(x), list(y)))
