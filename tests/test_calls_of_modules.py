"""Nothing of a call of ``apply`` stays in the module, in the next call or in memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from tests.modules import (
    TRACED,
    Of,
    Params,
    assert_equal,
    close,
    data,
    grads,
    linear,
    made,
    train,
)


@pytest.mark.parametrize("name", ["self-referring", "checkpointed", "tied"])
def test_threads_do_not_meet(name: str) -> None:
    """Ranks with their own params, all at once through one ``apply``."""
    params, apply = ps.from_module(made(name))
    ranks = [{name: p * (1 + rank) for name, p in params.items()} for rank in range(4)]
    wanted = [grads(apply, mine, data()) for mine in ranks]
    on_ranks = ps.testing.ThreadAxis(4).map(lambda p: grads(apply, p, data()))
    for _ in range(10):
        for found, right in zip(on_ranks(ranks), wanted, strict=True):
            assert_equal(found, right)


@pytest.mark.parametrize("name", ["checkpointed", "helped"])
def test_nothing_is_kept_of_a_call(name: str) -> None:
    """Neither its params nor its module, once the output is gone, also where a class caches."""
    params, apply = ps.from_module(made(name))
    mine = {name: p.clone().requires_grad_() for name, p in params.items()}
    output = apply(mine, data())
    last = weakref.ref(mine["a.weight"])
    mine.clear()
    assert last() is not None
    output.sum().backward()
    del output
    if name == "helped":  # It refers to itself.
        gc.collect()
    assert last() is None


@pytest.mark.parametrize(
    "settings", [{}, {"compile": TRACED}], ids=["eager", "compiled"]
)
def test_what_a_call_leaves_behind_is_gone_in_the_next(
    settings: Any, fresh_compiler: None
) -> None:
    """Another object holds a list of the module, and keeps it."""
    module = made("keeping")
    params, apply = ps.from_module(module)

    def eight(p: Params, x: Tensor) -> Tensor:
        return functional.linear(x, p["a.weight"], p["a.bias"]) * 8

    assert close(train(apply, params, **settings), train(eight, params))
    assert torch.equal(apply(params, data()), eight(params, data()))
    assert (module.calls, module.log, module.nested) == (0, [1], {"log": [1]})
    assert module.config.module is module.log
    assert module.tensor == 1
    assert not hasattr(module, "last")


def average(module: Any) -> None:
    with torch.no_grad():
        module.frozen.weight.lerp_(module.a.weight, 0.1)


def statistic(m: Any) -> object:
    return functional.batch_norm(
        torch.ones(2, 3), m.buffer, torch.ones(3), training=True
    )


WRITES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "buffer": ("buffer", lambda m: m.buffer.add_(1)),
    "tensor": ("tensor", lambda m: m.tensor.add_(1)),
    "tensor in a list": (r"log\[0\]", lambda m: m.log[0].add_(1)),
    "buffer.data": ("buffer", lambda m: m.buffer.data.add_(1)),
    "assigned buffer.data": (
        "buffer",
        lambda m: setattr(m.buffer, "data", torch.ones(2)),
    ),
    "assigned buffer": ("buffer", lambda m: setattr(m, "buffer", m.buffer + 1)),
    "module in a tuple": (
        r"hidden\[0\].*\[weight\]",
        lambda m: m.hidden[0].weight.data.add_(1),
    ),
    "a result": ("tensor", lambda m: torch.add(m.tensor, 1, out=m.tensor)),
    "an average": ("frozen.weight", average),
    "a statistic": ("buffer", statistic),
    "param.data": ("a.weight", lambda m: m.a.weight.data.clamp_(-0.1, 0.1)),
    "assigned param.data": (
        "a.weight",
        lambda m: setattr(m.a.weight, "data", m.frozen.weight + 0),
    ),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_module_that_writes_to_its_tensors(way: str) -> None:
    """Is refused before it has done so, and again; compiled, and under a transform, too."""
    message, write = WRITES[way]

    def run(m: Any, x: Tensor) -> Tensor:
        write(m)
        return m.a(x) + m.frozen(x)

    module: Any = Of(run, a=linear(), frozen=linear(train=False)).double()
    module.register_buffer("buffer", torch.ones(3))
    module.tensor, module.log, module.hidden = (
        torch.ones(3),
        [torch.ones(3)],
        (linear(),),
    )
    params, apply = ps.from_module(module)
    kept = [
        *params.values(),
        *module.parameters(),
        module.buffer,
        module.tensor,
        *module.log,
    ]
    kept += module.hidden[0].parameters()
    before = [each.clone() for each in kept]
    for settings in ({}, {}, {"compile": TRACED}):
        with pytest.raises(ValueError, match=f"the module writes to {message}: "):
            train(apply, params, **settings)
    if way in ("buffer", "tensor", "an average"):
        with pytest.raises(
            (ValueError, RuntimeError), match=r"module writes to|captured Tensor"
        ):
            torch.func.grad(lambda p: apply(p, data()).sum())(params)
    assert all(map(torch.equal, kept, before))


@pytest.mark.parametrize("calls", [[False, True], [None, "now"], [1], []])
def test_calls_of_another_kind_are_looked_at(calls: Any) -> None:
    """With other flags, or more arguments; and those that autograd records."""

    def run(m: Any, x: Tensor, *writes: Any) -> Tensor:
        if any(writes) if calls else torch.is_grad_enabled():
            m.buffer.add_(1)
        return m.a(x)

    module: Any = Of(run, a=linear()).double()
    module.register_buffer("buffer", torch.ones(3))
    params, apply = ps.from_module(module)
    with torch.no_grad():
        for quiet in ([], *([each] for each in calls[:-1])):
            apply(params, data(), *quiet)
    with pytest.raises(ValueError, match="the module writes to buffer: "):
        apply(params, data(), *calls[-1:])
    assert module.buffer.eq(1).all()


REGISTRY: dict[str, nn.Module] = {}


class Elsewhere(Of):
    """Computes with a layer that it finds outside of its attributes."""

    layers: ClassVar[list[nn.Module]] = []


def elsewhere(way: str) -> nn.Module:
    layer = REGISTRY["layer"] = linear()
    Elsewhere.layers[:] = [layer]
    runs: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "class": lambda m, x: m.layers[0](x) + m.a(x),
        "global": lambda m, x: REGISTRY["layer"](x) + m.a(x),
        "default": lambda m, x, default=layer: default(x) + m.a(x),  # type: ignore[misc]
        "closure": lambda m, x: layer(x) + m.a(x),
    }
    return Elsewhere(runs[way], a=layer).double()


@pytest.mark.parametrize("way", ["class", "global", "default", "closure"])
def test_a_module_that_computes_with_its_own_parameters(way: str) -> None:
    """Is refused: they would not train. No matter if they require grad, or are recorded."""
    for frozen in (False, True):
        module = elsewhere(way).requires_grad_(not frozen)
        params, apply = ps.from_module(module, trainable="*")
        for settings in ({}, {"compile": TRACED}):
            with pytest.raises(
                ValueError, match=r"with a\.(weight|bias) of the module itself"
            ):
                train(apply, params, **settings)
        with torch.no_grad(), pytest.raises(ValueError, match="of the module itself"):
            apply.eval(params, data())
        # Those are the params that are passed, here.
        assert torch.equal(
            apply(dict(module.named_parameters()), data()), module(data())
        )


def test_parameters_are_parameters_inside() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        assert isinstance(m.a.weight, nn.Parameter)
        return m.a(x)

    params, apply = ps.from_module(Of(run, a=linear()).double())
    assert grads(apply, params, data()).keys() == params.keys()
    assert (
        torch.func.grad(lambda p: apply(p, data()).sum())(params).keys()
        == params.keys()
    )
