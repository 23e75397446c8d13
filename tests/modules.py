"""Modules of every kind, a step on them, and what their gradients are compared with."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import purestep as ps

D = 6
Params = dict[str, Tensor]


class SelfReferring(nn.Module):
    """Holds its parts, its methods and itself in all places where Python lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.method = self.helper
        self.partial = functools.partial(self.helper, times=3)
        self.listed, self.nested = [self.a], {"a": (self.a.weight, [self.a.bias])}
        self.me = weakref.ref(self)

    def helper(self, x: Tensor, times: int = 1) -> Tensor:
        return self.a(x) * times

    def forward(self, x: Tensor) -> Tensor:
        weight, (bias,) = self.nested["a"]
        called = self.method(x) + self.partial(x) + self.listed[0](x)
        me = self.me()
        assert me is self
        return called + x @ weight + bias + me.a(x)


class Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(D, D)) for _ in range(3)])
        self.v = nn.ParameterDict({"x": nn.Parameter(torch.randn(D))})

    def forward(self, x: Tensor) -> Tensor:
        for w in self.w:
            x = (x @ w).tanh()
        return x * self.v["x"]


class Forwarding(nn.Module):
    """Finds in a part what it lacks itself, as wrappers of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b, self.c = self.a, nn.Linear(D, D)
        self.c.weight = self.a.weight
        self.both = nn.Sequential(self.a, nn.Tanh(), self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.both(self.c(x)))


def doubled(module: nn.Module, given: Any, got: Any) -> Any:
    return tuple(2 * each for each in given)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.a.register_forward_hook(self.more)
        self.b.register_forward_pre_hook(lambda m, inputs: (inputs[0] * m.weight.sum(),))
        self.b.register_full_backward_hook(doubled)

    def more(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        made: Tensor = output * 2 + self.b(output)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def parametrized() -> nn.Module:
    symmetric = nn.Linear(D, D)
    parametrize.register_parametrization(symmetric, "weight", Symmetric())
    return nn.Sequential(
        symmetric,
        parametrizations.weight_norm(nn.Linear(D, D)),
        parametrizations.orthogonal(nn.Linear(D, D)),
    )


def weight_normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        module: nn.Module = nn.utils.weight_norm(nn.Linear(D, D))
    return module


class Recurrent(nn.Module):
    def __init__(
        self, kind: Callable[..., nn.RNNBase], frozen: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        self.r = kind(D, D, num_layers=2, batch_first=True, **settings)
        self.r.weight_hh_l0.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.r(x[:, None])[0][:, 0]
        return output


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.MultiheadAttention(D, 2, batch_first=True)
        self.t = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].repeat(1, 3, 1)
        output: Tensor = self.t(self.m(x, x, x)[0])[:, 0]
        return output


class Keeping(nn.Module):
    """Keeps what it should not."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls, self.seen = nn.Linear(D, D), 0, {"last": 0}
        self.log: list[Tensor] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        self.calls += 1
        self.seen["last"] = self.calls
        self.count = self.count + 1
        self.register_buffer("new", x)
        self.last = x
        return self.a(x)


class Patched(nn.Module):
    """Its parts' ``forward`` is replaced, as libraries do that move weights about."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[Any] = [nn.Linear(D, D), nn.Linear(D, D)]
        self.a, self.b = a, b = parts
        a.forward = functools.partial(lambda old, x, *, times=2: old(x) * times, a.forward)
        b.old_forward = b.forward
        b.forward = functools.update_wrapper(
            functools.partial(lambda module, x: module.old_forward(x) * 3, b), b.forward
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Helper:
    """An object of another class that leads to a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


@dataclasses.dataclass(frozen=True)
class Pair:
    one: Any
    other: Any


class Two(NamedTuple):
    one: Any
    other: Any


class Helped(nn.Module):
    """Finds its part, and itself, in objects of other kinds, and caches in its class."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.helper, self.pair = Helper(self.a), Pair(self.a, self)
        self.two, self.queue = Two([self.a], 2), collections.deque([self.a, self.a.weight])
        self.empty = nn.Parameter(torch.ones(0))

    @functools.cache  # noqa: B019
    def doubled(self, times: int) -> Tensor:
        return times * self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        assert self.pair.other is self
        assert self.queue[1] is self.a.weight
        x = self.helper.module(x) + self.pair.one(x) + self.two.one[0](x) + self.queue[0](x)
        return x * self.doubled(self.two.other) + torch.cat([self.empty, x.new_zeros(0)]).sum()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False, kept: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.frozen.requires_grad_(False)
        self.run: Any = functools.partial(checkpoint, use_reentrant=reentrant)
        if kept:
            self.run = lambda function, *args: function(*args)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(lambda h: self.frozen(self.b(h).tanh()).tanh(), self.a(x))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "self-referring": SelfReferring,
    "collections": Collections,
    "forwarding": Forwarding,
    "tied": Tied,
    "hooked": Hooked,
    "parametrized": parametrized,
    "weight_norm": weight_normed,
    "LSTM": lambda: Recurrent(nn.LSTM, frozen=True, bidirectional=True, proj_size=2),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "attention": Attention,
    "keeping": Keeping,
    "patched": Patched,
    "helped": Helped,
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(D, D), nn.Tanh())),
    "checkpointed": Checkpointed,
    "batch norm, evaluated": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D).eval()),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODULES[name]().double()


def data(rows: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ones(x: Tensor) -> Tensor:
    return torch.ones(len(x))


def losses(output: Tensor) -> Tensor:
    return output.square().sum(-1)


def grads(apply: ps.modules.Apply, params: Params, x: Tensor) -> Params:
    grads: Params = ps.accumulate(
        lambda p, x: losses(apply(p, x)), params, [x], weight_fn=ones
    ).grads
    return grads


def backward(module: nn.Module, x: Tensor) -> Params:
    losses(module(x)).backward(torch.ones(len(x), dtype=x.dtype))
    return {
        name: p.grad
        for name, p in module.named_parameters()
        if p.requires_grad and p.grad is not None
    }


def assert_equal(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def close(one: Params, other: Params) -> bool:
    """Compiled sums run in another order: some hundred roundings."""
    bound = 1000 * torch.finfo(torch.float64).eps
    return all(
        bool(((one[n] - other[n]).abs() <= bound * (1 + other[n].abs())).all()) for n in other
    )


def train(apply: Any, params: Params, whole: bool = False, **settings: Any) -> Params:
    """The params after three steps."""
    optimizer = ps.optim.adamw(1e-2)
    step = ps.make_update_step(
        lambda p, x: losses(apply(p, x)), optimizer, weight_fn=ones, **settings
    )
    if whole:
        step = ps.compile(step, fullgraph=True)
    new: Params = {name: p.clone() for name, p in params.items()}
    state = optimizer.init(new)
    for seed in range(3):
        new, state, _ = step(new, state, [data(2, seed), data(2, seed + 1)])
    return new


class Broken(Checkpointed):
    """No compiler makes one graph of it."""

    def forward(self, x: Tensor) -> Tensor:
        torch.compiler.disable(lambda: None)()
        return super().forward(x)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).double()
