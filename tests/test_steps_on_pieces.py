"""Steps that hold leaves in pieces, over the step's own axis or a different one, are those of whole leaves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from tests.pieces import SIZE, drawn


def tensor_parallel(dp: Any, tp: Any, whole: Any, batch: Tensor, optimizer: Any, **how: Any) -> Any:
    """Two steps of a network whose hidden layer is spread over ``tp``; and the state put together again."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        assert type(p["up"]) is not ps.Shard
        hidden = torch.sigmoid(x @ p["up"])
        output: Tensor = ps.psum(hidden @ p["down"], tp) + p["bias"]
        return output.square()

    params = {
        "up": ps.shard(whole["up"], tp, 1),
        "down": ps.shard(whole["down"], tp),
        "bias": whole["bias"],
    }
    opt_state = optimizer.init(params)
    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=lambda x: torch.ones(len(x)), axis=dp, **how
    )
    norms = []
    for _ in range(2):
        params, opt_state, metrics = step(params, opt_state, [batch])
        norms.append(metrics.grad_norm)
    return ps.unshard((params, opt_state)), norms, metrics.applied


def alone(whole: Any, batch: Tensor, optimizer: Any) -> Any:
    """The same on one rank."""
    params, opt_state, norms = whole, optimizer.init(whole), []
    step = ps.make_update_step(
        lambda p, x: (torch.sigmoid(x @ p["up"]) @ p["down"] + p["bias"]).square(),
        optimizer, weight_fn=lambda x: torch.ones(len(x)),
    )  # fmt: skip
    for _ in range(2):
        params, opt_state, metrics = step(params, opt_state, [batch])
        norms.append(metrics.grad_norm)
    return (params, opt_state), norms, metrics.applied


NETWORK = {"up": drawn(2, 5), "down": drawn(5), "bias": drawn(1)[0]}
CLIPPED = ps.optim.chain(ps.optim.clip_by_global_norm(0.1), ps.optim.adamw(0.1, weight_decay=0.1))


@pytest.mark.parametrize(
    "how",
    [{}, {"on_nonfinite": "skip"}, {"normalize": "grads"}, {"donate": True}],
    ids=["plain", "skip", "grads", "donate"],
)
@pytest.mark.parametrize("world", ["vmap", "threads"])
def test_tensor_parallel_step(world: str, how: dict[str, Any]) -> None:
    """Uneven pieces of a layer whose activation of 0 is not 0, clipped: the step of the whole layer."""
    batch = drawn(4, 2)
    expected = alone(NETWORK, batch, CLIPPED)
    if world == "threads":
        threads = ps.testing.ThreadAxis(6)
        dp, tp = threads.split(2, 3)

        def run(whole: Any, batch: Tensor) -> Any:
            return tensor_parallel(dp, tp, whole, batch, CLIPPED, **how)

        own = [tree.map(torch.clone, NETWORK) for _ in range(6)]
        batches = [batch[:1] if rank < 3 else batch[1:] for rank in range(6)]
        results = threads.map(run)(own, batches)
    else:
        rows, columns = ps.VmapAxis(2), ps.VmapAxis(3)

        def one(batch: Tensor) -> Any:
            return tensor_parallel(rows, columns, NETWORK, batch, CLIPPED, **how)

        on_columns = columns.map(one, in_dims=None, out_dims=None)
        results = [rows.map(on_columns, out_dims=None)(batch.view(2, 2, 2))]
    for result in results:
        for one, other in zip(tree.leaves_of(result), tree.leaves_of(expected), strict=True):
            torch.testing.assert_close(one, other)


def test_skipped_on_all_ranks_where_one_piece_is_not_finite() -> None:
    threads = ps.testing.ThreadAxis(4)
    dp, tp = threads.split(2, 2)
    optimizer = ps.optim.sgd(1.0, momentum=0.5)

    def rank(number: int) -> Any:
        params = {"w": ps.shard(torch.ones(4), tp), "b": torch.ones(())}
        data = torch.tensor([1.0, torch.inf]) if number == 3 else torch.ones(2)
        step = ps.make_update_step(
            lambda p, x: (p["w"] * x).sum()[None] + p["b"], optimizer, axis=dp,
            weight_fn=lambda x: torch.ones(1), on_nonfinite="skip",
        )  # fmt: skip
        new, _, metrics = step(params, optimizer.init(params), [data])
        return new["w"].piece, new["b"], metrics.applied

    for piece, b, applied in threads.map(rank)([0, 1, 2, 3]):
        assert not applied
        assert torch.equal(piece, torch.ones(2))
        assert b == 1


def test_eval_step_hands_over_pieces_and_accumulate_shards() -> None:
    """In ``accumulate``, the loss itself gathers a ``Shard`` or takes its piece."""
    axis = ps.VmapAxis(SIZE)
    data = torch.ones(2, dtype=torch.float64)

    def of_piece(p: Any, x: Tensor) -> Tensor:
        result: Tensor = ps.psum(p["w"].sum(), axis) * x
        return result

    def of_shard(p: Any, x: Tensor) -> Tensor:
        result: Tensor = ps.unshard(p)["w"].sum() * x
        return result

    def rank(w: Tensor) -> Any:
        params = {"w": ps.shard(w, axis)}
        evaluate = ps.make_eval_step(of_piece, weight_fn=torch.ones_like)
        sums = ps.accumulate(of_shard, params, [data], weight_fn=torch.ones_like)
        return evaluate(params, [data]).loss, ps.unshard(sums.grads)["w"]

    whole = drawn(5)
    loss, grads = axis.map(rank, in_dims=None, out_dims=None)(whole)
    torch.testing.assert_close(loss, whole.sum())
    assert torch.equal(grads, torch.full((5,), 2.0 * SIZE, dtype=torch.float64))


def test_partition_clips_its_own_pieces() -> None:
    """A part of the tree keeps the axes of its leaves."""
    axis, clip = ps.VmapAxis(SIZE), ps.optim.clip_by_global_norm(1.0)
    optimizer = ps.optim.partition(
        {"a": "clipped", "b": "plain"},
        {"clipped": ps.optim.chain(clip, ps.optim.sgd(1.0)), "plain": ps.optim.sgd(1.0)},
    )
    whole = {"a": drawn(5), "b": drawn(4)}

    def rank(whole: Any) -> Any:
        zeros = tree.map(torch.zeros_like, ps.shard(whole, axis))
        return ps.unshard(optimizer.update(ps.shard(whole, axis), optimizer.init(zeros), zeros)[0])

    new = axis.map(rank, in_dims=None, out_dims=None)(whole)
    torch.testing.assert_close(new["a"], -whole["a"] / whole["a"].norm())
    torch.testing.assert_close(new["b"], -whole["b"])


def test_a_norm_costs_one_number() -> None:
    """However many leaves are sharded over an axis."""
    calls: list[tuple[str, int]] = []

    class Counting(ps.LocalAxis):
        def apply(self, law: str, x: Tensor) -> Tensor:
            calls.append((law, x.numel()))
            return super().apply(law, x)

    params = ps.shard({"w": drawn(5, 2), "v": drawn(3), "b": torch.ones(())}, Counting())
    tree.global_norm(params)
    assert calls == [("psum", 1)]


def test_pieces_over_all_ranks_beside_a_single_replica() -> None:
    """Sharded over one dimension of the step's axis, while the other has size 1."""
    world = ps.testing.ThreadAxis(2)
    optimizer = ps.optim.sgd(0.5)
    step = ps.make_update_step(
        lambda w, x: x @ w, optimizer, weight_fn=lambda x: torch.ones(len(x)), axis=world
    )

    def rank(_: int) -> Any:
        w = ps.shard(torch.zeros(3), world.split(1, 2)[1])
        new, _, metrics = step(w, optimizer.init(w), [torch.ones(2, 3)])
        return ps.unshard(new), metrics.grad_norm

    for new, norm in world.map(rank)(range(2)):
        assert torch.equal(new, torch.full((3,), -0.5))
        assert torch.equal(norm, torch.ones(3).norm())


@pytest.mark.parametrize("how", [{}, {"accum_dtype": torch.float64}, {"donate": True}], ids=str)
def test_params_over_the_steps_own_axis(how: dict[str, Any]) -> None:
    """In float32, with pieces in the buffers that were given where they are donated."""
    batch, whole = drawn(6, 2).float(), tree.map(lambda x: x.float(), NETWORK)
    optimizer = ps.optim.sgd(0.1, momentum=0.5)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (torch.sigmoid(x @ p["up"]) @ p["down"] + p["bias"]).square()

    def steps(axis: Any, params: Any, data: Tensor, **how: Any) -> Any:
        opt_state = optimizer.init(params)
        step = ps.make_update_step(
            loss_fn, optimizer, weight_fn=lambda x: torch.ones(len(x)), axis=axis, **how
        )
        for _ in range(2):
            before = [leaf.data_ptr() for leaf in tree.leaves_of(params)]
            params, opt_state, metrics = step(params, opt_state, [data])
            after = [leaf.data_ptr() for leaf in tree.leaves_of(params)]
            assert not how.get("donate") or before == after
        return ps.unshard((params, opt_state)), metrics.grad_norm

    threads = ps.testing.ThreadAxis(2)
    expected = steps(ps.LocalAxis(), whole, batch)
    results = threads.map(
        lambda data: steps(
            threads, ps.shard(tree.map(torch.clone, whole), threads, -1), data, **how
        )
    )([batch[:2], batch[2:]])
    for result in results:
        for one, other in zip(tree.leaves_of(result), tree.leaves_of(expected), strict=True):
            torch.testing.assert_close(one, other, check_dtype=False)


def test_derivatives_of_a_step_on_pieces() -> None:
    """By the whole params, through gather and scatter: those of the step on whole tensors."""
    axis, whole, batch = ps.VmapAxis(2), drawn(3), drawn(4)
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(0.5), ps.optim.sgd(0.1))

    def after(axis: Any, w: Tensor, x: Tensor, spread: bool) -> Tensor:
        params = {"w": ps.shard(w, axis)} if spread else {"w": w}
        step = ps.make_update_step(
            lambda p, x: (p["w"].square().sum() * x - 1).square(), optimizer,
            weight_fn=torch.ones_like, axis=axis,
        )  # fmt: skip
        result: Tensor = ps.unshard(step(params, optimizer.init(params), [x])[0])["w"]
        return result

    def on_ranks(w: Tensor) -> Tensor:
        rank = axis.map(partial(after, axis, spread=True), in_dims=(None, 0), out_dims=None)
        result: Tensor = rank(w, batch.view(2, 2))
        return result

    expected = torch.func.jacrev(lambda w: after(ps.LocalAxis(), w, batch, False))(whole)
    torch.testing.assert_close(torch.func.jacrev(on_ranks)(whole), expected)
    torch.testing.assert_close(torch.func.jacfwd(on_ranks)(whole), expected)
    torch.testing.assert_close(torch.vmap(on_ranks)(whole[None])[0], on_ranks(whole))


def test_params_over_the_steps_own_axis_compiled() -> None:
    """With ``compile=True`` an optimizer without kernels is one graph, the norm over pieces included."""
    axis, batch = ps.LocalAxis(), drawn(4, 2)
    clip, adam = ps.optim.clip_by_global_norm(0.1), ps.optim.scale_by_adam()
    optimizer = ps.optim.chain(clip, adam, ps.optim.descend(0.1))
    params = ps.shard({"w": drawn(2)}, axis)

    def step(**how: Any) -> Any:
        run = ps.make_update_step(
            lambda p, x: (x @ p["w"]).square(), optimizer,
            weight_fn=lambda x: torch.ones(len(x)), axis=axis, **how,
        )  # fmt: skip
        return run(params, optimizer.init(params), [batch])

    torch.testing.assert_close(
        tree.leaves_of(step(compile=True)), tree.leaves_of(step()), check_dtype=True
    )
