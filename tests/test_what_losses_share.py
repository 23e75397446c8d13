"""Programs whose tensors share memory, or whose ranks reach different leaves: each was wrong once."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.squares import x_ones


@pytest.mark.parametrize("gather", ["step", "microbatch", "loss"])
def test_ranks_that_reach_different_leaves(gather: Any) -> None:
    """Experts: all leaves are scattered on all ranks, in whatever buckets they are."""
    axis, sgd = ps.testing.ThreadAxis(2, bucket_bytes=8), ps.optim.sgd(1.0)

    def loss_fn(params: Any, m: dict[str, Any]) -> Tensor:
        params = ps.unshard(params)
        return m["x"] * params[m["expert"]].sum()

    step = ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, axis=axis, gather=gather)

    def run(group: Any) -> Any:
        params = ps.shard({"a": torch.zeros(2), "b": torch.zeros(2)}, axis)
        return ps.unshard(step(params, sgd.init(params), group)[0])

    groups = [[{"x": torch.tensor([x]), "expert": name}] for x, name in ((1.0, "a"), (3.0, "b"))]
    for params in axis.map(run)(groups):
        assert params["a"].tolist() == [-0.5, -0.5]
        assert params["b"].tolist() == [-1.5, -1.5]


@pytest.mark.parametrize("donate", [False, True])
def test_an_optimizer_that_hands_its_state_on(donate: bool) -> None:
    """Views of the old state are read before it is written over."""
    late = ps.optim.Optimizer(
        init=lambda p: {"h0": torch.zeros_like(p), "h1": torch.zeros_like(p)},
        update=lambda g, s, p: (p - s["h0"], {"h0": s["h1"].detach(), "h1": g.detach()}),
    )
    step = ps.make_update_step(lambda w, m: w[0] * m["x"], late, weight_fn=x_ones, donate=donate)
    w = torch.tensor([0.0])
    state, seen = late.init(w), []
    for i in range(4):
        w, state, _ = step(w, state, [{"x": torch.tensor([1.0 + i])}])
        seen.append(w.item())
    assert seen == [0, 0, -1, -3]


class Dot(torch.autograd.Function):
    """Its backward pass returns a tensor that it has saved."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (w * x).sum().view(1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return x.detach(), None


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_gradient_that_is_the_data(normalize: Any, k: int) -> None:
    apply: Any = Dot.apply
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(1e-3), ps.optim.sgd(1.0))
    step = ps.make_update_step(
        lambda w, m: apply(w, m["x"]),
        optimizer,
        weight_fn=lambda _: torch.ones(1),
        normalize=normalize,
    )
    w, m = torch.zeros(2), {"x": torch.tensor([1.0, 2.0])}
    step(w, optimizer.init(w), [m] * k)
    assert m["x"].tolist() == [1, 2]


@pytest.mark.parametrize("second", ["strided", "sharded"])
def test_a_loss_that_reaches_nothing_over_ranks(second: str) -> None:
    """Whether a leaf has a bucket or not."""
    linear, axis = torch.nn.Linear(1, 1), ps.testing.ThreadAxis(2)
    adamw = ps.optim.adamw(0.1)
    step = ps.make_update_step(
        lambda p, m: linear(m["x"][:, None])[:, 0], adamw, weight_fn=x_ones, axis=axis
    )

    def run(group: Any) -> Any:
        a = torch.ones(2, 3)
        a = a.t() if second == "strided" else ps.shard(a, axis)
        params = {"a": a, "b": torch.ones(2)}
        return step(params, adamw.init(params), group)

    with pytest.raises(ValueError, match="do not depend on params"):
        axis.map(run)([[{"x": torch.ones(2)}]] * 2)


class Batch(NamedTuple):
    """A microbatch, which is a sequence."""

    x: Tensor
    y: Tensor


def test_a_microbatch_is_no_group_at_any_step() -> None:
    sgd, w, batch = ps.optim.sgd(1.0), torch.tensor(1.0), Batch(torch.ones(2), torch.ones(2))
    step = ps.make_update_step(lambda w, m: w * m.x, sgd, weight_fn=lambda m: torch.ones_like(m.x))
    step(w, sgd.init(w), [batch])
    with pytest.raises(TypeError, match="must be a sequence of microbatches, got Batch"):
        step(w, sgd.init(w), batch)


def test_evaluation_does_not_mark_its_data() -> None:
    m = {"x": torch.ones(2)}
    evaluate = ps.make_eval_step(lambda w, m: w * m["x"].requires_grad_(), weight_fn=x_ones)
    evaluate(torch.tensor(1.0), [m])
    assert not m["x"].requires_grad


def test_the_dtype_of_sums_is_not_that_of_a_loss_own_derivatives() -> None:
    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        (slope,) = torch.autograd.grad((w * m["x"]).pow(3).sum(), w, create_graph=True)
        assert slope.dtype == w.dtype
        return slope.pow(2)

    sgd, w = ps.optim.sgd(1.0), torch.tensor([1.1, 2.3])
    losses = []
    for dtype in (None, torch.bfloat16, torch.float64):
        step = ps.make_update_step(loss_fn, sgd, weight_fn=x_ones, accum_dtype=dtype)
        losses.append(step(w, sgd.init(w), [{"x": torch.tensor([0.3, 0.7])}])[2].loss)
    assert losses[0] == losses[1] == losses[2]
