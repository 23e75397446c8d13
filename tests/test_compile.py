"""``compile=True``: how often something is compiled, and that the step stays the step."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from purestep.torch_internals import unwatched
from purestep.types import UpdateStep
from tests.torch_internals import few_recompilations


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Compilations:
    """A backend that runs graphs as they are, and keeps their code, and whether any of their sizes may vary."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.varying: list[bool] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append(graph.code)
        self.varying.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward


def loss_fn(params: Any, m: Any) -> Tensor:
    hidden = (m["x"] @ params["w"]).relu()
    return (hidden @ params["v"] - m["y"]).square()


def weight_fn(m: Any) -> Tensor:
    return m["y"] > -4


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, length, 3), generator=generator).double()
    return {"x": x, "y": torch.randint(-8, 5, (rows, length), generator=generator).double()}


def start() -> dict[str, Tensor]:
    return {
        "v": torch.tensor([1.0, -2.0]).double(),
        "w": torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]]).double(),
    }


def run(step: UpdateStep, optimizer: ps.optim.Optimizer, groups: list[Any]) -> Any:
    """A state after one step on each group, and all metrics."""
    params = start()
    state, metrics = (params, optimizer.init(params)), []
    for group in groups:
        *state_, reported = step(*state, group)
        state = (state_[0], state_[1])
        metrics.append(reported)
    return state, metrics


def make(optimizer: ps.optim.Optimizer, **settings: Any) -> UpdateStep:
    return ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn, **settings)


def compiled(optimizer: ps.optim.Optimizer, **settings: Any) -> tuple[UpdateStep, Compilations]:
    """A compiled step, and what was compiled for it."""
    backend = Compilations()
    return make(optimizer, compile=partial(torch.compile, backend=backend), **settings), backend


def close(a: Tensor, b: Tensor) -> bool:
    """The gradients are exact, so what differs are some dozens of roundings in each of a few steps of the optimizer."""
    a, b = a.double(), b.double()
    roundings = 100 * torch.finfo(torch.float64).eps
    return bool(((a - b).abs() <= roundings * (1 + b.abs())).all())


PLAIN = ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(0.125))
GROUPS = [
    [batch(2, 4, seed) for seed in range(1)],
    [batch(2, 4, seed) for seed in range(4)],
    [batch(2, 4, seed) for seed in range(16)],
    [],
]
RAGGED = [[batch(3, length, length) for length in lengths] for lengths in ([4, 7], [5], [9, 6, 8])]


@pytest.mark.parametrize("settings", [{}, {"donate": True}, {"normalize": "grads"}])
def test_once_for_every_number_of_microbatches(settings: dict[str, Any]) -> None:
    """One graph for a first microbatch and one for all others; one for an optimizer without kernels, none for one with."""
    for optimizer, graphs in ((ps.optim.adamw(0.125), 2), (PLAIN, 3)):
        step, backend = compiled(optimizer, **settings)
        run(step, optimizer, GROUPS)
        assert len(backend.graphs) == graphs


FROM_TORCH: dict[str, ps.optim.Optimizer] = {
    "alone": ps.optim.from_torch(torch.optim.AdamW, lr=0.125),
    "clipped": ps.optim.chain(
        ps.optim.clip_by_global_norm(1.0), ps.optim.from_torch(torch.optim.RMSprop, lr=0.125)
    ),
    "parts": ps.optim.partition(
        lambda params: {"v": "native", "w": "torch"},
        {
            "native": ps.optim.adamw(0.125),
            "torch": ps.optim.from_torch(torch.optim.Muon, lr=0.125),
        },
    ),
    "masters": ps.optim.master_weights(ps.optim.from_torch(torch.optim.SGD, lr=0.125)),
}


@pytest.mark.parametrize("settings", [{}, {"donate": True}, {"normalize": "grads"}], ids=str)
@pytest.mark.parametrize("name", FROM_TORCH)
def test_torchs_own_steps_are_left_as_they_are(name: str, settings: dict[str, Any]) -> None:
    """``from_torch`` runs kernels, which no compiler can follow: only microbatches are compiled, and it is the same step."""
    optimizer = FROM_TORCH[name]
    step, backend = compiled(optimizer, **settings)
    state, _ = run(step, optimizer, GROUPS)
    assert len(backend.graphs) == 2
    expected, _ = run(make(optimizer, **settings), optimizer, GROUPS)
    assert_same(state, expected)


def test_ragged_shapes_become_dynamic() -> None:
    """The second length makes graphs dynamic; no later length, and no number of them, makes another."""
    optimizer = ps.optim.adamw(0.125)
    step, backend = compiled(optimizer)
    run(step, optimizer, RAGGED)
    assert len(backend.graphs) == 3


@pytest.mark.parametrize("groups", [GROUPS, RAGGED], ids=["groups", "ragged"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"donate": True},
        {"normalize": "grads"},
        {"on_nonfinite": "skip"},
        {"grad_and_value": torch.func.grad_and_value},
    ],
    ids=["plain", "donate", "grads", "skip", "torch.func"],
)
def test_compiled_is_the_step(settings: dict[str, Any], groups: list[Any]) -> None:
    """Compiled for real, in exact arithmetic for the sums: the same counts, the same state to rounding."""
    for optimizer in (ps.optim.adamw(0.125), PLAIN):
        ours, metrics = run(make(optimizer, compile=True, **settings), optimizer, groups)
        theirs, expected = run(make(optimizer, **settings), optimizer, groups)
        for a, b in zip(tree.leaves_of(ours), tree.leaves_of(theirs), strict=True):
            assert close(a, b)
        for a, b in zip(metrics, expected, strict=True):
            assert a.num_tokens == b.num_tokens
            assert a.num_microbatches == b.num_microbatches
            assert a.applied == b.applied


def test_every_step_of_a_process_is_compiled_like_the_first() -> None:
    """However many there are, and of whatever sizes: one graph for each, in which no size varies."""
    for size in range(2, 12):
        backend = Compilations()
        step = ps.make_update_step(
            lambda params, m: (m["x"] @ params).square(),
            PLAIN,
            weight_fn=lambda m: m["x"][:, 0] > -9,
            compile=partial(torch.compile, backend=backend),
        )
        params = torch.ones(size).double()
        group = [{"x": torch.ones(3, size).double()} for _ in range(3)]
        step(params, PLAIN.init(params), group)
        assert backend.varying == [False] * 3


@pytest.mark.parametrize("where", ["loss", "optimizer"])
def test_where_the_compiler_gives_up(where: str) -> None:
    """It is told once, with the reason and the line; the step stays what it was."""

    def branches(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    def branching_loss(params: Any, m: Any) -> Tensor:
        return branches(loss_fn(params, m))

    branching = ps.optim.Transform(
        init=lambda params: (),
        update=lambda grads, state, params: (tree.map(branches, grads), state),
    )
    loss = branching_loss if where == "loss" else loss_fn
    optimizer = PLAIN if where == "loss" else ps.optim.chain(branching, PLAIN)
    step, plain = (
        ps.make_update_step(loss, optimizer, weight_fn=weight_fn, compile=compile)
        for compile in (True, False)
    )
    with pytest.warns(UserWarning, match="cannot make one graph of") as told:
        ours, _ = run(step, optimizer, GROUPS)
    assert len(told) == 1
    assert "Data-dependent branching" in str(told[0].message)
    assert "in branches: return x * 2 if x.sum() > 0 else x" in str(told[0].message)
    theirs, _ = run(plain, optimizer, GROUPS)
    for a, b in zip(tree.leaves_of(ours), tree.leaves_of(theirs), strict=True):
        assert close(a, b)


def test_where_the_compiler_fails() -> None:
    """An index that only the data tells is an error of the compiler's own kind, and eagerly no error at all."""

    def picked(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m) * params["v"][m["y"].argmax().clamp(max=1)]

    step, plain = (
        ps.make_update_step(picked, PLAIN, weight_fn=weight_fn, compile=compile)
        for compile in (True, False)
    )
    with pytest.warns(UserWarning, match="cannot make one graph of"):
        ours, _ = run(step, PLAIN, GROUPS)
    theirs, _ = run(plain, PLAIN, GROUPS)
    for a, b in zip(tree.leaves_of(ours), tree.leaves_of(theirs), strict=True):
        assert close(a, b)


@pytest.mark.parametrize("settings", [{}, {"donate": True}])
@pytest.mark.parametrize("name", ["lion", "chain", "masters"])
def test_a_rate_that_requires_grad(name: str, settings: dict[str, Any]) -> None:
    """What is recorded is not written over, compiled or not: the derivative is right, and the caller's params stay."""
    make_optimizer: dict[str, Any] = {
        "lion": ps.optim.lion,
        "chain": lambda rate: ps.optim.chain(ps.optim.scale_by_adam(), ps.optim.descend(rate)),
        "masters": lambda rate: ps.optim.master_weights(ps.optim.lion(rate)),
    }
    slopes = []
    for compile in (False, partial(torch.compile, backend="eager")):
        rate, params = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), start()
        optimizer = make_optimizer[name](rate)
        new, *_ = make(optimizer, compile=compile, **settings)(
            params, optimizer.init(params), GROUPS[1]
        )
        (new["w"].flatten() @ torch.arange(6).double()).backward()
        assert rate.grad is not None
        slopes.append(rate.grad)
        assert_same(params, start())
    assert slopes[0].abs() > 0
    assert close(*slopes)


def test_under_a_transform_nothing_is_compiled() -> None:
    """Nor is anybody told that the compiler cannot make a graph of it: a warning would be an error here."""
    axis = ps.VmapAxis(2)
    optimizer = ps.optim.sgd(0.125)
    step = make(optimizer, compile=True, axis=axis, grad_and_value=torch.func.grad_and_value)
    group = [tree.map(lambda *leaves: torch.stack(leaves), batch(2, 4, 0), batch(2, 4, 1))]
    moved = axis.map(step, in_dims=(None, None, 0), out_dims=None)(
        start(), optimizer.init(start()), group
    )
    expected = make(optimizer)(start(), optimizer.init(start()), GROUPS[1][:2])
    assert_same(moved[0], expected[0])


def test_what_varies_without_end_is_told() -> None:
    """A microbatch with a new text each time is a new graph each time, until the compiler has had enough."""
    optimizer = ps.optim.adamw(0.125)

    def scaled(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m) * len(m["name"])

    step, plain = (
        ps.make_update_step(scaled, optimizer, weight_fn=weight_fn, compile=compile)
        for compile in (True, False)
    )
    groups = [[batch(2, 4) | {"name": "a" * length}] for length in range(1, 8)]
    with few_recompilations(), pytest.warns(UserWarning, match="recompile_limit") as told:
        ours, _ = run(step, optimizer, groups)
    assert len(told) == 1
    theirs, _ = run(plain, optimizer, groups)
    for a, b in zip(tree.leaves_of(ours), tree.leaves_of(theirs), strict=True):
        assert close(a, b)


def test_a_loss_that_raises_is_no_matter_of_the_compiler() -> None:
    """The error is the loss's own, and the next step is compiled."""
    step = make(ps.optim.adamw(0.125), compile=True)
    state = ps.optim.adamw(0.125).init(start())
    with warnings.catch_warnings():
        # Dynamo looks at the loss's ``.grad`` when it gives up at the raise.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for _ in range(2):
            with pytest.raises(KeyError, match="y") as raised:
                step(
                    start(),
                    state,
                    [{"x": batch(2, 4)["x"]} | {"y": batch(2, 4)["y"]}, {"x": batch(2, 4)["x"]}],
                )
            assert raised.value.__context__ is None
    step(start(), state, [batch(2, 4)])


MATRICES_APART = ps.optim.partition(
    lambda params: tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", params),
    {
        "matrix": ps.optim.from_torch(torch.optim.Muon, lr=0.125),
        "rest": PLAIN,
    },
)
MIXTURES: dict[str, tuple[ps.optim.Optimizer, int]] = {
    "partition": (MATRICES_APART, 3),
    "chain": (
        ps.optim.chain(
            ps.optim.scale_by_adam(),
            ps.optim.from_torch(torch.optim.RMSprop, lr=0.125),
        ),
        3,
    ),
    "masters": (ps.optim.master_weights(MATRICES_APART), 3),
    "clipped": (ps.optim.chain(ps.optim.clip_by_global_norm(1.0), MATRICES_APART), 3),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_parts_beside_torchs_own_steps_are_compiled(name: str) -> None:
    """What torch steps is left alone, and what is beside it makes one graph: with the two of microbatches, three."""
    optimizer, graphs = MIXTURES[name]
    step, backend = compiled(optimizer)
    ours, _ = run(step, optimizer, GROUPS)
    assert len(backend.graphs) == graphs
    theirs, _ = run(make(optimizer), optimizer, GROUPS)
    for a, b in zip(tree.leaves_of(ours), tree.leaves_of(theirs), strict=True):
        assert close(a, b)


class Layer(NamedTuple):
    w: Any
    v: Any


NESTED = {
    "flat": lambda params: params,
    "lists": lambda params: {"all": [{"w": params["w"]}, ({"v": params["v"]}, None)]},
    "records": lambda params: Layer(params["w"], {"deep": OrderedDict(v=params["v"])}),
}


@pytest.mark.parametrize("nest", NESTED)
def test_labels_and_masks_under_the_compiler(nest: str) -> None:
    """Made of the params as docstrings make them, in ``init`` and in the step, in one graph."""

    def matrices(params: Any) -> Any:
        return tree.map(lambda leaf: leaf.ndim == 2, params)

    optimizer = ps.optim.partition(
        lambda params: tree.map(lambda leaf: "w" if leaf.ndim == 2 else "v", params),
        {
            "w": ps.optim.adamw(0.125, weight_decay=0.5, mask=matrices),
            "v": ps.optim.lion(0.125, weight_decay=0.5, mask=matrices),
        },
    )

    def loss(params: Any, m: Any) -> Tensor:
        w, v = sorted(tree.leaves_of(params), key=lambda leaf: -leaf.ndim)
        return loss_fn({"w": w, "v": v}, m)

    step = ps.make_update_step(loss, optimizer, weight_fn=weight_fn)
    once: Any = partial(torch.compile, fullgraph=True, backend="eager")
    params = NESTED[nest](start())
    state = once(optimizer.init)(params)
    assert_same(state, optimizer.init(params))
    compiled_, group = once(step), [batch(2, 4, 0)]
    ours = theirs = (params, state)
    for _ in range(2):
        ours, theirs = compiled_(*ours, group)[:2], step(*theirs, group)[:2]
    for a, b in zip(tree.leaves_of(ours), tree.leaves_of(theirs), strict=True):
        assert close(a, b)


@pytest.mark.parametrize("settings", [{}, {"donate": True}])
def test_who_looks_at_every_operation(settings: dict[str, Any]) -> None:
    """A dispatch mode, as a counter of operations is, keeps the compiler away: the step is taken once, without a word."""
    step = make(PLAIN, compile=True, **settings)
    with FlopCounterMode(display=False) as counter:
        ours, _ = run(step, PLAIN, GROUPS)
    assert counter.get_total_flops() > 0
    theirs, _ = run(make(PLAIN), PLAIN, GROUPS)
    assert_same(ours, theirs)


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_what_is_no_compiler(value: Any) -> None:
    with pytest.raises(TypeError, match="compile must be True, False or a function such as"):
        make(PLAIN, compile=value)


# Dynamo looks at the loss's ``.grad`` when it gives up at the raise.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_errors_come_through() -> None:
    step = ps.make_update_step(
        lambda params, m: loss_fn(params, m).mean(),
        ps.optim.sgd(0.1),
        weight_fn=weight_fn,
        compile=True,
    )
    with pytest.raises(ValueError, match=r"losses of shape \(\) against weights of shape \(2, 4\)"):
        step(start(), ps.optim.sgd(0.1).init(start()), [batch(2, 4)])


def test_ranks_may_be_empty() -> None:
    """What happens between ranks is not compiled, so ranks may hold what they like."""
    optimizer = ps.optim.adamw(0.125)
    axis = ps.testing.ThreadAxis(3)
    step = make(optimizer, compile=True, axis=axis)
    part = [batch(2, 4, seed) for seed in range(3)]
    state = [start() for _ in range(3)]
    results = axis.map(step)(state, [optimizer.init(s) for s in state], [part[:2], [], part[2:]])
    alone = make(optimizer)(start(), optimizer.init(start()), part)
    for params, _, metrics in results:
        assert metrics.num_tokens == alone[2].num_tokens
        for a, b in zip(tree.leaves_of(params), tree.leaves_of(alone[0]), strict=True):
            assert close(a, b)


def test_a_compiler_at_work_in_another_thread_is_not_ours() -> None:
    """``torch.compiler.is_compiling`` is true of every thread while one of them compiles."""
    began, go_on = threading.Event(), threading.Event()

    def slow(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        began.set()
        assert go_on.wait(60)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=slow)
    other = threading.Thread(target=lambda: compiled(torch.ones(2)))
    other.start()
    try:
        assert began.wait(60)
        assert torch.compiler.is_compiling()
        with pytest.raises(ValueError, match="one is -1"):
            ps.count_tokens([torch.tensor([1.0, -1.0])], lambda m: m)
        old = torch.ones(2, requires_grad=True).clone()
        assert tree.overwrite(old, torch.zeros(2), None) is not old
        torch.testing.assert_close(old, torch.ones(2), rtol=0, atol=0)
    finally:
        go_on.set()
        other.join(60)


def test_transforms_go_around_the_compiler() -> None:
    """An ensemble of compiled steps is the ensemble of steps; a derivative through one is the derivative."""
    optimizer = ps.optim.sgd(0.125)
    group = [batch(2, 4, seed) for seed in range(2)]

    def moved(step: UpdateStep, rate: Tensor) -> Tensor:
        params = tree.map(lambda leaf: leaf * rate, start())
        new: Tensor = step(params, optimizer.init(params), group)[0]["w"]
        return new.sum()

    rates = torch.tensor([1.0, 2.0]).double()
    plain, through = make(optimizer), make(optimizer, compile=True)
    for transform in (torch.vmap, lambda f: torch.vmap(torch.func.grad(f))):
        expected = transform(lambda rate: moved(plain, rate))(rates)
        assert torch.equal(transform(lambda rate: moved(through, rate))(rates), expected)


def test_a_whole_step_has_a_cache_of_its_own() -> None:
    """A tenth compiled step is one graph like the first, and it is the step."""
    for seed in range(10):
        backend = Compilations()
        step = make(PLAIN, donate=True)
        whole = ps.compile(step, backend=backend, fullgraph=True)
        group = [batch(2, 4, seed)]
        for _ in range(2):
            params, state, _ = whole(start(), PLAIN.init(start()), group)
        assert len(backend.graphs) == 1
        expected = step(start(), PLAIN.init(start()), group)
        for a, b in zip(tree.leaves_of((params, state)), tree.leaves_of(expected[:2]), strict=True):
            assert close(a, b)


SCALE = [1.0]


def test_what_the_loss_reads_is_looked_at() -> None:
    """Globals and what a loss closes over may change; that of the libraries is not looked at any more."""
    factor = 1.0

    def scaled(params: Any, m: Any) -> Tensor:
        return loss_fn(params, m) * factor * SCALE[0]

    whole = ps.compile(
        ps.make_update_step(scaled, PLAIN, weight_fn=weight_fn), backend="eager", fullgraph=True
    )
    losses = []
    for factor, scale in ((1.0, 1.0), (2.0, 1.0), (2.0, 4.0)):  # noqa: B007
        SCALE[0] = scale
        losses.append(float(whole(start(), PLAIN.init(start()), GROUPS[0])[2].loss))
    assert losses == [losses[0], 2 * losses[0], 8 * losses[0]]


@pytest.mark.parametrize("whole", [False, True])
def test_names_of_a_loss_without_a_module_are_looked_at(whole: bool) -> None:
    """As ``exec`` makes one, of a file of settings, say."""
    names: dict[str, Any] = {"factor": 1.0, "loss_fn": loss_fn}
    exec("def scaled(params, m):\n    return loss_fn(params, m) * factor", names)
    compiler = partial(ps.compile, backend="eager")
    step = ps.make_update_step(
        names["scaled"], PLAIN, weight_fn=weight_fn, compile=False if whole else compiler
    )
    step = compiler(step) if whole else step
    losses = []
    for names["factor"] in (1.0, 2.0):
        losses.append(float(step(start(), PLAIN.init(start()), GROUPS[1])[2].loss))
    assert losses == [losses[0], 2 * losses[0]]


def test_what_a_step_closes_over_is_not_looked_at() -> None:
    """Functions and constants in cells of purestep's own functions stay; tensors and what is the caller's may change."""

    class Guard(NamedTuple):
        name: str
        value: Any

    step: Any = ps.make_update_step(loss_fn, PLAIN, weight_fn=weight_fn)
    looked_at = {
        Guard("transit", step): False,
        Guard("donate", False): False,
        Guard("params", (1,)): True,
        Guard("transit.__closure__[0].cell_contents", loss_fn): False,
        Guard("transit.__closure__[0].cell_contents.rate", 0.5): True,
        Guard("transit.__closure__[0].cell_contents.__closure__[0].cell_contents", 0.5): True,
        Guard("transit.__closure__[1].cell_contents", 0.5): False,
        Guard("transit.__closure__[2].cell_contents", torch.ones(())): True,
    }
    look = unwatched(step, ["purestep"])["guard_filter_fn"]
    assert look([*looked_at]) == [*looked_at.values()]


def test_settings_beside_our_own() -> None:
    """A mode and options of the caller's go along, which torch.compile takes only one of."""
    x = torch.eye(3)
    for settings in ({"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_autotune": False}}):
        assert torch.equal(ps.compile(lambda x: 2 * x, **settings)(x), 2 * x)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_gradient_for_two_leaves(microbatches: int) -> None:
    """A graph may give both of them one tensor; their sums are each its own, and clipped once."""
    optimizer = ps.optim.chain(ps.optim.clip_by_global_norm(0.125), ps.optim.sgd(0.125, 0.5))
    params = {"a": torch.tensor([1.0, 2.0, 3.0]).double(), "b": torch.ones(3).double()}
    group = [{"x": torch.ones(2, 3).double()} for _ in range(microbatches)]
    moved = []
    for compile in (True, False):
        step = ps.make_update_step(
            lambda p, m: (m["x"] @ (p["a"] + p["b"])).square(),
            optimizer,
            weight_fn=lambda m: m["x"][:, 0] > 0,
            compile=compile,
            donate=True,
        )
        own = tree.map(torch.clone, params)
        moved.append(step(own, optimizer.init(own), group)[0])
    assert close(moved[0]["a"], moved[1]["a"])
    assert close(moved[0]["b"], moved[1]["b"])


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_compiled_loss_closes_over_is_a_constant(whole: bool) -> None:
    """Nothing is recorded of it, and its ``.grad`` is not written."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def scaled(params: Any, m: Any) -> ps.LossTerms:
        losses = loss_fn(params, m) * scale
        return ps.LossTerms(losses, aux={"loss": losses.sum()})

    step = ps.make_update_step(scaled, PLAIN, weight_fn=weight_fn, compile=not whole)
    step = ps.compile(step, backend="eager", fullgraph=True) if whole else step
    new = step(start(), PLAIN.init(start()), GROUPS[1])
    assert not tree.requires_grad(new)
    assert scale.grad is None
    if whole:
        recorded = tree.map(lambda leaf: leaf.requires_grad_(), start())
        assert step(recorded, PLAIN.init(recorded), GROUPS[1])[0]["w"].requires_grad


@pytest.mark.filterwarnings("ignore:compile=True", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("inside", [False, True])
def test_a_second_derivative_of_what_is_compiled_is_refused(inside: bool) -> None:
    """torch.compile has none, and its graph does not lead to the leaves: it would be left out without a word."""

    def energy(params: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).square().sum()

    shaped: Any = torch.compile(energy, backend="aot_eager") if inside else energy

    def penalised(params: Any, m: Any) -> Tensor:
        x = m["x"].clone().requires_grad_()
        (force,) = torch.autograd.grad(shaped(params, x), x, create_graph=True)
        losses: Tensor = loss_fn(params, m) + force.square().mean()
        return losses

    step = ps.make_update_step(penalised, PLAIN, weight_fn=weight_fn, compile=not inside)
    with pytest.raises(ValueError, match=r"cannot be differentiated a second time.*compile="):
        step(start(), PLAIN.init(start()), GROUPS[1])


def test_a_checkpoint_is_compiled_without_the_backward_pass() -> None:
    """No graph holds both, and what the compiler forbade when it failed is allowed again."""

    def checkpointed(params: Any, m: Any) -> Tensor:
        kept: Tensor = checkpoint(loss_fn, params, m, use_reentrant=False)
        return kept

    ours, theirs = (
        ps.make_update_step(checkpointed, PLAIN, weight_fn=weight_fn, compile=compile)(
            start(), PLAIN.init(start()), GROUPS[1]
        )
        for compile in (True, False)
    )
    for a, b in zip(tree.leaves_of(ours[:2]), tree.leaves_of(theirs[:2]), strict=True):
        assert close(a, b)
    w = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, w, use_reentrant=False).sum().backward()
    assert w.grad is not None
