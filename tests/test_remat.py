"""Rematerialisation: the values and gradients of the plain function, under everything that transforms it, in less memory."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs.strategies import assert_same
from proofs.test_t10_transforms import COMPILER
from purestep import tree
from purestep.torch_internals import may_draw
from tests.memory import LiveBytes
from tests.torch_internals import attention

Function = Callable[..., Any]


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small ones, so that sums are exact in whatever order they are added up."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


PARAMS = [
    {"w": integers(3, 3, seed=seed), "b": torch.tensor([1, -seed, 2]).double()} for seed in (1, 2)
]
X = integers(4, 3)
MANY = tree.map(lambda leaf: torch.stack([leaf, leaf + 1, -leaf]), PARAMS)
ONE = torch.tensor(1.0, dtype=torch.float64)


def block(p: Any, x: Tensor, *, power: int = 2, mask: Tensor | None = None) -> dict[str, Any]:
    """A polynomial, and beside it what is no tensor, or no floating point."""
    y = (x @ p["w"] + p["b"]) ** power - x
    return {"y": y, "positive": (y > 0).sum(-1), "mask": mask, "name": "block", "scale": p["b"]}


def chain(block: Function) -> Function:
    """A loss of two blocks, which takes all that they return."""

    def loss(params: Any, x: Tensor) -> Tensor:
        scale = ONE
        for p in params:
            out = block(p, x, power=2, mask=None)
            assert (out["mask"], out["name"]) == (None, "block")
            x, scale = out["y"] + out["positive"][:, None], scale * out["scale"].sum()
        return (x.sum(-1) * scale).sum()

    return loss


def both(transform: Callable[[Function], Any], function: Function = block) -> None:
    """What is made of a function is the same with it under ``remat``."""
    assert_same(transform(ps.remat(function)), transform(function))


def pulled(function: Function, *args: Any) -> Any:
    """``vjp``, pulled when its level is gone."""
    return vjp(function, *args)[1](2 * ONE)


def over_params(loss: Function) -> Function:
    """The sum of an ensemble's losses."""
    return lambda params, x: vmap(loss, (0, None))(params, x).sum()


def recorded(loss: Function, params: Any, x: Tensor, again: bool) -> Any:
    """Gradients by autograd, or those of their squares' sum."""
    leaves, structure = tree.flatten((params, x))
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(loss(*tree.unflatten(structure, own)), own, create_graph=again)
    total = torch.stack([g.square().sum() for g in grads]).sum()
    return torch.autograd.grad(total, own) if again else grads


def squared(loss: Function) -> Function:
    """The square of a gradient."""
    return lambda params, x: grad(loss, argnums=1)(params, x).square().sum()


TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "value": lambda f: f(PARAMS, X),
    "without gradients": lambda f: torch.no_grad()(f)(PARAMS, X),
    "autograd": lambda f: recorded(f, PARAMS, X, again=False),
    "autograd twice": lambda f: recorded(f, PARAMS, X, again=True),
    "ps.grad_and_value": lambda f: ps.grad_and_value(f, argnums=(0, 1))(PARAMS, X),
    "grad": lambda f: grad(f, argnums=(0, 1))(PARAMS, X),
    "vjp": lambda f: pulled(f, PARAMS, X),
    "vmap": lambda f: vmap(f, (0, None))(MANY, X),
    "vmap of grad": lambda f: vmap(grad(f, argnums=(0, 1)), (0, None))(MANY, X),
    "grad of vmap": lambda f: grad(over_params(f), argnums=(0, 1))(MANY, X),
    "vmap of vjp": lambda f: vmap(lambda p: pulled(f, p, X))(MANY),
    "vjp of vmap": lambda f: pulled(over_params(f), MANY, X),
    "autograd of vmap": lambda f: recorded(over_params(f), MANY, X, again=False),
    "vmap in vmap": lambda f: vmap(lambda x: vmap(f, (0, None))(MANY, x))(torch.stack([X, -X])),
    "grad of grad": lambda f: grad(squared(f), argnums=(0, 1))(PARAMS, X),
    "jvp": lambda f: jvp(f, (PARAMS, X), (PARAMS, X)),
    "jvp of grad": lambda f: jvp(grad(f), (PARAMS, X), (PARAMS, X)),
    "grad of jvp": lambda f: grad(lambda p: jvp(lambda x: f(p, x), (X,), (X,))[1])(PARAMS),
    "hessian": lambda f: hessian(f)(PARAMS, X),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f))(PARAMS, X),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f))(PARAMS, X),
    "vmap of hessian": lambda f: vmap(hessian(f), (0, None))(MANY, X),
}


def test_no_gradient_is_zero() -> None:
    """Which would say nothing."""
    for name in ("autograd", "autograd twice"):
        assert all(leaf.any() for leaf in TRANSFORMS[name](chain(block)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform(name: str) -> None:
    both(lambda block: TRANSFORMS[name](chain(block)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nested(name: str) -> None:
    """A function under remat, made of such functions, and called twice with the same params."""

    def nested(remat: Any) -> Function:
        def twice(p: Any, x: Tensor, **how: Any) -> Any:
            return remat(block)(p, remat(block)(p, x, power=1)["y"], **how)

        return TRANSFORMS[name](chain(remat(twice)))

    assert_same(nested(ps.remat), nested(lambda fn: fn))


RESULTS: dict[str, Function] = {
    "one tensor": lambda w, x: x @ w,
    "an argument": lambda w, x: (x, x @ w),
    "a view of an argument": lambda w, x: (x.T, x @ w),
    "views of what is made": lambda w, x: ((y := x @ w), y.T, y[0]),
    "twice the same": lambda w, x: ((y := x @ w), y),
    "a constant": lambda w, x: (torch.ones(3), x @ w),
    "not of all arguments": lambda w, x: (w.sum(), x * x),
    "detached": lambda w, x: ((x @ w).detach(), x @ w),
    "nothing else": lambda w, x: (x @ w, None, (), {"none": None}),
    "indices": lambda w, x: (x @ w).max(-1),
    "no tensor": lambda w, x: (3, "three"),
}


@pytest.mark.parametrize(
    "name", ["ps.grad_and_value", "grad", "grad of vmap", "vmap of grad", "jvp", "grad of grad"]
)
@pytest.mark.parametrize("result", RESULTS)
def test_whatever_is_returned(result: str, name: str) -> None:
    """Under vmap too, where some of it is not batched."""

    def loss(function: Function) -> Function:
        def over_leaves(params: Any, x: Tensor) -> Tensor:
            loss = (params[0]["w"] * x[0]).sum()
            for leaf in tree.leaves_of(function(params[0]["w"], x)):
                if isinstance(leaf, Tensor):
                    loss = loss + (leaf * leaf).sum() * leaf.sum() * loss
            return loss + 0 * params[0]["b"].sum() + 0 * params[1]["b"].sum() * params[1]["w"].sum()

        return over_leaves

    both(lambda function: TRANSFORMS[name](loss(function)), RESULTS[result])


@pytest.mark.parametrize("name", ["ps.grad_and_value", "grad", "vmap of grad", "grad of vmap"])
def test_what_nobody_uses_has_no_gradient(name: str) -> None:
    """Not even one of zero, of which the square root's derivative at zero would make a NaN."""

    def rooted(p: Any, x: Tensor, **how: Any) -> Any:
        return {**block(p, x, **how), "root": (0 * x).sqrt()}

    both(lambda function: TRANSFORMS[name](chain(function)), rooted)


def closing(w: Tensor) -> Tensor:
    """Closes over a parameter, as users write it."""
    return ps.remat(lambda x: x * w)(X[:, 0]).sum()


def closing_beside(w: Tensor) -> Tensor:
    """What it is given is differentiated, too."""
    return ps.remat(lambda x: x * w)(2 * w).sum()


class Holding(torch.nn.Module):
    """Computes a part of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return ps.remat(self.part)(x)


_, HOLDING = ps.from_module(Holding())


def closing_in_module(w: Tensor) -> Tensor:
    """A module holds it."""
    params = {"part.weight": torch.ones(4, 4).double(), "part.bias": w}
    total: Tensor = HOLDING(params, X[:, 0]).sum()
    return total


def returning(w: Tensor) -> Tensor:
    """It is returned as it is."""
    return ps.remat(lambda x: (x, w))(X[:, 0])[1].sum()


W = integers(4)


@pytest.mark.parametrize("loss", [closing, closing_beside, closing_in_module, returning])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: ps.grad_and_value(f)(W),
        lambda f: grad(f)(W),
        lambda f: pulled(f, W),
        lambda f: jvp(f, (W,), (W,)),
        lambda f: vmap(grad(f))(torch.stack([W, W])),
        lambda f: grad(lambda w: vmap(f)(w).sum())(torch.stack([W, W])),
        lambda f: f(W.clone().requires_grad_()).backward(),
    ],
)
def test_what_is_closed_over_is_no_constant_unseen(transform: Any, loss: Function) -> None:
    """Its gradient would be zero without a word: it is refused before anything is differentiated."""
    with pytest.raises(ValueError, match=r"closes over.*ps\.remat\(block\)\(params, x\)"):
        transform(loss)


def test_what_only_a_derivative_within_sees_is_closed_over_too() -> None:
    with pytest.raises(ValueError, match="closes over"):
        grad(lambda w: ps.remat(lambda x: grad(lambda y: (y * y * w).sum())(x))(2 * w).sum())(W)


def test_what_the_function_itself_differentiates() -> None:
    """It may make what requires grad, and close over constants."""

    def by_engine(x: Tensor) -> Tensor:
        y = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return slope * x * W

    def by_transform(x: Tensor) -> Tensor:
        return grad(lambda y: (y**3).sum())(x) * x * W

    both(lambda f: ps.grad_and_value(lambda w: f(w).sum())(W), by_engine)
    both(lambda f: ps.grad_and_value(lambda w: f(w).sum())(W), by_transform)
    both(lambda f: grad(lambda w: f(w).sum())(W), by_transform)


def test_what_writes_to_its_arguments_is_refused() -> None:
    def doubling(x: Tensor) -> Tensor:
        return x.mul_(2) * x

    with pytest.raises(ValueError, match="doubling wrote to one of its arguments in place"):
        ps.grad_and_value(lambda w: ps.remat(doubling)(w * 1).sum())(W)


def dropping(p: Any, x: Tensor, **how: Any) -> dict[str, Any]:
    """A block with dropout, whose derivative needs the same numbers twice."""
    out = block(p, x, **how)
    return {**out, "y": torch.nn.functional.dropout(out["y"]) ** 2}


@pytest.mark.parametrize(
    "name", [name for name in TRANSFORMS if not re.search("vmap|hess|jac", name)]
)
def test_random_numbers_are_drawn_again(name: str) -> None:
    """And the generator stands where one call of the function leaves it."""

    def seeded(block: Function) -> Any:
        torch.manual_seed(0)
        return TRANSFORMS[name](chain(block)), torch.get_rng_state()

    if name in ("value", "without gradients", "autograd", "ps.grad_and_value", "grad", "vjp"):
        both(seeded, dropping)
    else:  # Forward mode runs the function twice, and a second derivative more often.
        state = seeded(ps.remat(dropping))[1]
        assert torch.equal(state, seeded(ps.remat(dropping))[1])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers_under_vmap(randomness: Any) -> None:
    def seeded(transform: Callable[[Function], Any]) -> Callable[[Function], Any]:
        def run(block: Function) -> Any:
            torch.manual_seed(0)
            return transform(chain(block)), torch.get_rng_state()

        return run

    both(seeded(lambda f: vmap(grad(f), (0, None), randomness=randomness)(MANY, X)), dropping)
    both(
        seeded(
            lambda f: grad(lambda p: vmap(f, (0, None), randomness=randomness)(p, X).sum())(MANY)
        ),
        dropping,
    )


def test_a_generator_that_is_given() -> None:
    def noisy(p: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randint(0, 3, x.shape, generator=generator)
        return (x @ p["w"]) ** 2 * noise

    def seeded(block: Function) -> Any:
        generator = torch.Generator().manual_seed(0)

        def loss(params: Any) -> Tensor:
            return block(params[1], block(params[0], X, generator), generator=generator).sum()

        return ps.grad_and_value(loss)(PARAMS), generator.get_state()

    both(seeded, noisy)


def test_who_draws_nothing_leaves_the_generator_alone() -> None:
    """Another thread may draw from it while blocks are computed again."""
    calls: list[Tensor] = []

    def meanwhile(x: Tensor) -> Tensor:
        if calls:
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
        calls.append(x)
        return x * x

    torch.manual_seed(0)
    torch.rand(1)
    wanted = torch.get_rng_state()
    torch.manual_seed(0)
    ps.grad_and_value(lambda w: ps.remat(meanwhile)(w).sum())(W)
    assert len(calls) == 2
    assert torch.equal(torch.get_rng_state(), wanted)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("transform", [ps.grad_and_value, torch.func.grad_and_value])
def test_autocast(around: bool, transform: Any) -> None:
    """What was cast in the forward pass is cast in the backward pass, be autocast still on or not; nothing stays in its cache."""
    params, x = tree.map(Tensor.float, (PARAMS, X))
    held, dtypes = [], set()

    def cast(p: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ p["w"] / 8) @ p["w"]
        held.append(weakref.ref(p["w"]))
        dtypes.add(y.dtype)
        return y

    def run(block: Function) -> Any:
        def loss(params: Any) -> Tensor:
            y = x
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for p in params:
                    y = block(p, y)
            return y.float().square().sum()

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
            result = transform(loss)(params)
            if block is not cast and transform is ps.grad_and_value:
                assert not any(each() is not None for each in held)
            return result

    both(run, cast)
    assert dtypes == {torch.bfloat16}


def test_modules_and_checkpoints() -> None:
    """A module's pure function under remat, a checkpoint inside, and remat inside of a checkpoint."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    params, apply = ps.from_module(module.double())

    def run(apply: Function) -> Any:
        return ps.grad_and_value(lambda params: apply(params, X).square().sum())(params)

    both(run, apply)
    plain = run(apply)

    def again(apply: Function) -> Function:
        return lambda params, x: checkpoint(apply, params, x, use_reentrant=False)

    assert_same(run(again(ps.remat(apply))), plain)
    assert_same(run(ps.remat(again(apply))), plain)


def group(ranks: int, microbatches: int = 2) -> list[list[dict[str, Tensor]]]:
    """A group for each rank."""
    return [
        [{"x": integers(4, 3, seed=10 * rank + m)} for m in range(microbatches)]
        for rank in range(ranks)
    ]


def weight_fn(m: Any) -> Tensor:
    """Every row is a token."""
    return torch.ones(m["x"].shape[0], dtype=torch.float64)


def step(block: Function, axis: Any, rate: Any = 0.5, **how: Any) -> Any:
    """Two blocks, in whose middle ranks meet."""

    def loss_fn(params: Any, m: Any) -> Tensor:
        x = m["x"]
        for p in params:
            x = block(p, x, axis)
        return x.sum(-1)

    return ps.make_update_step(loss_fn, ps.optim.sgd(rate), axis=axis, weight_fn=weight_fn, **how)


def meeting(p: Any, x: Tensor, axis: Any) -> Tensor:
    """A block with collectives inside, and another number on each rank."""
    y = x @ ps.pvary(p["w"], axis) + ps.pvary(p["b"], axis)
    total = ps.psum(y.sum(0), axis)
    return y * total - x * (1 + axis.index) - ps.all_gather(y, axis).sum(0)


def start() -> Any:
    return tree.map(torch.clone, PARAMS)


@pytest.mark.parametrize("donate", [False, True])
def test_collectives_on_threads(donate: bool) -> None:
    """Each rank calls them again, in one order; gradients that travel meanwhile are not taken for them."""

    def run(block: Function) -> Any:
        axis = ps.testing.ThreadAxis(2, bucket_bytes=8)
        update_step = step(block, axis, donate=donate)
        state = ps.optim.sgd(0.5).init(PARAMS)
        return axis.map(lambda group: update_step(start(), state, group))(group(2))

    both(run, meeting)


def test_ranks_in_threads_draw_nothing_from_each_other() -> None:
    """Without collectives in the block, gradients leave while blocks are computed again."""

    def local(p: Any, x: Tensor, axis: Any) -> Tensor:
        return (x @ p["w"] + p["b"]) ** 2

    def run(block: Function) -> Any:
        axis = ps.testing.ThreadAxis(3, bucket_bytes=8)
        update_step = step(block, axis)
        state = ps.optim.sgd(0.5).init(PARAMS)
        return axis.map(lambda group: update_step(PARAMS, state, group))(group(3))

    both(run, local)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f(PARAMS, ONE / 2),
        lambda f: grad(lambda p, rate: f(p, rate)[0]["w"].sum(), argnums=(0, 1))(PARAMS, ONE / 2),
        lambda f: pulled(lambda p: f(p, ONE / 2)[0]["w"].sum(), PARAMS),
        lambda f: vmap(lambda p: f(p, ONE / 2))(MANY),
        lambda f: jvp(lambda p: f(p, ONE / 2), (PARAMS,), (PARAMS,)),
    ],
)
def test_collectives_under_vmap(transform: Callable[[Function], Any]) -> None:
    """Also where a derivative is taken when the axis does not map any more."""
    stacked = [
        {"x": torch.stack(each)}
        for each in zip(*[[m["x"] for m in rank] for rank in group(2)], strict=True)
    ]

    def run(block: Function) -> Any:
        axis = ps.VmapAxis(2)

        def trained(params: Any, rate: Any) -> Any:
            update_step = step(block, axis, rate)
            state = ps.optim.sgd(0.5).init(PARAMS)
            mapped = axis.map(lambda p, group: update_step(p, state, group)[0], (None, 0), None)
            return mapped(params, stacked)

        return transform(trained)

    both(run, meeting)


def test_penalties_in_a_step() -> None:
    """A loss that differentiates its blocks by the input, with a graph."""

    def run(block: Function) -> Any:
        def penalised(params: Any, m: Any) -> Tensor:
            x = m["x"].clone().requires_grad_()
            energy = block(params[1], block(params[0], x)["y"])["y"].sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().sum(-1)

        def transformed(params: Any, m: Any) -> Tensor:
            force = grad(lambda x: block(params[1], block(params[0], x)["y"])["y"].sum())(m["x"])
            return force.square().sum(-1)

        return [
            ps.make_update_step(
                loss, ps.optim.sgd(0.5), weight_fn=weight_fn, grad_and_value=transform
            )(PARAMS, ps.optim.sgd(0.5).init(PARAMS), group(1)[0])
            for loss, transform in (
                (penalised, ps.grad_and_value),
                (transformed, ps.grad_and_value),
                (transformed, torch.func.grad_and_value),
            )
        ]

    both(run)


def test_a_compiled_function() -> None:
    """``torch.compile`` inside of remat, without a word in either pass."""

    def run(remat: Any) -> Any:
        torch.compiler.reset()
        compiled = remat(torch.compile(lambda p, x: block(p, x)["y"], backend="aot_eager"))
        return ps.grad_and_value(lambda p: compiled(p, X).sum())(PARAMS[0])

    assert_same(run(ps.remat), run(lambda fn: fn))
    torch.compiler.reset()


def test_a_second_derivative_of_what_is_compiled_is_refused() -> None:
    """Inside of a function under remat, too, where nobody else sees its graph."""
    compiled = torch.compile(lambda w, x: torch.tanh(x @ w), backend="aot_eager")

    def force(w: Tensor, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(compiled(w, y).sum(), y, create_graph=True)[0] + (x @ w)

    with pytest.raises(ValueError, match="cannot be differentiated a second time"):
        ps.grad_and_value(lambda w: ps.remat(force)(w, X).sum())(PARAMS[0]["w"])
    torch.compiler.reset()


LAYERS, ROWS, WIDTH = 12, 256, 16
ACTIVATION = ROWS * WIDTH * 4


def deep(weights: list[Tensor], x: Tensor, remat: Any) -> Tensor:
    """Layers of which each computes five activations."""

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(x @ weight)
        return x

    for weight in weights:
        x = remat(layer)(weight, x)
    return x.square().sum()


def by_vjp(loss: Function, weights: list[Tensor], x: Tensor) -> Any:
    """Which frees as it goes."""
    transform: Any = torch.func.vjp
    value, pull = transform(lambda weights: loss(weights, x), weights)
    return pull(torch.ones_like(value), retain_graph=False)


@pytest.mark.parametrize(
    "reverse",
    [
        lambda loss, weights, x: ps.grad_and_value(loss)(weights, x),
        by_vjp,
        lambda loss, weights, x: vmap(lambda x: by_vjp(loss, weights, x))(x.view(2, -1, WIDTH)),
    ],
)
def test_what_is_kept(reverse: Any) -> None:
    """The input of each layer, and all of one layer's; without remat, all of all layers."""
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)

    def peak(remat: Any) -> int:
        with LiveBytes() as live:
            reverse(lambda weights, x: deep(weights, x, remat), weights, x)
        return live.peak

    gc.collect()
    grads = 2 * LAYERS * WIDTH * WIDTH * 4  # of at most two examples
    # tanh keeps what it returns. Beside that are alive a cotangent, what is made of it, and a product before tanh takes it.
    assert peak(lambda fn: fn) >= 5 * LAYERS * ACTIVATION
    assert peak(ps.remat) <= (LAYERS + 5 + 3) * ACTIVATION + grads


PEAK = """
import sys
import torch
import purestep as ps
from benchmarks.memory import peak_on_host
from tests.test_remat import deep

kind, backend = sys.argv[1:]
torch.manual_seed(0)
weights, m = [torch.randn(64, 64) / 8 for _ in range(12)], {"x": torch.randn(4096, 64)}
sgd = ps.optim.sgd(1e-3)
how = dict(weight_fn=lambda m: torch.ones(1))
for remat in (lambda fn: fn, ps.remat):
    loss = lambda w, m: deep(w, m["x"], remat).expand(1)
    if kind == "whole":
        step = ps.compile(ps.make_update_step(loss, sgd, **how), backend=backend, fullgraph=True)
        run = lambda: step(weights, sgd.init(weights), [m])
    elif kind == "graph":
        compiler = lambda fn: torch.compile(fn, backend=backend)
        step = ps.make_update_step(loss, sgd, compile=compiler, **how)
        run = lambda: step(weights, sgd.init(weights), [m])
    else:
        own = [w.clone().requires_grad_() for w in weights]
        compiled = torch.compile(loss, backend=backend, fullgraph=True)
        run = lambda: torch.autograd.grad(compiled(own, m).sum(), own)
    run(), run()
    print("peak", peak_on_host(run) / m["x"].nbytes)
    torch.compiler.reset()
"""


@pytest.mark.parametrize("kind", ["whole", "graph", "joint"])
def test_what_is_kept_under_the_compiler(kind: str) -> None:
    """Whether reverse mode is in the graph, or the compiler's own, which would compute as it likes."""

    # Only the compiler's own partition of a joint graph takes what is computed twice for one and the same.
    backend = COMPILER if kind == "joint" else "aot_eager"
    run = subprocess.run(
        [sys.executable, "-c", PEAK, kind, backend], capture_output=True, text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}, timeout=240,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    plain, remat = map(float, re.findall(r"^peak ([\d.]+)$", run.stdout, re.M))
    assert plain >= 4 * 12
    assert remat <= 12 + 5 + 5


def test_attention_draws_where_it_drops() -> None:
    """All of it has the mark of what draws random numbers, and would be kept."""
    aten = torch.ops.aten
    given = [torch.ones(1, 1, 2, 4)] * 3
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert not may_draw(attention, given, {})
    assert not may_draw(attention, [*given, 0.0, True], {"scale": None})
    assert may_draw(attention, [*given, 0.1], {})
    assert may_draw(attention, given, {"dropout_p": 0.1})
    assert may_draw(aten.native_dropout.default, [given[0], 0.0, True], {})
    assert not may_draw(aten.mm.default, given[:2], {})


@pytest.mark.parametrize(
    "compiled",
    [
        lambda step: ps.compile(step(), backend="aot_eager", fullgraph=True),
        lambda step: step(compile=lambda fn: torch.compile(fn, backend="aot_eager")),
        lambda step: step(compile=lambda fn: torch.compile(fn, backend="eager")),
    ],
)
@pytest.mark.parametrize("name", ["block", "closure", "kept", "drawn", "nested"])
def test_compiled(name: str, compiled: Any) -> None:
    """A compiled step is the step: also where a function closes over what is differentiated, or draws random numbers."""

    def made(remat: Any) -> Any:
        functions: dict[str, Function] = {
            "block": remat(block),
            "closure": (lambda p, x: remat(lambda x: block(p, x))(x)),
            "kept": remat(lambda p, x: {**block(p, x), "x": x, "view": x.T}),
            "drawn": remat(lambda p, x: {**block(p, x), "x": torch.nn.functional.dropout(x)}),
            "nested": remat(lambda p, x: remat(block)(p, remat(block)(p, x, power=1)["y"])),
        }

        def loss_fn(params: Any, m: Any) -> Tensor:
            x = m["x"]
            for p in params:
                out = functions[name](p, x)
                x = out["y"] + out["positive"][:, None] + out.get("x", 0) * out["scale"]
            return x.sum(-1)

        def step(**how: Any) -> Any:
            return ps.make_update_step(loss_fn, ps.optim.sgd(0.5), weight_fn=weight_fn, **how)

        return step

    torch.compiler.reset()
    state, groups = ps.optim.sgd(0.5).init(PARAMS), group(1)[0]
    torch.manual_seed(0)
    ours = compiled(made(ps.remat))(PARAMS, state, groups)
    torch.manual_seed(0)
    assert_same(ours, made(lambda fn: fn)()(PARAMS, state, groups))
    torch.compiler.reset()
