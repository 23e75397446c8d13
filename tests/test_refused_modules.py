"""Modules, params and calls that ``from_module`` refuses by name, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import purestep as ps
from tests.modules import D, data, made, normed


class FSDPModule:
    """As the class that ``fully_shard`` puts before a module's own is named."""


class Sharded(FSDPModule, nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.DataParallel(nn.Linear(D, D))), r"Sequential\.0 is a DataParallel.* module\.module"),
        (lambda: Sharded(D, D), r"Sharded is a FSDPModule, no plain module: pass a module that fully_shard"),
        (lambda: torch.compile(nn.Linear(D, D)), r"is a OptimizedModule.* compile=True"),
        (lambda: {"w": torch.ones(1)}, r"takes an nn\.Module, got dict"),
    ],
)  # fmt: skip
def test_refused_modules(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ps.from_module(make())


def masked() -> nn.Module:
    module = nn.Linear(D, D)
    module.weight.register_hook(lambda grad: grad * 0)
    return module


def aliased() -> nn.Module:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight.data = first.weight.data[:D]
    return nn.Sequential(first, second)


class Viewed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.kept = [self.weight.t()]


class Complex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.at = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Indexed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.at = nn.Parameter(torch.arange(3), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "trainable", "error", "message"),
    [
        (masked, None, TypeError, r"^weight has a hook on its gradient, .* Transform"),
        (aliased, None, ValueError, r"^[01]\.weight, which trains, shares memory with [01]\.weight, .* one Parameter"),
        (aliased, "0.weight", ValueError, r"^0\.weight, which trains, shares memory with 1\.weight, .* one Parameter"),
        (Viewed, None, ValueError, r"^weight, which trains, shares memory with kept\[0\], .* in forward"),
        (Complex, None, TypeError, r"chooses at, which is torch\.complex64 .* torch\.view_as_real\(p\)"),
        (Indexed, "*", TypeError, r"chooses at, which is torch\.int64 .* leave it out"),
        (lambda: nn.LazyLinear(D), None, ValueError, r"^weight has no values yet: .* call a lazy module"),
        (lambda: nn.Linear(D, D, device="meta"), None, ValueError, r"^weight has no values yet: load it"),
        (lambda: nn.Linear(D, D), ["weight"], TypeError, r"^trainable=\['weight'\] must be a pattern"),
    ],
)  # fmt: skip
def test_refused_params(
    make: Callable[[], nn.Module], trainable: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ps.from_module(make(), trainable=trainable)


def test_what_shares_memory_and_does_not_train() -> None:
    """Or lies beside what trains, as the weights of an RNN do on a GPU."""
    assert [*ps.from_module(aliased(), trainable="*.bias")[0]] == ["0.bias", "1.bias"]
    module, both = nn.Linear(D, D), torch.randn(D + 1, D)
    module.weight.data, module.bias.data = both[:D], both[D]
    params, apply = ps.from_module(module)
    assert torch.equal(apply(params, both), module(both))


def test_refused_calls() -> None:
    params, apply = ps.from_module(normed().eval())
    bias = {"0.bias": params["0.bias"]}
    with pytest.raises(
        ValueError, match=r"params lacks 0\.weight, 1\.weight, 1\.bias, and has no place for none"
    ):
        apply(bias, data())
    with pytest.raises(ValueError, match=r"params lacks none, and has no place for other"):
        apply({**params, "other": data()}, data())
    with pytest.raises(ValueError, match=r"buffers lacks none, and has no place for other"):
        apply(params, data(), buffers={"other": data()})

    params, apply = ps.from_module(normed())
    with pytest.raises(
        ValueError, match=r"buffers lacks 1\.running_mean, .*buffers=dict\(module\.named_buffers"
    ):
        apply(params, data())
    params, apply = ps.from_module(parametrizations.spectral_norm(nn.Linear(D, D).double()))
    with pytest.raises(ValueError, match=r"writes to parametrizations\.weight\.0\._u"):
        apply(params, data())

    params, apply = ps.from_module(made("checkpointed"))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):  # torch's own words
        torch.func.grad(lambda p: apply(p, data()).sum())(params)


def test_what_no_call_uses_is_no_matter() -> None:
    """Whatever leads to the module from there."""
    module: Any = nn.Sequential(nn.Linear(D, D))
    module.seen = {module[0]}
    module.register_state_dict_pre_hook(lambda *_: module.seen.clear())
    params, apply = ps.from_module(module)
    assert torch.equal(apply(params, torch.ones(D)), module(torch.ones(D)))
