"""Steps with ``partition``, on one rank and on several, are those of its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same, labels
from proofs.test_t06_purity import storages
from purestep import tree
from tests.parts import PARTS, drawn, exact_group, exact_loss, exact_params, split


def loss_fn(params: Any, microbatch: Any) -> Tensor:
    """A squared loss, for each row."""
    hidden = microbatch["x"]
    for block in params["blocks"]:
        hidden = torch.tanh(hidden @ block["w"] + block["b"])
    return (hidden @ params["head"]["w"] * params["head"]["scale"]).square().sum(1)


def group(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Microbatches of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(rows, 4, generator=generator, dtype=dtype), "w": torch.ones(rows)}
        for rows in sizes
    ]


def step_with(optimizer: ps.optim.Optimizer, **how: Any) -> Any:
    """The step."""
    return ps.make_update_step(loss_fn, optimizer, weight_fn=lambda m: m["w"], **how)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
@pytest.mark.parametrize("name", PARTS)
def test_in_the_step(name: str, normalize: str) -> None:
    """Donated or not, the same bits; a step that is not taken is the identity for every part."""
    optimizer = ps.optim.partition(labels, PARTS[name])
    params, _ = drawn(1)
    good = group([2, 1])
    groups = [
        good,
        [],
        [{**part, "w": torch.zeros_like(part["w"])} for part in good],
        [{**part, "x": part["x"] * float("inf")} for part in good],
        group([3, 2], seed=1),
    ]
    histories = []
    for donate in (False, True):
        step = step_with(optimizer, donate=donate, normalize=normalize, on_nonfinite="skip")
        given = ours, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        history = [tree.map(torch.clone, (ours, opt_state))]
        for one in groups:
            ours, opt_state, metrics = step(ours, opt_state, one)
            assert bool(metrics.applied) is (one is groups[0] or one is groups[-1])
            history.append(tree.map(torch.clone, (ours, opt_state)))
        shared = storages((ours, opt_state)) & storages(given)
        assert shared == (storages(given) if donate else set())
        for number in (2, 3, 4):
            assert_same(history[number], history[1])
        assert not torch.equal(history[-1][0]["head"]["w"], history[1][0]["head"]["w"])
        assert not torch.equal(history[-1][0]["head"]["scale"], history[1][0]["head"]["scale"])
        histories.append(history)
    assert_same(histories[1], histories[0])


@pytest.mark.parametrize("name", PARTS)
def test_the_step_is_its_parts_by_hand(name: str) -> None:
    """The gradients that the step sees, taken apart by hand, each to its optimizer."""
    optimizer = ps.optim.partition(labels, PARTS[name])
    params, _ = drawn(1)
    state = (params, optimizer.init(params))
    alone = {label: (mine, PARTS[name][label].init(mine)) for label, mine in split(params).items()}
    for seed in range(3):
        microbatches = group([2, 3], seed)
        grads, *_ = ps.accumulate(
            loss_fn,
            state[0],
            microbatches,
            weight_fn=lambda m: m["w"],
            total=ps.Count(torch.tensor(5), torch.tensor(1)),
        )
        new_params, new_state, _ = step_with(optimizer)(*state, microbatches)
        state = (new_params, new_state)
        for label, (mine, own) in alone.items():
            alone[label] = PARTS[name][label].update(split(grads)[label], own, mine)
            assert_same(split(state[0])[label], alone[label][0], label)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_ranks_agree(name: str, donate: bool) -> None:
    """Ranks with uneven data, one with none: the same bits on each, and those of one rank with all data."""
    optimizer = ps.optim.partition(labels, PARTS[name])
    axis = ps.testing.ThreadAxis(3)
    params = exact_params(0)
    whole = exact_group()

    def program(mine: list[Any]) -> Any:
        step = ps.make_update_step(
            exact_loss, optimizer, weight_fn=lambda m: m["w"], axis=axis, donate=donate
        )
        history = []
        ours, opt_state = tree.map(torch.clone, (params, optimizer.init(params)))
        for _ in range(3):
            ours, opt_state, metrics = step(ours, opt_state, mine)
            history.append(tree.map(torch.clone, (ours, opt_state, metrics)))
        return history

    alone = ps.make_update_step(exact_loss, optimizer, weight_fn=lambda m: m["w"])
    results = axis.map(program)([whole[:2], [], whole[2:]])
    for result in results:
        assert_same(result, results[0])
    assert_same(results[0][0], alone(params, optimizer.init(params), whole))
    assert not torch.equal(results[0][2][0]["w"], results[0][0][0]["w"])
