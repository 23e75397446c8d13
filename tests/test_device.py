"""Steps on a device that is not the CPU: the CPU's answer without a wait, and waits are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs import models
from proofs.devices import Waits, lazy, moved, placed
from proofs.strategies import Batch, assert_same, cut, weights_of
from purestep import optim, tree
from tests.on_a_device import EXACT, OPTIMIZERS, assert_near, on_both, one_leaf, ones, problem, row

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "grads": {"normalize": "grads"},
    "skip": {"on_nonfinite": "skip"},
    "donate": {"donate": True},
    "all": {"normalize": "grads", "on_nonfinite": "skip", "donate": True},
    "accum_dtype": {"accum_dtype": torch.float64},
    "torch.func": {"grad_and_value": torch.func.grad_and_value},
}
CASES = [(name, how) for name in OPTIMIZERS for how in ("default", "all")]
CASES += [(name, how) for name in ("momentum", "adamw") for how in SETTINGS]


def started(optimizer: optim.Optimizer, params: Any) -> Any:
    """A state as if training had gone on for a while."""
    return tree.map(
        lambda leaf: torch.full_like(leaf, 2 if leaf.dtype == torch.int64 else 1),
        optimizer.init(params),
    )


def assert_as_on_the_host(name: str, group: list[Batch], **settings: Any) -> bool:
    """A step; and whether it is taken."""
    optimizer, params = OPTIMIZERS[name], problem()[0]
    state = (params, started(optimizer, params))
    make: Callable[..., Any] = ps.make_update_step
    step = make(models.integer_loss, optimizer, weight_fn=weights_of, **settings)
    (*actual, metrics), (*expected, told) = on_both(step, *state, group)
    if not told.applied:
        assert_same(tuple(actual), state)
    if name in EXACT or not told.applied:
        assert_same(actual, expected)
    else:
        assert_near(actual, expected, [*state])
    assert_same(metrics._replace(grad_norm=()), told._replace(grad_norm=()))
    return bool(told.applied)


@pytest.mark.parametrize(("name", "how"), dict.fromkeys(CASES))
def test_the_step_of_the_host(name: str, how: str) -> None:
    group = cut(problem()[1], [[0, 1], [], [2], [3]])
    assert assert_as_on_the_host(name, group, **SETTINGS[how])


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipping_without_reading_whether_the_step_is_taken(name: str, donate: bool) -> None:
    batch = problem()[1]
    group = [{**batch, "y": batch["y"] * torch.inf}]
    assert not assert_as_on_the_host(name, group, on_nonfinite="skip", donate=donate)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("how", ["default", "grads"])
def test_weights_of_every_dtype(how: str, dtype: torch.dtype) -> None:
    assert assert_as_on_the_host("momentum", [problem(dtype)[1]], **SETTINGS[how])


@pytest.mark.parametrize("algorithm", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_algorithm_of_torch_waits_once(algorithm: type[torch.optim.Optimizer]) -> None:
    """It cannot leave values as they are, so the host reads whether to call it."""
    optimizer = optim.from_torch(algorithm, lr=0.5)
    params, batch = problem()
    there = moved(params)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    state, batch_there = optimizer.init(there), moved(batch)
    with Waits() as waits:
        actual = step(there, state, [batch_there])[:2]
    assert waits.seen == ["aten::_local_scalar_dense"]
    before = (params, optimizer.init(params))
    # One formula for each leaf, in the same kernels or in those that torch calls foreach.
    assert_near(placed(actual, before), step(*before, [batch])[:2], before)


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
    """In a loss, as in the step itself."""

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


def brings_weights(params: Any, batch: Batch) -> ps.LossTerms:
    losses = models.integer_loss(params, batch)
    aux = {"sum": losses.sum(), "rows": batch["w"].sum()}
    return ps.LossTerms(losses, weights=batch["w"], aux=aux)


def test_weights_and_aux_of_the_loss() -> None:
    """In the step and in evaluation."""
    params, batch = problem()
    optimizer = optim.sgd(0.5)
    step = ps.make_update_step(brings_weights, optimizer, weight_fn=None, normalize="grads")
    evaluate = ps.make_eval_step(brings_weights, weight_fn=None)

    def run(params: Any, group: Any) -> Any:
        moved, _, metrics = step(params, optimizer.init(params), group)
        return moved, metrics.aux, evaluate(params, group)

    assert_same(*on_both(run, params, cut(batch, [[0, 1], [2, 3]])))


def test_the_parts_of_a_step() -> None:
    """``count``, ``accumulate`` and an update, as in a program that outgrows the step."""
    optimizer = optim.sgd(0.5)

    def by_hand(params: Any, group: list[Batch]) -> Any:
        total = ps.count(group, weights_of)
        sums = ps.accumulate(models.integer_loss, params, group, weight_fn=weights_of, total=total)
        return optimizer.update(sums.grads, optimizer.init(params), params), sums.loss

    params, batch = problem()
    assert_same(*on_both(by_hand, params, [batch]))


def test_half_precision() -> None:
    """A copy in float32 moves; integers of one digit are exact in bfloat16 as well."""
    optimizer = optim.master_weights(optim.sgd(0.5, 0.5, weight_decay=0.5, mask={"w": True}))
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    batch = {"x": torch.tensor([[1.0, 2, 3, 4], [1, 0, 1, 0]], dtype=torch.bfloat16)}
    step = ps.make_update_step(
        lambda params, m: (params["w"] * m["x"]).sum(-1),
        optimizer,
        weight_fn=lambda m: torch.ones_like(m["x"][:, 0], dtype=torch.bool),
    )
    run = lambda params, group: step(params, optimizer.init(params), group)[:2]  # noqa: E731
    assert_same(*on_both(run, params, [batch]))


def test_groups_that_are_prefetched_from_the_host() -> None:
    """Empty ones included: nothing is waited for, and the weights come with them."""
    params, batch = problem()
    groups = [cut(batch, [[0, 1], [2], [3]]), [], [batch]]
    optimizer = optim.sgd(0.5, 0.5)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)
    ours: Any = moved(params), optimizer.init(moved(params))
    theirs: Any = params, optimizer.init(params)
    stream = ps.prefetch(groups, lazy(), weight_fn=weights_of)
    for group in groups:
        arriving = next(stream)
        with Waits() as waits:
            *ours, metrics = step(*ours, arriving)
        assert waits.seen == []
        *theirs, expected = step(*theirs, group)
        assert_same(placed(metrics.num_tokens, expected.num_tokens), expected.num_tokens)
        assert_same(placed(ours, theirs), theirs)


def test_ranks_in_threads() -> None:
    """They meet on the host, which waits; the answer is the same."""
    params, batch = problem()
    axis = ps.testing.ThreadAxis(2)
    optimizer = optim.sgd(0.5, 0.5)
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of, axis=axis)
    groups = [cut(batch, [[0], [1, 2], [3]]), []]

    def run(params: Any, groups: Any) -> Any:
        return axis.map(lambda group: step(params, optimizer.init(params), group)[:2])(groups)

    expected = run(params, groups)
    assert_same(placed(run(*moved((params, groups))), expected), expected)


def test_steps_that_are_recorded() -> None:
    """A step under ``torch.func.grad``, and one of parameters that require grad."""
    optimizer = OPTIMIZERS["decayed by a tensor"]
    step = ps.make_update_step(models.integer_loss, optimizer, weight_fn=weights_of)

    def after(params: Any, state: Any, batch: Batch) -> Tensor:
        new = step(params, state, [batch])[0]
        return torch.stack([leaf.sum() for leaf in tree.leaves_of(new)]).sum()

    def recorded(params: Any, batch: Batch) -> Any:
        state = optimizer.init(params)
        own = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        total = after(own, state, batch)
        grads = torch.autograd.grad(total, tree.leaves_of(own))
        return torch.func.grad(after)(params, state, batch), [*grads]

    assert_same(*on_both(recorded, *problem()))


NO_STATE: Any = ()


def test_two_devices_are_refused() -> None:
    params = {"v": torch.ones(3), "w": torch.ones(3, device=lazy())}
    step = ps.make_update_step(one_leaf, optim.sgd(0.5), weight_fn=ones)
    with pytest.raises(ValueError, match=r"params\['v'\] is on cpu, but params\['w'\] is on lazy"):
        step(params, NO_STATE, [row()])


def test_data_on_the_host_is_refused_but_not_its_weights() -> None:
    """As on CUDA, the loss meets tensors of two devices."""
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
