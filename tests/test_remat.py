"""Tests rematerialisation: values and gradients are those of the plain function.

Only the function's arguments are kept for the backward pass.
"""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import tree
from purestep.torch_private import may_draw_random
from support.strategies import assert_same
from support.torch_private import attention
from tests.memory import LiveBytes
from tests.module_kinds import FunctionModule

Function = Callable[..., Any]
SGD = ps.optim.sgd(0.5)


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Makes small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


FIRST = {
    "w": integers(3, 3, seed=1),
    "b": torch.tensor([1, -1, 2]).double(),
}
SECOND = {
    "w": integers(3, 3, seed=2),
    "b": torch.tensor([1, -2, 2]).double(),
}
PARAMS = [FIRST, SECOND]
X = integers(4, 3)
W = integers(4)
MANY = tree.map(lambda leaf: torch.stack([leaf, leaf + 1, -leaf]), PARAMS)
ONE = torch.tensor(1.0, dtype=torch.float64)


def plain(function: Function) -> Function:
    """Stands for ``ps.remat`` where the function runs as it is."""
    return function


def block(
    p: Any, x: Tensor, *, power: int = 2, mask: Tensor | None = None
) -> dict[str, Any]:
    """Computes a polynomial, and values that are no tensors or no floats."""
    linear = x @ p["w"] + p["b"]
    y = linear**power - x
    return {
        "y": y,
        "positive": (y > 0).sum(-1),
        "mask": mask,
        "name": "block",
        "scale": p["b"],
    }


def chain(block: Function) -> Function:
    """Makes a loss of two blocks, which uses all that they return."""

    def loss(params: Any, x: Tensor) -> Tensor:
        scale = ONE
        for p in params:
            out = block(p, x, power=2, mask=None)
            assert out["mask"] is None
            assert out["name"] == "block"
            x = out["y"] + out["positive"][:, None]
            scale = scale * out["scale"].sum()
        return (x.sum(-1) * scale).sum()

    return loss


def autograd_grads(
    loss: Function, params: Any, x: Tensor, *, twice: bool = False
) -> Any:
    """Computes gradients by autograd, or those of their squares' sum."""
    leaves, structure = tree.flatten((params, x))
    copies = [leaf.clone().requires_grad_() for leaf in leaves]
    value = loss(*tree.unflatten(structure, copies))
    grads = torch.autograd.grad(value, copies, create_graph=twice)
    if not twice:
        return grads
    squares = [leaf.square().sum() for leaf in grads]
    total = torch.stack(squares).sum()
    return torch.autograd.grad(total, copies)


def run_vjp(loss: Function) -> Any:
    """Pulls a cotangent back when the level of ``vjp`` is gone."""
    _, pull, *_ = vjp(loss, PARAMS, X)
    return pull(2 * ONE)


def run_autograd_of_vmap(loss: Function) -> Any:
    def total(params: Any, x: Tensor) -> Tensor:
        return vmap(loss, (0, None))(params, x).sum()

    return autograd_grads(total, MANY, X)


def run_vmap_of_grad(loss: Function) -> Any:
    grads = grad(loss, BOTH)
    return vmap(grads, (0, None))(MANY, X)


def run_without_gradients(loss: Function) -> Any:
    with torch.no_grad():
        return loss(PARAMS, X)


BOTH = (0, 1)
"""Both arguments of a loss: its params and its data."""
INPUTS = (PARAMS, X)
TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "value": lambda f: f(*INPUTS),
    "without gradients": run_without_gradients,
    "autograd": lambda f: autograd_grads(f, *INPUTS),
    "autograd twice": lambda f: autograd_grads(f, *INPUTS, twice=True),
    "ps.grad_and_value": lambda f: ps.grad_and_value(f, argnums=BOTH)(*INPUTS),
    "grad": lambda f: grad(f, argnums=BOTH)(*INPUTS),
    "vjp, pulled when its level is gone": run_vjp,
    "vmap of grad": run_vmap_of_grad,
    "jvp of grad": lambda f: jvp(grad(f), INPUTS, INPUTS),
    "autograd of vmap": run_autograd_of_vmap,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_of_nested_functions(name: str) -> None:
    """A function under remat that is made of such functions.

    They are called twice with the same params.
    """

    def nested(remat: Any) -> Any:
        def twice(p: Any, x: Tensor, **settings: Any) -> Any:
            first = remat(block)(p, x, power=1)
            return remat(block)(p, first["y"], **settings)

        return TRANSFORMS[name](chain(remat(twice)))

    expected = nested(plain)
    leaves = tree.leaves(expected)
    assert any(leaf.any() for leaf in leaves), "all zeros prove nothing"
    assert_same(nested(ps.remat), expected)


_, module_that_remats = ps.from_module(
    FunctionModule(
        lambda m, x, remat: remat(m.part)(x),
        part=torch.nn.Linear(4, 4, dtype=torch.float64),
    )
)
COLUMN = X[:, 0]


def close_over_in_a_lambda(remat: Any, w: Tensor) -> Tensor:
    times_w = remat(lambda x: x * w)
    return times_w(2 * w).sum()


def close_over_in_a_module(remat: Any, w: Tensor) -> Any:
    params = {
        "part.weight": torch.eye(4).double(),
        "part.bias": w,
    }
    return module_that_remats(params, COLUMN, remat).sum()


def return_what_is_closed_over(remat: Any, w: Tensor) -> Any:
    _, returned = remat(lambda x: (x, w))(COLUMN)
    return returned.sum()


def close_over_in_an_inner_vmap(remat: Any, w: Tensor) -> Tensor:
    def times_w(v: Tensor) -> Any:
        return remat(lambda x: x * w)(v)

    return vmap(times_w)(COLUMN).sum()


def grad_by_autograd(loss: Function) -> Any:
    w = W.clone().requires_grad_()
    return torch.autograd.grad(loss(w), w)


def grad_of_vmap(loss: Function) -> Any:
    many = torch.stack([W, -W, W, W])
    mapped = vmap(loss)
    return grad(lambda w: mapped(w).sum())(many)


@pytest.mark.parametrize(
    "loss",
    [
        close_over_in_a_lambda,
        close_over_in_a_module,
        return_what_is_closed_over,
        close_over_in_an_inner_vmap,
    ],
)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: ps.grad_and_value(f)(W),
        grad_by_autograd,
        grad_of_vmap,
        lambda f: jvp(f, (W,), (W,)),
    ],
)
def test_closures_are_differentiated(transform: Any, loss: Any) -> None:
    """And batched, where both are of one size."""
    result = transform(lambda w: loss(ps.remat, w))

    assert_same(result, transform(lambda w: loss(plain, w)))


def write_after_the_call(x: Tensor) -> Tensor:
    """Writes to the argument before the backward pass."""
    cube = ps.remat(lambda p: p["x"] ** 3)
    y: Tensor = cube({"x": x})
    x.mul_(3)
    return y


def write_in_the_call(x: Tensor) -> Any:
    cube_of_double = ps.remat(lambda p: p["x"].mul_(2) ** 3)
    return cube_of_double({"x": x})


@pytest.mark.parametrize("use", [write_after_the_call, write_in_the_call])
def test_arguments_that_are_written_to_are_refused(use: Function) -> None:
    """In a tree, too."""
    transformed = ps.grad_and_value(lambda w: use(2 * w).sum())
    with pytest.raises(RuntimeError, match="an inplace operation"):
        transformed(W)


def test_grad_inside_is_refused() -> None:
    """As in checkpoints."""

    def slope(x: Tensor) -> Tensor:
        cube_grad = grad(lambda y: (y**3).sum())
        return cube_grad(x) * x

    rematerialised = ps.remat(slope)
    transformed = ps.grad_and_value(lambda w: rematerialised(w).sum())
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        transformed(W)


def test_a_generator_is_refused() -> None:
    """It would draw other numbers in the backward pass."""
    rand = ps.remat(torch.rand)
    message = r"rand under ps\.remat takes a torch\.Generator, .* a key"
    with pytest.raises(TypeError, match=message):
        rand(4, generator=torch.Generator())


@pytest.mark.parametrize(
    "name", ["value", "without gradients", "autograd", "ps.grad_and_value"]
)
def test_random_numbers_are_drawn_again(name: str) -> None:
    """The generator ends up where one call of the function leaves it."""

    def dropping(p: Any, x: Tensor, **settings: Any) -> dict[str, Any]:
        out = block(p, x, **settings)
        out["y"] = functional.dropout(out["y"]) ** 2
        return out

    def run_seeded(block: Function) -> Any:
        torch.manual_seed(0)
        result = TRANSFORMS[name](chain(block))
        return result, torch.get_rng_state()

    result = run_seeded(ps.remat(dropping))

    assert_same(result, run_seeded(dropping))


def test_checkpoints_inside_and_around() -> None:
    def checkpointed(function: Function) -> Function:
        return partial(checkpoint, function, use_reentrant=False)

    run = TRANSFORMS["ps.grad_and_value"]
    inside = checkpointed(ps.remat(block))
    around = ps.remat(checkpointed(block))

    expected = run(chain(block))
    assert_same(run(chain(inside)), expected)
    assert_same(run(chain(around)), expected)


def test_the_input_of_each_layer_is_kept_and_all_of_one_layer() -> None:
    """Without remat, all activations of all layers are kept."""
    layers = 12
    rows = 256
    width = 16
    activation_bytes = rows * width * 4
    weight_bytes = layers * width * width * 4
    weights = [torch.randn(width, width) / width**0.5 for _ in range(layers)]
    x = torch.randn(rows, width)

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(x @ weight)
        return x

    def measure_peak(layer: Function) -> int:
        def deep(weights: list[Tensor]) -> Tensor:
            y = x
            for weight in weights:
                y = layer(weight, y)
            return y.square().sum()

        with LiveBytes() as live:
            ps.grad_and_value(deep)(weights)
        return live.peak

    gc.collect()
    # tanh keeps its result. Also alive are a cotangent, what is computed from it, and the
    # product that tanh takes.
    peak = measure_peak(layer)
    peak_with_remat = measure_peak(ps.remat(layer))

    assert peak >= 5 * layers * activation_bytes
    assert peak_with_remat <= (layers + 5 + 3) * activation_bytes + weight_bytes


def test_arguments_are_freed_as_the_backward_pass_goes() -> None:
    """In a tree, and while the result is alive."""
    x = torch.ones(3, requires_grad=True)
    argument = 2 * x
    reference = weakref.ref(argument)
    square = ps.remat(lambda p: p["x"].square())
    value = square({"x": argument}).sum()
    del argument
    assert reference() is not None

    torch.autograd.grad(value, x)

    assert reference() is None
    assert value == 12


Q = torch.ones(1, 1, 2, 4)
QKV = [Q, Q, Q]
NATIVE_DROPOUT = torch.ops.aten.native_dropout.default
MM = torch.ops.aten.mm.default


def test_attention_draws_where_it_drops() -> None:
    """torch marks every call of it as one that draws random numbers."""
    assert torch.Tag.nondeterministic_seeded in attention.tags
    assert may_draw_random(attention, [*QKV, 0.1], {})
    assert may_draw_random(attention, QKV, {"dropout_p": 0.1})
    assert may_draw_random(NATIVE_DROPOUT, [Q, 0.0, True], {})

    assert not may_draw_random(attention, QKV, {})
    assert not may_draw_random(attention, [*QKV, 0.0, True], {"scale": None})
    assert not may_draw_random(MM, QKV[:2], {})


def weigh_rows(x: Tensor) -> Tensor:
    return torch.ones(len(x))


def run_step(loss_fn: Function, params: Any = PARAMS, **settings: Any) -> Any:
    """Runs one step of two microbatches."""
    torch.manual_seed(0)
    group = [
        integers(4, 3, seed=0),
        integers(4, 3, seed=1),
    ]
    step: Any = ps.make_update_step(loss_fn, SGD, weight_fn=weigh_rows, **settings)
    return step(params, SGD.init(params), group)


def make_nested_loss(remat: Any) -> Function:
    """Makes a loss that remats within remat, closes over params, and drops."""

    def inner(p: Any, x: Tensor) -> Any:
        inside = remat(lambda x: block(p, x, power=1))
        dropped = functional.dropout(inside(x)["y"])
        out = remat(block)(p, dropped)
        return {**out, "x": x, "view": x.T}

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        first, second = params
        out = remat(inner)(first, x)
        y = out["y"] + out["positive"][:, None]
        scaled = out["x"] * out["scale"]
        y = y + scaled + out["view"].sum()
        output = y @ second["w"] + second["b"]
        return output.sum(-1)

    return loss_fn


def test_a_compiled_step_is_the_step(fresh_compiler: None) -> None:
    """Nested, closing over params, with views among the results, and random numbers."""
    compiler = partial(torch.compile, backend="aot_eager")

    result = run_step(make_nested_loss(ps.remat), compile=compiler)

    assert_same(result, run_step(make_nested_loss(plain)))


def test_a_compiled_function_inside_remat_in_the_first_step(
    fresh_compiler: None,
) -> None:
    """The step watches what its first backward pass recomputes.

    A compiler does not see that.
    """
    params = W[:3]

    def losses_of(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh()

    compiled = torch.compile(losses_of, backend="eager")

    result = run_step(ps.remat(compiled), params)

    assert_same(result, run_step(ps.remat(losses_of), params))
