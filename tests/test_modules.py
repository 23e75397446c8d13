"""``from_module``: the module's own outputs and gradients, to the bit, the module as it was; what is refused by name."""

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import purestep as ps
from tests import modules
from tests.modules import (
    D,
    Of,
    assert_equal,
    close,
    data,
    grads,
    linear,
    losses,
    made,
    train,
)


def look(module: nn.Module) -> list[Any]:
    """All that can be seen of a module, by identity, and its values."""
    found: list[Any] = [value.tolist() for value in module.state_dict().values()]
    for each in module.modules():
        for key, value in vars(each).items():
            parts = value.items() if isinstance(value, dict) else enumerate([value])
            parts = enumerate(value) if isinstance(value, list) else parts
            found += [(key, id(value)), *[(name, id(part)) for name, part in parts]]
    return found


@pytest.mark.parametrize("name", modules.MODULES)
def test_gradients_are_the_modules_own(name: str) -> None:
    module, x = made(name), data()
    before = look(module)
    params, apply = ps.from_module(module)
    found = grads(apply, params, x)
    assert look(module) == before
    assert all(p.grad is None for p in module.parameters())
    assert all(not p.requires_grad and type(p) is Tensor for p in params.values())
    assert_equal(found, modules.backward(module, x))


@pytest.mark.parametrize(
    "name", ["self-referring", "tied", "parametrized", "LSTM", "attention"]
)
def test_transforms(name: str) -> None:
    module, x = made(name), data()
    params, apply = ps.from_module(module)

    def loss(p: Any) -> Tensor:
        return losses(apply(p, x)).sum()

    grad = torch.func.grad(loss)
    trained = {n: g for n, g in modules.backward(module, x).items() if n in params}
    assert close(grad(params), trained)
    if name in ("LSTM", "attention", "parametrized"):
        return  # torch has no rules for some of their operations under vmap and jvp.
    many = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    at_once = torch.vmap(grad)(many)
    for index in (0, 1):
        alone = grad({name: p[index] for name, p in many.items()})
        assert close({name: g[index] for name, g in at_once.items()}, alone)
    along = torch.func.jvp(loss, (params,), (params,))[1]
    slope = sum((g * params[name]).sum() for name, g in grad(params).items())
    assert close({"": along}, {"": torch.as_tensor(slope)})


def test_what_trains_is_chosen_and_tied_params_are_one() -> None:
    module = made("tied")
    params, apply = ps.from_module(module)
    assert [*params] == ["a.weight", "a.bias", "c.bias"]
    assert [*ps.from_module(module, trainable="c.weight")[0]] == ["a.weight"]
    with pytest.raises(
        ValueError, match=r"trainable='\*\.wight' .* a\.weight, a\.bias, "
    ):
        ps.from_module(module, trainable="*.wight")
    module = made("checkpointed")
    assert [*ps.from_module(module)[0]] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert [*ps.from_module(module, trainable="*.bias")[0]] == [
        "a.bias",
        "b.bias",
        "frozen.bias",
    ]
    params, apply = ps.from_module(
        module, trainable=lambda name, p: p.ndim == 2 and "b" in name
    )
    assert [*params] == ["b.weight"]

    def scaled(p: Any, x: Tensor) -> Any:
        return apply({name: 1 * leaf for name, leaf in p.items()}, x)

    wanted = modules.backward(module, data())["b.weight"]
    for each in (apply, scaled):
        assert torch.equal(grads(each, params, data())["b.weight"], wanted)


def test_evaluation() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    module[1].eval()
    params, apply = ps.from_module(module)
    output = apply.eval(params, data())
    evaluate = ps.make_eval_step(
        lambda p, x: losses(apply.eval(p, x)), weight_fn=modules.ones
    )
    loss = evaluate(params, [data()]).loss
    assert module.training
    with torch.no_grad():
        wanted = module.eval()(data())
    assert torch.equal(output, wanted)
    assert torch.equal(loss, losses(wanted).sum() / 4)
    assert apply.eval.eval is apply.eval


def test_params_are_written_back() -> None:
    module = made("tied")
    params, apply = ps.from_module(module)
    doubled = {name: 2 * p for name, p in params.items()}
    pointers = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(ValueError, match="no place for other"):
        ps.to_module({"other": data()}, module)
    with pytest.raises(
        ValueError, match=r"c\.bias is .* of shape \(1,\), and the module's is tor"
    ):
        ps.to_module({**doubled, "c.bias": params["c.bias"][:1]}, module)
    assert torch.equal(module.a.bias, params["a.bias"])
    ps.to_module(doubled, module)
    assert torch.equal(module(data()), apply(doubled, data()))
    ps.to_module({"c.bias": params["c.bias"]}, module)
    assert torch.equal(module.c.bias, params["c.bias"])
    assert torch.equal(module.a.weight, doubled["a.weight"])
    assert [p.data_ptr() for p in module.parameters()] == pointers
    module.a.register_buffer("n", torch.zeros(1))
    module.d = module.a
    ps.to_module({"d.bias": params["a.bias"]}, module, buffers={"d.n": torch.ones(1)})
    assert torch.equal(module.a.n + module.a.bias, 1 + params["a.bias"])


def test_checkpoints_compute_again_with_the_params_of_their_call() -> None:
    """Also when ``apply`` is called with others before the backward pass."""
    results: list[Any] = []
    for name in ("checkpointed", "kept"):
        params, apply = ps.from_module(made(name))
        one = {name: p.clone().requires_grad_() for name, p in params.items()}
        two = {name: (2 * p).requires_grad_() for name, p in params.items()}
        first, second = (
            losses(apply(one, data())).sum(),
            losses(apply(two, data())).sum(),
        )
        apply({name: 3 * p for name, p in one.items()}, data())
        (first * second).backward()
        results.append(
            {f"{n} {i}": p[n].grad for i, p in enumerate((one, two)) for n in p}
        )
    assert_equal(*results)


GRAPHS = [
    "collections",
    "tied",
    "parametrized",
    "attention",
    "keeping",
    "helped",
    "checkpointed",
]


@pytest.mark.parametrize("name", GRAPHS)
def test_compiled_it_is_one_graph(name: str, fresh_compiler: None) -> None:
    """But for hooks and objects that lead back to the module. It keeps neither params nor module."""
    module, x = made(name), data()
    params, apply = ps.from_module(module)
    before = [id(p) for p in module.parameters()]
    compiled = modules.traced(apply)
    for scale in (1, 2):
        there = {name: scale * p for name, p in params.items()}
        assert torch.equal(compiled(there, x), apply(there, x))
    assert [id(p) for p in module.parameters()] == before
    last = weakref.ref(there.pop(next(iter(params))))
    gc.collect()
    assert last() is None


def test_steps_compiled_and_donated(fresh_compiler: None) -> None:
    """Where there is no one graph, as of checkpoints from torch 2.12 on, the step is eager: nothing was swapped."""
    for name in ("tied", "checkpointed"):
        params, apply = ps.from_module(made(name))
        plain = train(apply, params)
        assert_equal(train(apply, params, donate=True), plain)
        refused = pytest.warns(UserWarning, match="cannot make one graph")
        gives_up = name == "checkpointed" and torch.__version__ >= "2.12"
        with refused if gives_up else nullcontext():
            assert close(
                train(apply, params, compile=modules.TRACED, donate=True), plain
            )
        assert_equal(train(apply, params), plain)


def test_hooks_on_the_backward_pass_are_not_compiled(fresh_compiler: None) -> None:
    params, apply = ps.from_module(made("hooked"))
    plain = train(apply, params)
    with pytest.raises(Exception, match="leaves hooks on a module's backward pass out"):
        modules.traced(apply)(params, data())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        assert close(train(apply, params, compile=modules.TRACED), plain)


class FSDPModule:
    """As the class that ``fully_shard`` puts before a module's own is named."""


Sharded = type("Sharded", (FSDPModule, nn.Linear), {})


def masked(way: str = "register_hook") -> nn.Module:
    module = linear()
    getattr(module.weight, way)(lambda _: None)
    return module


def aliased() -> nn.Module:
    first, second = linear(), linear()
    second.weight.data = first.weight.data[:D]
    return nn.Sequential(first, second)


def viewed() -> nn.Module:
    module = linear()
    module.kept = [module.weight.t()]
    return module


def beside(other: Tensor) -> nn.Module:
    return Of(
        print, a=linear(), at=nn.Parameter(other, requires_grad=other.is_complex())
    )


REFUSED: list[tuple[Callable[[], Any], Any, type[Exception], str]] = [
    (lambda: nn.Sequential(nn.DataParallel(linear())), None, TypeError, r"Sequential\.0 is a DataParallel.* module\.module"),
    (lambda: Sharded(D, D), None, TypeError, r"Sharded is a FSDPModule, no plain module: pass a module that fully_shard"),
    (lambda: torch.compile(linear()), None, TypeError, r"is a OptimizedModule.* compile=True"),
    (lambda: type("Slotted", (nn.Linear,), {"__slots__": ("at",)})(D, D), None, TypeError, r"^Slotted has __slots__"),
    (lambda: {"w": torch.ones(1)}, None, TypeError, r"takes an nn\.Module, got dict"),
    (masked, None, TypeError, r"^weight has a hook on its gradient, .* Transform"),
    (lambda: masked("register_post_accumulate_grad_hook"), None, TypeError, r"^weight has a hook on its gradient, .* Transform"),
    (aliased, None, ValueError, r"^[01]\.weight, which trains, shares memory with [01]\.weight, .* one Parameter"),
    (aliased, "0.weight", ValueError, r"^0\.weight, which trains, shares memory with 1\.weight, .* one Parameter"),
    (viewed, None, ValueError, r"^weight, which trains, shares memory with kept\[0\], .* compute kept\[0\] in forward"),
    (lambda: beside(torch.ones(3, dtype=torch.complex64)), None, TypeError, r"chooses at, which is torch\.complex64 .* torch\.view_as_real\(p\)"),
    (lambda: beside(torch.arange(3)), "*", TypeError, r"chooses at, which is torch\.int64 .* leave it out"),
    (lambda: nn.LazyLinear(D), None, ValueError, r"^weight has no values yet: .* call a lazy module"),
    (lambda: nn.Linear(D, D, device="meta"), None, ValueError, r"^weight has no values yet: load it"),
    (linear, ["weight"], TypeError, r"^trainable=\['weight'\] must be a pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "trainable", "error", "message"), REFUSED)
def test_refused_modules_and_params(
    make: Any, trainable: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        ps.from_module(make(), trainable=trainable)


def test_what_is_no_matter() -> None:
    """Memory that is shared beside what trains, as of RNNs on a GPU; what leads to the module where no call goes."""
    assert [*ps.from_module(aliased(), trainable="*.bias")[0]] == ["0.bias", "1.bias"]
    module, both = linear(), torch.randn(D + 1, D)
    module.weight.data, module.bias.data = both[:D], both[D]
    module.seen = {module}
    module.register_state_dict_pre_hook(lambda *_: module.seen.clear())
    params, apply = ps.from_module(module)
    assert torch.equal(apply(params, both), module(both))
    normed = nn.utils.spectral_norm(
        linear()
    )  # whose weight is one of its parameters until a call
    params, apply = ps.from_module(normed)
    assert torch.equal(apply.eval(params, both), normed.eval()(both))


def test_refused_calls() -> None:
    x, (params, apply) = data(), ps.from_module(modules.normed().eval())
    less, more, buffers = (
        {"0.bias": params["0.bias"]},
        {**params, "other": x},
        {"other": x},
    )
    trained, untracked = ps.from_module(modules.normed())
    spectral, normalized = ps.from_module(
        parametrizations.spectral_norm(linear().double())
    )
    kept, checkpointed = ps.from_module(made("checkpointed"))
    grad, wrong = torch.func.grad(lambda p: checkpointed(p, x).sum()), cast(Any, x)
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: apply(less, x), ValueError, r"params lacks 0\.weight, 1\.weight, 1\.bias, and has no place for none"),
        (lambda: apply(more, x), ValueError, r"params lacks none, and has no place for other"),
        (lambda: apply(wrong), TypeError, r"params is a Tensor, no mapping by name: call apply\(params"),
        (lambda: apply(params, x, buffers=buffers), ValueError, r"buffers lacks none, and has no place for other"),
        (lambda: untracked(trained, x), ValueError, r"buffers lacks 1\.running_mean, .*buffers=dict\(module\.named_buffers"),
        (lambda: normalized(spectral, x), ValueError, r"writes to parametrizations\.weight\.0\._u"),
        (lambda: grad(kept), RuntimeError, "saved tensor hooks"),  # torch's own words
    ]  # fmt: skip
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
