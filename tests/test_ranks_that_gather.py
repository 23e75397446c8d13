"""Ranks whose losses gather: what each must bring, what each may use, and how one fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.ranks import Run
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


def gathers(axis: Any, which: str) -> Callable[..., Tensor]:
    """A loss of two layers, of which rank 1 does something else when its microbatch says so."""

    def loss_fn(params: Any, batch: dict[str, Tensor]) -> Tensor:
        other = axis.rank == 1 and bool(batch["other"])
        first, second = reversed(params) if other and which == "swapped" else params
        if other and which == "skipped":
            return batch["x"].sum(-1) * ps.unshard(first).sum()
        x = batch["x"] @ ps.unshard(first)
        w = ps.unshard(second)
        if other and which == "unused":
            return x.sum(-1) + w.detach().sum()
        return (x @ w).sum(-1)

    return loss_fn


def gathering_program(axis: Any, rank: int, which: str, when: int) -> str:
    """Two updates; what the one in which ranks differ says."""
    loss_fn, sgd = gathers(axis, which), ps.optim.sgd(0.5)
    params = ps.shard(network(2), axis)
    step = ps.make_update_step(
        loss_fn, sgd, weight_fn=lambda m: ones(m["x"]), axis=axis, gather="loss"
    )
    for update in range(2):
        batch = {"x": rows(2), "other": torch.tensor(update == when)}
        try:
            params, _, _ = step(params, sgd.init(params), [batch] * 2)
        except ValueError as error:
            return f"{update}: {error}"
    return ""


FIRST = r"0: the ranks of .* disagree on what they gather next, or scatter \(add 0 \* w.sum\(\).*"
LAST = r"1: the ranks of .* disagree on the order in which their losses gather params.*"


@pytest.mark.parametrize(
    ("which", "when", "message"),
    [
        (
            "unused",
            0,
            FIRST + r"ranks 0, 2, 3 with 3. psum_scatter of params\[1\].piece against rank 1 ",
        ),
        (
            "skipped",
            0,
            FIRST + r"ranks 0, 2, 3 with 2. all_gather of params\[1\].piece against rank 1 ",
        ),
        (
            "swapped",
            0,
            FIRST + r"ranks 0, 2, 3 with 1. all_gather of params\[0\].piece against rank 1 ",
        ),
        (
            "swapped",
            1,
            LAST + r"ranks 0, 2, 3 with 1. .* against rank 1 with 1. all_gather of params\[1\]",
        ),
    ],
)
def test_ranks_that_gather_differently(ranks: Run, which: str, when: int, message: str) -> None:
    """Named on all ranks: before it happens, in the first update; before the update, in others."""
    for said in ranks(gathering_program, range(4), [which] * 4, [when] * 4):
        assert re.match(message, said), said


def unsharded(axis: Any, rank: int) -> str:
    """Pieces of ``tensor_split``, of which one fits."""
    piece = torch.tensor_split(torch.arange(9.0), 4)[rank].clone()
    with pytest.raises(ValueError, match="disagree on what they gather next") as info:
        ps.unshard(ps.Shard(piece, axis, (9,)))
    return str(info.value)


def test_pieces_that_fit_on_one_rank_alone(ranks: Run) -> None:
    """It would wait for the others, which refuse theirs."""
    for said in ranks(unsharded, range(4)):
        assert re.search(
            r"rank 0 with torch.float32 of shape \(9,\).* against ranks 1, 2 with", said
        )
        assert re.search(r"the piece of a Shard has shape \(2,\)", said)
