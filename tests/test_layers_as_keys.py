"""Modules that were compiled before, and modules that look their parts up by identity."""

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import purestep as ps

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SGD = ps.optim.sgd(1.0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def squared_outputs(output: Tensor) -> Tensor:
    """Computes one loss for each row."""
    return output.squeeze(-1) ** 2


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def compile_all(module: nn.Sequential) -> None:
    module.compile(backend="eager")


def compile_a_layer(module: nn.Sequential) -> None:
    module[0].compile(backend="eager")


def compile_a_method(module: nn.Sequential) -> None:
    module[2].forward = torch.compile(module[2].forward, backend="eager")


def keep_eager(step: Any) -> Any:
    return step


def compile_step(step: Any) -> Any:
    return ps.compile(step, fullgraph=True, backend="eager")


@pytest.mark.parametrize("wrap", [keep_eager, compile_step], ids=["eager", "compiled"])
@pytest.mark.parametrize("prepare", [compile_all, compile_a_layer, compile_a_method])
def test_what_was_compiled_before_computes_with_params(
    prepare: Callable[[nn.Sequential], None], wrap: Any, fresh_compiler: None
) -> None:
    """It was bound to the module's own weights: these layers had no gradient, without a word."""
    module = network()
    mean = squared_outputs(module(X)).mean()
    expected = torch.autograd.grad(mean, list(module.parameters()))
    prepare(module)
    params, apply = ps.from_module(module)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return squared_outputs(apply(p, x))

    def weight_fn(x: Tensor) -> Tensor:
        return x[:, 0] < 9

    step = wrap(ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn))
    group = [X[:2], X[2:]]
    new, *_ = step(params, SGD.init(params), group)

    for name, grad in zip(params, expected, strict=True):
        assert_close(params[name] - new[name], grad)


SCALES: Any = {}


class ByIdentity(nn.Module):
    """Finds its layers, and a weight, by identity."""

    scales: ClassVar[dict[Any, float]] = {}

    def __init__(self, way: str) -> None:
        super().__init__()
        first = nn.Linear(5, 5)
        second = nn.Linear(5, 5)
        self.way = way
        self.layers = nn.ModuleList([first, second])
        self.residual = {first}
        self.frozen = frozenset({first, "another"})
        self.scale = OrderedDict([(second, 1.0), (first, 3.0), ("another", 2.0)])
        self.default: Any = defaultdict(lambda: 1.0, {first: 3.0})
        self.by_id = {id(first.weight): 3.0}
        self.ids = {id(first), 1}
        self.number = id(first)
        self.counter = Counter({first: 3, second: 1})
        scales: dict[Any, float] = {first: 3.0}
        self.scale_of = lambda layer: scales.get(layer, 1.0)
        SCALES[first] = self.scales[first] = 3.0

    def factor(self, layer: Any) -> float:
        """Returns 3 for the first layer and 1 for the second."""
        if self.way == "dict":
            return self.scale[layer]
        if self.way == "defaultdict":
            return self.default.get(layer, self.default["another"])
        if self.way == "Counter":
            return self.counter[layer]
        if self.way == "closure":
            return self.scale_of(layer)
        if self.way == "global":
            return float(SCALES.get(layer, 1.0))
        if self.way == "class":
            return self.scales.get(layer, 1.0)
        if self.way == "id of a weight":
            return self.by_id.get(id(layer.weight), 1.0)
        return 3.0 if self.is_first(layer) else 1.0

    def is_first(self, layer: Any) -> bool:
        ways: dict[str, Callable[[], bool]] = {
            "set": lambda: layer in self.residual,
            "frozenset": lambda: layer in self.frozen,
            "order of keys": lambda: layer is list(self.scale)[1],
            "set of ids": lambda: id(layer) in self.ids,
            "id in an attribute": lambda: id(layer) == self.number,
        }
        return ways[self.way]()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor(layer)
        return x


@pytest.mark.parametrize(
    "way",
    [
        "set",
        "frozenset",
        "dict",
        "defaultdict",
        "order of keys",
        "id of a weight",
        "set of ids",
        "id in an attribute",
        "Counter",
        "closure",
        "global",
        "class",
    ],
)
def test_parts_are_found_by_identity(way: str) -> None:
    """In each call these are other objects. Calls leave nothing behind in the module's."""
    module = ByIdentity(way).double()
    params, apply = ps.from_module(module)
    doubled = {name: 2 * p for name, p in params.items()}
    module_of_doubled = ByIdentity(way).double()
    ps.to_module(doubled, module_of_doubled)
    num_scales = len(module.scale)
    num_residuals = len(module.residual)

    for _ in range(2):
        assert torch.equal(apply(params, X), module(X))
        assert torch.equal(apply(doubled, X), module_of_doubled(X))
    assert len(module.scale) == num_scales
    assert len(module.residual) == num_residuals


Features = dict[Any, Tensor]
Hook = Callable[[nn.Module, Any, Tensor], None]

FEATURES: Features = {}


def fill_a_global(layer: nn.Module, args: Any, output: Tensor) -> None:
    FEATURES[layer] = output


class Recorder:
    """Fills a dict of its own."""

    def __init__(self) -> None:
        self.features: Features = {}

    def record(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.features[layer] = output


def hook_with_global() -> tuple[Hook, Features]:
    FEATURES.clear()
    return fill_a_global, FEATURES


def hook_of_object() -> tuple[Hook, Features]:
    recorder = Recorder()
    return recorder.record, recorder.features


def hook_with_method() -> tuple[Hook, Features]:
    features: Features = {}
    update = features.update
    return lambda layer, args, output: update({layer: output}), features


def hook_with_operator() -> tuple[Hook, Features]:
    """Has a method of another type: that of Python's operators."""
    features: Features = {}
    store = features.__setitem__
    return lambda layer, args, output: store(layer, output), features


def hook_with_closure() -> tuple[Hook, Features]:
    features: Features = {}

    def fill(layer: nn.Module, args: Any, output: Tensor) -> None:
        features[layer] = output

    return fill, features


def hook_with_keyword() -> tuple[Hook, Features]:
    features: Features = {}

    def fill(
        layer: nn.Module, args: Any, output: Tensor, *, into: Features = features
    ) -> None:
        into[layer] = output

    return fill, features


@pytest.mark.parametrize(
    "make_hook",
    [
        hook_with_closure,
        hook_with_method,
        hook_with_operator,
        hook_with_keyword,
        hook_of_object,
        hook_with_global,
    ],
)
@pytest.mark.parametrize("looked_before", [True, False])
def test_a_hook_fills_a_dict_by_layer(make_hook: Any, looked_before: bool) -> None:
    """Its entries are those of the call, under the module's own layers, with their gradient."""
    module = network()
    hook, features = make_hook()
    module[1].register_forward_hook(hook)
    if looked_before:
        module(X)
    params, apply = ps.from_module(module)

    def loss_of(output: Tensor) -> Tensor:
        penalty = features[module[1]].square().sum(-1)
        return squared_outputs(output) + penalty

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return loss_of(apply(p, x))

    def weight_fn(x: Tensor) -> Tensor:
        return torch.ones(len(x))

    step = ps.make_update_step(loss_fn, SGD, weight_fn=weight_fn)
    new, *_ = step(params, SGD.init(params), [X])

    mean = loss_of(module(X)).mean()
    first_weight = next(module.parameters())
    (expected,) = torch.autograd.grad(mean, first_weight)
    assert_close(params["0.weight"] - new["0.weight"], expected)
    for _ in range(3):
        apply(params, X)
    assert list(features) == [module[1]]


def test_a_dict_by_layer_keeps_its_order() -> None:
    module = network()
    order: list[Any] = []
    values: dict[Any, str] = {module[1]: "second", "name": "text", module[0]: "first"}

    def look(layer: nn.Module, args: Any, output: Tensor) -> None:
        order.append(([*values.values()], values[layer]))

    module[0].register_forward_hook(look)
    params, apply = ps.from_module(module)
    apply(params, X)

    expected = ["second", "text", "first"]
    assert order == [(expected, "first")]
    assert [*values.values()] == expected
    assert [*values] == [module[1], "name", module[0]]


def test_a_counter_by_layer_counts() -> None:
    module = network()
    calls = Counter({module[0]: 3})
    module[0].register_forward_hook(lambda layer, args, output: calls.update([layer]))
    params, apply = ps.from_module(module)
    apply(params, X)
    assert calls == {module[0]: 4}


def test_a_hook_that_raises_leaves_the_modules_own_keys() -> None:
    module = network()
    layer = module[1]
    features: dict[Any, int] = {layer: 1}

    def fail(layer: nn.Module, args: Any, output: Tensor) -> None:
        features[layer] += 1
        raise ZeroDivisionError

    layer.register_forward_hook(fail)
    params, apply = ps.from_module(module)

    with pytest.raises(ZeroDivisionError):
        apply(params, X)
    assert features == {layer: 2}


def test_calls_at_once_of_a_module_with_such_a_dict_are_refused() -> None:
    """In other threads, and inside of a call: one would look up the layers of the other."""
    module = network()
    scales: dict[Any, float] = {module[0]: 3.0}
    inner: list[str] = []

    def scale(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not inner:
            thread = threading.Thread(target=call_again)
            thread.start()
            thread.join(timeout=30)
        return output * scales[layer]

    def call_again() -> None:
        inner.append("began")
        with pytest.raises(RuntimeError, match="let the keys be names"):
            apply(params, X)
        inner.append("refused")

    module[0].register_forward_hook(scale)
    params, apply = ps.from_module(module)
    output = apply(params, X)
    assert inner == ["began", "refused"]
    assert torch.equal(output, module(X))
    assert [*scales] == [module[0]]
    assert torch.equal(apply(params, X), output)


class RecentlyUsed(OrderedDict[Any, float]):
    """Moves what is read to its end, and knows no key but layers."""

    fails = False

    def __contains__(self, key: Any) -> bool:
        assert isinstance(key, nn.Linear)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> float:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: float) -> None:
        if self.fails:
            raise OSError("the disk is full")
        super().__setitem__(key, value)


def test_a_mapping_of_another_class_is_read_by_dicts_methods() -> None:
    """It is left whole by an error, after which calls go on."""
    module = network()
    first: dict[Any, float] = {module[0]: 1.0}
    recent = RecentlyUsed({module[2]: 2.0, module[0]: 3.0})
    module[0].register_forward_hook(
        lambda layer, args, output: output * recent[layer] * first[layer]
    )
    params, apply = ps.from_module(module)
    assert torch.equal(apply(params, X), module(X))
    recent.fails = True
    with pytest.raises(OSError, match="disk is full"):
        apply(params, X)
    assert [*first] == [module[0]]
    recent.fails = False
    recent.update({module[2]: 2.0, module[0]: 3.0})
    assert torch.equal(apply(params, X), module(X))


class Registered(nn.Linear):
    """Puts each into a set, which no call reads."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        REGISTER.add(self)


REGISTER: set[Any] = set()


class Lazy:
    """Would load something when it is asked for its attributes."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        assert name != "__dict__"
        raise AttributeError(name)


LAZY: Any = Lazy()


class UsesLazy(Registered):
    def load(self) -> Any:
        return LAZY.value


def test_registers_and_proxies_are_left_alone() -> None:
    _, apply = ps.from_module(UsesLazy())
    assert vars(apply)["_rekeying"].mappings == []


def test_texts_among_the_arguments_are_not_kept_for_ever() -> None:
    """Each prompt would be another signature of a call, which is checked and remembered."""

    class Named(nn.Linear):
        def forward(self, x: Tensor, name: str) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    params, apply = ps.from_module(Named(5, 1).double())
    for number in range(100):
        apply(params, X, f"file {number}")
    assert len(vars(apply)["_known"]) < 20


def test_a_hook_that_names_torch_reaches_none_of_its_dicts() -> None:
    """Such as ``sys.modules``, with which no ``apply`` could be pickled."""
    module = network()
    module[1].register_forward_hook(lambda layer, args, output: torch.relu(output))
    _, apply = ps.from_module(module)
    assert vars(apply)["_rekeying"].mappings == []


def test_a_hook_that_names_a_module_reaches_the_dict_that_it_names() -> None:
    store = ModuleType("store")
    store.features = {}  # type: ignore[attr-defined]
    namespace = {"store": store}
    exec("def fill(layer, args, output): store.features[layer] = output", namespace)
    module = network()
    fill: Any = namespace["fill"]
    module[1].register_forward_hook(fill)
    params, apply = ps.from_module(module)
    apply(params, X)
    assert [*store.features] == [module[1]]


def test_a_hook_fills_its_dict_at_every_kind_of_call() -> None:
    """Of many kinds of calls, only the first few are looked at whole."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1).double()

        def forward(self, x: Tensor, name: str) -> Any:
            return self.layer(x)

    module = Named()
    features: dict[Any, Any] = {}
    module.layer.register_forward_hook(
        lambda layer, args, output: features.__setitem__(layer, output)
    )
    params, apply = ps.from_module(module)
    for number in range(20):
        output = apply(params, X * number, name=f"text {number}")
        assert features[module.layer] is output
        assert len(features) == 1
