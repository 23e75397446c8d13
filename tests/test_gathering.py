"""Where the gather of params in pieces stands: what travels when, what is whole, and what is alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.axis.ranks import Wait
from purestep.gathering import Gather
from tests.memory import LiveBytes

pytestmark = pytest.mark.timeout(60)

WIDTH, ADAMW = 16, ps.optim.adamw(0.1)
GATHERS: list[Gather] = ["step", "microbatch", "loss"]


def network(layers: int, width: int = WIDTH) -> list[Tensor]:
    """Equal layers of integers."""
    generator = torch.Generator().manual_seed(0)
    shape = (layers, width, width)
    return [*torch.randint(-1, 2, shape, generator=generator).to(torch.float64)]


def rows(count: int, seed: int = 0) -> Tensor:
    """Inputs, integers as well."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (count, WIDTH), generator=generator).to(torch.float64)


def of_whole(params: Sequence[Tensor], x: Tensor) -> Tensor:
    """A deep network, one loss for each row."""
    for layer in params:
        x = torch.relu(x @ layer) * 0.125
    return x.square().sum(-1)


def of_pieces(params: Sequence[Any], x: Tensor) -> Tensor:
    """The same, of which one layer is whole at a time, and the next on its way."""
    for layer in ps.unshard_each(params):
        x = torch.relu(x @ layer) * 0.125
        del layer
    return x.square().sum(-1)


def loss_of(gather: Gather) -> Callable[..., Tensor]:
    """The one that this way needs."""
    return of_pieces if gather == "loss" else of_whole


def ones(x: Tensor) -> Tensor:
    """Every row is a token."""
    return torch.ones(len(x), dtype=torch.int64)


class Log(ps.testing.ThreadAxis):
    """Ranks that write down what they launch."""

    def __init__(self, size: int, *, bucket_bytes: int = 1 << 20) -> None:
        super().__init__(size, bucket_bytes=bucket_bytes)
        self.launched: list[list[Any]] = [[] for _ in range(size)]
        self.waited = [0] * size

    def launch(self, law: str, x: Tensor, out: Tensor) -> Wait:
        """As ever."""
        self.launched[self.rank].append((law, x.numel()))
        wait = super().launch(law, x, out)

        def waited() -> None:
            self.waited[self.rank] += 1
            wait()

        return waited


def test_what_travels() -> None:
    """However many microbatches: a gather and a scatter a step, or each for a microbatch, or two gathers of each layer."""

    def count(gather: Gather, microbatches: int) -> dict[str, int]:
        axis = Log(2, bucket_bytes=1 << 19)

        def program(rank: int) -> None:
            params = ps.shard(network(3, 256), axis)
            step = ps.make_update_step(
                lambda p, x: loss_of(gather)(p, x.repeat(1, 16)), ADAMW, weight_fn=ones, axis=axis,
                gather=gather,
            )  # fmt: skip
            state = ADAMW.init(params)
            axis.launched[rank].clear()
            step(params, state, [rows(2)] * microbatches)

        axis.map(program)(range(2))
        assert axis.launched[0] == axis.launched[1]
        laws = [law for law, numel in axis.launched[0] if numel > 1000]
        return {law: laws.count(law) for law in ("all_gather", "psum_scatter")}

    for microbatches in (1, 4):
        assert count("step", microbatches) == {"all_gather": 3, "psum_scatter": 3}
        each = {"all_gather": 3 * microbatches, "psum_scatter": 3 * microbatches}
        assert count("microbatch", microbatches) == each
        again = {"all_gather": 6 * microbatches, "psum_scatter": 3 * microbatches}
        assert count("loss", microbatches) == again


@pytest.mark.parametrize("gather", GATHERS)
def test_gradients_leave_while_the_backward_pass_runs(gather: Gather) -> None:
    """When the first layer's gradient is found, that of the last one is on its way."""
    axis = Log(2, bucket_bytes=8)
    seen: list[list[str]] = [[], []]

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen[axis.rank] += [law for law, _ in axis.launched[axis.rank]]
            return grad

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        first = torch.relu(x @ ps.unshard(params[0])) * 0.125
        look: Callable[[Tensor], Tensor] = Look.apply
        return loss_of(gather)(params[1:], look(first))

    def program(rank: int) -> None:
        params = ps.shard(network(3, 256), axis)
        step = ps.make_update_step(loss_fn, ADAMW, weight_fn=ones, axis=axis, gather=gather)
        state = ADAMW.init(params)
        axis.launched[rank].clear()
        step(params, state, [rows(2, rank).repeat(1, 16)])

    axis.map(program)(range(2))
    for laws in seen:
        assert laws.count("psum_scatter") == 2


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


@pytest.mark.parametrize("recomputed", [False, True])
def test_one_layer_is_whole_at_a_time(recomputed: bool) -> None:
    """Sixteen layers more take the sums of their gradients and their activations, and no whole layer.

    Of one rank, whose pieces are whole: what threads copy for each other they count for whoever comes last.
    """
    width, more = 128, 16
    of_layer = 8 * width * width

    def loss_fn(params: Sequence[Any], x: Tensor) -> Tensor:
        def block(layer: Any, x: Tensor) -> Tensor:
            return torch.relu(x @ ps.unshard(layer)) * 0.125

        if recomputed:
            for layer in params:
                x = ps.remat(block)(layer, x)
            return x.square().sum(-1)
        return of_pieces(params, x)

    def peak(layers: int) -> int:
        axis = ps.testing.ThreadAxis(1)

        def program(_: int) -> int:
            params = ps.shard(network(layers, width), axis)
            optimizer = ps.optim.sgd(0.1)
            step = ps.make_update_step(
                loss_fn, optimizer, weight_fn=ones, axis=axis, gather="loss", donate=True
            )
            state, x = optimizer.init(params), torch.ones(1, width).double()
            with LiveBytes() as live:
                step(params, state, [x, x])
            return live.peak

        (found,) = axis.map(program)(range(1))
        return int(found)

    assert more * of_layer <= peak(4 + more) - peak(4) < 1.05 * more * of_layer


def test_state_is_a_piece() -> None:
    """1/n of params and moments, and at most a row more."""
    axis = ps.testing.ThreadAxis(3)

    def program(rank: int) -> int:
        params = ps.shard({"w": torch.ones(7, 5), "b": torch.ones(6)}, axis)
        return sum(leaf.numel() for leaf in tree.leaves_of((params, ADAMW.init(params))))

    whole = 7 * 5 + 6
    for held in axis.map(program)(range(3)):
        assert held <= 3 * (whole + 2 * 5) / 3 + 1  # params and two moments, and a step


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


def test_unshard_in_inference_mode() -> None:
    axis = ps.testing.ThreadAxis(2)

    def program(_: int) -> Any:
        params = ps.shard({"w": torch.arange(5.0), "n": torch.arange(3)}, axis)
        with torch.inference_mode():
            return ps.unshard(params), next(iter(ps.unshard_each([params])))

    for found in axis.map(program)(range(2)):
        for each in found:
            assert torch.equal(each["w"], torch.arange(5.0))
            assert torch.equal(each["n"], torch.arange(3))


@pytest.mark.parametrize("gather", GATHERS)
def test_nothing_waits_for_the_garbage_collector(gather: Gather) -> None:
    """What was whole, and what was summed, is gone when the step has returned."""
    axis = ps.testing.ThreadAxis(2)
    wholes: list[list[Any]] = [[], []]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = list(ps.unshard_each(params))
        wholes[axis.rank] += map(weakref.ref, layers)
        return of_whole(layers, x)

    def program(rank: int) -> list[int]:
        params = ps.shard(network(3), axis)
        step = ps.make_update_step(loss_fn, ADAMW, weight_fn=ones, axis=axis, gather=gather)
        state = ADAMW.init(params)
        step(params, state, [rows(2)] * 2)
        return [sum(each() is not None for each in wholes[rank])]

    axis.map(program)(range(2))
    for each in wholes:
        each.clear()
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is Tensor for each in gc.get_objects())
        assert axis.map(program)(range(2)) == [[0], [0]]
        assert sum(type(each) is Tensor for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_unshard_each_is_unshard() -> None:
    """Of every tree, under transforms too; and a derivative of a derivative passes."""
    axis, vmapped = ps.testing.ThreadAxis(2), ps.VmapAxis(2)
    layers = [{"w": torch.arange(5.0), "b": torch.tensor(2.0)}, {"w": torch.ones(3, 2)}]

    def program(_: int) -> Any:
        mine = [ps.shard(layer, axis) for layer in layers]
        assert list(ps.unshard_each([])) == []
        piece = ps.Shard(mine[0]["w"].piece.requires_grad_(), axis, (5,))
        loss = sum(each.pow(3).sum() for each in ps.unshard_each([piece]))
        (slope,) = torch.autograd.grad(loss, piece.piece, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), piece.piece)
        return list(ps.unshard_each(mine)), ps.unshard(ps.Shard(curve, axis, (5,)))

    for found, curve in axis.map(program)(range(2)):
        assert all(map(torch.equal, tree.leaves_of(found), tree.leaves_of(layers)))
        # Both ranks compute the same, and what they compute is summed.
        assert torch.equal(curve, 2 * 6 * layers[0]["w"])

    def on_ranks(w: Tensor) -> Tensor:
        nodes = [ps.shard(w, vmapped), ps.shard(2 * w, vmapped)]
        return torch.stack(list(ps.unshard_each(nodes)))

    run = vmapped.map(on_ranks, in_dims=None, out_dims=None)
    assert torch.equal(
        run(torch.arange(3.0)), torch.stack([torch.arange(3.0), 2 * torch.arange(3.0)])
    )


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
    """An embedding's, torch.func's own, and a step that nobody records."""
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

    def inference(rank: int) -> Any:
        with torch.inference_mode():
            return program(rank, False, {})

    assert torch.equal(axis.map(inference)(range(2))[0], expected)


def test_a_loss_that_transforms_itself_is_told_so() -> None:
    axis = ps.testing.ThreadAxis(1)

    def loss_fn(w: Any, x: Tensor) -> Tensor:
        force: Tensor = torch.func.grad(lambda x: (ps.unshard(w) * x).sum())(x)
        return force.square()

    def program(_: int) -> None:
        w = ps.shard(torch.ones(2), axis)
        step = ps.make_update_step(
            loss_fn, ps.optim.sgd(1.0), axis=axis, weight_fn=ones, gather="loss"
        )
        with pytest.raises(
            ValueError, match=r"torch.func.grad and vjp inside.*torch.autograd.grad"
        ):
            step(w, ps.optim.sgd(1.0).init(w), [torch.ones(2)])

    axis.map(program)(range(1))


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


def test_who_leaves_unshard_each_early_waits() -> None:
    """The next tree is on its way already: nobody leaves it there, nor takes a following collective for it."""
    axis = Log(2)

    def program(rank: int) -> Any:
        layers = [ps.shard(layer, axis) for layer in network(3)]
        for layer in ps.unshard_each(layers):
            first = layer
            break
        return first, axis.apply("psum", torch.tensor(rank))

    for first, total in axis.map(program)(range(2)):
        assert torch.equal(first, network(3)[0])
        assert total == 1
    assert axis.waited == [len(launched) for launched in axis.launched] == [2, 2]


def test_a_loss_that_keeps_a_whole() -> None:
    """Of one microbatch for the next: it has the values of a constant there."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(1.0)

    def program(rank: int) -> Any:
        kept: list[Tensor] = []

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            (whole,) = ps.unshard_each(params)
            kept.append(whole)
            return (whole * kept[0] * x).sum()[None]

        params = ps.shard([torch.arange(4.0)], axis)
        step = ps.make_update_step(
            loss_fn, optimizer, axis=axis, weight_fn=lambda x: torch.ones(1), gather="loss"
        )
        new, _, _ = step(params, optimizer.init(params), [torch.tensor(4.0)] * 2)
        return ps.unshard(new)

    for (new,) in axis.map(program)(range(2)):
        # Twice two ranks of w w, then of w times a constant.
        assert torch.equal(new, torch.arange(4.0) * (1 - 2 * (2 * 4 + 4) / 4))


def test_hooks_on_pieces_see_one_microbatch() -> None:
    """And may change its gradient, which is then a piece's."""
    axis, optimizer = ps.testing.ThreadAxis(2), ps.optim.sgd(1.0)

    def program(rank: int) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            params[0].piece.register_hook(lambda grad: 10 * grad)
            return (ps.unshard(params)[0] * x).sum()[None]

        params = ps.shard([torch.zeros(4)], axis)
        step = ps.make_update_step(
            loss_fn, optimizer, axis=axis, weight_fn=lambda x: torch.ones(1), gather="loss"
        )
        new, _, _ = step(params, optimizer.init(params), [torch.tensor(1.0), torch.tensor(2.0)])
        return ps.unshard(new)

    for (new,) in axis.map(program)(range(2)):
        assert torch.equal(new, torch.full((4,), -10 * 2 * 3 / 4))
