"""Ranks whose losses gather: what each must bring, what each may use, and how one fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.axis import Gather
from tests.layers import ADAMW, GATHERS, network, of_pieces, ones, rows

pytestmark = pytest.mark.timeout(60)


def test_a_loss_that_gathers_wants_equally_many_microbatches() -> None:
    """Refused on all ranks before any of them gathers."""
    axis = ps.testing.ThreadAxis(2)

    def program(rank: int) -> None:
        params = ps.shard(network(2), axis)
        step = ps.make_update_step(of_pieces, ADAMW, weight_fn=ones, axis=axis, gather="loss")
        with pytest.raises(
            ValueError,
            match=r"disagree on the number of microbatches, each of which gathers params "
            r"\(add some whose weights are zero\).*rank 0 with .*'1'.* against rank 1 with .*'2'",
        ):
            step(params, ADAMW.init(params), [rows(2)] * (1 + rank))

    axis.map(program)(range(2))


def test_a_rank_that_fails_where_its_loss_gathers() -> None:
    """It cannot bring what the others wait for: they learn that it has ended."""
    axis = ps.testing.ThreadAxis(3)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        losses = of_pieces(params, x)
        if axis.rank == 1:
            raise ArithmeticError
        return losses

    def program(rank: int) -> str:
        params = ps.shard(network(3), axis)
        step = ps.make_update_step(loss_fn, ADAMW, weight_fn=ones, axis=axis, gather="loss")
        with pytest.raises(ArithmeticError if rank == 1 else ps.RankError) as info:
            step(params, ADAMW.init(params), [rows(2)])
        return str(info.value)

    raised = axis.map(program)(range(3))
    for rank in (0, 2):
        assert "rank 1 has returned" in raised[rank]


def experts(params: Any, batch: dict[str, Tensor]) -> ps.LossTerms:
    """Each row goes to one of three experts, all of which are gathered; with a term."""
    x, place, total = batch["x"], batch["expert"], torch.zeros(len(batch["x"])).double()
    for number, expert in enumerate(ps.unshard(params["experts"])):
        chosen = place == number
        if chosen.any():
            total = total.index_add(
                0, chosen.nonzero()[:, 0], (x[chosen] @ expert).square().sum(-1)
            )
    router = ps.unshard(params["router"])
    total = total + 0 * router.sum()  # The term of a microbatch without tokens is left out.
    return ps.LossTerms(total, microbatch=router.square().sum())


def expert_step(axis: Any, loss_fn: Any, gather: Gather, groups: Sequence[Any]) -> list[Any]:
    """A step of whole tensors, or of pieces on ranks that hold these groups."""
    optimizer = ps.optim.sgd(0.5)
    params = {"experts": network(3), "router": torch.arange(6.0).double()}
    how: Any = {"weight_fn": lambda m: m["w"], "axis": axis, "gather": gather}

    def program(group: Any) -> Any:
        step = ps.make_update_step(loss_fn, optimizer, **how)
        given = params if isinstance(axis, ps.LocalAxis) else ps.shard(params, axis)
        new, _, metrics = step(given, optimizer.init(given), group)
        return ps.unshard(new), metrics

    return [program(groups[0])] if isinstance(axis, ps.LocalAxis) else axis.map(program)(groups)


def expert_batch(*places: int, weight: int = 1) -> dict[str, Tensor]:
    """A row for each of these experts."""
    count = len(places)
    weights = torch.full((count,), weight)
    return {"x": rows(count, sum(places)), "expert": torch.tensor(places), "w": weights}


@pytest.mark.parametrize("gather", GATHERS)
def test_ranks_that_use_different_wholes(gather: Gather) -> None:
    """A mixture of experts: each rank's rows go to different ones; one rank has weights of zero."""
    axis = ps.testing.ThreadAxis(3)
    groups = [[expert_batch(0, 0)], [expert_batch(2, 1)], [expert_batch(1, weight=0)]]
    everything = [part for group in groups for part in group]
    ((expected, metrics),) = expert_step(ps.LocalAxis(), experts, "step", [everything])
    for new, told in expert_step(axis, experts, gather, groups):
        assert torch.equal(told.loss, metrics.loss)
        assert all(map(torch.equal, tree.leaves_of(new), tree.leaves_of(expected)))
