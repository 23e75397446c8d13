"""``compile=True``: how often it compiles, and that the step stays the step."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from proofs.strategies import assert_same
from purestep.compiling.graph import drop_guards, drop_library_guards
from tests import counted_graphs
from tests.counted_graphs import (
    AOT,
    GROUPS,
    PLAIN,
    batch,
    compiled,
    loss_fn,
    make,
    run,
    start,
)
from tests.torch_private import few_recompilations

RAGGED = [
    [batch(3, length, length) for length in lengths]
    for lengths in ([4, 7], [5], [9, 6], [])
]
ADAMW = ps.optim.adamw(0.125)
from_torch = partial(ps.optim.from_torch, lr=0.125)
OPTIMIZERS: dict[str, ps.optim.Optimizer] = {
    "a kernel": ADAMW,
    "no kernel": PLAIN,
    "torch's": from_torch(torch.optim.AdamW),
    "torch's for a part": ps.optim.partition(
        {"v": "a", "w": "b"}, {"a": ADAMW, "b": from_torch(torch.optim.Muon)}
    ),
}


CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in OPTIMIZERS]
CASES += [("torch's", {"donate": True}), ("torch's", {"normalize": "grads"})]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_two_graphs_for_every_number_of_microbatches(
    name: str, settings: dict[str, Any]
) -> None:
    """One for the first microbatch and one for all others; none for the optimizer."""
    optimizer = OPTIMIZERS[name]
    step, backend = compiled(optimizer, **settings)
    ours = run(step, optimizer, GROUPS)
    assert len(backend.graphs) == 2
    assert_same(ours, run(make(optimizer, **settings), optimizer, GROUPS))


def test_ragged_shapes_become_dynamic() -> None:
    """The second length makes graphs dynamic; no later length, and no number, makes another."""
    step, backend = compiled(ADAMW)
    run(step, ADAMW, RAGGED)
    assert len(backend.graphs) == 3


ALL: dict[str, Any] = {"donate": True, "normalize": "grads", "on_nonfinite": "skip"}
REVERSE = {"grad_and_value": torch.func.grad_and_value}


@pytest.mark.parametrize(("compiler", "settings"), [(True, ALL), (AOT, REVERSE)])
def test_compiled_is_the_step(compiler: Any, settings: dict[str, Any]) -> None:
    """With the compiler that torch has, too: the same counts, the same state to rounding.

    Of its two graphs, one is for any length.
    """
    groups = [
        [batch(3, length, length) for length in lengths]
        for lengths in ([4, 7], [4, 9], [])
    ]
    ours, counts = run(make(ADAMW, compile=compiler, **settings), ADAMW, groups)
    theirs, expected = run(make(ADAMW, **settings), ADAMW, groups)
    counted_graphs.assert_close(ours, theirs)
    assert counts == expected


def test_each_step_has_a_cache_in_which_no_size_varies() -> None:
    """However many steps of whatever sizes a process makes."""
    for size in range(2, 5):
        backend, params = counted_graphs.Compilations(), torch.ones(size).double()
        how: Any = {"compile": partial(torch.compile, backend=backend)}
        loss_fn: Any = lambda params, x: (x @ params).square()  # noqa: E731
        step = ps.make_update_step(
            loss_fn, PLAIN, weight_fn=lambda x: x[:, 0] > -9, **how
        )
        with few_recompilations():
            step(params, PLAIN.init(params), [torch.ones(3, size).double()] * 3)
        assert backend.varying == [False] * 2


def test_each_function_has_a_cache() -> None:
    """One more of the same code than share a cache is one graph like the first."""
    for seed in range(3):
        backend = counted_graphs.Compilations()
        m = batch(2, 4, seed)
        whole = ps.compile(
            lambda params, m=m: loss_fn(params, m), backend=backend, fullgraph=True
        )
        with few_recompilations():
            for _ in range(2):
                assert torch.equal(whole(start()), loss_fn(start(), m))
        assert len(backend.graphs) == 1


def test_ranks_that_are_empty_and_params_in_pieces() -> None:
    """What happens between ranks is not compiled; the sums of some leaves are in buckets, those of others are not."""
    axis, part = ps.testing.ThreadAxis(3), [batch(2, 4, seed) for seed in range(4)]
    step = make(PLAIN, compile=AOT, axis=axis)

    def rank(mine: list[Any]) -> Any:
        params = start() | ps.shard({"w": start()["w"]}, axis)
        new, _, metrics = step(params, PLAIN.init(params), mine)
        return ps.unshard(new), metrics.num_tokens

    expected, _, metrics = make(PLAIN)(start(), PLAIN.init(start()), part)
    for params, count in axis.map(rank)([part[:2], [], part[2:]]):
        counted_graphs.assert_close(params, expected)
        assert count == metrics.num_tokens


def test_settings_of_the_caller() -> None:
    """Options go before those of purestep; a mode takes their place, since torch refuses both."""
    ps.compile(lambda x: 2 * x, mode="max-autotune-no-cudagraphs")
    asked: list[int] = []

    def every(guards: list[Any]) -> list[bool]:
        asked.append(len(guards))
        return [True] * len(guards)

    options = {"guard_filter_fn": every}
    ps.compile(lambda x: 2 * x, backend="eager", options=options)(torch.eye(3))
    assert asked
    assert options == {"guard_filter_fn": every}


@pytest.mark.parametrize("value", ["yes", None, 1, lambda function: function])
def test_what_is_no_compiler(value: Any) -> None:
    """It makes one graph or raises, as ``fullgraph`` says: it has to take that."""
    with pytest.raises(
        TypeError, match=r"compile must be True, False or a function|fullgraph"
    ):
        make(PLAIN, compile=value)


SCALE = [1.0]
CODE = "def scaled(losses):\n    return losses * x['_tuple_new'] * x['__builtins_dict__'] * y"


@pytest.mark.parametrize("how", ["a loss", "a microbatch", "a whole step"])
def test_what_is_read_may_change(how: str) -> None:
    """Globals, also of a file of settings, and what a loss closes over, whatever the name."""
    factor, keys = 1.0, {"_tuple_new": 1.0, "__builtins_dict__": 1.0}
    names: dict[str, Any] = {"x": keys, "y": 1.0}
    exec(CODE, names)

    def scaled(params: Any, m: Any) -> Tensor:
        losses: Tensor = names["scaled"](loss_fn(params, m)) * factor * SCALE[0]
        return losses

    compiler: Any = partial(ps.compile, backend="eager")
    step = make(PLAIN, scaled, compile=compiler if how == "a microbatch" else False)
    whole: Any = (
        compiler(scaled if how == "a loss" else step) if how != "a microbatch" else step
    )

    def loss() -> float:
        if how == "a loss":
            return float(whole(start(), batch(2, 4)).sum())
        return float(whole(start(), PLAIN.init(start()), GROUPS[0])[2].loss)

    first = loss()
    names["y"] = 2.0
    assert loss() == 2 * first
    if how == "a whole step":
        return  # Each takes seconds.
    for key in keys:
        keys[key] = 2.0
        assert loss() == 2 * first * math.prod(keys.values())
    factor = 4.0
    assert loss() == 32 * first
    SCALE[0] = 8.0
    assert loss() == 256 * first
    SCALE[0] = 1.0


def test_a_whole_step_has_few_guards_on_globals() -> None:
    """Those on what the loss reads. Should the compiler rename its globals, calls are slower."""
    found: list[str] = []

    def kept(guards: list[Any]) -> list[bool]:
        keep = drop_library_guards(guards)
        found.extend(
            g.name
            for g, stays in zip(guards, keep, strict=True)
            if stays and g.is_global
        )
        return keep

    whole = ps.compile(make(PLAIN), backend="eager", options={"guard_filter_fn": kept})
    whole(start(), PLAIN.init(start()), GROUPS[0])
    assert len(found) < 40
    assert not [name for name in found if "purestep" in name or "optree" in name]


def test_guards_on_libraries_are_left_out_by_name() -> None:
    """What a loss reads by a like name keeps its guard, and so does what is no global."""
    names = {
        "G['__import_purestep_dot_step'].weigh": False,
        "dict(G['__import_purestep_dot_types'].Count.__dict__)['__new__'].__func__": False,
        "G['__builtins_dict__7']['len']": False,
        "G['___unnamed_scope_1_c0']['_tuple_new'].__self__": False,
        "G['__import_torchtrain_dot_loss'].RATE": True,
        "G['__import___main__'].factors['_tuple_new']": True,
        "G['___unnamed_scope_1_c0']['factor']": True,
        "L['loss_fn'].__closure__[0].cell_contents": True,
    }
    guards = [SimpleNamespace(name=name, guard_type="ID_MATCH") for name in names]
    assert drop_library_guards(guards) == [*names.values()]
    stack = [SimpleNamespace(name="", guard_type="FUNCTORCH_STACK_MATCH")]
    assert (drop_library_guards(stack), drop_guards(stack)) == ([True], [False])
