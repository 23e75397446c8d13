"""Tests ``compile=True``: how often it compiles, and that the step stays the step."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.compiling.graph import drop_guards, drop_library_guards
from purestep.grads.compiled import preserve_generators
from support.strategies import assert_same
from support.torch_private import limit_recompilations
from tests import counted_graphs
from tests.counted_graphs import (
    ADAM,
    AOT,
    GROUPS,
    compile_step,
    initial_params,
    loss_fn,
    make_batch,
    make_step,
    run_steps,
)

ADAMW = ps.optim.adamw(0.125)
from_torch = partial(ps.optim.from_torch, lr=0.125)
OPTIMIZERS: dict[str, ps.optim.Optimizer] = {
    "a kernel": ADAMW,
    "no kernel": ADAM,
    "torch's": from_torch(torch.optim.AdamW),
    "torch's for a part": ps.optim.partition(
        {"a": ADAMW, "b": from_torch(torch.optim.Muon)}, {"v": "a", "w": "b"}
    ),
}


def make_groups(*lengths_of_groups: list[int]) -> list[list[dict[str, Tensor]]]:
    """Makes groups of microbatches with these lengths."""
    groups = []
    for lengths in lengths_of_groups:
        groups.append([make_batch(3, length, seed=length) for length in lengths])
    return groups


CASES: list[tuple[str, dict[str, Any]]] = [
    ("a kernel", {}),
    ("no kernel", {}),
    ("torch's", {}),
    ("torch's for a part", {}),
    ("torch's", {"donate": True}),
    ("torch's", {"normalize": "grads"}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_two_graphs_for_every_number_of_microbatches(
    name: str, settings: dict[str, Any]
) -> None:
    """One for the first microbatch and one for all others; none for the optimizer."""
    optimizer = OPTIMIZERS[name]
    compiled_step, backend = compile_step(optimizer, **settings)

    actual = run_steps(compiled_step, optimizer, GROUPS)

    assert len(backend.graphs) == 2
    eager_step = make_step(optimizer, **settings)
    assert_same(actual, run_steps(eager_step, optimizer, GROUPS))


def test_ragged_shapes_become_dynamic() -> None:
    """The second length makes graphs dynamic.

    No later length, and no number of microbatches, makes another graph.
    """
    step, backend = compile_step(ADAMW)

    run_steps(step, ADAMW, make_groups([4, 7], [5], [9, 6], []))

    assert len(backend.graphs) == 3


COMPILERS: list[dict[str, Any]] = [
    {
        "compile": True,
        "donate": True,
        "normalize": "grads",
        "on_nonfinite": "skip",
    },
    {"compile": AOT, "grad_and_value": torch.func.grad_and_value},
]


@pytest.mark.parametrize("settings", COMPILERS)
def test_compiled_is_the_step(settings: dict[str, Any]) -> None:
    """With torch's own compiler, too: the same counts, the same state to rounding.

    Of its two graphs, one is for any length.
    """
    groups = make_groups([4, 7], [4, 9], [])
    eager_settings = {k: v for k, v in settings.items() if k != "compile"}

    state, counts = run_steps(make_step(ADAMW, **settings), ADAMW, groups)

    eager_step = make_step(ADAMW, **eager_settings)
    expected_state, expected_counts = run_steps(eager_step, ADAMW, groups)
    counted_graphs.assert_close(state, expected_state)
    assert counts == expected_counts


def test_each_step_has_a_cache_in_which_no_size_varies() -> None:
    """However many steps of whatever sizes a process makes."""

    def squares(params: Tensor, x: Tensor) -> Tensor:
        return (x @ params).square()

    def weight_fn(x: Tensor) -> Tensor:
        return x[:, 0] > -9

    for size in (2, 3, 4):
        backend = counted_graphs.CountingBackend()
        params = torch.ones(size).double()
        group = [torch.ones(3, size).double()] * 3
        compiler: Any = partial(torch.compile, backend=backend)
        step = ps.make_update_step(squares, ADAM, weight_fn=weight_fn, compile=compiler)
        with limit_recompilations():
            step(params, ADAM.init(params), group)
        assert backend.varying == [False, False]


def test_each_function_has_a_cache() -> None:
    """A further function of the same code gets one graph, as the first did."""
    for seed in range(3):
        backend = counted_graphs.CountingBackend()
        microbatch = make_batch(2, 4, seed)

        def losses(params: Any, microbatch: Any = microbatch) -> Tensor:
            return loss_fn(params, microbatch)

        compiled_losses = ps.compile(losses, backend=backend, fullgraph=True)
        with limit_recompilations():
            for _ in range(2):
                assert_same(compiled_losses(initial_params()), losses(initial_params()))
        assert len(backend.graphs) == 1


def test_ranks_that_are_empty_and_sharded_params() -> None:
    """Communication between ranks is not compiled.

    The sums of some leaves are in buckets, those of others are not.
    """
    axis = ps.testing.ThreadAxis(3)
    microbatches = [make_batch(2, 4, seed) for seed in range(4)]
    step = make_step(ADAM, compile=AOT, axis=axis)

    def run_rank(group: list[Any]) -> Any:
        params = initial_params()
        params.update(ps.shard({"w": params["w"]}, axis))
        new_params, _, metrics = step(params, ADAM.init(params), group)
        return ps.unshard(new_params), metrics.num_tokens

    results = axis.map(run_rank)([microbatches[:2], [], microbatches[2:]])

    alone = make_step(ADAM)
    expected, _, metrics = alone(
        initial_params(), ADAM.init(initial_params()), microbatches
    )
    for params, count in results:
        counted_graphs.assert_close(params, expected)
        assert count == metrics.num_tokens


def test_options_of_the_caller() -> None:
    """They go before those of purestep, and are not changed."""
    num_guards: list[int] = []

    def keep_all(guards: list[Any]) -> list[bool]:
        num_guards.append(len(guards))
        return [True] * len(guards)

    options = {"guard_filter_fn": keep_all}

    doubled = ps.compile(lambda x: 2 * x, backend="eager", options=options)
    doubled(torch.eye(3))

    assert num_guards
    assert options == {"guard_filter_fn": keep_all}


def test_a_mode_of_the_caller() -> None:
    """It replaces the options of purestep, since torch refuses both."""
    ps.compile(lambda x: 2 * x, mode="max-autotune-no-cudagraphs")


@pytest.mark.parametrize("value", ["yes", None, 1, lambda function: function])
def test_a_value_that_is_no_compiler(value: Any) -> None:
    """A compiler has to take ``fullgraph``, which says to make one graph or raise."""
    message = r"compile must be True, False or a function|fullgraph"
    with pytest.raises(TypeError, match=message):
        make_step(ADAM, compile=value)


compile_eager: Any = partial(ps.compile, backend="eager")


def make_compiled_loss(loss: Any) -> Callable[[], float]:
    compiled_loss = compile_eager(loss)
    return lambda: float(compiled_loss(initial_params(), make_batch(2, 4)).sum())


def run_step_for_loss(step: Any) -> Callable[[], float]:
    def run_step() -> float:
        _, _, metrics = step(initial_params(), ADAM.init(initial_params()), GROUPS[0])
        return float(metrics.loss)

    return run_step


def make_compiled_microbatch(loss: Any) -> Callable[[], float]:
    return run_step_for_loss(make_step(ADAM, loss, compile=compile_eager))


def make_compiled_step(loss: Any) -> Callable[[], float]:
    return run_step_for_loss(compile_eager(make_step(ADAM, loss)))


SCALE = [1.0]
CODE = """
def scaled(losses):
    return losses * x['_tuple_new'] * x['__builtins_dict__'] * y
"""


@pytest.mark.parametrize(
    "make_compiled", [make_compiled_loss, make_compiled_microbatch, make_compiled_step]
)
def test_values_that_a_loss_reads_may_change(make_compiled: Any) -> None:
    """Globals, also of a file of settings, and closures, whatever the name."""
    factor = 1.0
    keys = {"_tuple_new": 1.0, "__builtins_dict__": 1.0}
    names: dict[str, Any] = {"x": keys, "y": 1.0}
    exec(CODE, names)

    def scaled_loss(params: Any, m: Any) -> Tensor:
        losses: Tensor = names["scaled"](loss_fn(params, m))
        return losses * factor * SCALE[0]

    compute_loss = make_compiled(scaled_loss)
    first = compute_loss()
    names["y"] = 2.0
    assert compute_loss() == 2 * first
    if make_compiled is make_compiled_step:
        return  # Each change takes seconds.
    for key in keys:
        keys[key] = 2.0
        assert compute_loss() == 2 * first * math.prod(keys.values())
    factor = 4.0
    assert compute_loss() == 32 * first
    SCALE[0] = 8.0
    assert compute_loss() == 256 * first
    SCALE[0] = 1.0


def test_a_global_may_change_where_several_graphs_read_it() -> None:
    """After a branch on data, a graph begins in this file: ``SCALE`` is a global without a module."""

    def scale_twice(x: Tensor) -> Tensor:
        scaled = x * SCALE[0]
        if scaled.sum() < 0:
            return x
        return scaled * SCALE[0]

    x = torch.ones(2)
    compiled = ps.compile(scale_twice, backend="eager")
    assert_same(compiled(x), x)
    SCALE[0] = 3.0
    assert_same(compiled(x), 9 * x)
    SCALE[0] = 1.0


def test_a_whole_step_has_few_guards_on_globals() -> None:
    """Only on those that the loss reads.

    Should the compiler rename its own globals, calls become slower.
    """
    global_guards: list[str] = []

    def filter_and_list(guards: list[Any]) -> list[bool]:
        keeps = drop_library_guards(guards)
        for guard, stays in zip(guards, keeps, strict=True):
            if stays and guard.is_global:
                global_guards.append(guard.name)
        return keeps

    options = {"guard_filter_fn": filter_and_list}
    step = ps.compile(make_step(ADAM), backend="eager", options=options)
    step(initial_params(), ADAM.init(initial_params()), GROUPS[0])

    assert len(global_guards) < 40
    for name in global_guards:
        assert "purestep" not in name
        assert "optree" not in name


KEEPS_GUARD = {
    "G['__import_purestep_dot_step'].with_weights": False,
    "dict(G['__import_purestep_dot_types'].TokenCounts.__dict__)['__new__'].__func__": False,
    "G['__builtins_dict__7']['len']": False,
    "G['___unnamed_scope_1_c0']['_tuple_new'].__self__": False,
    "G['__import_torchtrain_dot_loss'].RATE": True,
    "G['SCALE']": True,
    "G['__import___main__'].factors['_tuple_new']": True,
    "G['___unnamed_scope_1_c0']['factor']": True,
    "L['loss_fn'].__closure__[0].cell_contents": True,
}


def test_guards_on_libraries_are_left_out_by_name() -> None:
    """A global of a similar name keeps its guard if a loss reads it, as do other values."""
    guards = []
    for name in KEEPS_GUARD:
        guards.append(SimpleNamespace(name=name, guard_type="ID_MATCH"))

    assert drop_library_guards(guards) == list(KEEPS_GUARD.values())


def test_the_guard_on_functorchs_stack_is_left_out_with_surroundings() -> None:
    guard = SimpleNamespace(name="", guard_type="FUNCTORCH_STACK_MATCH")

    assert drop_library_guards([guard]) == [True]
    assert drop_guards([guard]) == [False]


def test_a_microbatch_without_a_graph_before_one_that_has_it() -> None:
    """The first reaches one leaf alone; its gradient counts, too."""

    def product(p: Any, x: Tensor) -> Tensor:
        return (p["a"] * x).flatten()

    params = {"a": torch.tensor(2.0), "unused": torch.tensor(1.0)}
    row = torch.tensor([1.0, 2.0])
    square = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    new_params = []
    for compile in (False, partial(torch.compile, backend="eager")):
        sgd = ps.optim.sgd(1.0)
        step = ps.make_update_step(
            product, sgd, weight_fn=lambda x: torch.ones(x.numel()), compile=compile
        )
        for group in ([row], [row, row]):
            step(params, sgd.init(params), group)
        with torch.compiler.set_stance("eager_on_recompile"):
            new_params.append(step(params, sgd.init(params), [square, row])[0])
    assert_same(*new_params)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_generators_are_put_back_on_devices_without_their_own(device: str) -> None:
    before = torch.get_rng_state()
    with preserve_generators(torch.device(device)):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_options_beside_a_mode() -> None:
    """An error of the function comes out as it is."""

    def fail(x: Tensor) -> Tensor:
        raise KeyError(x)

    compiled = ps.compile(fail, mode="default", options=None, backend="eager")
    with pytest.raises(KeyError):
        compiled(torch.ones(1))
