"""Modules of every kind, a step on them, and what their gradients are compared with."""

import collections
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import purestep as ps

D = 6
Params = dict[str, Tensor]


class Of(nn.Module):
    """A module of these parts, which runs a function of itself and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def linear(train: bool = True) -> Any:
    return nn.Linear(D, D).requires_grad_(train)


class SelfReferring(nn.Module):
    """Holds its parts, its methods and itself in all places where Python lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
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


def tied() -> nn.Module:
    a, c = linear(), linear()
    c.weight = a.weight
    return Of(
        lambda m, x: m.b(m.both(m.c(x))),
        a=a,
        b=a,
        c=c,
        both=nn.Sequential(a, nn.Tanh(), a),
    )


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.a.register_forward_hook(self.more)
        self.b.register_forward_pre_hook(
            lambda m, inputs: (inputs[0] * m.weight.sum(),)
        )
        self.b.register_full_backward_hook(
            lambda m, given, got: tuple(2 * each for each in given)
        )

    def more(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 2 + self.b(output)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def weight_normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(linear())


def recurrent() -> nn.Module:
    lstm = nn.LSTM(
        D, D, num_layers=2, batch_first=True, bidirectional=True, proj_size=2
    )
    lstm.weight_hh_l0.requires_grad_(False)
    return Of(lambda m, x: m.r(x[:, None])[0][:, 0], r=lstm)


def attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = x[:, None].repeat(1, 3, 1)
        return m.t(m.m(x, x, x)[0])[:, 0]

    encoder = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True)
    return Of(run, m=nn.MultiheadAttention(D, 2, batch_first=True), t=encoder)


class Keeping(nn.Module):
    """Keeps what it should not: what it gives depends on how often it has been called."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls, self.nested = linear(), 0, {"log": [1]}
        self.log: list[Any] = [1]
        self.config, self.tensor = Helper(self.log), torch.ones(())
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        self.nested["log"].append(1)
        self.calls += 1
        self.count, self.tensor = self.count + 1, self.tensor + 1
        self.last = getattr(self, "last", 0) + 1
        self.register_buffer("new", x)
        times = self.calls * len(self.log) * len(self.nested["log"]) * self.last
        return self.a(x) * times * self.tensor


def patched() -> nn.Module:
    """Its parts' ``forward`` is replaced, as libraries do that move weights about."""
    a, b = linear(), linear()
    a.forward = functools.partial(lambda old, x, *, times=2: old(x) * times, a.forward)
    b.old_forward = b.forward
    run = functools.partial(lambda module, x: module.old_forward(x) * 3, b)
    b.forward = functools.update_wrapper(run, b.forward)
    return nn.Sequential(a, b)


class Helper:
    """An object of another class that leads to a module."""

    def __init__(self, module: Any) -> None:
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
        self.a = linear()
        self.helper, self.pair = Helper(self.a), Pair(self.a, self)
        self.two, self.queue = (
            Two([self.a], 2),
            collections.deque([self.a, self.a.weight]),
        )
        self.empty = nn.Parameter(torch.ones(0))

    @functools.cache  # noqa: B019
    def doubled(self, times: int) -> Tensor:
        return times * self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        assert self.pair.other is self
        assert self.queue[1] is self.a.weight
        x = (
            self.helper.module(x)
            + self.pair.one(x)
            + self.two.one[0](x)
            + self.queue[0](x)
        )
        return (
            x * self.doubled(self.two.other)
            + torch.cat([self.empty, x.new_zeros(0)]).sum()
        )


def checkpointed(how: Callable[..., Any] = lambda run, x: run(x)) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.how(lambda h: m.frozen(m.b(h).tanh()).tanh(), m.a(x))

    return Of(run, a=linear(), b=linear(), frozen=linear(train=False), how=how)


def again(run: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(run, x, use_reentrant=False)


def collections_of_parameters() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        for w in m.w:
            x = (x @ w).tanh()
        return x * m.v["x"]

    matrices = nn.ParameterList([torch.randn(D, D) for _ in range(3)])
    return Of(run, w=matrices, v=nn.ParameterDict({"x": torch.randn(D)}))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "self-referring": SelfReferring,
    "collections": collections_of_parameters,
    "tied": tied,
    "hooked": Hooked,
    "parametrized": lambda: nn.Sequential(
        parametrizations.weight_norm(linear()), parametrizations.orthogonal(linear())
    ),
    "weight_norm": weight_normed,
    "LSTM": recurrent,
    "attention": attention,
    "keeping": Keeping,
    "patched": patched,
    "helped": Helped,
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(linear(), nn.Tanh())),
    "checkpointed": lambda: checkpointed(again),
    "kept": checkpointed,
    "batch norm, evaluated": lambda: nn.Sequential(linear(), nn.BatchNorm1d(D).eval()),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODULES[name]().double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.BatchNorm1d(D)).double()


def data(rows: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(
        rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def ones(x: Tensor) -> Tensor:
    return torch.ones(len(x))


def losses(output: Tensor) -> Tensor:
    return output.square().sum(-1)


def grads(apply: Callable[..., Any], params: Params, x: Tensor) -> Params:
    sums = ps.accumulate(lambda p, x: losses(apply(p, x)), params, [x], weight_fn=ones)
    grads: Params = sums.grads
    return grads


def backward(module: nn.Module, x: Tensor) -> Params:
    losses(module(x)).backward(torch.ones(len(x), dtype=x.dtype))
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_equal(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def close(one: Params, other: Params) -> bool:
    """Compiled sums run in another order: some hundred roundings."""
    bound = 1000 * torch.finfo(torch.float64).eps
    return all(torch.allclose(one[n], other[n], rtol=bound, atol=bound) for n in other)


def train(apply: Any, params: Params, **settings: Any) -> Params:
    """The params after three steps."""
    optimizer, how = ps.optim.adamw(1e-2), {"weight_fn": ones, **settings}
    step = ps.make_update_step(lambda p, x: losses(apply(p, x)), optimizer, **how)
    new: Params = {name: p.clone() for name, p in params.items()}
    state = optimizer.init(new)
    for seed in range(3):
        new, state, _ = step(new, state, [data(2, seed), data(2, seed + 1)])
    return new


def traced(apply: Any) -> Any:
    """The same, of which a compiler makes one graph, run as it is."""
    called = lambda *args, **more: apply(*args, **more)  # noqa: E731
    return torch.compile(called, backend="eager", fullgraph=True)


TRACED = functools.partial(ps.compile, backend="aot_eager")
"""A compiler that traces as all do, forward and backward, and takes a tenth of the time."""
