"""``from_module``: the module's own outputs and gradients, to the bit, and the module as it was."""

import gc
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from tests import modules
from tests.memory import LiveBytes
from tests.modules import Of, assert_equal, close, data, grads, linear, losses, made, traced, train


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


@pytest.mark.parametrize("name", ["self-referring", "tied", "parametrized", "LSTM", "attention"])
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
    with pytest.raises(ValueError, match=r"trainable='\*\.wight' .* a\.weight, a\.bias, "):
        ps.from_module(module, trainable="*.wight")
    module = made("checkpointed")
    assert [*ps.from_module(module)[0]] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert [*ps.from_module(module, trainable="*.bias")[0]] == ["a.bias", "b.bias", "frozen.bias"]
    params, apply = ps.from_module(module, trainable=lambda name, p: p.ndim == 2 and "a" in name)
    assert [*params] == ["a.weight"]
    found = grads(apply, params, data())["a.weight"]
    assert torch.equal(found, modules.backward(module, data())["a.weight"])


def test_what_is_frozen_is_not_copied() -> None:
    """The whole step, and ``from_module``, make less than it."""
    frozen, optimizer = nn.Linear(512, 512).requires_grad_(False), ps.optim.adamw(1e-3)
    adapter = nn.Sequential(nn.Linear(512, 1), nn.Linear(1, 512))
    module = Of(lambda m, x: m.frozen(x) + m.adapter(x), frozen=frozen, adapter=adapter)
    x = torch.ones(2, 512)
    with LiveBytes() as live:
        params, apply = ps.from_module(module)
        of_rows = lambda p, x: losses(apply(p, x))  # noqa: E731
        step = ps.make_update_step(of_rows, optimizer, weight_fn=modules.ones)
        step(params, optimizer.init(params), [x, x])
    assert len(params) == 4
    assert 0 < live.peak < frozen.weight.nbytes / 10


def test_evaluation() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    module[1].eval()
    params, apply = ps.from_module(module)
    output = apply.eval(params, data())
    metrics = ps.make_eval_step(lambda p, x: losses(apply.eval(p, x)), weight_fn=modules.ones)(
        params, [data()]
    )
    assert module.training
    with torch.no_grad():
        wanted = module.eval()(data())
    assert torch.equal(output, wanted)
    assert torch.equal(metrics.loss, losses(wanted).sum() / 4)
    assert apply.eval.eval is apply.eval


def test_params_are_written_back() -> None:
    module = made("tied")
    params, apply = ps.from_module(module)
    doubled = {name: 2 * p for name, p in params.items()}
    pointers = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(ValueError, match="no place for other"):
        ps.to_module({"other": data()}, module)
    with pytest.raises(ValueError, match=r"c\.bias is .* of shape \(1,\), and the module's is tor"):
        ps.to_module({**doubled, "c.bias": params["c.bias"][:1]}, module)
    assert torch.equal(module.a.bias, params["a.bias"])
    ps.to_module(doubled, module)
    assert torch.equal(module(data()), apply(doubled, data()))
    ps.to_module({"c.bias": params["c.bias"]}, module)
    assert torch.equal(module.c.bias, params["c.bias"])
    assert torch.equal(module.a.weight, doubled["a.weight"])
    assert [p.data_ptr() for p in module.parameters()] == pointers


def test_checkpoints_compute_again_with_the_params_of_their_call() -> None:
    """Also when ``apply`` is called with others before the backward pass."""
    results: list[Any] = []
    for name in ("checkpointed", "kept"):
        params, apply = ps.from_module(made(name))
        one = {name: p.clone().requires_grad_() for name, p in params.items()}
        two = {name: (2 * p).requires_grad_() for name, p in params.items()}
        first, second = losses(apply(one, data())).sum(), losses(apply(two, data())).sum()
        apply({name: 3 * p for name, p in one.items()}, data())
        (first * second).backward()
        results.append({f"{n} {i}": p[n].grad for i, p in enumerate((one, two)) for n in p})
    assert_equal(*results)


@pytest.mark.parametrize(
    "name", sorted({*modules.MODULES} - {"self-referring", "hooked", "patched"})
)
def test_compiled_it_is_one_graph(name: str, fresh_compiler: None) -> None:
    """But for hooks and objects that lead back to the module. It keeps neither params nor module."""
    module, x = made(name), data()
    params, apply = ps.from_module(module)
    before = [id(p) for p in module.parameters()]
    compiled = traced(apply)
    for scale in (1, 2):
        there = {name: scale * p for name, p in params.items()}
        assert torch.equal(compiled(there, x), apply(there, x))
    assert [id(p) for p in module.parameters()] == before
    last = weakref.ref(there.pop(next(iter(params))))
    gc.collect()
    assert last() is None


def test_steps_compiled_and_donated(fresh_compiler: None) -> None:
    """Where there is no one graph, as of checkpoints, the step is eager: nothing was swapped."""
    for name in ("tied", "checkpointed"):
        params, apply = ps.from_module(made(name))
        plain = train(apply, params)
        assert_equal(train(apply, params, donate=True), plain)
        refused = pytest.warns(UserWarning, match="cannot make one graph")
        with refused if name == "checkpointed" else nullcontext():
            assert close(train(apply, params, compile=modules.TRACED, donate=True), plain)
        assert_equal(train(apply, params), plain)


def test_hooks_on_the_backward_pass_are_not_compiled(fresh_compiler: None) -> None:
    params, apply = ps.from_module(made("hooked"))
    plain = train(apply, params)
    with pytest.raises(Exception, match="leaves hooks on a module's backward pass out"):
        traced(apply)(params, data())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        assert close(train(apply, params, compile=modules.TRACED), plain)
