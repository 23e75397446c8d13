"""``from_module``: the module's own outputs and gradients, to the bit, and the module as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from tests.memory import LiveBytes
from tests.modules import (
    MODULES,
    D,
    Params,
    assert_equal,
    backward,
    close,
    data,
    grads,
    losses,
    made,
    ones,
)


def look(module: nn.Module) -> list[Any]:
    """All that can be seen of a module, by identity, and its values."""
    seen: list[Any] = [value.clone() for value in module.state_dict().values()]
    for each in module.modules():
        seen += [(key, id(value)) for key, value in vars(each).items()]
        seen += [list(map(id, value)) for value in vars(each).values() if isinstance(value, list)]
        seen += [
            [(key, id(part)) for key, part in value.items()]
            for value in vars(each).values()
            if isinstance(value, dict)
        ]
    return seen


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_the_modules_own(name: str) -> None:
    module, x = made(name), data()
    before = look(module)
    params, apply = ps.from_module(module)
    given = grads(apply, params, x)
    after = look(module)
    assert all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )
    assert all(p.grad is None for p in module.parameters())
    assert all(not p.requires_grad and type(p) is Tensor for p in params.values())
    assert_equal(given, backward(module, x))


@pytest.mark.parametrize("name", ["self-referring", "tied", "parametrized", "LSTM", "attention"])
def test_transforms(name: str) -> None:
    module, x = made(name), data()
    params, apply = ps.from_module(module)

    def loss(p: Params) -> Tensor:
        return losses(apply(p, x)).sum()

    grad = torch.func.grad(loss)
    trained = {name: g for name, g in backward(module, x).items() if name in params}
    assert close(grad(params), trained)
    if name in ("LSTM", "attention", "parametrized"):
        return  # torch has no rules for some of their operations under vmap and jvp.
    two = [params, {name: 2 * p for name, p in params.items()}]
    many = {name: torch.stack([p[name] for p in two]) for name in params}
    at_once = torch.vmap(grad)(many)
    for index, each in enumerate(two):
        assert close({name: g[index] for name, g in at_once.items()}, grad(each))
    along = torch.func.jvp(loss, (params,), (params,))[1]
    slope = sum((g * params[name]).sum() for name, g in grad(params).items())
    assert close({"": along}, {"": torch.as_tensor(slope)})


def test_ranks_that_are_simulated() -> None:
    params, apply = ps.from_module(made("tied"))
    axis, sgd = ps.VmapAxis(2), ps.optim.sgd(1.0)

    def loss_fn(p: Params, x: Tensor) -> Tensor:
        return losses(apply(p, x))

    step = ps.make_update_step(loss_fn, sgd, weight_fn=ones, axis=axis)
    on_ranks = axis.map(step, in_dims=(None, None, 0), out_dims=None)
    new, _, _ = on_ranks(params, sgd.init(params), [data().unflatten(0, (2, 2))])
    alone = ps.make_update_step(loss_fn, sgd, weight_fn=ones)
    assert close(new, alone(params, sgd.init(params), [data()])[0])


def test_tied_params_are_one() -> None:
    module = made("tied")
    params, apply = ps.from_module(module)
    assert [*params] == ["a.weight", "a.bias", "c.bias"]
    assert [*ps.from_module(module, trainable="c.weight")[0]] == ["a.weight"]
    doubled = {name: 2 * p for name, p in params.items()}
    output = apply(doubled, data())
    ps.to_module(doubled, module)
    assert torch.equal(module(data()), output)


def test_what_trains_is_chosen() -> None:
    module = made("checkpointed")
    assert [*ps.from_module(module)[0]] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert [*ps.from_module(module, trainable="*.bias")[0]] == ["a.bias", "b.bias", "frozen.bias"]
    params, apply = ps.from_module(module, trainable=lambda name, p: p.ndim == 2 and "a" in name)
    assert [*params] == ["a.weight"]
    assert torch.equal(
        grads(apply, params, data())["a.weight"], backward(module, data())["a.weight"]
    )
    with pytest.raises(ValueError, match=r"trainable='\*\.wight' .* a\.weight, a\.bias, "):
        ps.from_module(module, trainable="*.wight")


class Adapted(nn.Module):
    """A frozen product of matrices, and a small one beside it that trains."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 1), nn.Linear(1, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def test_what_is_frozen_is_not_copied() -> None:
    """The whole step, and ``from_module``, make less than it."""
    module, x, optimizer = Adapted(), torch.ones(2, 512), ps.optim.adamw(1e-3)
    with LiveBytes() as live:
        params, apply = ps.from_module(module)
        step = ps.make_update_step(lambda p, x: losses(apply(p, x)), optimizer, weight_fn=ones)
        step(params, optimizer.init(params), [x, x])
    assert [*params] == ["down.weight", "down.bias", "up.weight", "up.bias"]
    assert 0 < live.peak < module.frozen.weight.nbytes / 10


def test_evaluation() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5)).double()
    module[1].eval()
    params, apply = ps.from_module(module)
    output = apply.eval(params, data())
    metrics = ps.make_eval_step(lambda p, x: losses(apply.eval(p, x)), weight_fn=ones)(
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
    params, _ = ps.from_module(module)
    pointers = [p.data_ptr() for p in module.parameters()]
    ps.to_module({"c.bias": params["c.bias"] + 1}, module)
    assert torch.equal(module.c.bias, params["c.bias"] + 1)
    assert torch.equal(module.a.weight, params["a.weight"])
    assert [p.data_ptr() for p in module.parameters()] == pointers
    with pytest.raises(ValueError, match="no place for other"):
        ps.to_module({"other": data()}, module)
    with pytest.raises(
        ValueError,
        match=r"c\.bias is torch\.float64 of shape \(1,\), and the module's is torch",
    ):
        ps.to_module({"a.bias": params["a.bias"] + 1, "c.bias": params["c.bias"][:1]}, module)
    assert torch.equal(module.a.bias, params["a.bias"])
