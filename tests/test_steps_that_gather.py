"""Steps that gather params, however they do, are those of whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.axis import Gather
from tests.layers import GATHERS, WIDTH, loss_of, network, of_whole, ones, rows

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("gather", GATHERS)
def test_ranks_that_hold_what_they_hold_evaluate(gather: Gather) -> None:
    """The loss of all rows, where one rank has none."""
    axis = ps.testing.ThreadAxis(3)
    groups = [[rows(2, 1)], [], [rows(1, 2), rows(5, 3)]]
    if gather == "loss":
        groups = [[*group, *[rows(0)] * (2 - len(group))] for group in groups]
    whole = torch.cat([x for group in groups for x in group])
    expected = ps.make_eval_step(of_whole, weight_fn=ones)(network(3), [whole])

    def program(group: list[Tensor]) -> Any:
        how: Any = {"weight_fn": ones, "axis": axis, "gather": gather}
        return ps.make_eval_step(loss_of(gather), **how)(ps.shard(network(3), axis), group)

    for metrics in axis.map(program)(groups):
        assert torch.equal(metrics.loss, expected.loss)
        assert metrics.num_tokens == 8


@pytest.mark.parametrize("gather", GATHERS)
def test_pieces_over_both_axes_of_a_mesh(gather: Gather) -> None:
    """One leaf over the step's own axis, one over the other, one over none: the step of whole tensors."""
    world = ps.testing.ThreadAxis(4)
    dp, tp = world.split(2, 2)
    whole = {"in": network(1)[0], "up": network(2)[1], "bias": torch.ones(WIDTH).double()}
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(8.0), ps.optim.sgd(0.5))

    def plain(params: Any, x: Tensor) -> Tensor:
        return ((x @ params["in"]) @ params["up"] + params["bias"]).square().sum(-1)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        # What each rank of tp computes of it enters a sum there.
        first = ps.pvary(ps.unshard(params["in"]), tp)
        mine = (x @ first).chunk(2, -1)[tp.rank] @ params["up"]
        return (ps.psum(mine, tp) + params["bias"]).square().sum(-1)

    how: Any = {"weight_fn": ones}
    x = rows(4)
    step = ps.make_update_step(plain, optimizer, **how)
    expected, _, metrics = step(whole, optimizer.init(whole), [x])

    def program(_: int) -> Any:
        params = {**whole, "in": ps.shard(whole["in"], dp), "up": ps.shard(whole["up"], tp)}
        step = ps.make_update_step(loss_fn, optimizer, axis=dp, gather=gather, **how)
        new, _, told = step(params, optimizer.init(params), [x[2 * dp.rank :][:2]])
        return ps.unshard(new), told

    for new, told in world.map(program)(range(4)):
        assert torch.equal(told.grad_norm, metrics.grad_norm)
        assert all(map(torch.equal, tree.leaves_of(new), tree.leaves_of(expected)))


# A compiler reads .grad, and hides the warning by filters that threads share.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("gather", "compile"),
    [*[(gather, False) for gather in GATHERS], ("step", True), ("microbatch", True)],
)
def test_losses_of_others(gather: Gather, compile: bool) -> None:
    """Compiled; with a leaf that is used twice, one that is not used, and one without elements."""
    axis = ps.testing.ThreadAxis(2)
    whole = {
        "w": network(1)[0],
        "unused": torch.ones(3).double(),
        "none": torch.ones(3, 0).double(),
    }

    def plain(params: Any, x: Tensor) -> Tensor:
        return (x @ params["w"] @ params["w"].T).square().sum(-1) + params["none"].sum()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return plain(ps.unshard(params), x)

    optimizer = ps.optim.sgd(0.5)
    step = ps.make_update_step(plain, optimizer, weight_fn=ones)
    expected = step(whole, optimizer.init(whole), [rows(4)])

    def program(rank: int) -> Any:
        params = ps.shard(whole, axis)
        step = ps.make_update_step(
            loss_fn, optimizer, weight_fn=ones, axis=axis, gather=gather, compile=compile
        )
        new, _, metrics = step(params, optimizer.init(params), [rows(4)[2 * rank :][:2]])
        return ps.unshard(new), metrics.grad_norm

    for new, norm in axis.map(program)(range(2)):
        assert all(map(torch.equal, tree.leaves_of(new), tree.leaves_of(expected[0])))
        assert torch.equal(norm, expected[2].grad_norm)


@pytest.mark.parametrize("gather", GATHERS)
def test_sums_over_ranks_are_not_rounded_to_params(gather: Gather) -> None:
    """257 is none of bfloat16's numbers, nor 2^24 + 1 one of float32's."""
    axis = ps.testing.ThreadAxis(2)

    def norm(slope: float, dtype: torch.dtype, accum_dtype: Any) -> Tensor:
        params = ps.shard({"w": torch.zeros(1, dtype=dtype)}, axis)
        step = ps.make_update_step(
            lambda p, x: (ps.unshard(p)["w"] * x).sum()[None], ps.optim.sgd(1.0), axis=axis,
            weight_fn=lambda x: torch.ones(1), normalize="grads", gather=gather, accum_dtype=accum_dtype,
        )  # fmt: skip
        return step(params, ps.optim.sgd(1.0).init(params), [torch.tensor(slope)])[2].grad_norm * 2

    half = axis.map(norm)([256.0, 1.0], [torch.bfloat16] * 2, [None] * 2)
    assert [float(each) for each in half] == [257.0] * 2
    single = axis.map(norm)([2.0**24, 1.0], [torch.float32] * 2, [torch.float64] * 2)
    assert [float(each) for each in single] == [2.0**24 + 1] * 2


@pytest.mark.parametrize("gather", GATHERS)
def test_sparse_gradients_and_reverse_modes_of_others(gather: Gather) -> None:
    """An embedding's, and torch.func's own."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(0.5)
    whole = torch.arange(12.0).view(6, 2)

    def program(rank: int, sparse: bool, how: Any) -> Any:
        def loss_fn(w: Any, x: Tensor) -> Tensor:
            found = torch.nn.functional.embedding(x, ps.unshard(w), sparse=sparse)
            return found.square().sum(-1)

        w = ps.shard(whole, axis)
        x = torch.tensor([[0, 1, 1, 5], [2, 1, 3, 0]])[rank]
        step = ps.make_update_step(
            loss_fn, optimizer, axis=axis, weight_fn=ones, gather=gather, **how
        )
        return ps.unshard(step(w, optimizer.init(w), [x])[0])

    expected = whole - 0.5 * 2 * whole * torch.tensor([2, 3, 1, 1, 0, 1.0])[:, None] / 8
    for sparse, how in [
        (True, {}),
        (False, {"grad_and_value": torch.func.grad_and_value}),
        (False, {}),
    ]:
        for new in axis.map(program)(range(2), [sparse] * 2, [how] * 2):
            assert torch.equal(new, expected)


def test_the_state_of_others_in_pieces_and_whole_again() -> None:
    """What ``from_torch`` keeps for a param is a node with tensors of the piece's shape, and counts."""
    axis, whole = ps.testing.ThreadAxis(2), {"w": torch.arange(5.0), "b": torch.tensor(1.0)}
    optimizer = ps.optim.from_torch(torch.optim.RMSprop, lr=0.1)

    def program(_: int) -> Any:
        params = ps.shard(whole, axis)
        new = optimizer.update(tree.map(torch.ones_like, params), optimizer.init(params), params)
        assert params["b"] is not whole["b"]  # A donated step would write to it.
        return ps.unshard(new)

    expected = optimizer.update(tree.map(torch.ones_like, whole), optimizer.init(whole), whole)
    for found in axis.map(program)(range(2)):
        assert all(map(torch.equal, tree.leaves_of(found), tree.leaves_of(expected)))
