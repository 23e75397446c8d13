"""Modules that were compiled before, and modules that look their parts up by identity."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SGD = ps.optim.sgd(1.0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def compile_all(module: nn.Sequential) -> None:
    module.compile(backend="eager")


def compile_a_layer(module: nn.Sequential) -> None:
    module[0].compile(backend="eager")


def compile_a_method(module: nn.Sequential) -> None:
    module[2].forward = torch.compile(module[2].forward, backend="eager")


def graphs(step: Any) -> Any:
    return ps.compile(step, fullgraph=True, backend="eager")


@pytest.mark.parametrize("wrap", [lambda step: step, graphs], ids=["eager", "compiled"])
@pytest.mark.parametrize("prepare", [compile_all, compile_a_layer, compile_a_method])
def test_what_was_compiled_before_computes_with_params(
    prepare: Callable[[nn.Sequential], None], wrap: Any, fresh_compiler: None
) -> None:
    """It was bound to the module's own weights: these layers had no gradient, without a word."""
    module = network()
    losses = module(X).squeeze(-1) ** 2
    wanted = torch.autograd.grad(losses.mean(), [*module.parameters()])
    prepare(module)
    params, apply = ps.from_module(module)
    step = wrap(
        ps.make_update_step(
            lambda p, x: apply(p, x).squeeze(-1) ** 2,
            SGD,
            weight_fn=lambda x: x[:, 0] < 9,
        )
    )
    new = step(params, SGD.init(params), [X[:2], X[2:]])[0]
    for name, grad in zip(params, wanted, strict=True):
        torch.testing.assert_close(params[name] - new[name], grad, rtol=0, atol=1e-12)


class ByIdentity(nn.Module):
    """Asks for its layers, and for a weight, by what they are."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers, self.way = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]), way
        first, second = self.layers
        self.residual, self.frozen = {first}, frozenset({first, "another"})
        self.scale = OrderedDict([(second, 1.0), (first, 3.0), ("another", 2.0)])
        self.default: Any = defaultdict(lambda: 1.0, {first: 3.0})
        self.by_id, self.ids = {id(first.weight): 3.0}, {id(first), 1}
        self.number = id(first)

    def factor(self, layer: Any) -> float:
        if self.way == "order of keys":
            return 3.0 if layer is [*self.scale][1] else 1.0
        ways: dict[str, Callable[[], float]] = {
            "set": lambda: 3.0 if layer in self.residual else 1.0,
            "frozenset": lambda: 3.0 if layer in self.frozen else 1.0,
            "dict": lambda: self.scale[layer],
            "defaultdict": lambda: self.default.get(layer, self.default["another"]),
            "id of a weight": lambda: self.by_id.get(id(layer.weight), 1.0),
            "set of ids": lambda: 3.0 if id(layer) in self.ids else 1.0,
            "id in an attribute": lambda: 3.0 if id(layer) == self.number else 1.0,
        }
        return ways[self.way]()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor(layer)
        return x


@pytest.mark.parametrize(
    "way",
    [
        "set", "frozenset", "dict", "defaultdict", "order of keys", "id of a weight", "set of ids",
        "id in an attribute",
    ],
)  # fmt: skip
def test_parts_are_found_by_identity(way: str) -> None:
    """In each call these are other objects. Calls leave nothing behind in the module's."""
    module = ByIdentity(way).double()
    params, apply = ps.from_module(module)
    sizes = len(module.scale), len(module.residual)
    doubled = {name: 2 * p for name, p in params.items()}
    other = ByIdentity(way).double()
    ps.to_module(doubled, other)
    for _ in range(2):
        assert torch.equal(apply(params, X), module(X))
        assert torch.equal(apply(doubled, X), other(X))
    assert sizes == (len(module.scale), len(module.residual))


FEATURES: dict[Any, Tensor] = {}


def fill_a_global(layer: nn.Module, args: Any, output: Tensor) -> None:
    FEATURES[layer] = output


class Recorder:
    """An object that fills a dict of its own."""

    def __init__(self) -> None:
        self.features: dict[Any, Tensor] = {}

    def record(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.features[layer] = output


def hook_and_features(kind: str) -> tuple[Any, dict[Any, Tensor]]:
    """A hook, and the dict that it fills by layer."""
    if kind == "a global dict":
        FEATURES.clear()
        return fill_a_global, FEATURES
    if kind == "an object":
        recorder = Recorder()
        return recorder.record, recorder.features
    features: dict[Any, Tensor] = {}
    if kind == "a method of the dict":
        return lambda layer, args, output: features.__setitem__(layer, output), features

    def fill(layer: nn.Module, args: Any, output: Tensor) -> None:
        features[layer] = output

    return fill, features


@pytest.mark.parametrize(
    "kind", ["a closure", "a method of the dict", "an object", "a global dict"]
)
@pytest.mark.parametrize("looked_before", [True, False])
def test_a_hook_fills_a_dict_by_layer(kind: str, looked_before: bool) -> None:
    """Its entries are those of the call, under the module's own layers, with their gradient."""
    module = network()
    hook, features = hook_and_features(kind)
    module[1].register_forward_hook(hook)
    if looked_before:
        module(X)

    def loss_of(output: Tensor) -> Tensor:
        return output.squeeze(-1) ** 2 + features[module[1]].square().sum(-1)

    params, apply = ps.from_module(module)
    step = ps.make_update_step(
        lambda p, x: loss_of(apply(p, x)), SGD, weight_fn=lambda x: torch.ones(len(x))
    )
    new = step(params, SGD.init(params), [X])[0]
    (wanted,) = torch.autograd.grad(
        loss_of(module(X)).mean(), next(module.parameters())
    )
    torch.testing.assert_close(
        params["0.weight"] - new["0.weight"], wanted, rtol=0, atol=1e-12
    )
    for _ in range(3):
        apply(params, X)
    assert [*features] == [module[1]]


def test_a_hook_that_raises_leaves_the_modules_own_keys() -> None:
    module, features = network(), dict[Any, int]()
    features[module[1]] = 1

    def fail(layer: nn.Module, args: Any, output: Tensor) -> None:
        features[layer] += 1
        raise ZeroDivisionError

    module[1].register_forward_hook(fail)
    params, apply = ps.from_module(module)
    with pytest.raises(ZeroDivisionError):
        apply(params, X)
    assert features == {module[1]: 2}


def test_texts_among_the_arguments_are_not_kept_for_ever() -> None:
    """Each prompt would be another kind of call, which is checked and remembered."""

    class Named(nn.Linear):
        def forward(self, x: Tensor, name: str) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    params, apply = ps.from_module(Named(5, 1).double())
    for number in range(100):
        apply(params, X, f"file {number}")
    assert len(vars(apply)["_known"]) < 20
