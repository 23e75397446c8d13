"""``from_module``: the module's own outputs and gradients, to the bit, and the module as it was."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import purestep as ps
from tests.memory import LiveBytes
from tests.torch_internals import forward_hooks

D = 6
Params = dict[str, Tensor]


class SelfReferring(nn.Module):
    """Holds its parts, its methods and itself in all places where Python lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.method = self.helper
        self.closure = lambda x, *, k=self.a: k(self.a(x)) * 2
        self.partial = functools.partial(self.helper, times=3)
        self.listed, self.nested = [self.a], {"a": (self.a.weight, [self.a.bias])}
        self.me = weakref.ref(self)

    def helper(self, x: Tensor, times: int = 1) -> Tensor:
        return self.a(x) * times

    def forward(self, x: Tensor) -> Tensor:
        weight, (bias,) = self.nested["a"]
        called = self.method(x) + self.closure(x) + self.partial(x) + self.listed[0](x)
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
        self.a.register_forward_hook(lambda m, inputs, output: output * 2 + self.b(output))
        self.b.register_forward_pre_hook(lambda m, inputs: (inputs[0] * m.weight.sum(),))
        self.b.register_full_backward_hook(doubled)

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
        old = a.forward

        @functools.wraps(old)
        def new(x: Tensor, *, times: int = 2) -> Tensor:
            return old(x) * times

        a.forward = new
        b.old_forward = b.forward
        b.forward = functools.update_wrapper(
            functools.partial(lambda module, x: module.old_forward(x) * 3, b), b.forward
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


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
    "checkpointed": Checkpointed,
    "batch norm, evaluated": lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D).eval()),
}
COMPILED = {*MODULES} - {"self-referring", "LSTM", "GRU", "RNN", "hooked"}


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


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_compiled_it_is_one_graph(name: str) -> None:
    """And the module is as it was, though a compiler swaps tensors in a skeleton that it keeps."""
    torch.compiler.reset()
    module, x = made(name), data()
    params, apply = ps.from_module(module)
    before = [id(p) for p in module.parameters()]
    compiled = torch.compile(lambda p, x: apply(p, x), backend="eager", fullgraph=True)
    for scale in (1, 2):
        there = {name: scale * p for name, p in params.items()}
        assert torch.equal(compiled(there, x), apply(there, x))
    assert [id(p) for p in module.parameters()] == before
    last = weakref.ref(there.pop(next(iter(params))))
    gc.collect()
    assert last() is None  # It is not kept there either.


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


@pytest.mark.parametrize("name", ["tied", "checkpointed"])
def test_steps_compiled_and_donated(name: str) -> None:
    torch.compiler.reset()
    params, apply = ps.from_module(made(name))
    plain = train(apply, params)
    assert_equal(train(apply, params, donate=True), plain)
    assert close(train(apply, params, compile=True), plain)
    if name == "tied":  # torch.func, which is in the whole step's graph, knows no checkpoints.
        assert close(train(apply, params, whole=True, donate=True), plain)
    assert_equal(plain, train(apply, params))


class Broken(Checkpointed):
    """No compiler makes one graph of it."""

    def forward(self, x: Tensor) -> Tensor:
        torch.compiler.disable(lambda: None)()
        return super().forward(x)


def test_in_pieces_it_is_right() -> None:
    """Where a compiler gives up, nothing is swapped: checkpoints and threads find their own params."""
    torch.compiler.reset()
    params, apply = ps.from_module(Broken().double())
    with pytest.warns(UserWarning, match="cannot make one graph"):
        pieces = train(apply, params, compile=True)
    assert close(pieces, train(apply, params))


def test_checkpoints_compute_again_with_the_params_of_their_call() -> None:
    """Also when ``apply`` is called with others before the backward pass."""
    module, x = made("checkpointed"), data()
    kept = Checkpointed(kept=True).double()
    kept.load_state_dict(module.state_dict())
    for reentrant in (False, True):
        module.run = functools.partial(checkpoint, use_reentrant=reentrant)
        results: list[Any] = []
        for each in (module, kept):
            params, apply = ps.from_module(each)
            one = {name: p.clone().requires_grad_() for name, p in params.items()}
            two = {name: (2 * p).requires_grad_() for name, p in params.items()}
            first, second = losses(apply(one, x)).sum(), losses(apply(two, x)).sum()
            apply({name: 3 * p for name, p in one.items()}, x)
            (first * second).backward()
            results.append({f"{n} {i}": ps[n].grad for i, ps in enumerate((one, two)) for n in ps})
        assert_equal(*results)


def test_a_step_refuses_reentrant_checkpoints() -> None:
    params, apply = ps.from_module(Checkpointed(reentrant=True).double())
    with pytest.raises(ValueError, match="use_reentrant=False"):
        grads(apply, params, data())


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


def test_threads_do_not_meet_in_compiled_pieces() -> None:
    torch.compiler.reset()
    params, apply = ps.from_module(Broken().double())
    compiled = torch.compile(lambda p, x: apply(p, x), backend="eager")
    compiled(params, data())
    wrong: list[int] = []

    def run(rank: int) -> None:
        mine = {name: p * rank for name, p in params.items()}
        right = apply(mine, data())
        wrong.extend(rank for _ in range(100) if not torch.equal(compiled(mine, data()), right))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        count = torch.ones(())
        if registered:
            self.register_buffer("count", count)
        else:
            self.count = count

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.a(x) * self.count.add_(1)
        return output


@pytest.mark.parametrize("settings", [{}, {"compile": True}], ids=str)
@pytest.mark.parametrize(("registered", "kind"), [(True, "buffer"), (False, "tensor")])
def test_a_module_that_writes_to_its_tensors(registered: bool, kind: str, settings: Any) -> None:
    """Is refused before it has done so."""
    torch.compiler.reset()
    module = Writing(registered).double()
    params, apply = ps.from_module(module)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"written to its {kind} count: "):
            train(apply, params, **settings)
    with pytest.raises(ValueError, match=f"written to its {kind} count"):
        torch.func.grad(lambda p: apply(p, data()).sum())(params)
    assert module.count == 1


def test_evaluation() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5)).double()
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


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).double()


def test_buffers_are_carried() -> None:
    """As ``LossTerms.aux``: their mean over microbatches is that of what the module itself makes of each."""
    module = normed()
    params, apply = ps.from_module(module)
    start = dict(module.named_buffers())
    kept = {name: buffer.clone() for name, buffer in start.items()}

    def loss_fn(p: Params, m: Any) -> ps.LossTerms:
        output, buffers = apply(p, m["x"], buffers=m["buffers"])
        return ps.LossTerms(losses(output), aux=(buffers, torch.tensor(1)))

    # The last one holds padding alone.
    group = [
        {"x": data(4, seed), "w": torch.tensor(seed < 3), "buffers": start} for seed in (1, 2, 3)
    ]
    sgd = ps.optim.sgd(0.1)
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: ones(m["x"]) * m["w"])
    _, _, metrics = step(params, sgd.init(params), group)
    assert_equal(dict(module.named_buffers()), kept)
    torch.compiler.reset()
    compiled = torch.compile(apply, backend="eager", fullgraph=True)(params, data(), buffers=start)
    assert_equal(compiled[1], apply(params, data(), buffers=start)[1])
    assert_equal(dict(module.named_buffers()), kept)

    after = []
    for m in group:
        module.load_state_dict(kept, strict=False)
        module(m["x"])
        after.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    totals, microbatches = metrics.aux
    for name, total in totals.items():
        assert torch.equal(total, torch.stack([each[name] for each in after]).sum(0))
    assert totals["1.num_batches_tracked"] / microbatches == 1
    assert metrics.num_microbatches == 2


def test_buffers_that_are_replaced_are_carried_too() -> None:
    params, apply = ps.from_module(made("keeping"))
    start = {"count": torch.tensor(4.0)}
    for f in (apply, torch.compile(apply, backend="eager", fullgraph=True)):
        assert f(params, data(), buffers=start)[1] == {"count": torch.tensor(5.0)}
    assert start == {"count": torch.tensor(4.0)}


class Helper:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


def helped() -> nn.Module:
    module = nn.Sequential(nn.Linear(D, D))
    module.helper = Helper(module)  # type: ignore[assignment]
    return module


def holding_a_set() -> nn.Module:
    module = nn.Sequential(nn.Linear(D, D))
    module.seen = {module[0]}  # type: ignore[assignment]
    return module


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
        (helped, r"Sequential\.helper is a Helper that leads back to the module"),
        (holding_a_set, r"Sequential\.seen is a set that leads back to the module"),
        (lambda: {"w": torch.ones(1)}, r"takes an nn\.Module, got dict"),
    ],
)  # fmt: skip
def test_refused_modules(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ps.from_module(make())


def by_global_name(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return by_way_of_a_function(output)


def by_way_of_a_function(output: Tensor) -> Tensor:
    def inside() -> Tensor:
        return output * cast("Tensor", GLOBAL[1].weight).sum()

    return inside()


GLOBAL = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))


class Namesake(nn.Module):
    """An attribute has the name of a global."""

    def __init__(self) -> None:
        super().__init__()
        self.GLOBAL = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.GLOBAL(x)
        return output


def test_global_names_of_the_module_are_refused() -> None:
    ps.from_module(GLOBAL)
    handle = GLOBAL[0].register_forward_hook(by_global_name)
    for module in (GLOBAL, GLOBAL[0]):
        with pytest.raises(TypeError, match=r"^by_way_of_a_function.* by the global name GLOBAL"):
            ps.from_module(module)
    handle.remove()
    module = Namesake()
    GLOBAL.append(module)
    ps.from_module(module)
    del GLOBAL[2]


def masked() -> nn.Module:
    module = nn.Linear(D, D)
    module.weight.register_hook(lambda grad: grad * 0)
    return module


def accumulating() -> nn.Module:
    module = nn.Linear(D, D)
    module.weight.register_post_accumulate_grad_hook(lambda p: None)
    return module


def aliased() -> nn.Module:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight.data = first.weight.data[:D]
    return nn.Sequential(first, second)


class Viewed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.kept = [self.weight.t()[2:]]


class Indexed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.at = nn.Parameter(torch.arange(3), requires_grad=False)


@pytest.mark.parametrize(
    ("make", "trainable", "error", "message"),
    [
        (masked, None, TypeError, r"^weight has a hook on its gradient, .* Transform"),
        (accumulating, None, TypeError, r"^weight has a hook on its gradient, .* Transform"),
        (aliased, None, ValueError, r"^[01]\.weight, which trains, shares memory with [01]\.weight, .* one Parameter"),
        (aliased, "0.weight", ValueError, r"^0\.weight, which trains, shares memory with 1\.weight, .* one Parameter"),
        (Viewed, None, ValueError, r"^weight, which trains, shares memory with kept\[0\], .* in forward"),
        (Indexed, "*", TypeError, r"chooses at, which is torch\.int64 .* p\.is_floating_point\(\)"),
        (lambda: nn.LazyLinear(D), None, ValueError, r"^weight has no shape yet: call the module once"),
        (lambda: nn.Linear(D, D, device="meta"), None, ValueError, r"^weight is on the device meta"),
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


def test_hooks_on_the_backward_pass_are_not_compiled() -> None:
    torch.compiler.reset()
    module = made("hooked")
    params, apply = ps.from_module(module)
    plain = train(apply, params)
    whole = torch.compile(lambda p, x: apply(p, x), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="leaves hooks on a module's backward pass out"):
        whole(params, data())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        compiled = train(apply, params, compile=True)
    assert close(compiled, plain)
    with pytest.raises(ValueError, match="register_full_backward_hook"):
        torch.func.grad(lambda p: apply(p, data()).sum())(params)


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
    with pytest.raises(
        ValueError, match=r"has written to its buffer parametrizations\.weight\.0\._u"
    ):
        apply(params, data())

    params, apply = ps.from_module(made("checkpointed"))
    with pytest.raises(
        ValueError, match=r"checkpoints activations, which torch\.func knows nothing of"
    ):
        torch.func.grad(lambda p: apply(p, data()).sum())(params)


def test_inputs_that_are_let_require_grad() -> None:
    """As libraries do by a hook, so that checkpoints of frozen modules work."""
    module = made("checkpointed")
    wanted = grads(ps.from_module(module)[1], ps.from_module(module)[0], data())
    module.a.register_forward_hook(lambda m, inputs, output: output.requires_grad_(True))
    params, apply = ps.from_module(module)
    assert_equal(grads(apply, params, data()), wanted)
    with pytest.raises(ValueError, match="disable_input_require_grads"):
        torch.func.grad(lambda p: apply(p, data()).sum())(params)


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
        match=r"params\['c\.bias'\] is torch\.float64 of shape \(1,\), and Tied\.c\.bias is",
    ):
        ps.to_module({"a.bias": params["a.bias"] + 1, "c.bias": params["c.bias"][:1]}, module)
    assert torch.equal(module.a.bias, params["a.bias"])
