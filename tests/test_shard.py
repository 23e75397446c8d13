"""Leaves in pieces: what is refused, what others do with them, and figures that T12 does not say."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.test_t02_ranks import CountingAxis
from purestep import tree
from purestep.testing import ThreadAxis

SIZE, TP, TWO = 3, ps.VmapAxis(2), torch.ones(2)


def noise(*shape: int) -> Tensor:
    """Numbers that are the same every time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def ones(x: Tensor) -> Tensor:
    """Every row is a token."""
    return torch.ones(len(x))


def assert_close(actual: Any, expected: Any) -> None:
    """Trees of one structure whose leaves are close."""
    torch.testing.assert_close(tree.leaves_of(actual), tree.leaves_of(expected))


def on_all(axis: ps.VmapAxis, fn: Any, *args: Any) -> Any:
    """What all simulated ranks return alike, of arguments that all have."""
    return axis.map(fn, in_dims=None, out_dims=None)(*args)


def test_compiled() -> None:
    """One graph of cutting, gathering, and a norm over pieces, which come out as nodes."""
    axis, whole = ps.VmapAxis(SIZE), noise(5, 2)

    def program(x: Tensor) -> Any:
        def rank(x: Tensor) -> Any:
            nodes = ps.shard({"w": x, "scale": x.sum()}, axis)
            return nodes, ps.unshard(nodes), tree.global_norm(nodes), tree.all_finite(nodes)

        return axis.map(rank, in_dims=None, out_dims=(0, None, None, None))(x)

    found = torch.compile(program, fullgraph=True, backend="aot_eager")(whole)
    assert isinstance(found[0]["w"], ps.Shard)
    assert_close(found, program(whole))


def test_a_zero_tree_has_a_zero_norm_with_a_zero_gradient() -> None:
    axis = ps.VmapAxis(SIZE)

    def rank(x: Tensor) -> Any:
        leaves, structure = tree.flatten({"a": ps.shard(x, axis), "b": torch.zeros(2)})
        return torch.func.grad_and_value(
            lambda leaves: tree.global_norm(tree.unflatten(structure, leaves))
        )(leaves)

    slopes, norms = axis.map(rank, in_dims=None)(torch.zeros(4))
    assert not norms.any()
    assert not any(slope.any() for slope in slopes)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_a_norm_has_the_dtype_of_sums(dtype: torch.dtype, expected: torch.dtype) -> None:
    node = ps.Shard(torch.full((4,), 300, dtype=dtype), ps.LocalAxis(), (4,))
    assert tree.global_norm(node).dtype == expected
    assert tree.global_norm(node) == 600


def test_a_norm_costs_one_number() -> None:
    """However many leaves are sharded over an axis."""
    axis = CountingAxis()
    tree.global_norm(ps.shard({"w": noise(5, 2), "v": noise(3), "b": torch.ones(())}, axis))
    assert axis.calls == [("psum", 1)]


def test_states_are_trees_of_nodes() -> None:
    """By name, and of the same structure as the params."""
    params = {"w": ps.Shard(TWO, ps.LocalAxis(), (2,), dim=-1)}
    assert params["w"].dim == 0
    assert isinstance(ps.optim.adamw(0.1).init(params).mu["w"], ps.Shard)
    assert list(ps.state_dict(params)) == ["tree['w'].piece"]
    with pytest.raises(ValueError, match="differ in structure"):
        tree.map(torch.add, params, {"w": ps.Shard(TWO, ps.LocalAxis(), (4,))})
    count = torch.tensor(3)
    assert ps.unshard(ps.Shard(count, ps.LocalAxis(), (4, 6))) is count, "kept beside a param"


# Steps


def network(p: Any, x: Tensor, tp: ps.Axis = ps.LocalAxis()) -> Tensor:
    """The activation of what a piece is filled up with is not 0."""
    output: Tensor = ps.psum(torch.sigmoid(x @ p["up"]) @ p["down"], tp) + p["bias"]
    return output.square()


NETWORK = {"up": noise(2, 5), "down": noise(5), "bias": noise(1)[0]}
CLIPPED = ps.optim.chain(ps.optim.clip_by_global_norm(0.1), ps.optim.adamw(0.1, weight_decay=0.1))


def two_steps(loss_fn: Any, params: Any, batch: Tensor, optimizer: Any, **how: Any) -> Any:
    """The whole state after two steps, and the last norm."""
    opt_state = optimizer.init(params)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones, **how)
    for _ in range(2):
        params, opt_state, metrics = step(params, opt_state, [batch])
    return ps.unshard((params, opt_state)), metrics.grad_norm


def test_pieces_that_are_filled_up_keep_the_step_of_the_whole_layer() -> None:
    dp, tp, batch = ps.VmapAxis(2), ps.VmapAxis(3), noise(4, 2)

    def rank(batch: Tensor) -> Any:
        pieces = {"up": ps.shard(NETWORK["up"], tp, 1), "down": ps.shard(NETWORK["down"], tp)}
        loss_fn = partial(network, tp=tp)
        return two_steps(loss_fn, {**NETWORK, **pieces}, batch, CLIPPED, axis=dp)

    on_columns = tp.map(rank, in_dims=None, out_dims=None)
    found = dp.map(on_columns, out_dims=None)(batch.view(2, 2, 2))
    assert_close(found, two_steps(network, NETWORK, batch, CLIPPED))


def test_a_compiled_step_clips_pieces() -> None:
    """With ``compile=True`` an optimizer without kernels is one graph, the norm included."""
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(0.1), ps.optim.descend(0.1))
    params = ps.shard({"w": noise(2)}, ps.LocalAxis())

    def step(**how: Any) -> Any:
        return two_steps(lambda p, x: (x @ p["w"]).square(), params, noise(4, 2), optimizer, **how)

    assert_close(step(compile=True), step())


def test_derivatives_of_a_step_on_pieces() -> None:
    """By the whole params, through gather and scatter: those of the step on whole tensors."""
    axis, whole, batch = ps.VmapAxis(2), noise(3), noise(4)
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(0.5), ps.optim.sgd(0.1))

    def after(axis: Any, w: Tensor, x: Tensor, sharded: bool) -> Tensor:
        params = ps.shard(w, axis) if sharded else w
        step = ps.make_update_step(
            lambda w, x: (w.square().sum() * x - 1).square(), optimizer,
            weight_fn=torch.ones_like, axis=axis,
        )  # fmt: skip
        return ps.unshard(step(params, optimizer.init(params), [x])[0])

    def on_ranks(w: Tensor) -> Tensor:
        rank = axis.map(partial(after, axis, sharded=True), in_dims=(None, 0), out_dims=None)
        return rank(w, batch.view(2, 2))

    expected = torch.func.jacrev(lambda w: after(ps.LocalAxis(), w, batch, False))(whole)
    assert_close(torch.func.jacrev(on_ranks)(whole), expected)
    assert_close(torch.func.jacfwd(on_ranks)(whole), expected)
    assert_close(torch.vmap(on_ranks)(whole[None])[0], on_ranks(whole))


def test_accumulate_and_evaluation_of_pieces() -> None:
    """A loss takes the pieces that ``make_eval_step`` hands it, or gathers a ``Shard``."""
    axis, data = ps.VmapAxis(SIZE), torch.ones(2, dtype=torch.float64)
    how: Any = {"weight_fn": torch.ones_like}

    def rank(w: Tensor) -> Any:
        w = ps.shard(w, axis)
        metrics = ps.make_eval_step(lambda w, x: ps.psum(w.sum(), axis) * x, **how)(w, [data])
        sums = ps.accumulate(lambda w, x: ps.unshard(w).sum() * x, w, [data], **how)
        return metrics.loss, ps.unshard(sums.grads)

    loss, grads = on_all(axis, rank, noise(5))
    assert_close(loss, noise(5).sum())
    assert torch.equal(grads, torch.full((5,), 2.0 * SIZE, dtype=torch.float64))


def test_partition_clips_its_own_pieces() -> None:
    """A part of the tree keeps the axes of its leaves."""
    axis, sgd = ps.VmapAxis(SIZE), ps.optim.sgd(1.0)
    clipped = ps.optim.chain(ps.optim.clip_by_global_norm(1.0), sgd)
    labels = {"a": "clipped", "b": "plain"}
    optimizer = ps.optim.partition(labels, {"clipped": clipped, "plain": sgd})
    whole = {"a": noise(5), "b": noise(4)}

    def rank(whole: Any) -> Any:
        zeros = tree.map(torch.zeros_like, ps.shard(whole, axis))
        return ps.unshard(optimizer.update(ps.shard(whole, axis), optimizer.init(zeros), zeros)[0])

    expected = {"a": -whole["a"] / whole["a"].norm(), "b": -whole["b"]}
    assert_close(on_all(axis, rank, whole), expected)


# What is refused


def step_once(axis: Any, w: Any) -> Any:
    """A step with this param."""
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(
        lambda p, x: p["w"].sum() * x, sgd, weight_fn=torch.ones_like, axis=axis
    )
    return step({"w": w}, sgd.init({"w": w}), [torch.ones(2)])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ps.Shard(TWO, TP, (2,), dim=1), r"shape=\(2,\), dim=1.*no such dimension"),
        (lambda: ps.Shard(torch.ones(()), TP, ()), "a scalar is not cut"),
        (
            lambda: tree.global_norm(ps.Shard(ps.Shard(TWO, TP, (2,)), ps.VmapAxis(3), (2,))),
            r"over VmapAxis\(3\) and over VmapAxis\(2\)",
        ),
        (
            lambda: ps.unshard(ps.Shard(torch.ones(4, 3), ps.LocalAxis(), (4, 6))),
            r"shape \(4, 3\), but this rank's piece.*take ps.shard",
        ),
        (
            lambda: TP.map(lambda w: step_once(ps.LocalAxis(), ps.Shard(w, TP, (4,))))(
                torch.ones(2, 3)
            ),
            r"params\['w'\]\.piece has shape \(3,\).*has shape \(2,\)",
        ),
        (
            lambda: ps.optim.from_torch(torch.optim.Muon, lr=0.1).init(
                ps.Shard(torch.ones(2, 2), TP, (4, 2))
            ),
            "Muon may look at all of a parameter",
        ),
    ],
    ids=["dim", "scalar", "nested", "no piece", "another piece", "Muon"],
)
def test_refused(act: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


def test_the_name_of_an_axis_is_refused() -> None:
    with pytest.raises(TypeError, match=r"axis='tp'.*must have an axis object"):
        ps.Shard(TWO, "tp", (2,))


def test_pieces_over_more_than_the_steps_axis_are_refused() -> None:
    world = ThreadAxis(4)
    rows, _ = world.split(2, 2)
    message = r"params\['w'\]\.piece is sharded over .*some of whose ranks"
    with pytest.raises(ValueError, match=message):
        world.map(lambda w: step_once(rows, ps.Shard(w, world, (4,))))([torch.ones(1)] * 4)


def test_ranks_that_disagree_on_what_is_sharded() -> None:
    """Pieces of different lengths are alike, pieces of different tensors are not."""
    axis = ThreadAxis(2)
    message = (
        r"disagree on params.*rank 0 with params\['w'\]\.piece: torch.float64, of shape \(4,\) in "
        r"pieces.*\(5,\)"
    )
    with pytest.raises(ValueError, match=message):
        axis.map(lambda size: step_once(axis, ps.shard(noise(size), axis)))([4, 5])
