"""``compile=True``: how often something is compiled, and that the step stays the step."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from tests.counted_graphs import (
    GROUPS,
    PLAIN,
    Compilations,
    assert_close,
    batch,
    compiled,
    loss_fn,
    make,
    run,
    start,
    weight_fn,
)
from tests.torch_private import few_recompilations

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RAGGED = [[batch(3, length, length) for length in lengths] for lengths in ([4, 7], [5], [9, 6, 8])]


@pytest.mark.parametrize("settings", [{}, {"donate": True}, {"normalize": "grads"}])
def test_once_for_every_number_of_microbatches(settings: dict[str, Any]) -> None:
    """One graph for a first microbatch and one for all others; none for the optimizer, with kernels or without."""
    for optimizer in (ps.optim.adamw(0.125), PLAIN):
        step, backend = compiled(optimizer, **settings)
        run(step, optimizer, GROUPS)
        assert len(backend.graphs) == 2


FROM_TORCH: dict[str, ps.optim.Optimizer] = {
    "alone": ps.optim.from_torch(torch.optim.AdamW, lr=0.125),
    "clipped": ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0), ps.optim.from_torch(torch.optim.RMSprop, lr=0.125)
    ),
    "parts": ps.optim.partition(
        lambda params: {"v": "native", "w": "torch"},
        {
            "native": ps.optim.adamw(0.125),
            "torch": ps.optim.from_torch(torch.optim.Muon, lr=0.125),
        },
    ),
    "masters": ps.optim.master_weights(ps.optim.from_torch(torch.optim.SGD, lr=0.125)),
}


@pytest.mark.parametrize("settings", [{}, {"donate": True}, {"normalize": "grads"}], ids=str)
@pytest.mark.parametrize("name", FROM_TORCH)
def test_torchs_own_steps_are_left_as_they_are(name: str, settings: dict[str, Any]) -> None:
    """``from_torch`` runs kernels, which no compiler can follow: only microbatches are compiled, and it is the same step."""
    optimizer = FROM_TORCH[name]
    step, backend = compiled(optimizer, **settings)
    state, _ = run(step, optimizer, GROUPS)
    assert len(backend.graphs) == 2
    expected, _ = run(make(optimizer, **settings), optimizer, GROUPS)
    assert_same(state, expected)


def test_ragged_shapes_become_dynamic() -> None:
    """The second length makes graphs dynamic; no later length, and no number of them, makes another."""
    optimizer = ps.optim.adamw(0.125)
    step, backend = compiled(optimizer)
    run(step, optimizer, RAGGED)
    assert len(backend.graphs) == 3


@pytest.mark.parametrize("groups", [GROUPS, RAGGED], ids=["groups", "ragged"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"donate": True},
        {"normalize": "grads"},
        {"on_nonfinite": "skip"},
        {"grad_and_value": torch.func.grad_and_value},
    ],
    ids=["plain", "donate", "grads", "skip", "torch.func"],
)
def test_compiled_is_the_step(settings: dict[str, Any], groups: list[Any]) -> None:
    """Compiled for real, in exact arithmetic for the sums: the same counts, the same state to rounding."""
    for optimizer in (ps.optim.adamw(0.125), PLAIN):
        ours, metrics = run(make(optimizer, compile=True, **settings), optimizer, groups)
        theirs, expected = run(make(optimizer, **settings), optimizer, groups)
        assert_close(ours, theirs)
        for a, b in zip(metrics, expected, strict=True):
            assert a.num_tokens == b.num_tokens
            assert a.num_microbatches == b.num_microbatches
            assert a.applied == b.applied


def test_every_step_of_a_process_is_compiled_like_the_first() -> None:
    """However many there are, and of whatever sizes: one graph for each, in which no size varies."""
    for size in range(2, 6):
        backend = Compilations()
        step = ps.make_update_step(
            lambda params, m: (m["x"] @ params).square(),
            PLAIN,
            weight_fn=lambda m: m["x"][:, 0] > -9,
            compile=partial(torch.compile, backend=backend),
        )
        params = torch.ones(size).double()
        group = [{"x": torch.ones(3, size).double()} for _ in range(3)]
        with few_recompilations():
            step(params, PLAIN.init(params), group)
        assert backend.varying == [False] * 2


class Layer(NamedTuple):
    w: Any
    v: Any


NESTED = {
    "flat": lambda params: params,
    "lists": lambda params: {"all": [{"w": params["w"]}, ({"v": params["v"]}, None)]},
    "records": lambda params: Layer(params["w"], {"deep": OrderedDict(v=params["v"])}),
}


@pytest.mark.parametrize("nest", NESTED)
def test_labels_and_masks_under_the_compiler(nest: str) -> None:
    """Made of the params as docstrings make them, in ``init`` and in the step, in one graph."""

    def matrices(params: Any) -> Any:
        return tree.map(lambda leaf: leaf.ndim == 2, params)

    optimizer = ps.optim.partition(
        lambda params: tree.map(lambda leaf: "w" if leaf.ndim == 2 else "v", params),
        {
            "w": ps.optim.adamw(0.125, weight_decay=0.5, mask=matrices),
            "v": ps.optim.lion(0.125, weight_decay=0.5, mask=matrices),
        },
    )

    def loss(params: Any, m: Any) -> Tensor:
        w, v = sorted(tree.leaves_of(params), key=lambda leaf: -leaf.ndim)
        return loss_fn({"w": w, "v": v}, m)

    step = ps.make_update_step(loss, optimizer, weight_fn=weight_fn)
    once: Any = partial(torch.compile, fullgraph=True, backend="eager")
    params = NESTED[nest](start())
    state = once(optimizer.init)(params)
    assert_same(state, optimizer.init(params))
    compiled_, group = once(step), [batch(2, 4, 0)]
    ours = theirs = (params, state)
    for _ in range(2):
        ours, theirs = compiled_(*ours, group)[:2], step(*theirs, group)[:2]
    assert_close(ours, theirs)


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_what_is_no_compiler(value: Any) -> None:
    with pytest.raises(TypeError, match="compile must be True, False or a function such as"):
        make(PLAIN, compile=value)


def test_ranks_may_be_empty() -> None:
    """What happens between ranks is not compiled, so ranks may hold what they like."""
    optimizer = ps.optim.adamw(0.125)
    axis = ps.testing.ThreadAxis(3)
    step = make(optimizer, compile=True, axis=axis)
    part = [batch(2, 4, seed) for seed in range(3)]
    state = [start() for _ in range(3)]
    results = axis.map(step)(state, [optimizer.init(s) for s in state], [part[:2], [], part[2:]])
    alone = make(optimizer)(start(), optimizer.init(start()), part)
    for params, _, metrics in results:
        assert metrics.num_tokens == alone[2].num_tokens
        assert_close(params, alone[0])


@pytest.mark.parametrize("number", [1, 2])
def test_pieces_beside_leaves_that_ranks_hold_whole(number: int) -> None:
    """The sums of some leaves are in buckets, those of others are not."""
    axis, part = ps.testing.ThreadAxis(2), [batch(2, 4, seed) for seed in range(2 * number)]
    step = make(PLAIN, compile=partial(ps.compile, backend="aot_eager"), axis=axis)

    def rank(mine: list[Any]) -> Any:
        params = start() | ps.shard({"w": start()["w"]}, axis)
        return ps.unshard(step(params, PLAIN.init(params), mine)[0])

    expected = make(PLAIN)(start(), PLAIN.init(start()), part)[0]
    for params in axis.map(rank)([part[:number], part[number:]]):
        assert_close(params, expected)


def test_a_whole_step_has_a_cache_of_its_own() -> None:
    """One more than share a cache is one graph like the first, and it is the step."""
    for seed in range(3):
        backend = Compilations()
        step = make(PLAIN, donate=True)
        whole = ps.compile(step, backend=backend, fullgraph=True)
        group = [batch(2, 4, seed)]
        with few_recompilations():
            for _ in range(2):
                params, state, _ = whole(start(), PLAIN.init(start()), group)
        assert len(backend.graphs) == 1
        expected = step(start(), PLAIN.init(start()), group)
        assert_close((params, state), expected[:2])


def test_settings_of_the_caller() -> None:
    """Options go before those of purestep; a mode takes their place."""
    x = torch.eye(3)
    for settings in ({"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_autotune": False}}):
        assert torch.equal(ps.compile(lambda x: 2 * x, **settings)(x), 2 * x)
    asked: list[int] = []

    def every(guards: list[Any]) -> list[bool]:
        asked.append(len(guards))
        return [True] * len(guards)

    options = {"guard_filter_fn": every}
    assert torch.equal(ps.compile(lambda x: 2 * x, backend="eager", options=options)(x), 2 * x)
    assert asked
    assert options == {"guard_filter_fn": every}


def test_a_compiler_is_called_like_torchs() -> None:
    """It makes one graph or raises, as ``fullgraph`` says, which it has to take."""
    with pytest.raises(TypeError, match="fullgraph"):
        make(PLAIN, compile=lambda function: function)
