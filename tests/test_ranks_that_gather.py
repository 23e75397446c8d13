"""Ranks whose losses gather: what each must bring, what they may use, and what they hear of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.gathering import Gather
from tests.layers import ADAMW, GATHERS, loss_of, network, of_pieces, ones, rows

pytestmark = pytest.mark.timeout(60)


def test_a_loss_that_gathers_is_told_what_every_rank_must_bring() -> None:
    """Equally many microbatches; and so it is where somebody differentiates the step."""
    axis = ps.testing.ThreadAxis(2)

    def program(rank: int, gather: Gather, recorded: bool) -> None:
        params = ps.shard(network(2), axis)
        if recorded:
            params = tree.map(lambda leaf: leaf.requires_grad_(), params)
        step = ps.make_update_step(loss_of(gather), ADAMW, weight_fn=ones, axis=axis, gather=gather)
        with pytest.raises(
            ValueError,
            match=r"disagree on the number of microbatches, while the loss gathers params \(add some whose weights are zero\).*"
            r"rank 0 with .*'1'.* against rank 1 with .*'2'",
        ):
            step(params, ADAMW.init(params), [rows(2)] * (1 + rank))

    for gather, recorded in (("loss", False), ("loss", True), ("microbatch", True)):
        axis.map(program)(range(2), [gather] * 2, [recorded] * 2)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_rank_that_fails_where_its_loss_gathers(recorded: bool) -> None:
    """It cannot bring what the others wait for, and does not disturb them with a message in its place; they hear that it has ended."""
    axis = ps.testing.ThreadAxis(3)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        losses = of_pieces(params, x)
        if axis.rank == 1:
            raise ArithmeticError
        return losses

    def program(rank: int) -> str:
        params = ps.shard(network(3), axis)
        if recorded:
            params = tree.map(lambda leaf: leaf.requires_grad_(), params)
        step = ps.make_update_step(loss_fn, ADAMW, weight_fn=ones, axis=axis, gather="loss")
        with pytest.raises(ArithmeticError if rank == 1 else ps.RankError) as info:
            step(params, ADAMW.init(params), [rows(2)])
        return str(info.value)

    heard = axis.map(program)(range(3))
    for rank in (0, 2):
        assert "rank 1 has returned" in heard[rank]


def experts(params: Any, batch: dict[str, Tensor]) -> ps.LossTerms:
    """Each row goes to one of three experts; of those that no row here goes to, nothing is used. A term for each microbatch."""
    x, place, total = batch["x"], batch["expert"], torch.zeros(len(batch["x"])).double()
    for number, expert in enumerate(ps.unshard_each(params["experts"])):
        chosen = place == number
        if chosen.any():
            total = total.index_add(
                0, chosen.nonzero()[:, 0], (x[chosen] @ expert).square().sum(-1)
            )
    router = ps.unshard(params["router"])
    return ps.LossTerms(total, microbatch=router.square().sum())


def routed(params: Any, batch: dict[str, Tensor]) -> ps.LossTerms:
    """The same, of experts that are gathered only where a row goes to them."""
    hit = sorted(set(batch["expert"].tolist()))
    place = torch.tensor([hit.index(each) for each in batch["expert"].tolist()])
    chosen = {**params, "experts": [params["experts"][number] for number in hit]}
    return experts(chosen, {**batch, "expert": place})


def expert_step(axis: Any, loss_fn: Any, gather: Gather, groups: Sequence[Any]) -> list[Any]:
    """A step of whole tensors, or of pieces on each rank, who hold these groups."""
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
    """A mixture of experts, where each rank's rows go to different ones; and a rank that brings tokens of weight zero alone."""
    axis = ps.testing.ThreadAxis(3)
    groups = [[expert_batch(0, 0)], [expert_batch(2, 1)], [expert_batch(1, weight=0)]]
    everything = [part for group in groups for part in group]
    ((expected, metrics),) = expert_step(ps.LocalAxis(), experts, "step", [everything])
    for new, told in expert_step(axis, experts, gather, groups):
        assert torch.equal(told.loss, metrics.loss)
        assert all(map(torch.equal, tree.leaves_of(new), tree.leaves_of(expected)))


def test_ranks_that_gather_different_wholes() -> None:
    """Wholes of one shape are taken for each other's, so nothing is updated, and it is said; by microbatches it is right."""
    axis = ps.testing.ThreadAxis(2)
    groups = [[expert_batch(0, 0)], [expert_batch(2, 2)]]
    with pytest.raises(
        ValueError, match=r'disagree on what their losses gathered .with gather="loss"'
    ):
        expert_step(axis, routed, "loss", groups)
    (new, _), _ = expert_step(axis, routed, "microbatch", groups)
    everything = [part for group in groups for part in group]
    ((expected, _),) = expert_step(ps.LocalAxis(), experts, "step", [everything])
    assert all(map(torch.equal, tree.leaves_of(new), tree.leaves_of(expected)))
