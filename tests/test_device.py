"""Steps on a device that is not the CPU: the CPU's answer, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import purestep as ps
from proofs import models
from proofs.devices import Waits, lazy, moved, placed
from proofs.strategies import Batch, assert_same, cut, integer_batch, labels, matrices, weights_of
from purestep import tree
from purestep.testing.bounds import gamma
from tests.torch_internals import FakeTensorMode

optim = ps.optim
line = optim.linear_schedule(0.5, 0.25, 4)
cosine = optim.cosine_decay_schedule(0.5, 8)
half = torch.tensor(0.5)

# Integers, their halves and their signs: no rounding anywhere.
EXACT = {
    "sgd": optim.sgd(0.5),
    "tensor": optim.sgd(half),
    "momentum": optim.sgd(0.5, 0.5),
    "nesterov": optim.sgd(0.5, 0.5, nesterov=True),
    "decayed": optim.sgd(0.5, weight_decay=0.5),
    "decayed by a tensor": optim.sgd(0.5, weight_decay=half, mask=matrices),
    "masked": optim.sgd(0.5, weight_decay=0.5, mask=matrices),
    "all of sgd": optim.sgd(line, 0.5, nesterov=True, weight_decay=0.5, mask=matrices),
    "chain": optim.chain(optim.add_decayed_weights(0.5), optim.momentum(0.5), optim.descend(line)),
    "lion": optim.lion(0.5, 0.5, 0.5),
    "all of lion": optim.lion(line, 0.5, 0.5, weight_decay=0.5, mask=matrices),
    "master": optim.master_weights(optim.sgd(0.5, 0.5)),
    "ema": optim.ema(optim.sgd(0.5, 0.5), 0.5),
    "no update_": optim.sgd(0.5, 0.5, weight_decay=0.5, mask=matrices)._replace(update_=None),
}
ROUNDED = {
    "adamw": optim.adamw(0.125),
    "adam": optim.adamw(0.125, weight_decay=0),
    "all of adamw": optim.adamw(cosine, 0.8, 0.99, 1e-3, weight_decay=half, mask=matrices),
    "joined": optim.adamw(optim.join_schedules([line, cosine], [2])),
    "warmed up": optim.adamw(optim.warmup_cosine_decay_schedule(0.0, 0.5, 2, 8)),
    "scale_by_adam": optim.chain(optim.scale_by_adam(), optim.descend(0.125)),
    "clipped": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.5, 0.5)),
    "clipped by a tensor": optim.chain(optim.clip_by_global_norm(half), optim.adamw(0.125)),
    "partition": optim.partition(
        labels, {"matrix": optim.sgd(0.5, 0.5), "rest": optim.adamw(0.125, mask=matrices)}
    ),
    "master of adamw": optim.master_weights(optim.adamw(0.125, mask=matrices)),
}
OPTIMIZERS = EXACT | ROUNDED

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "grads": {"normalize": "grads"},
    "skip": {"on_nonfinite": "skip"},
    "donate": {"donate": True},
    "all": {"normalize": "grads", "on_nonfinite": "skip", "donate": True},
    "accum_dtype": {"accum_dtype": torch.float64},
    "torch.func": {"grad_and_value": torch.func.grad_and_value},
}
GROUPS: dict[str, Callable[[Batch], list[Batch]]] = {
    "one": lambda batch: [batch],
    "many": lambda batch: cut(batch, [[0, 1], [], [2], [3]]),
    "none": lambda batch: [],
    "ignored": lambda batch: [{**batch, "w": torch.zeros_like(batch["w"])}],
    "infinite": lambda batch: [{**batch, "y": batch["y"] * torch.inf}],
}


def problem(dtype: torch.dtype = torch.int64) -> tuple[Any, Batch]:
    """Parameters, and a batch of 8 tokens whose weights sum to 8."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.tensor([[1, 2], [0, 1], [1, 1], [2, 0]]).to(dtype)
    return models.integer_params(generator), integer_batch(weights, generator)


def started(optimizer: optim.Optimizer, params: Any) -> Any:
    """A state as if training had gone on for a while."""
    return tree.map(
        lambda leaf: torch.full_like(leaf, 2 if leaf.dtype == torch.int64 else 1),
        optimizer.init(params),
    )


def on_both(
    optimizer: optim.Optimizer, group: list[Batch], **settings: Any
) -> tuple[Any, Any, Any]:
    """Where a step begins, and what comes of it: on the host, and on the device without a wait."""
    make: Callable[..., Any] = ps.make_update_step
    step = make(models.integer_loss, optimizer, weight_fn=weights_of, **settings)
    params = problem()[0]
    state = (params, started(optimizer, params))
    there = moved(params)
    state_there = (there, placed(state[1], optimizer.init(there)))
    group_there = moved(group)
    expected = step(*tree.map(torch.clone, state), group)
    with Waits() as waits:
        actual = step(*state_there, group_there)
    assert waits.seen == []
    assert devices(actual[:2]) == devices(state_there), "state stays where it is"
    return state, expected, actual


@pytest.mark.parametrize("name", ["masked", "all of lion", "all of adamw"])
def test_state_loaded_to_the_device(name: str) -> None:
    """As ``torch.load(map_location=)`` brings it."""
    params, batch = problem()
    optimizer = OPTIMIZERS[name]
    state = (params, started(optimizer, params))
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    there, batch_there = moved((state, batch))
    with Waits() as waits:
        actual = step(there[0], there[1], [batch_there])
    assert waits.seen == []
    assert set(devices(actual)) == {lazy()}
    assert_near(actual[:2], step(*state, [batch])[:2], state)


def devices(state: Any) -> list[torch.device]:
    return [leaf.device for leaf in tree.leaves_of(state)]


def assert_near(actual: Any, expected: Any, state: Any) -> None:
    """The gradients are exact; the formula of a step, its powers and its norms round so often."""
    elements = sum(leaf.numel() for leaf in tree.leaves_of(state[0]))
    roundings = gamma(2 * (elements + 64), torch.float64)
    for path, *leaves in zip(
        tree.paths(state, "state"),
        *map(tree.leaves_of, (placed(actual, state), expected, state)),
        strict=True,
    ):
        ours, theirs, old = (leaf.to(torch.float64) for leaf in leaves)
        scale = old.abs() + (theirs - old).abs()
        assert ((ours - theirs).abs() <= roundings * scale).all(), path


def assert_as_on_the_host(name: str, group: list[Batch], **settings: Any) -> None:
    state, expected, actual = on_both(OPTIMIZERS[name], group, **settings)
    if name in EXACT or not expected[2].applied:
        assert_same(placed(actual[:2], state), expected[:2])
    else:
        assert_near(actual[:2], expected[:2], state)
    loss, *counts = placed(actual[2], expected[2])._replace(grad_norm=())
    assert_same((loss, counts), (expected[2].loss, [*expected[2]._replace(grad_norm=())[1:]]))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_every_setting(name: str, settings: str) -> None:
    group = GROUPS["many"](problem()[1])
    assert_as_on_the_host(name, group, **SETTINGS[settings])


@pytest.mark.parametrize("kind", ["one", "none", "ignored"])
@pytest.mark.parametrize("settings", ["default", "all"])
@pytest.mark.parametrize("name", ["all of sgd", "all of lion", "all of adamw", "partition"])
def test_every_group(name: str, settings: str, kind: str) -> None:
    assert_as_on_the_host(name, GROUPS[kind](problem()[1]), **SETTINGS[settings])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipping(name: str, donate: bool) -> None:
    """Nobody reads whether the step is taken, and yet the state is as it was."""
    state, expected, actual = on_both(
        OPTIMIZERS[name], GROUPS["infinite"](problem()[1]), on_nonfinite="skip", donate=donate
    )
    assert_same(placed(actual[:2], state), state)
    assert_same(placed(actual[:2], state), expected[:2])
    assert not actual[2].applied


@pytest.mark.parametrize("fused", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_algorithms_of_torch_wait_once(fused: type[torch.optim.Optimizer]) -> None:
    """They cannot be told to stay where they are, so the host reads whether to call them."""
    optimizer = optim.from_torch(fused, lr=0.5)
    params, batch = problem()
    there = moved(params)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    state, batch_there = optimizer.init(there), moved(batch)
    with Waits() as waits:
        actual = step(there, state, [batch_there])
    assert waits.seen == ["aten::_local_scalar_dense"]
    expected = step(params, optimizer.init(params), [batch])
    # One formula for each leaf, in the same kernels or in those that torch calls foreach.
    assert_near(actual[:2], expected[:2], (params, optimizer.init(params)))


WEIGHTS = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("name", ["default", "grads"])
def test_weights_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    assert_as_on_the_host("momentum", [problem(dtype)[1]], **SETTINGS[name])


def brings_weights(params: Any, batch: Batch) -> ps.LossTerms:
    losses = models.integer_loss(params, batch)
    return ps.LossTerms(
        losses, weights=batch["w"], aux={"sum": losses.sum(), "rows": batch["w"].sum()}
    )


def brings_terms(params: Any, batch: Batch) -> ps.LossTerms:
    return brings_weights(params, batch)._replace(
        weights=None, microbatch=params["hidden"]["weight"].sum().square()
    )


@pytest.mark.parametrize(
    ("loss_fn", "settings"),
    [
        (brings_weights, {"weight_fn": None, "normalize": "grads"}),
        (brings_terms, {"weight_fn": weights_of}),
    ],
)
def test_terms(loss_fn: Any, settings: dict[str, Any]) -> None:
    """Weights, a term and aux from the loss, in the step and in evaluation."""
    params, batch = problem()
    group = cut(batch, [[0, 1], [2, 3]])
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, **settings)
    evaluate = ps.make_eval_step(loss_fn, weight_fn=settings["weight_fn"])
    there, group_there = moved((params, group))
    with Waits() as waits:
        actual = step(there, optimizer.init(there), group_there), evaluate(there, group_there)
    assert waits.seen == []
    expected = step(params, optimizer.init(params), group), evaluate(params, group)
    everything = placed(actual, expected)
    assert_same(everything[0][:2], expected[0][:2])
    assert_same(everything[0][2].aux, expected[0][2].aux)
    assert_same(everything[1], expected[1])


def test_parts() -> None:
    """``count``, ``accumulate`` and an update, as who outgrows the step calls them."""
    params, batch = problem()
    optimizer = optim.sgd(0.5)

    def by_hand(params: Any, group: list[Batch]) -> Any:
        total = ps.count_tokens(group, weights_of)
        grads, loss, *_ = ps.accumulate(
            models.integer_loss,
            params,
            group,
            weight_fn=weights_of,
            total=ps.Count(total, torch.tensor(1)),
        )
        return optimizer.update(grads, optimizer.init(params), params), loss

    there, batch_there = moved((params, batch))
    with Waits() as waits:
        actual = by_hand(there, [batch_there])
    assert waits.seen == []
    expected = by_hand(params, [batch])
    assert_same(placed(actual, expected), expected)


def test_half_precision() -> None:
    """A copy in float32 moves; integers of one digit are exact in bfloat16 as well."""
    optimizer = optim.master_weights(
        optim.sgd(0.5, 0.5, weight_decay=0.5, mask=lambda p: {"w": True})
    )
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    batch = {"x": torch.tensor([[1.0, 2, 3, 4], [1, 0, 1, 0]], dtype=torch.bfloat16)}

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return (params["w"] * batch["x"]).sum(-1)

    step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=lambda m: torch.ones_like(m["x"][:, 0], dtype=torch.bool)
    )
    there, batch_there = moved((params, batch))
    state = optimizer.init(there)
    with Waits() as waits:
        actual = step(there, state, [batch_there])
    assert waits.seen == []
    expected = step(params, optimizer.init(params), [batch])
    assert_same(placed(actual[:2], expected[:2]), expected[:2])


def test_prefetch() -> None:
    """Groups from the host, empty ones included: nothing is waited for, and the weights come with them."""
    params, batch = problem()
    groups = [cut(batch, [[0, 1], [2], [3]]), [], [batch]]
    optimizer = optim.sgd(0.5, 0.5)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    there = moved(params)
    ours, theirs = (there, optimizer.init(there)), (params, optimizer.init(params))
    stream = ps.prefetch(groups, lazy(), weight_fn=weights_of)
    seen: list[str] = []
    for group in groups:
        arriving = next(stream)
        with Waits() as waits:
            *state, metrics = step(*ours, arriving)
        seen += waits.seen
        ours = state[0], state[1]
        *state, expected = step(*theirs, group)
        theirs = state[0], state[1]
        assert_same(placed(metrics.num_tokens, expected.num_tokens), expected.num_tokens)
        assert_same(placed(ours, theirs), theirs)
    assert seen == []


def test_ensemble() -> None:
    """Members that differ: every member's own step."""
    params, batch = problem()
    for name in ("masked", "all of lion", "all of adamw"):
        optimizer = OPTIMIZERS[name]
        step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
        both = tree.map(lambda leaf: torch.stack([leaf, 2 * leaf]), params)
        there, batch_there = moved((both, batch))
        state, state_there = (torch.vmap(optimizer.init)(each) for each in (both, there))
        run = torch.vmap(step, (0, 0, None))
        with Waits() as waits:
            actual = run(there, state_there, [batch_there])
        assert waits.seen == []
        expected = run(both, state, [batch])
        assert_near(actual[:2], expected[:2], (both, state))


def test_simulated_ranks() -> None:
    params, batch = problem()
    axis = ps.VmapAxis(2)
    optimizer = OPTIMIZERS["all of sgd"]
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of, axis=axis)
    run = axis.map(step, (None, None, 0), None)
    group = [tree.map(lambda leaf: leaf.unflatten(0, (2, 2)), batch)]
    there, group_there = moved((params, group))
    state = optimizer.init(there)
    with Waits() as waits:
        actual = run(there, state, group_there)
    assert waits.seen == []
    expected = run(params, optimizer.init(params), group)
    assert_same(placed(actual[:2], expected[:2]), expected[:2])


def test_threads() -> None:
    """Threads meet on the host, which waits; the answer is the same."""
    params, batch = problem()
    axis = ps.testing.ThreadAxis(2)
    optimizer = optim.sgd(0.5, 0.5)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of, axis=axis)
    groups = [cut(batch, [[0], [1, 2], [3]]), []]
    there, groups_there = moved((params, groups))
    actual = axis.map(lambda group: step(there, optimizer.init(there), group))(groups_there)
    expected = axis.map(lambda group: step(params, optimizer.init(params), group))(groups)
    assert_same(placed([rank[:2] for rank in actual], [rank[:2] for rank in expected]), [
        rank[:2] for rank in expected
    ])  # fmt: skip


def test_recorded() -> None:
    """A step under ``torch.func.grad``, and one of parameters that require grad."""
    params, batch = problem()
    optimizer = OPTIMIZERS["masked"]
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)

    def after(params: Any, state: Any, batch: Batch) -> Tensor:
        new = step(params, state, [batch])[0]
        return torch.stack([leaf.sum() for leaf in tree.leaves_of(new)]).sum()

    def recorded(params: Any, batch: Batch) -> Any:
        state = optimizer.init(params)
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        total = after(own, state, batch)
        return torch.func.grad(after)(params, state, batch), torch.autograd.grad(
            total, tree.leaves_of(own)
        )

    there, batch_there = moved((params, batch))
    with Waits() as waits:
        actual = recorded(there, batch_there)
    assert waits.seen == []
    expected = recorded(params, batch)
    assert_same(placed(actual, expected), expected)


def one_leaf(params: Any, batch: Batch) -> Tensor:
    return batch["x"] @ params["w"] - batch["y"]


def row(**more: Any) -> Batch:
    """A microbatch for it, on the device."""
    data = {"x": torch.tensor([[1.0, 2.0, 3.0]]), "y": torch.tensor([1.0]), **more}
    return {key: value.to(lazy()) for key, value in data.items()}


def ones(batch: Batch) -> Tensor:
    return torch.ones_like(batch["y"], dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda w: ({"w": w, "v": w}, {}), "'v'.*'w'.* share memory"),
        (lambda w: ({"w": w, "v": w.detach()}, {}), "'v'.*'w'.* share memory"),
        (lambda w: ({"w": w, "v": w[:2]}, {}), "'v'.*'w'.* share memory"),
        (
            lambda w: ({"w": w}, {"z": w.view(1, 3)}),
            r"'w'.*microbatches\[0\]\['z'\] shares its memory",
        ),
    ],
)
def test_donation_sees_aliases(make: Any, match: str) -> None:
    """Without addresses, too: tensors of one storage."""
    params, more = make(torch.ones(3, device=lazy()))
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(one_leaf, optimizer, weight_fn=ones, donate=True)
    with pytest.raises(ValueError, match=match):
        step(params, optimizer.init(params), [row(**more)])


def test_donation_of_many_leaves() -> None:
    """Storages of their own are taken for what they are, however close they lie."""
    leaves = [torch.ones(1000, device=lazy()) for _ in range(200)]
    params: dict[str, Any] = {
        "w": torch.ones(3, device=lazy()),
        "more": leaves,
        "some": torch.ones(9, device=lazy())[2:],
    }
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(one_leaf, optimizer, weight_fn=ones, donate=True)
    new, _, _ = step(params, optimizer.init(params), [row()])
    assert new["w"] is params["w"]
    assert params["w"].tolist() == [0.5, 0.0, -0.5]


def test_a_loss_that_exchanges_values() -> None:
    """What it puts under its leaf is not there for the next microbatch."""

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        losses = one_leaf(params, batch).square()
        params["w"].data = torch.full_like(params["w"], 7.0)
        return losses

    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones)
    params = {"w": torch.ones(3, device=lazy())}
    new, _, metrics = step(params, optimizer.init(params), [row(), row()])
    assert metrics.loss == 25
    assert new["w"].tolist() == [-4, -9, -14]


class Again(Function):
    """Computes with a parameter in the backward pass again, as checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Tensor) -> Tensor:
        ctx.again = again
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            return grad * ctx.again.sum(), None


@pytest.mark.parametrize("shared", [True, False])
def test_recomputation(shared: bool) -> None:
    """With a module's own parameter it is refused, but for one that is a leaf's own memory."""
    parameter = torch.nn.Parameter(torch.ones(3, device=lazy()))
    params = {"w": parameter.detach() if shared else torch.ones(3, device=lazy())}

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        again: Tensor = Again.apply(one_leaf(params, batch), parameter)
        return again

    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones)
    if shared:
        assert step(params, optimizer.init(params), [row()])[0]["w"].tolist() == [-0.5, -2, -3.5]
        return
    with pytest.raises(ValueError, match="a module's own parameter"):
        step(params, optimizer.init(params), [row()])


def test_two_devices() -> None:
    params = {"v": torch.ones(3), "w": torch.ones(3, device=lazy())}
    step = ps.make_update_step(one_leaf, optim.sgd(0.5), weight_fn=ones)
    with pytest.raises(ValueError, match=r"params\['v'\] is on cpu, but params\['w'\] is on lazy"):
        step(params, (), [row()])


def test_data_on_the_host() -> None:
    """As on CUDA, the loss meets tensors of two devices; only ``weight_fn`` and ``prefetch`` may stay behind."""
    params = {"w": torch.ones(3, device=lazy())}
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(one_leaf, optimizer, weight_fn=ones)
    with pytest.raises(RuntimeError, match="not a lazy tensor"):
        step(params, optimizer.init(params), [{"x": torch.ones(1, 3), "y": torch.ones(1)}])
    weighed = ps.make_update_step(one_leaf, optimizer, weight_fn=lambda m: torch.ones(1))
    data = row()
    with Waits() as waits:
        new = weighed(params, optimizer.init(params), [data])[0]
    assert waits.seen == []
    assert new["w"].tolist() == [0.5, 0, -0.5]


def test_a_device_without_float64() -> None:
    with FakeTensorMode():
        params = {"w": torch.ones(3, device="mps")}
        step = ps.make_update_step(one_leaf, optim.sgd(0.5), weight_fn=ones)
        with pytest.raises(ValueError, match=r"mps:0, which has no float64.* move params and"):
            step(params, (), [])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: float(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.ones(2).to(x.device),
        lambda x: x.clone().copy_(torch.ones(3)),
    ],
)
def test_every_wait_is_seen(read: Callable[[Tensor], Any]) -> None:
    """In a loss; in the step itself it is no different."""

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        read(params["w"].detach() * 2)
        return one_leaf(params, batch)

    params = {"w": torch.ones(3, device=lazy())}
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=ones)
    data = row()
    with Waits() as waits:
        step(params, optimizer.init(params), [data])
    assert len(waits.seen) == 1
