"""Nothing of a call of ``apply`` stays in the module, in the next call or in memory."""

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from tests.module_kinds import (
    AOT_EAGER,
    FunctionModule,
    Params,
    assert_equal,
    draw_inputs,
    grads,
    is_close,
    linear,
    make_module,
    train_three_steps,
)


@pytest.mark.parametrize("name", ["self-referring", "checkpointed", "tied"])
def test_threads_do_not_meet(name: str) -> None:
    """Ranks with their own params run all at once through one ``apply``."""
    params, apply = ps.from_module(make_module(name))
    params_of_ranks = []
    for scale in (1, 2, 3, 4):
        params_of_ranks.append({name: p * scale for name, p in params.items()})
    expected = [grads(apply, p, draw_inputs()) for p in params_of_ranks]

    on_ranks = ps.testing.ThreadAxis(4).map(lambda p: grads(apply, p, draw_inputs()))
    for _ in range(10):
        actual = on_ranks(params_of_ranks)
        for rank in range(4):
            assert_equal(actual[rank], expected[rank])


@pytest.mark.parametrize("name", ["checkpointed", "helped"])
def test_a_call_keeps_no_params_alive(name: str) -> None:
    """Neither its params nor its module, once the output is gone, also where a class caches."""
    params, apply = ps.from_module(make_module(name))
    mine = {name: p.clone().requires_grad_() for name, p in params.items()}
    output = apply(mine, draw_inputs())
    weight = weakref.ref(mine["a.weight"])

    mine.clear()
    assert weight() is not None

    output.sum().backward()
    del output
    if name == "helped":  # The module refers to itself.
        gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    "settings",
    [{}, {"compile": AOT_EAGER}],
    ids=["eager", "compiled"],
)
def test_what_a_call_leaves_behind_is_gone_in_the_next(
    settings: Any, fresh_compiler: None
) -> None:
    """Another object holds a list of the module, and keeps it."""
    module = make_module("keeping")
    params, apply = ps.from_module(module)

    def first_call(p: Params, x: Tensor) -> Tensor:
        """Computes what the module does when it is called for the first time."""
        return functional.linear(x, p["a.weight"], p["a.bias"]) * 8

    assert is_close(
        train_three_steps(apply, params, **settings),
        train_three_steps(first_call, params),
    )
    assert torch.equal(apply(params, draw_inputs()), first_call(params, draw_inputs()))
    assert module.calls == 0
    assert module.log == [1]
    assert module.nested == {"log": [1]}
    assert module.config.module is module.log
    assert module.tensor == 1
    assert not hasattr(module, "last")


def write_average(m: Any) -> None:
    with torch.no_grad():
        m.frozen.weight.lerp_(m.a.weight, 0.1)


def write_statistic(m: Any) -> None:
    functional.batch_norm(torch.ones(2, 3), m.buffer, torch.ones(3), training=True)


def assign_buffer_data(m: Any) -> None:
    m.buffer.data = torch.ones(2)


def assign_buffer(m: Any) -> None:
    m.buffer = m.buffer + 1


def assign_param_data(m: Any) -> None:
    m.a.weight.data = m.frozen.weight + 0


WRITES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "buffer": (
        "buffer",
        lambda m: m.buffer.add_(1),
    ),
    "tensor": (
        "tensor",
        lambda m: m.tensor.add_(1),
    ),
    "tensor in a list": (
        r"log\[0\]",
        lambda m: m.log[0].add_(1),
    ),
    "buffer.data": (
        "buffer",
        lambda m: m.buffer.data.add_(1),
    ),
    "assigned buffer.data": ("buffer", assign_buffer_data),
    "assigned buffer": ("buffer", assign_buffer),
    "module in a tuple": (
        r"hidden\[0\].*\[weight\]",
        lambda m: m.hidden[0].weight.data.add_(1),
    ),
    "a result": (
        "tensor",
        lambda m: torch.add(m.tensor, 1, out=m.tensor),
    ),
    "an average": ("frozen.weight", write_average),
    "a statistic": ("buffer", write_statistic),
    "param.data": (
        "a.weight",
        lambda m: m.a.weight.data.clamp_(-0.1, 0.1),
    ),
    "assigned param.data": ("a.weight", assign_param_data),
}
"""The tensor that an error names, and what writes to it."""


def module_that_writes(write: Callable[[Any], object]) -> Any:
    """Makes a module with a tensor in every place, and a forward that writes to one."""

    def run(m: Any, x: Tensor) -> Tensor:
        write(m)
        return m.a(x) + m.frozen(x)

    module: Any = FunctionModule(run, a=linear(), frozen=linear(train=False)).double()
    module.register_buffer("buffer", torch.ones(3))
    module.tensor = torch.ones(3)
    module.log = [torch.ones(3)]
    module.hidden = (linear(),)
    return module


@pytest.mark.parametrize("case", WRITES)
def test_a_module_that_writes_to_its_tensors_is_refused(case: str) -> None:
    """Before it has done so, and again; compiled, and under a transform, too."""
    name, write = WRITES[case]
    module = module_that_writes(write)
    params, apply = ps.from_module(module)
    tensors = [
        *params.values(),
        *module.parameters(),
        *module.hidden[0].parameters(),
        *module.log,
        module.buffer,
        module.tensor,
    ]
    before = [tensor.clone() for tensor in tensors]

    for settings in ({}, {}, {"compile": AOT_EAGER}):
        with pytest.raises(ValueError, match=f"the module writes to {name}: "):
            train_three_steps(apply, params, **settings)
    if case in ("buffer", "tensor", "an average"):
        message = r"module writes to|captured Tensor"
        with pytest.raises((ValueError, RuntimeError), match=message):
            torch.func.grad(lambda p: apply(p, draw_inputs()).sum())(params)

    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)


def empty_buffer(m: Any, x: Tensor) -> Tensor:
    m.cache = None
    return m.a(x)


def fill_buffer(m: Any, x: Tensor) -> Tensor:
    m.cache = x
    return m.a(x)


def fail_in_a_hook(*_: Any) -> None:
    raise AssertionError("a call saves no state")


@pytest.mark.parametrize("run", [empty_buffer, fill_buffer])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_none_before_or_after_a_call(
    run: Callable[[Any, Tensor], Tensor],
    persistent: bool,
) -> None:
    """Is refused, since a checkpoint of the module keeps it, but no call does."""
    x = draw_inputs()
    module: Any = FunctionModule(run, a=linear()).double()
    cache = None if run is fill_buffer else torch.ones(3)
    module.register_buffer("cache", cache, persistent=persistent)
    module.register_state_dict_post_hook(fail_in_a_hook)
    params, apply = ps.from_module(module)
    if not persistent:
        assert torch.equal(apply(params, x), module.a(x))
        return

    for _ in range(2):
        with pytest.raises(ValueError, match="the module assigns to cache, a buffer"):
            apply(params, x)
    assert module.cache is cache


def module_that_writes_if_told() -> Any:
    """Makes a module that writes to a buffer when an argument after ``x`` is true.

    With several, the last of them.
    """

    def run(m: Any, x: Tensor, *flags: Any) -> Tensor:
        if flags and flags[-1]:
            m.buffer.add_(1)
        return m.a(x)

    module: Any = FunctionModule(run, a=linear()).double()
    module.register_buffer("buffer", torch.ones(3))
    return module


@pytest.mark.parametrize(
    "flags",
    [[False, True], [None, "now"], [1]],
)
def test_calls_with_other_arguments_are_checked_again(flags: Any) -> None:
    """With another flag, or more arguments."""
    module = module_that_writes_if_told()
    params, apply = ps.from_module(module)
    *quiet, writes = flags

    with torch.no_grad():
        apply(params, draw_inputs())
        for flag in quiet:
            apply(params, draw_inputs(), flag)
    with pytest.raises(ValueError, match="the module writes to buffer: "):
        apply(params, draw_inputs(), writes)
    assert module.buffer.eq(1).all()


def test_a_flag_in_another_place_is_checked_again() -> None:
    params, apply = ps.from_module(module_that_writes_if_told())
    with torch.no_grad():
        apply(params, draw_inputs(), True, None)
        with pytest.raises(ValueError, match="the module writes to buffer: "):
            apply(params, draw_inputs(), None, True)


def test_calls_that_autograd_records_are_checked_again() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            m.buffer.add_(1)
        return m.a(x)

    module: Any = FunctionModule(run, a=linear()).double()
    module.register_buffer("buffer", torch.ones(3))
    params, apply = ps.from_module(module)

    with torch.no_grad():
        apply(params, draw_inputs())
    with pytest.raises(ValueError, match="the module writes to buffer: "):
        apply(params, draw_inputs())
    assert module.buffer.eq(1).all()


REGISTRY: dict[str, nn.Module] = {}


class Elsewhere(FunctionModule):
    """Computes with a layer that it finds outside of its attributes."""

    layers: ClassVar[list[nn.Module]] = []


def make_elsewhere(way: str) -> nn.Module:
    """Makes a module that finds its own layer outside of its attributes."""
    layer = linear()
    REGISTRY["layer"] = layer
    Elsewhere.layers[:] = [layer]

    runs: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "class": lambda m, x: m.layers[0](x) + m.a(x),
        "global": lambda m, x: REGISTRY["layer"](x) + m.a(x),
    }
    return Elsewhere(runs[way], a=layer).double()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["class", "global"])
def test_a_module_that_computes_with_its_own_parameters_is_refused(
    way: str, frozen: bool
) -> None:
    """They would not train. No matter if they require grad, or are recorded."""
    module = make_elsewhere(way).requires_grad_(not frozen)
    params, apply = ps.from_module(module, trainable="*")

    for settings in ({}, {"compile": AOT_EAGER}):
        message = r"with a\.(weight|bias) of the module itself"
        with pytest.raises(ValueError, match=message):
            train_three_steps(apply, params, **settings)
    with torch.no_grad(), pytest.raises(ValueError, match="of the module itself"):
        apply.eval(params, draw_inputs())

    # Here the module's parameters are the params that are passed.
    same = dict(module.named_parameters())
    assert torch.equal(apply(same, draw_inputs()), module(draw_inputs()))


def make_closure(way: str) -> tuple[nn.Module, list[int]]:
    """Makes a module whose function finds its layer; returns it, and a list of what it counts."""
    layer = linear()
    counts = [0]
    count = 0

    def run_closure(m: Any, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        counts[0] = count
        return layer(x) + m.a(x)

    def run_default(m: Any, x: Tensor, default: nn.Module = layer) -> Tensor:
        return default(x) + m.a(x)

    def run_keyword_default(m: Any, x: Tensor, *, default: nn.Module = layer) -> Tensor:
        return default(x) + m.a(x)

    def run_itself(m: Any, x: Tensor, depth: int = 1) -> Tensor:
        return layer(x) + (run_itself(m, x, depth - 1) if depth else 0)

    def run_inner(m: Any, x: Tensor) -> Tensor:
        def run() -> Tensor:
            return layer(x)

        return run() + m.a(x)

    def run_later(m: Any, x: Tensor) -> Tensor:
        return later(x) + m.a(x)

    def run_reference(m: Any, x: Tensor) -> Tensor:
        return reference()(x) + m.a(x)

    later = layer
    reference: Any = weakref.ref(layer)
    runs: dict[str, Callable[..., Tensor]] = {
        "closure": run_closure,
        "default": run_default,
        "keyword default": run_keyword_default,
        "recursion": run_itself,
        "inner function": run_inner,
        "assigned later": run_later,
        "weak reference": run_reference,
    }
    return FunctionModule(runs[way], a=layer).double(), counts


WAYS_TO_CLOSE = [
    "closure", "default", "keyword default", "recursion", "inner function",
    "assigned later", "weak reference",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS_TO_CLOSE)
def test_a_layer_in_a_closure_trains(way: str) -> None:
    """Computes with params where a function finds a layer; its other variables are shared."""
    module, counts = make_closure(way)
    params, apply = ps.from_module(module)
    x = draw_inputs()
    expected = module(x)
    for _ in range(3):
        assert torch.equal(apply(params, x), expected)
    assert counts[0] == (4 if way == "closure" else 0)
    doubled = {name: 2 * p for name, p in params.items()}
    assert torch.equal(apply(doubled, x), 2 * expected)


def test_a_layer_that_is_a_default_is_freed_with_its_module() -> None:
    """No signature of a copied function keeps its params."""
    module: Any = make_closure("keyword default")[0]
    layer = weakref.ref(module.a)
    _, apply = ps.from_module(module)
    assert inspect.signature(module.run).parameters["default"].default is layer()
    del module
    gc.collect()
    assert apply is not None
    assert layer() is None


def test_a_checkpoint_calls_such_a_function_again() -> None:
    """In the backward pass, when the copies of the call have been dropped."""
    layer = linear()
    module: Any = FunctionModule(
        lambda m, x: checkpoint(m.act, x, use_reentrant=False).sin(), a=layer
    )
    module.act = lambda x: layer(x).tanh()
    module.double()
    params, apply = ps.from_module(module)
    x = draw_inputs()
    slopes = torch.autograd.grad(module(x).sum(), [*module.parameters()])
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    actual = torch.autograd.grad(apply(leaves, x).sum(), [*leaves.values()])
    torch.testing.assert_close(actual, slopes)


def test_such_a_function_after_a_call_is_refused() -> None:
    layer = linear()
    module: Any = FunctionModule(lambda m: m.later, a=layer)
    module.later = lambda x: layer(x)
    params, apply = ps.from_module(module)
    with pytest.raises(ReferenceError, match="called after apply has returned"):
        apply(params)(torch.ones(1))


def test_another_error_of_such_a_function_is_its_own() -> None:
    layer = linear()
    module: Any = FunctionModule(lambda m: m.later, a=layer)
    module.later = lambda: layer if missing else 0  # type: ignore[name-defined]  # noqa: F821
    params, apply = ps.from_module(module)
    with pytest.raises(NameError, match="'missing' is not defined"):
        apply(params)()


def scaled(compiled: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def scale(*args: Any) -> Any:
        return 2 * compiled(*args)

    return scale


@pytest.mark.parametrize("wrap", [scaled, lambda function: function])
@pytest.mark.parametrize("change", [AOT_EAGER, torch.compiler.disable])
def test_a_function_around_a_compiled_one(change: Any, wrap: Any) -> None:
    """``functools.wraps`` gives it the attributes of the compiled one."""
    module: Any = FunctionModule(lambda m, x: m.scale(x), a=linear()).double()
    module.scale = wrap(change(lambda x: module.a(x)))
    params, apply = ps.from_module(module)
    doubled = {name: 2 * p for name, p in params.items()}
    torch.testing.assert_close(apply(doubled, draw_inputs()), 2 * module(draw_inputs()))


def test_a_program_whose_file_has_the_name_of_the_compiler() -> None:
    """``train_dynamo.py`` is none of torch's files."""
    namespace: dict[str, Any] = {}
    exec(compile("def act(x): return x.relu()", "train_dynamo.py", "exec"), namespace)
    module: Any = FunctionModule(lambda m, x: m.a(m.act(x)), a=linear()).double()
    module.act = AOT_EAGER(namespace["act"])
    params, apply = ps.from_module(module)
    assert torch.equal(apply(params, draw_inputs()), module(draw_inputs()))


def test_an_attribute_goes_before_a_cached_method() -> None:
    class Cached(FunctionModule):
        @functools.cache  # noqa: B019
        def scale(self) -> float:
            return 1.0

    module: Any = Cached(lambda m, x: m.scale() * m.a(x), a=linear()).double()
    module.scale = lambda: 5.0
    params, apply = ps.from_module(module)
    assert torch.equal(apply(params, draw_inputs()), module(draw_inputs()))


def test_a_checkpoint_keeps_no_copies_after_its_backward_pass() -> None:
    class Checkpointed(FunctionModule):
        pass

    def count() -> int:
        return sum(type(obj) is Checkpointed for obj in gc.get_objects())

    module: Any = Checkpointed(
        lambda m, x: checkpoint(m.act, x, use_reentrant=False), a=linear()
    )
    module.act = lambda x: module.a(x).sin()
    module.double()
    params, apply = ps.from_module(module)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    gc.collect()
    num_before = count()
    gc.disable()
    try:
        apply(leaves, draw_inputs()).sum().backward()
        assert count() == num_before
    finally:
        gc.enable()


def test_a_copied_function_keeps_its_plain_defaults() -> None:
    layer = linear()

    def act(x: Tensor, scale: float = 2.0, other: Any = layer) -> Tensor:
        return other(x) * scale

    def run(m: Any, x: Tensor) -> Tensor:
        parameters = inspect.signature(m.act).parameters
        assert parameters["scale"].default == 2.0
        return m.act(x)

    module: Any = FunctionModule(run, a=layer, act=act).double()
    params, apply = ps.from_module(module)
    assert torch.equal(apply(params, draw_inputs()), module(draw_inputs()))


class Recorder:
    """Collects a penalty, and leads to the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.penalty = 0.0

    def add(self, output: Tensor) -> None:
        self.penalty += float(output.detach().sum())


def test_what_hooks_fill_through_closures_stays() -> None:
    """Adds to the caller's object, and to a list of the module's, at each call."""
    module: Any = nn.Sequential(linear()).double()
    recorder = Recorder(module)
    module.seen = []
    module[0].register_forward_hook(lambda m, i, o: recorder.add(o))
    module[0].register_forward_hook(lambda m, i, o: module.seen.append(o))
    params, apply = ps.from_module(module)
    for _ in range(2):
        output = apply(params, draw_inputs())
    assert len(module.seen) == 2
    assert recorder.penalty == 2 * float(output.detach().sum())


def test_a_copy_that_a_closure_leads_to_is_freed_at_once() -> None:
    """Makes no cycle of the copy, its ``forward`` and the closure, which would keep params."""
    module: Any = nn.Sequential(linear()).double()
    original = module[0].forward
    layer = module[0]
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(weakref.ref(layer))
        return original(x)

    layer.forward = forward
    params, apply = ps.from_module(module)
    gc.disable()
    try:
        apply(params, draw_inputs())
        assert seen[-1]() is None
    finally:
        gc.enable()


def test_parameters_are_parameters_inside() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        assert isinstance(m.a.weight, nn.Parameter)
        return m.a(x)

    params, apply = ps.from_module(FunctionModule(run, a=linear()).double())

    assert grads(apply, params, draw_inputs()).keys() == params.keys()
    slopes = torch.func.grad(lambda p: apply(p, draw_inputs()).sum())(params)
    assert slopes.keys() == params.keys()
