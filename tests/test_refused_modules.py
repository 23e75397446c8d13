"""Modules, params and calls that ``from_module`` refuses by name, with the way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import purestep as ps
from tests.modules import D, Of, data, linear, made, normed


class FSDPModule:
    """As the class that ``fully_shard`` puts before a module's own is named."""


class Sharded(FSDPModule, nn.Linear):
    pass


def masked() -> nn.Module:
    module = linear()
    module.weight.register_hook(lambda grad: grad * 0)
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
    return Of(print, a=linear(), at=nn.Parameter(other, requires_grad=other.is_complex()))


def refuses(error: type[Exception], message: str, run: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(error, match=message):
        run(*args)


@pytest.mark.parametrize(
    ("make", "trainable", "error", "message"),
    [
        (lambda: nn.Sequential(nn.DataParallel(linear())), None, TypeError, r"Sequential\.0 is a DataParallel.* module\.module"),
        (lambda: Sharded(D, D), None, TypeError, r"Sharded is a FSDPModule, no plain module: pass a module that fully_shard"),
        (lambda: torch.compile(linear()), None, TypeError, r"is a OptimizedModule.* compile=True"),
        (lambda: {"w": torch.ones(1)}, None, TypeError, r"takes an nn\.Module, got dict"),
        (masked, None, TypeError, r"^weight has a hook on its gradient, .* Transform"),
        (aliased, None, ValueError, r"^[01]\.weight, which trains, shares memory with [01]\.weight, .* one Parameter"),
        (aliased, "0.weight", ValueError, r"^0\.weight, which trains, shares memory with 1\.weight, .* one Parameter"),
        (viewed, None, ValueError, r"^weight, which trains, shares memory with kept\[0\], .* compute kept\[0\] in forward"),
        (lambda: beside(torch.ones(3, dtype=torch.complex64)), None, TypeError, r"chooses at, which is torch\.complex64 .* torch\.view_as_real\(p\)"),
        (lambda: beside(torch.arange(3)), "*", TypeError, r"chooses at, which is torch\.int64 .* leave it out"),
        (lambda: nn.LazyLinear(D), None, ValueError, r"^weight has no values yet: .* call a lazy module"),
        (lambda: nn.Linear(D, D, device="meta"), None, ValueError, r"^weight has no values yet: load it"),
        (linear, ["weight"], TypeError, r"^trainable=\['weight'\] must be a pattern"),
    ],
)  # fmt: skip
def test_refused_modules_and_params(
    make: Callable[[], nn.Module], trainable: Any, error: type[Exception], message: str
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


def test_refused_calls() -> None:
    x = data()
    params, apply = ps.from_module(normed().eval())
    less, more = {"0.bias": params["0.bias"]}, {**params, "other": x}
    lacks = r"params lacks 0\.weight, 1\.weight, 1\.bias, and has no place for none"
    refuses(ValueError, lacks, apply, less, x)
    refuses(ValueError, r"params lacks none, and has no place for other", apply, more, x)
    refuses(TypeError, r"params is a Tensor, no mapping by name: call apply\(params", apply, x)
    with pytest.raises(ValueError, match=r"buffers lacks none, and has no place for other"):
        apply(params, x, buffers={"other": x})
    params, apply = ps.from_module(normed())
    lacks = r"buffers lacks 1\.running_mean, .*buffers=dict\(module\.named_buffers"
    refuses(ValueError, lacks, apply, params, x)
    params, apply = ps.from_module(parametrizations.spectral_norm(linear().double()))
    refuses(ValueError, r"writes to parametrizations\.weight\.0\._u", apply, params, x)
    params, apply = ps.from_module(made("checkpointed"))
    grad = torch.func.grad(lambda p: apply(p, x).sum())
    refuses(RuntimeError, "saved tensor hooks", grad, params)  # torch's own words
