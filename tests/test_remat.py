"""Rematerialisation: the values and gradients of the plain function, of which its arguments alone are kept."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import purestep as ps
from proofs.strategies import assert_same
from purestep import tree
from purestep.torch_private import may_draw
from tests.memory import LiveBytes
from tests.modules import Of
from tests.torch_private import attention

Function = Callable[..., Any]
SGD = ps.optim.sgd(0.5)


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small ones, so that sums are exact in whatever order they are added up."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


PARAMS = [
    {"w": integers(3, 3, seed=n), "b": torch.tensor([1, -n, 2]).double()}
    for n in (1, 2)
]
X, W = integers(4, 3), integers(4)
MANY = tree.map(lambda leaf: torch.stack([leaf, leaf + 1, -leaf]), PARAMS)
ONE = torch.tensor(1.0, dtype=torch.float64)


def block(
    p: Any, x: Tensor, *, power: int = 2, mask: Tensor | None = None
) -> dict[str, Any]:
    """A polynomial, and beside it what is no tensor, or no floating point."""
    y = (x @ p["w"] + p["b"]) ** power - x
    return {
        "y": y,
        "positive": (y > 0).sum(-1),
        "mask": mask,
        "name": "block",
        "scale": p["b"],
    }


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


def recorded(loss: Function, params: Any, x: Tensor, again: bool) -> Any:
    """Gradients by autograd, or those of their squares' sum."""
    leaves, structure = tree.flatten((params, x))
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(
        loss(*tree.unflatten(structure, own)), own, create_graph=again
    )
    total = torch.stack([g.square().sum() for g in grads]).sum()
    return torch.autograd.grad(total, own) if again else grads


TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "value": lambda f: f(PARAMS, X),
    "without gradients": lambda f: torch.no_grad()(f)(PARAMS, X),
    "autograd": lambda f: recorded(f, PARAMS, X, again=False),
    "autograd twice": lambda f: recorded(f, PARAMS, X, again=True),
    "ps.grad_and_value": lambda f: ps.grad_and_value(f, argnums=(0, 1))(PARAMS, X),
    "grad": lambda f: grad(f, argnums=(0, 1))(PARAMS, X),
    "vjp, pulled when its level is gone": lambda f: vjp(f, PARAMS, X)[1](2 * ONE),
    "vmap of grad": lambda f: vmap(grad(f, argnums=(0, 1)), (0, None))(MANY, X),
    "jvp of grad": lambda f: jvp(grad(f), (PARAMS, X), (PARAMS, X)),
    "autograd of vmap": lambda f: recorded(lambda p, x: vmap(f, (0, None))(p, x).sum(), MANY, X, again=False),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_of_nested_functions(name: str) -> None:
    """A function under remat, made of such functions, and called twice with the same params."""

    def nested(remat: Any) -> Any:
        def twice(p: Any, x: Tensor, **how: Any) -> Any:
            return remat(block)(p, remat(block)(p, x, power=1)["y"], **how)

        return TRANSFORMS[name](chain(remat(twice)))

    expected = nested(lambda fn: fn)
    assert any(leaf.any() for leaf in tree.leaves(expected)), "zero would say nothing"
    assert_same(nested(ps.remat), expected)


_, HOLDING = ps.from_module(
    Of(
        lambda m, x, remat: remat(m.part)(x),
        part=torch.nn.Linear(4, 4, dtype=torch.float64),
    )
)
EYE = torch.eye(4).double()
CLOSING: dict[str, Function] = {
    "lambda": lambda remat, w: remat(lambda x: x * w)(2 * w).sum(),
    "module": lambda remat, w: HOLDING(
        {"part.weight": EYE, "part.bias": w}, X[:, 0], remat
    ).sum(),
    "returned": lambda remat, w: remat(lambda x: (x, w))(X[:, 0])[1].sum(),
    "in an inner vmap": lambda remat, w: vmap(lambda v: remat(lambda x: x * w)(v))(
        X[:, 0]
    ).sum(),
}


@pytest.mark.parametrize("loss", CLOSING)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: ps.grad_and_value(f)(W),
        lambda f: torch.autograd.grad(f(own := W.clone().requires_grad_()), own),
        lambda f: grad(lambda w: vmap(f)(w).sum())(torch.stack([W, -W, W, W])),
        lambda f: jvp(f, (W,), (W,)),
    ],
)
def test_what_is_closed_over_is_differentiated(transform: Any, loss: str) -> None:
    """And batched, where both are of one size."""

    def run(remat: Any) -> Any:
        return transform(lambda w: CLOSING[loss](remat, w))

    assert_same(run(ps.remat), run(lambda fn: fn))


def written_later(x: Tensor) -> Tensor:
    """The argument is written to before the backward pass."""
    y = ps.remat(lambda p: p["x"] ** 3)({"x": x})
    x.mul_(3)
    return y


WRITING: Any = [
    written_later,
    lambda x: ps.remat(lambda p: p["x"].mul_(2) ** 3)({"x": x}),
]


@pytest.mark.parametrize("use", WRITING)
def test_arguments_that_are_written_to_are_refused(use: Function) -> None:
    """In a tree, too."""
    with pytest.raises(RuntimeError, match="an inplace operation"):
        ps.grad_and_value(lambda w: use(2 * w).sum())(W)


def test_what_no_checkpoint_takes_is_refused() -> None:
    """``torch.func.grad`` inside, and a generator, which would draw other numbers."""

    slope = ps.remat(lambda x: grad(lambda y: (y**3).sum())(x) * x)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        ps.grad_and_value(lambda w: slope(w).sum())(W)
    with pytest.raises(
        TypeError, match=r"rand under ps\.remat takes a torch\.Generator, .* a key"
    ):
        ps.remat(torch.rand)(4, generator=torch.Generator())


@pytest.mark.parametrize(
    "name", ["value", "without gradients", "autograd", "ps.grad_and_value"]
)
def test_random_numbers_are_drawn_again(name: str) -> None:
    """And the generator stands where one call of the function leaves it."""

    def dropping(p: Any, x: Tensor, **how: Any) -> dict[str, Any]:
        out = block(p, x, **how)
        return {**out, "y": torch.nn.functional.dropout(out["y"]) ** 2}

    def seeded(block: Function) -> Any:
        torch.manual_seed(0)
        return TRANSFORMS[name](chain(block)), torch.get_rng_state()

    assert_same(seeded(ps.remat(dropping)), seeded(dropping))


def test_checkpoints_inside_and_around() -> None:
    def again(function: Function) -> Function:
        return partial(checkpoint, function, use_reentrant=False)

    run = TRANSFORMS["ps.grad_and_value"]
    for function in (again(ps.remat(block)), ps.remat(again(block))):
        assert_same(run(chain(function)), run(chain(block)))


def test_the_input_of_each_layer_is_kept_and_all_of_one_layer() -> None:
    """Without remat, all of all layers."""
    layers, rows, width = 12, 256, 16
    activation = rows * width * 4
    weights = [torch.randn(width, width) / width**0.5 for _ in range(layers)]
    x = torch.randn(rows, width)

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(x @ weight)
        return x

    def peak(layer: Function) -> int:
        def deep(weights: list[Tensor]) -> Tensor:
            y = x
            for weight in weights:
                y = layer(weight, y)
            return y.square().sum()

        with LiveBytes() as live:
            ps.grad_and_value(deep)(weights)
        return live.peak

    gc.collect()
    # tanh keeps what it returns. Beside that are alive a cotangent, what is made of it, and a product before tanh takes it.
    assert peak(layer) >= 5 * layers * activation
    assert (
        peak(ps.remat(layer))
        <= (layers + 5 + 3) * activation + layers * width * width * 4
    )


def test_arguments_are_freed_as_the_backward_pass_goes() -> None:
    """In a tree, and while the result is alive."""
    x = torch.ones(3, requires_grad=True)
    argument = 2 * x
    held = weakref.ref(argument)
    value = ps.remat(lambda p: p["x"].square())({"x": argument}).sum()
    del argument
    assert held() is not None
    torch.autograd.grad(value, x)
    assert held() is None
    assert value == 12


def test_attention_draws_where_it_drops() -> None:
    """All of it has the mark of what draws random numbers."""
    aten, given = torch.ops.aten, [torch.ones(1, 1, 2, 4)] * 3
    assert torch.Tag.nondeterministic_seeded in attention.tags
    draws: list[Any] = [
        (attention, [*given, 0.1], {}), (attention, given, {"dropout_p": 0.1}),
        (aten.native_dropout.default, [given[0], 0.0, True], {}),
    ]  # fmt: skip
    none: list[Any] = [
        (attention, given, {}), (attention, [*given, 0.0, True], {"scale": None}),
        (aten.mm.default, given[:2], {}),
    ]  # fmt: skip
    assert all(may_draw(*call) for call in draws)
    assert not any(may_draw(*call) for call in none)


def step(loss_fn: Function, params: Any = PARAMS, **how: Any) -> Any:
    """One of two microbatches."""
    torch.manual_seed(0)
    update = ps.make_update_step(
        loss_fn, SGD, weight_fn=lambda x: torch.ones(len(x)), **how
    )
    return update(
        params, SGD.init(params), [integers(4, 3, seed=seed) for seed in range(2)]
    )


def test_a_compiled_step_is_the_step(fresh_compiler: None) -> None:
    """Nested, closing over params, with views among the results, and random numbers."""

    def of(remat: Any) -> Function:
        def inner(p: Any, x: Tensor) -> Any:
            inside = remat(lambda x: block(p, x, power=1)["y"])(x)
            dropped = torch.nn.functional.dropout(inside)
            return {**remat(block)(p, dropped), "x": x, "view": x.T}

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            out = remat(inner)(params[0], x)
            x = (
                out["y"]
                + out["positive"][:, None]
                + out["x"] * out["scale"]
                + out["view"].sum()
            )
            return (x @ params[1]["w"] + params[1]["b"]).sum(-1)

        return loss_fn

    backend = partial(torch.compile, backend="aot_eager")
    assert_same(step(of(ps.remat), compile=backend), step(of(lambda fn: fn)))


def test_a_compiled_function_inside_remat_in_the_first_step(
    fresh_compiler: None,
) -> None:
    """The step watches what its first backward pass recomputes; a compiler does not see that."""

    def losses_of(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh()

    compiled = ps.remat(torch.compile(losses_of, backend="eager"))
    assert_same(step(compiled, W[:3]), step(ps.remat(losses_of), W[:3]))
