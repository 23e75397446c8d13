"""Pieces that do not fit, and ranks that fail or disagree on them: refused by name, on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.pieces import drawn


def once(axis: Any, params: Any, **how: Any) -> Any:
    optimizer = ps.optim.sgd(0.1)
    step = ps.make_update_step(
        lambda p, x: p["w"].sum() * x, optimizer, weight_fn=torch.ones_like, axis=axis, **how
    )
    return step(params, optimizer.init(params), [torch.ones(2)])


def test_refused() -> None:
    """By name, with the value and the way out."""
    tp = ps.VmapAxis(2)
    with pytest.raises(TypeError, match=r"axis='tp'.*must have an axis object"):
        ps.Shard(torch.ones(2), "tp", (2,))
    with pytest.raises(ValueError, match=r"shape=\(2,\), dim=1.*no such dimension"):
        ps.Shard(torch.ones(2), tp, (2,), dim=1)
    with pytest.raises(ValueError, match="a scalar is not cut"):
        ps.Shard(torch.ones(()), tp, ())
    nested = {"w": ps.Shard(ps.Shard(torch.ones(2), tp, (2,)), ps.VmapAxis(3), (2,))}
    with pytest.raises(ValueError, match=r"over VmapAxis\(3\) and over VmapAxis\(2\)"):
        tree.global_norm(nested)
    with pytest.raises(
        ValueError, match=r"params\['w'\]\.piece has shape \(3,\).*has shape \(2,\)"
    ):
        tp.map(lambda w: once(ps.LocalAxis(), {"w": ps.Shard(w, tp, (4,))}))(torch.ones(2, 3))
    muon = ps.optim.from_torch(torch.optim.Muon, lr=0.1)
    with pytest.raises(ValueError, match="Muon may look at all of a parameter"):
        muon.init({"w": ps.Shard(torch.ones(2, 2), tp, (4, 2))})
    ps.optim.from_torch(torch.optim.RMSprop, lr=0.1).init({"w": ps.Shard(torch.ones(2), tp, (4,))})


def test_pieces_over_more_than_the_steps_axis_are_refused() -> None:
    world = ps.testing.ThreadAxis(4)
    rows, _ = world.split(2, 2)
    with pytest.raises(
        ValueError, match=r"params\['w'\]\.piece is sharded over .*some of whose ranks"
    ):
        world.map(lambda w: once(rows, {"w": ps.Shard(w, world, (4,))}))([torch.ones(1)] * 4)


def test_an_error_between_gather_and_scatter_reaches_all_ranks() -> None:
    """As in any step, and the ranks can go on with the next one."""
    threads = ps.testing.ThreadAxis(3)
    optimizer = ps.optim.sgd(1.0)

    def rank(number: int) -> Any:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            if number == 1 and x.isnan().any():
                raise ValueError("bad sample 17")
            losses: Tensor = p["w"].sum() * x
            return losses

        params = ps.shard({"w": drawn(4)}, threads)
        step = ps.make_update_step(loss_fn, optimizer, weight_fn=torch.ones_like, axis=threads)
        told = ""
        try:
            step(params, optimizer.init(params), [torch.full((1,), torch.nan)])
        except (ValueError, ps.RankError) as error:
            told = str(error)
        new, *_ = step(params, optimizer.init(params), [torch.ones(1)])
        return told, ps.unshard(new)["w"]

    for told, w in threads.map(rank)([0, 1, 2]):
        assert "bad sample 17" in told
        torch.testing.assert_close(w, drawn(4) - 1)


def test_ranks_that_disagree_on_what_is_spread() -> None:
    """Pieces of different lengths are alike, pieces of different tensors are not."""
    threads = ps.testing.ThreadAxis(2)

    def rank(number: int) -> Any:
        return once(threads, ps.shard({"w": drawn(4 + number)}, threads))

    with pytest.raises(
        ValueError,
        match=r"disagree on params.*rank 0 with params\['w'\]\.piece: torch.float64, of shape \(4,\) in pieces.*\(5,\)",
    ):
        threads.map(rank)([0, 1])
