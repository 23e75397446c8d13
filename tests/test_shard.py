"""Leaves that are spread over an axis: pieces, what is computed of all of them, and steps that hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree

SHAPES = [((6, 2), 0), ((5, 2), 0), ((2, 7), 1), ((7, 3), -1), ((2,), 0), ((1, 3), 0), ((0, 2), 0)]
SIZE = 3


def drawn(*shape: int) -> Tensor:
    """Numbers that are the same every time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def on_vmap(fn: Callable[..., Any], axis: Any, *same: Any) -> list[Any]:
    """What each rank of a ``VmapAxis`` gives."""
    results = axis.map(fn, in_dims=None)(*same)
    return [tree.map(lambda leaf, rank=rank: leaf[rank], results) for rank in range(axis.size)]


def on_threads(fn: Callable[..., Any], axis: Any, *same: Any) -> list[Any]:
    """What each thread gives."""
    results: list[Any] = axis.map(fn)(*[[each] * axis.size for each in same])
    return results


WORLDS: list[Any] = [
    pytest.param(ps.VmapAxis, on_vmap, id="vmap"),
    pytest.param(ps.testing.ThreadAxis, on_threads, id="threads"),
]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize(("make", "run"), WORLDS)
def test_pieces_are_chunks(make: Any, run: Any, shape: tuple[int, ...], dim: int) -> None:
    """Those of ``torch.chunk``, with nothing after the last; for ranks of one program filled up with zeros."""
    axis, whole = make(SIZE), drawn(*shape)
    chunks = whole.chunk(SIZE, dim) if whole.numel() else ()
    for rank, node in enumerate(run(lambda x: ps.shard(x, axis, dim), axis, whole)):
        expected = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
        held = expected.shape[dim]
        assert torch.equal(node.piece.narrow(dim, 0, held), expected)
        assert node.shape == shape
        rest = node.piece.narrow(dim, held, node.piece.shape[dim] - held)
        assert not rest.any()
        assert make is ps.VmapAxis or not rest.numel()


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize(
    ("make", "run"), [*WORLDS, pytest.param(lambda _: ps.LocalAxis(), None, id="local")]
)
def test_gathered_again(make: Any, run: Any, shape: tuple[int, ...], dim: int) -> None:
    """``unshard(shard(x))`` is x, beside scalars and leaves that are not spread; and so is its tangent."""
    axis, whole = make(SIZE), drawn(*shape)
    given = {"w": whole, "scale": torch.tensor(2.0)}

    def back(given: Any) -> Any:
        pieces = ps.shard(given, axis, dim)
        assert isinstance(pieces["scale"], Tensor)
        return ps.unshard({**pieces, "other": given["w"]})

    results = [back(given)] if run is None else run(back, axis, given)
    for result in results:
        assert torch.equal(result["w"], whole)
        assert torch.equal(result["scale"], given["scale"])
        assert torch.equal(result["other"], whole)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize(("make", "run"), WORLDS)
def test_transposes(make: Any, run: Any, shape: tuple[int, ...], dim: int) -> None:
    """The gradient of what each rank computes of the whole comes back summed: to pieces, and to the whole."""
    axis, whole, factors = make(SIZE), drawn(*shape), drawn(SIZE, *shape)

    def mine(whole: Tensor) -> Tensor:
        return whole * factors.index_select(0, axis.index.reshape(1)).squeeze(0)

    def grads(x: Tensor) -> Any:
        node = ps.shard(x, axis, dim)

        def of_piece(piece: Tensor) -> Tensor:
            return mine(ps.unshard(ps.Shard(piece, axis, shape, dim)).square()).sum()

        by_piece = torch.func.grad(of_piece)(node.piece)
        by_whole = torch.func.grad(
            lambda x: mine(ps.unshard(ps.shard(x, axis, dim)).square()).sum()
        )
        return ps.unshard(ps.Shard(by_piece, axis, shape, dim)), by_whole(x)

    expected = 2 * whole * factors.sum(0)
    for by_piece, by_whole in run(grads, axis, whole):
        torch.testing.assert_close(by_piece, expected)
        torch.testing.assert_close(by_whole, expected)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_transforms(shape: tuple[int, ...], dim: int) -> None:
    """Tangents, ensembles and compilers pass through."""
    axis, stack = ps.VmapAxis(SIZE), drawn(4, *shape)

    def squares(x: Tensor) -> Tensor:
        def rank(x: Tensor) -> Tensor:
            pieces = tree.map(torch.square, ps.shard({"w": x}, axis, dim))
            whole: Tensor = ps.unshard(pieces)["w"]
            return whole

        result: Tensor = axis.map(rank, in_dims=None, out_dims=None)(x)
        return result

    assert torch.equal(torch.vmap(squares)(stack), stack.square())
    jvp: Any = torch.func.jvp
    value, tangent = jvp(squares, (stack[0],), (stack[1],))
    assert torch.equal(value, stack[0].square())
    torch.testing.assert_close(tangent, 2 * stack[0] * stack[1])
    slope = torch.func.grad(lambda x: squares(x).sum())(stack[0])
    torch.testing.assert_close(slope, 2 * stack[0])


def test_compiled() -> None:
    """One graph of cutting, gathering, and a norm over pieces, which come out as nodes."""
    axis, whole = ps.VmapAxis(SIZE), drawn(5, 2)

    def program(x: Tensor) -> Any:
        def rank(x: Tensor) -> Any:
            nodes = ps.shard({"w": x, "scale": x.sum()}, axis)
            return nodes, ps.unshard(nodes), tree.global_norm(nodes), tree.all_finite(nodes)

        return axis.map(rank, in_dims=None, out_dims=(0, None, None, None))(x)

    expected = program(whole)
    found = torch.compile(program, fullgraph=True, backend="aot_eager")(whole)
    assert isinstance(found[0]["w"], ps.Shard)
    for one, other in zip(tree.leaves_of(found), tree.leaves_of(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("garbage", [7.0, torch.inf, torch.nan])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_what_a_piece_is_filled_up_with_is_never_read(
    shape: tuple[int, ...], dim: int, garbage: float
) -> None:
    """Not by a norm, a finite check, a gather or a loss."""
    axis, whole = ps.VmapAxis(SIZE), drawn(*shape)

    def rank(x: Tensor) -> Any:
        node, ones = ps.shard(x, axis, dim), ps.shard(torch.ones(shape), axis, dim)
        dirty = ps.Shard(torch.where(ones.piece > 0, node.piece, garbage), axis, shape, dim)
        evaluate = ps.make_eval_step(lambda w, m: w.sum() * m, weight_fn=torch.ones_like)
        loss = evaluate(dirty, [torch.ones(1, dtype=torch.float64)]).loss
        summed = ps.psum(loss, axis)
        return tree.global_norm(dirty), tree.all_finite(dirty), ps.unshard(dirty), summed

    norm, finite, gathered, loss = axis.map(rank, in_dims=None, out_dims=None)(whole)
    torch.testing.assert_close(norm, whole.norm())
    assert finite
    assert torch.equal(gathered, whole)
    torch.testing.assert_close(loss, whole.sum())


@pytest.mark.parametrize(("make", "run"), WORLDS)
def test_one_rank_alone_has_what_is_not_finite(make: Any, run: Any) -> None:
    """Every rank is told so, and of a zero tree every rank gets a zero norm with a zero gradient."""
    axis = make(SIZE)
    whole = torch.tensor([1.0, 2.0, torch.inf])

    def rank(x: Tensor) -> Any:
        nodes = {"a": ps.shard(x, axis), "b": torch.ones(2)}
        zero = tree.map(torch.zeros_like, nodes)
        leaves, structure = tree.flatten(zero)
        slopes = torch.func.grad(lambda leaves: tree.global_norm(tree.unflatten(structure, leaves)))
        return tree.all_finite(nodes), tree.global_norm(zero), slopes(leaves)

    for finite, norm, slopes in run(rank, axis, whole):
        assert not finite
        assert norm == 0
        assert not any(slope.any() for slope in slopes)


def test_the_norms_dtype_is_that_of_the_leaves() -> None:
    axis = ps.LocalAxis()
    for dtype, expected in [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]:
        node = ps.Shard(torch.full((4,), 300, dtype=dtype), axis, (4,))
        assert tree.global_norm(node).dtype == expected
        assert tree.global_norm(node) == 600


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


def test_eval_step_and_accumulate_hand_over_pieces() -> None:
    axis = ps.VmapAxis(SIZE)
    data = torch.ones(2, dtype=torch.float64)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        result: Tensor = ps.psum(p["w"].sum(), axis) * x
        return result

    def rank(w: Tensor) -> Any:
        params = {"w": ps.shard(w, axis)}
        evaluate = ps.make_eval_step(loss_fn, weight_fn=torch.ones_like)
        sums = ps.accumulate(loss_fn, params, [data], weight_fn=torch.ones_like)
        return evaluate(params, [data]).loss, ps.unshard(sums.grads)["w"]

    whole = drawn(5)
    loss, grads = axis.map(rank, in_dims=None, out_dims=None)(whole)
    torch.testing.assert_close(loss, whole.sum())
    assert torch.equal(grads, torch.full((5,), 2.0, dtype=torch.float64))


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


def test_states_are_trees_of_nodes() -> None:
    """By name, and of the same structure as the params."""
    axis = ps.LocalAxis()
    params = {"w": ps.Shard(torch.ones(2), axis, (2,), dim=-1)}
    assert params["w"].shape == (2,)
    assert params["w"].dim == 0
    state = ps.optim.adamw(0.1).init(params)
    assert isinstance(state.mu["w"], ps.Shard)
    assert list(ps.state_dict(params)) == ["tree['w'].piece"]
    other = {"w": ps.Shard(torch.ones(2), axis, (4,))}
    with pytest.raises(ValueError, match="differ in structure"):
        tree.map(torch.add, params, other)


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
    with pytest.raises(ValueError, match=r"ReverseMode.*pieces over VmapAxis"):
        tp.map(
            lambda w: once(
                ps.LocalAxis(), {"w": ps.Shard(w, tp, (4,))},
                normalize="grads", grad_and_value=ps.with_squared_norms(),
            )
        )(torch.ones(2, 2))  # fmt: skip
    muon = ps.optim.from_torch(torch.optim.Muon, lr=0.1)
    with pytest.raises(ValueError, match="Muon may look at all of a parameter"):
        muon.init({"w": ps.Shard(torch.ones(2, 2), tp, (4, 2))})
    ps.optim.from_torch(torch.optim.RMSprop, lr=0.1).init({"w": ps.Shard(torch.ones(2), tp, (4,))})


def test_pieces_over_more_than_the_steps_axis_are_refused() -> None:
    world = ps.testing.ThreadAxis(4)
    rows, _ = world.split(2, 2)
    with pytest.raises(
        ValueError, match=r"params\['w'\]\.piece is spread over .*some of whose ranks"
    ):
        world.map(lambda w: once(rows, {"w": ps.Shard(w, world, (4,))}))([torch.ones(1)] * 4)


class Counting(ps.LocalAxis):
    """One rank that counts its collectives."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def apply(self, law: str, x: Tensor) -> Tensor:
        self.calls.append((law, x.numel()))
        return super().apply(law, x)


@pytest.mark.parametrize("microbatches", [1, 5])
def test_gathered_once_and_scattered_once(microbatches: int) -> None:
    """Each leaf, however many microbatches there are; and a norm costs one number for all leaves."""
    axis = Counting()
    params = {"w": ps.shard(drawn(5, 2), axis), "v": ps.shard(drawn(3), axis), "b": torch.ones(())}
    step = ps.make_update_step(
        lambda p, x: (p["w"].sum() + p["v"].sum() + p["b"]) * x, CLIPPED,
        weight_fn=torch.ones_like, axis=axis,
    )  # fmt: skip
    opt_state = CLIPPED.init(params)
    axis.calls.clear()
    step(params, opt_state, [torch.ones(2)] * microbatches)
    gathers = [call for call in axis.calls if call[0] == "all_gather"]
    scatters = [call for call in axis.calls if call[0] == "psum_scatter"]
    sums = [call for call in axis.calls if call[0] == "psum"]
    assert sorted(gathers) == [("all_gather", 3), ("all_gather", 10)]
    assert sorted(scatters) == [("psum_scatter", 3), ("psum_scatter", 10)]
    assert sums == [("psum", 1), ("psum", 1)]  # of grad_norm and of the clip


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


def test_trees_without_pieces_pay_nothing() -> None:
    """No collective, no pass over the leaves: the very same structure reaches the loss."""
    from purestep.form import flat, without_shards

    given = flat({"w": torch.ones(2)})
    assert given.form.spread == ()
    assert without_shards(given) is given


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
