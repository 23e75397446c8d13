"""Each call of ``apply`` is one of its own: nothing of it stays in the module, in the next call or in memory."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from tests.modules import D, Params, assert_equal, close, data, grads, made, train
from tests.torch_private import forward_hooks


@pytest.mark.parametrize("name", ["self-referring", "checkpointed", "tied"])
def test_threads_do_not_meet(name: str) -> None:
    """Ranks with params of their own, all at once through one ``apply``."""
    params, apply = ps.from_module(made(name))
    ranks = [{name: p * (1 + rank) for name, p in params.items()} for rank in range(4)]
    wanted = [grads(apply, mine, data()) for mine in ranks]
    axis = ps.testing.ThreadAxis(4)
    for _ in range(10):
        for given, right in zip(
            axis.map(lambda p: grads(apply, p, data()))(ranks), wanted, strict=True
        ):
            assert_equal(given, right)


def test_nothing_is_kept_of_a_call() -> None:
    """Neither its params nor its module, once the output is gone: no cycle is left for the garbage collector."""
    params, apply = ps.from_module(made("checkpointed"))
    mine = {name: p.clone().requires_grad_() for name, p in params.items()}
    output = apply(mine, data())
    last = weakref.ref(mine["a.weight"])
    mine.clear()
    assert last() is not None
    output.sum().backward()
    del output
    assert last() is None


class Recording(nn.Module):
    """Registers its hook where it is first called, as transformers does for ``output_hidden_states``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.recording, self.calls = nn.Linear(D, D), False, 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        if not self.recording:
            self.a.register_forward_hook(self.count, with_kwargs=True)
            self.recording = True
        return self.a(x), self.calls

    def count(self, *_: Any) -> None:
        self.calls += 1


def test_hooks_that_a_call_registers_do_not_stay() -> None:
    module = Recording().double()
    params, apply = ps.from_module(module)
    assert [apply(params, data())[1] for _ in range(3)] == [1, 1, 1]
    assert module.calls == forward_hooks(module) == 0


class Counting(nn.Module):
    """What it gives depends on how often it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls, self.log = nn.Linear(D, D), 0, [1]
        self.nested, self.tensor = {"a": [1]}, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(1)
        self.nested["a"].append(1)
        self.tensor = self.tensor + 1
        self.seen = getattr(self, "seen", 0) + 1
        times = self.calls * len(self.log) * len(self.nested["a"]) * self.tensor * self.seen
        output: Tensor = self.a(x) * times
        return output


@pytest.mark.parametrize("settings", [{}, {"compile": True}, {"whole": True}], ids=str)
def test_what_a_call_leaves_behind_is_not_there_in_the_next(settings: Any) -> None:
    torch.compiler.reset()
    module = Counting().double()
    params, apply = ps.from_module(module)
    x = data()

    def four(p: Params, x: Tensor) -> Tensor:
        return functional.linear(x, p["a.weight"], p["a.bias"]) * 8

    assert close(train(apply, params, **settings), train(four, params))
    assert torch.equal(apply(params, x), apply(params, x))
    assert (module.calls, module.log, module.nested) == (0, [1], {"a": [1]})
    assert module.tensor == 1
    assert not hasattr(module, "seen")


class Writing(nn.Module):
    """Writes to what it holds, in one of many ways."""

    buffer: Tensor

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.a, self.frozen = nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False)
        self.register_buffer("buffer", torch.ones(3))
        self.tensor, self.log, self.write = torch.ones(3), [torch.ones(3)], write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        output: Tensor = self.a(x) + self.frozen(x)
        return output


def average(module: Any) -> None:
    with torch.no_grad():
        module.frozen.weight.lerp_(module.a.weight, 0.1)


WAYS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "buffer": ("buffer", lambda m: m.buffer.add_(1)),
    "tensor": ("tensor", lambda m: m.tensor.add_(1)),
    "tensor in a list": (r"log\[0\]", lambda m: m.log[0].add_(1)),
    "buffer.data": ("buffer", lambda m: m.buffer.data.add_(1)),
    "assigned buffer.data": ("buffer", lambda m: setattr(m.buffer, "data", torch.ones(2))),
    "a result": ("tensor", lambda m: torch.add(m.tensor, 1, out=m.tensor)),
    "an average": ("frozen.weight", average),
    "a statistic": (
        "buffer",
        lambda m: functional.batch_norm(torch.ones(2, 3), m.buffer, torch.ones(3), training=True),
    ),
    "param.data": ("a.weight", lambda m: m.a.weight.data.clamp_(-0.1, 0.1)),
    "assigned param.data": (
        "a.weight",
        lambda m: setattr(m.a.weight, "data", m.frozen.weight + 0),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_writes_to_its_tensors(way: str) -> None:
    """Is refused before it has done so, and again."""
    message, write = WAYS[way]
    module = Writing(write).double()
    params, apply = ps.from_module(module)
    kept = [p.clone() for p in params.values()]
    before = [
        (each, each.clone())
        for each in [*module.parameters(), module.buffer, module.tensor, *module.log]
    ]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"the module writes to {message}: "):
            train(apply, params)
    assert all(torch.equal(*pair) for pair in before)
    assert all(torch.equal(*pair) for pair in zip(params.values(), kept, strict=True))


@pytest.mark.parametrize("way", ["buffer", "tensor", "an average"])
def test_a_transformed_module_that_writes_to_its_tensors(way: str) -> None:
    message, write = WAYS[way]
    module = Writing(write).double()
    params, apply = ps.from_module(module)
    before = [module.buffer.clone(), module.tensor.clone(), module.frozen.weight.clone()]
    with pytest.raises(ValueError, match=f"the module writes to {message}: "):
        train(apply, params, compile=True)
    with pytest.raises((ValueError, RuntimeError), match=r"module writes to|captured Tensor"):
        torch.func.grad(lambda p: apply(p, data()).sum())(params)
    after = [module.buffer, module.tensor, module.frozen.weight]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


REGISTRY: dict[str, nn.Module] = {}


class Elsewhere(nn.Module):
    """Computes with a layer that it finds outside of its attributes."""

    layers: ClassVar[list[nn.Module]] = []

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.way = nn.Linear(D, D), way
        self.closure = lambda x: self.a(x)
        Elsewhere.layers[:] = [self.a]
        REGISTRY["layer"] = self.a
        Elsewhere.forward.__defaults__[0]["layer"] = self.a  # type: ignore[index]

    def forward(self, x: Tensor, default: Any = {}) -> Tensor:  # noqa: B006
        found = {
            "class": lambda: self.layers[0],
            "global": lambda: REGISTRY["layer"],
            "default": lambda: default["layer"],
            "closure": lambda: self.closure,
        }
        output: Tensor = found[self.way]()(x) + self.a(x)
        return output


@pytest.mark.parametrize("settings", [{}, {"compile": True}], ids=str)
@pytest.mark.parametrize("way", ["class", "global", "default", "closure"])
def test_a_module_that_computes_with_its_own_parameters(way: str, settings: Any) -> None:
    """Is refused: they would not train. No matter if they require grad, or are recorded."""
    for frozen in (False, True):
        module = Elsewhere(way).double().requires_grad_(not frozen)
        params, apply = ps.from_module(module, trainable="*")
        with pytest.raises(
            ValueError, match=r"computes with a\.(weight|bias) of the module itself"
        ):
            train(apply, params, **settings)
        with torch.no_grad(), pytest.raises(ValueError, match="of the module itself"):
            apply.eval(params, data())
        # Those are the params that are passed, here.
        assert torch.equal(apply(dict(module.named_parameters()), data()), module(data()))


def test_names_of_globals_are_no_references() -> None:
    """A wrapper whose ``__init__`` names the layer that it is given."""
    space: dict[str, Any] = {"nn": nn, "backbone": nn.Linear(D, D)}
    exec(
        "class Wrapper(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.backbone = backbone\n"
        "    def forward(self, x):\n"
        "        return self.backbone(x)\n",
        space,
    )
    params, apply = ps.from_module(space["Wrapper"]())
    x = torch.ones(2, D)
    assert torch.equal(apply(params, x), space["backbone"](x))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.a.weight, nn.Parameter)
        output: Tensor = self.a(x)
        return output


def test_parameters_are_parameters_inside() -> None:
    params, apply = ps.from_module(Asking().double())
    assert_equal(
        grads(apply, params, data()), grads(ps.from_module(nn_of(params))[1], params, data())
    )
    assert torch.func.grad(lambda p: apply(p, data()).sum())(params).keys() == params.keys()


def nn_of(params: Params) -> nn.Module:
    module = nn.Sequential(OrderedDict(a=nn.Linear(D, D).double()))
    ps.to_module(params, module)
    return module


def test_what_a_class_caches_does_not_keep_calls() -> None:
    params, apply = ps.from_module(made("helped"))
    mine = {name: p.clone() for name, p in params.items()}
    last = weakref.ref(mine["a.weight"])
    apply(mine, data())
    mine.clear()
    gc.collect()
    assert last() is None


class Config:
    def __init__(self) -> None:
        self.widths = [D, D]


class Configured(nn.Module):
    """Shares a list with an object that is not the module's, and has hooks that no call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.widths = self.config.widths
        self.a = nn.Linear(self.widths[0], self.widths[1])
        self.register_load_state_dict_pre_hook(self.hook)
        self.register_load_state_dict_post_hook(self.hook)
        self.register_state_dict_pre_hook(self.hook)

    def hook(self, *_: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.widths.append(1)
        output: Tensor = self.a(x) * len(self.widths)
        return output


def test_containers_that_others_hold_too() -> None:
    module = Configured().double()
    params, apply = ps.from_module(module)
    first = apply(params, data())
    assert torch.equal(apply(params, data()), first)
    assert module.widths == [D, D]
    assert torch.equal(module(data()), first)
