"""The functions of the page on fitting the memory, on ranks of which some hold more than fits."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

import purestep as ps

PAGE = Path(__file__).parent.parent / "docs" / "pages" / "howto" / "fit.md"
ROWS = [7, 300, 40, 129]
LIMIT = 100


def count_all(m: Any) -> torch.Tensor:
    return torch.ones_like(m["x"], dtype=torch.bool)


def test_each_rank_cuts_its_own_share() -> None:
    """The ranks that fit try again, and the update is that of one large batch."""
    namespace: dict[str, Any] = {}
    _, program, *_ = PAGE.read_text().split("```python\n")
    exec(program.split("```")[0], namespace)
    make_fitting_step = namespace["make_fitting_step"]
    largest: list[int] = []

    def loss_fn(w: Any, m: Any) -> torch.Tensor:
        if len(m["x"]) > LIMIT:
            raise torch.OutOfMemoryError("too many rows")
        largest.append(len(m["x"]))
        losses: torch.Tensor = (w - m["x"]).square()
        return losses

    optimizer = ps.optim.adamw(0.1)
    w = torch.zeros((), dtype=torch.float64)
    x = torch.arange(sum(ROWS), dtype=torch.float64)

    def run(axis: Any, rows: torch.Tensor) -> Any:
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=count_all, axis=axis)
        fitting = make_fitting_step(step, size=512)
        state: Any = (w, optimizer.init(w))
        for _ in range(2):
            *state, metrics = fitting(*state, {"x": rows})
        return *state, metrics

    axis = ps.testing.ThreadAxis(len(ROWS))
    results = axis.map(partial(run, axis))(x.split(ROWS))
    assert max(largest) <= LIMIT
    one, state, metrics = run(ps.LocalAxis(), x)
    for params, opt_state, on_rank in results:
        torch.testing.assert_close(params, one, rtol=1e-13, atol=0)
        torch.testing.assert_close(opt_state.mu, state.mu, rtol=1e-13, atol=0)
        assert on_rank.num_tokens == metrics.num_tokens
