"""Whose memory the gradients of a compiled microbatch are in: every sum has its own, each element its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import purestep as ps
from tests.squares import x_ones

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Loss = Callable[[list[Tensor], dict[str, Tensor]], Tensor]

SHARED: dict[str, Loss] = {
    "one tensor for both": lambda p, m: (p[0] + p[1]) @ torch.ones(2) * m["x"],
    "views of one tensor": lambda p, m: torch.stack(p).sum(0) @ torch.ones(2) * m["x"],
    "one number for all elements": lambda p, m: (p[0].sum() - p[1].sum()) * m["x"],
    "one number for all elements of both": lambda p, m: torch.stack(p).sum() * m["x"],
    "the microbatch": lambda p, m: torch.dot(p[0], m["x"])[None] + p[1].sum() * m["x"],
}
"""Of two leaves with two elements, what their gradients may share, or be a view of."""


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("shared", SHARED)
def test_gradients_that_share_memory_are_sums_of_their_own(shared: str, number: int) -> None:
    optimizer = ps.optim.sgd(1.0, momentum=0.5)
    group = [{"x": torch.arange(1.0, 3.0) * 2**m} for m in range(number)]
    before = [m["x"].clone() for m in group]
    make = partial(ps.make_update_step, SHARED[shared], optimizer, weight_fn=x_ones)
    steps = make(), make(compile=partial(ps.compile, backend="aot_eager"))
    found: list[Any] = []
    for step in steps:
        params = [torch.zeros(2), torch.zeros(2)]
        state = optimizer.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, group)
        found.append((params, state))
    assert str(found[0]) == str(found[1])
    assert all(map(torch.equal, before, (m["x"] for m in group)))


def test_sparse_gradients_arrive_dense() -> None:
    """Torch cannot call from compiled code what makes such gradients: a warning says so."""

    def loss_fn(p: dict[str, Tensor], m: dict[str, Tensor]) -> Tensor:
        rows = functional.embedding(m["x"], p["table"], sparse=True).sum(-1)
        bag = functional.embedding_bag(m["x"][:, None], p["bag"], sparse=True).sum(-1)
        return rows * p["w"] + bag

    optimizer = ps.optim.sgd(1.0)
    params = {"table": torch.ones(4, 2), "bag": torch.ones(4, 2), "w": torch.tensor(2.0)}
    group = [{"x": torch.tensor([1, 1])}, {"x": torch.tensor([3, 0])}]
    with pytest.warns(UserWarning, match="make one graph of .*loss_fn"):
        ours, theirs = (
            ps.make_update_step(loss_fn, optimizer, weight_fn=x_ones, compile=compile)(
                params, optimizer.init(params), group
            )[0]
            for compile in (True, False)
        )
    assert str(ours) == str(theirs)


def test_the_first_update_calls_the_loss_once_eagerly() -> None:
    """Not once for each microbatch, and never again."""
    calls: list[int] = []

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        if not torch.compiler.is_compiling():
            calls.append(1)
        return w * m["x"]

    sgd, w = ps.optim.sgd(1.0), torch.ones(2)
    compiler = partial(ps.compile, backend="aot_eager")
    step = ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, compile=compiler)
    for _ in range(2):
        step(w, sgd.init(w), [{"x": torch.ones(2)}] * 3)
    assert calls == [1]
