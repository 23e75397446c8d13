"""Modules of every kind, gradients and training steps on them, and comparisons of both."""

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


class FunctionModule(nn.Module):
    """Holds these parts, and runs a function of itself and its inputs."""

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
        self.listed = [self.a]
        self.nested = {"a": (self.a.weight, [self.a.bias])}
        self.me = weakref.ref(self)

    def helper(self, x: Tensor, times: int = 1) -> Tensor:
        return self.a(x) * times

    def forward(self, x: Tensor) -> Tensor:
        weight, (bias,) = self.nested["a"]
        output = self.method(x)
        output = output + self.partial(x)
        output = output + self.listed[0](x)
        output = output + x @ weight + bias
        me = self.me()
        assert me is self
        return output + me.a(x)


def tied() -> nn.Module:
    """Uses one linear layer by two names, and its weight in a third."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(m.both(m.c(x)))

    a = linear()
    c = linear()
    c.weight = a.weight
    both = nn.Sequential(a, nn.Tanh(), a)
    return FunctionModule(run, a=a, b=a, c=c, both=both)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.b = linear()
        self.a.register_forward_hook(self.add_b)
        self.b.register_forward_pre_hook(self.scale_input)
        self.b.register_full_backward_hook(
            lambda m, grad_inputs, grad_outputs: tuple(2 * grad for grad in grad_inputs)
        )

    @staticmethod
    def scale_input(module: Any, inputs: Any) -> Any:
        (x,) = inputs
        return (x * module.weight.sum(),)

    def add_b(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 2 + self.b(output)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def weight_normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return nn.utils.weight_norm(linear())


def recurrent() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        output, _ = m.r(x[:, None])
        return output[:, 0]

    lstm = nn.LSTM(
        input_size=D,
        hidden_size=D,
        num_layers=2,
        batch_first=True,
        bidirectional=True,
        proj_size=2,
    )
    lstm.weight_hh_l0.requires_grad_(False)
    return FunctionModule(run, r=lstm)


def attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = x[:, None].repeat(1, 3, 1)
        attended, _ = m.m(x, x, x)
        return m.t(attended)[:, 0]

    encoder = nn.TransformerEncoderLayer(
        d_model=D,
        nhead=2,
        dim_feedforward=12,
        dropout=0.0,
        batch_first=True,
    )
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    return FunctionModule(run, m=attention, t=encoder)


class Keeping(nn.Module):
    """Counts its calls in attributes, lists and buffers, and computes with the counts."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.calls = 0
        self.nested = {"log": [1]}
        self.log: list[Any] = [1]
        self.config = Helper(self.log)
        self.tensor = torch.ones(())
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        self.nested["log"].append(1)
        self.calls += 1
        self.count = self.count + 1
        self.tensor = self.tensor + 1
        self.last = getattr(self, "last", 0) + 1
        self.register_buffer("new", x)
        times = self.calls * self.last
        times *= len(self.log) * len(self.nested["log"])
        return self.a(x) * times * self.tensor


def patched() -> nn.Module:
    """Replaces the ``forward`` of its parts, as libraries do that offload weights."""

    def run_old(old: Any, x: Tensor, *, times: int = 2) -> Tensor:
        return old(x) * times

    def run_saved(module: Any, x: Tensor) -> Tensor:
        return module.old_forward(x) * 3

    a = linear()
    a.forward = functools.partial(run_old, a.forward)
    b = linear()
    b.old_forward = b.forward
    replacement = functools.partial(run_saved, b)
    b.forward = functools.update_wrapper(replacement, b.forward)
    return nn.Sequential(a, b)


class Helper:
    """Holds a module in an object that is none."""

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
    """Holds its part, and itself, in objects of other classes, and caches in its class."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.helper = Helper(self.a)
        self.pair = Pair(self.a, self)
        self.two = Two([self.a], 2)
        self.queue = collections.deque([self.a, self.a.weight])
        self.empty = nn.Parameter(torch.ones(0))

    @functools.cache  # noqa: B019
    def doubled(self, times: int) -> Tensor:
        return times * self.a.bias

    def forward(self, x: Tensor) -> Tensor:
        assert self.pair.other is self
        assert self.queue[1] is self.a.weight
        output = self.helper.module(x)
        output = output + self.pair.one(x)
        output = output + self.two.one[0](x)
        output = output + self.queue[0](x)
        nothing = torch.cat([self.empty, x.new_zeros(0)])
        factor = self.doubled(self.two.other)
        return output * factor + nothing.sum()


class Decorated(nn.Module):
    """Has methods that contexts decorate; one calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()

    @torch.no_grad()
    def scale(self, x: Tensor) -> Tensor:
        output: Tensor = self.a(x)
        return output.abs().mean() + 1

    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def divide(self, x: Tensor) -> Tensor:
        output: Tensor = self.a(x) / self.scale(x)
        return output

    def forward(self, x: Tensor) -> Tensor:
        return self.divide(x)


def call(run: Callable[..., Any], x: Tensor) -> Any:
    return run(x)


def checkpointed(run_block: Callable[..., Any] = call) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        def block(h: Tensor) -> Tensor:
            h = m.b(h).tanh()
            return m.frozen(h).tanh()

        return m.run_block(block, m.a(x))

    return FunctionModule(
        run,
        a=linear(),
        b=linear(),
        frozen=linear(train=False),
        run_block=run_block,
    )


def recompute(run: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(run, x, use_reentrant=False)


def collections_of_parameters() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        for w in m.w:
            x = (x @ w).tanh()
        return x * m.v["x"]

    tensors = [torch.randn(D, D) for _ in range(3)]
    matrices = nn.ParameterList(tensors)
    vectors = nn.ParameterDict({"x": torch.randn(D)})
    return FunctionModule(run, w=matrices, v=vectors)


def graph_module() -> nn.Module:
    module = nn.Sequential(linear(), nn.Tanh())
    return torch.fx.symbolic_trace(module)


def evaluated_batch_norm() -> nn.Module:
    norm = nn.BatchNorm1d(D)
    return nn.Sequential(linear(), norm.eval())


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(linear()),
        parametrizations.orthogonal(linear()),
    )


MODULES: dict[str, Callable[[], nn.Module]] = {
    "self-referring": SelfReferring,
    "collections": collections_of_parameters,
    "tied": tied,
    "hooked": Hooked,
    "parametrized": parametrized,
    "weight_norm": weight_normed,
    "LSTM": recurrent,
    "attention": attention,
    "keeping": Keeping,
    "patched": patched,
    "helped": Helped,
    "decorated": Decorated,
    "traced": graph_module,
    "checkpointed": lambda: checkpointed(recompute),
    "kept": checkpointed,
    "batch norm, evaluated": evaluated_batch_norm,
}


def make_module(name: str) -> Any:
    torch.manual_seed(0)
    return MODULES[name]().double()


def make_batch_normed() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(linear(), nn.BatchNorm1d(D))
    return module.double()


def draw_inputs(rows: int = 4, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, D, dtype=torch.float64, generator=generator)


def ones(x: Tensor) -> Tensor:
    return torch.ones(len(x))


def squared_losses(output: Tensor) -> Tensor:
    return output.square().sum(-1)


def grads(apply: Callable[..., Any], params: Params, x: Tensor) -> Params:
    """Accumulates the gradients of one microbatch."""

    def loss_fn(p: Params, x: Tensor) -> Tensor:
        return squared_losses(apply(p, x))

    sums = ps.accumulate(loss_fn, params, [x], weight_fn=ones)
    grads: Params = sums.grads
    return grads


def backward(module: nn.Module, x: Tensor) -> Params:
    """Computes the gradients of the module itself, by ``backward``."""
    cotangents = torch.ones(len(x), dtype=x.dtype)
    squared_losses(module(x)).backward(cotangents)
    return {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_equal(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def is_close(one: Params, other: Params) -> bool:
    """Compares up to some hundred roundings: compiled sums run in another order."""
    bound = 1000 * torch.finfo(torch.float64).eps
    return all(
        torch.allclose(one[name], other[name], rtol=bound, atol=bound) for name in other
    )


def train_three_steps(apply: Any, params: Params, **settings: Any) -> Params:
    """Returns the params after three steps."""

    def loss_fn(p: Params, x: Tensor) -> Tensor:
        return squared_losses(apply(p, x))

    settings = {"weight_fn": ones, **settings}
    optimizer = ps.optim.adamw(1e-2)
    step = ps.make_update_step(loss_fn, optimizer, **settings)
    new: Params = {name: p.clone() for name, p in params.items()}
    state = optimizer.init(new)
    for seed in range(3):
        group = [draw_inputs(2, seed), draw_inputs(2, seed + 1)]
        new, state, _ = step(new, state, group)
    return new


def trace(apply: Any) -> Any:
    """Traces ``apply`` into one graph, which runs as it is."""

    def call_apply(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **kwargs)

    return torch.compile(call_apply, backend="eager", fullgraph=True)


AOT_EAGER = functools.partial(ps.compile, backend="aot_eager")
"""Traces forward and backward as every backend does, in a tenth of the time."""
