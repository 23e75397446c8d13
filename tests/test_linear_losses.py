"""Tests losses of a product: values and derivatives are those of whole logits.

The whole logits are never made.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp
from torch.nn import functional

import purestep as ps
from purestep import tree
from purestep.losses import linear_cross_entropy
from purestep.testing.bounds import rounding_bound
from support.logits import compute_reference, error_bounds
from support.strategies import assert_same
from support.torch_private import compile_and_list_graphs
from tests.drawn_logits import draw_problem
from tests.memory import LiveBytes

vjp: Callable[..., Any] = torch.func.vjp
vmap: Callable[..., Any] = torch.vmap
BIAS = draw_problem(1, 7, 1).hidden[0]
WIDE = [torch.float64, torch.float32, torch.bfloat16]
FLOATS = [*WIDE, torch.float16]


def copy_leaf(tensor: Tensor) -> Tensor:
    """Copies a tensor into a new leaf that requires grad."""
    return tensor.clone().requires_grad_()


def sum_sizes(tensor: Tensor) -> Tensor:
    return tensor.abs().sum()


def assert_within(actual: Tensor, expected: Any, bound: Any) -> None:
    """Compares element by element, up to this absolute error."""
    error = (actual - expected).abs()
    assert (error <= bound).all()


def cross_entropy_of_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    soft_cap: float | None = None,
) -> Tensor:
    """Computes what ``linear_cross_entropy`` does, the usual way."""
    logits = functional.linear(hidden, weight, bias)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    z = logits.logsumexp(-1)
    index = labels.clamp(min=0).unsqueeze(-1)
    label_logits = logits.gather(-1, index).squeeze(-1)
    of_label = (1 - label_smoothing) * label_logits
    of_all = label_smoothing * logits.mean(-1)
    losses = z - of_label - of_all + z_loss * z.square()
    return torch.where(labels == ignore_index, 0, losses)


@given(
    st.sampled_from(FLOATS),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([1, 2, 33]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([None, 1, 3, 7, 100]),
)
def test_linear_is_as_exact_as_its_dtype(
    dtype: torch.dtype,
    tokens: int,
    features: int,
    classes: int,
    chunk: int | None,
) -> None:
    """Losses and gradients are within what rounding can do, whatever the chunk."""
    case = draw_problem(tokens, features, classes, dtype, seed=features)
    hidden = copy_leaf(case.hidden)
    weight = copy_leaf(case.weight)

    losses = linear_cross_entropy(hidden, weight, case.labels, chunk_size=chunk)
    cotangents = case.cotangents.to(losses.dtype)
    case = case._replace(cotangents=cotangents)
    grads = torch.autograd.grad(losses, (hidden, weight), cotangents)
    hidden_grad, weight_grad = grads

    assert losses.dtype == tree.accumulation_dtype(dtype)
    assert hidden_grad.dtype == dtype
    assert weight_grad.dtype == dtype
    exact = compute_reference(case)
    allowed = error_bounds(case)
    # Below its least normal number, half precision rounds to multiples of a fixed number.
    tiny = torch.finfo(dtype).tiny * (1 + tokens)
    actual = {
        "losses": losses.detach(),
        "hidden": hidden_grad,
        "weight": weight_grad,
    }
    for name, value in actual.items():
        bound = allowed[name] + tiny
        assert_within(value.double(), exact[name], bound)


OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1]),
        "z_loss": st.sampled_from([0.0, 1.0]),
        "ignore_index": st.sampled_from([-100, 2]),
        "soft_cap": st.sampled_from([None, 0.5, 30.0]),
    }
)
SHAPES = st.sampled_from([(), (4,), (2, 3), (2, 0)])
CHUNKS = st.sampled_from([None, 1, 4, 7])


@given(SHAPES, OPTIONS, st.booleans(), CHUNKS, st.integers(0, 3))
def test_linear_is_cross_entropy_of_the_product(
    shape: tuple[int, ...],
    options: Any,
    biased: bool,
    chunk: int | None,
    seed: int,
) -> None:
    """Values and gradients in float64, with all options.

    Each of few terms rounds as often as its sums are long.
    """
    features = 3
    classes = 7
    tokens = math.prod(shape)
    case = draw_problem(tokens, features, classes, seed=seed)
    hidden = case.hidden.reshape(*shape, features)
    labels = case.labels.reshape(shape)
    cotangents = case.cotangents.reshape(shape)
    if tokens > 1:
        labels.view(-1)[seed % tokens] = options["ignore_index"]
    inputs = [hidden, case.weight]
    if biased:
        inputs.append(BIAS)

    def in_chunks(h: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(h, w, labels, bias, chunk_size=chunk, **options)

    def usual(h: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return cross_entropy_of_logits(h, w, labels, bias, **options)

    losses, pull = vjp(in_chunks, *inputs)
    expected, pull_expected = vjp(usual, *inputs)

    size: Any = 1.0
    if tokens:
        magnitudes = hidden.abs() @ case.weight.abs().T
        if biased:
            magnitudes = magnitudes + BIAS.abs()
        size = 1 + magnitudes.max()
    roundings = 8 * (features + classes + tokens + 32)
    unit = rounding_bound(roundings, torch.float64) * size**2
    assert losses.shape == labels.shape
    assert_within(losses, expected, unit)
    ignored = labels == options["ignore_index"]
    assert (losses[ignored] == 0).all()
    # A token's logits have gradients of at most 4 in sum, each times what it was made of.
    inputs_size = 1 + sum_sizes(hidden) + sum_sizes(case.weight)
    bound = unit * 4 * sum_sizes(cotangents) * inputs_size
    grads = pull(cotangents)
    expected_grads = pull_expected(cotangents)
    for actual, expected_grad in zip(grads, expected_grads, strict=True):
        assert_within(actual, expected_grad, bound)


def check_uncounted_tokens(
    dtype: torch.dtype,
    labels: Tensor,
    cotangents: Tensor,
    uncounted: Tensor,
    z_loss: float = 0.0,
) -> Any:
    """Compares NaN with zero as hidden states of these tokens, and returns the losses."""
    case = draw_problem(6, 4, 10, dtype)

    def run(fill: float) -> Any:
        rows = uncounted.unsqueeze(1)
        hidden = copy_leaf(torch.where(rows, fill, case.hidden))
        weight = copy_leaf(case.weight)
        bias = copy_leaf(torch.ones(10, dtype=dtype))
        losses = linear_cross_entropy(
            hidden, weight, labels, bias, chunk_size=3, z_loss=z_loss
        )
        leaves = (hidden, weight, bias)
        grads = torch.autograd.grad(losses, leaves, cotangents.to(losses))
        return losses, grads

    losses, grads = run(fill=math.nan)
    _, expected = run(fill=0.0)

    hidden_grad, *_ = grads
    gets_no_gradient = hidden_grad.eq(0).all(1)
    assert_same(gets_no_gradient, uncounted)
    assert_same(grads, expected)
    return losses


UNCOUNTED = torch.tensor([False, True, False, False, True, True])


@pytest.mark.parametrize("dtype", WIDE)
def test_ignored_tokens_may_be_anything(dtype: torch.dtype) -> None:
    """A NaN there gives what a zero gives, to the bit, and gets exactly zero."""
    case = draw_problem(6, 4, 10, dtype)
    labels = torch.where(UNCOUNTED, -100, case.labels)
    cotangents = torch.where(UNCOUNTED, 1.0, case.cotangents)

    losses = check_uncounted_tokens(dtype, labels, cotangents, UNCOUNTED)

    assert (losses[UNCOUNTED] == 0).all()


@pytest.mark.parametrize("z_loss", [0.0, 0.5])
@pytest.mark.parametrize("dtype", WIDE)
def test_tokens_without_a_cotangent_may_be_anything(
    dtype: torch.dtype, z_loss: float
) -> None:
    """A NaN there gives what a zero gives, to the bit, and gets exactly zero."""
    case = draw_problem(6, 4, 10, dtype)
    cotangents = torch.where(UNCOUNTED, 0.0, case.cotangents)

    check_uncounted_tokens(dtype, case.labels, cotangents, UNCOUNTED, z_loss)


def test_a_loss_on_meta_has_its_shape() -> None:
    """A device without autocast."""
    hidden, weight = torch.ones(2, 3, 4), torch.ones(5, 4)
    labels = torch.zeros(2, 3, dtype=torch.int64)
    losses = linear_cross_entropy(*(x.to("meta") for x in (hidden, weight, labels)))
    assert losses.shape == (2, 3)


@pytest.mark.parametrize("chunk_size", [2, 3, 10])
def test_a_chunk_that_is_ruled_out(chunk_size: int) -> None:
    """A bias of −∞ fills up a vocabulary: no probability, no gradient, no NaN.

    Also in second derivatives.
    """
    case = draw_problem(3, 4, 10)
    labels = case.labels % 4
    few_classes = case.weight[:4]
    bias = torch.zeros(10, dtype=torch.float64)
    bias[4:] = -math.inf

    def loss_of_all(hidden: Tensor, weight: Tensor) -> Tensor:
        losses = linear_cross_entropy(
            hidden, weight, labels, bias, chunk_size=chunk_size
        )
        return losses.sum()

    def loss_of_few(hidden: Tensor, weight: Tensor) -> Tensor:
        losses = linear_cross_entropy(hidden, weight, labels, chunk_size=4)
        return losses.sum()

    hidden_grad, weight_grad = grad(loss_of_all, (0, 1))(case.hidden, case.weight)
    second = hessian(loss_of_all)(case.hidden, case.weight)

    expected, expected_few = grad(loss_of_few, (0, 1))(case.hidden, few_classes)
    expected_second = hessian(loss_of_few)(case.hidden, few_classes)
    torch.testing.assert_close(hidden_grad, expected)
    torch.testing.assert_close(weight_grad[:4], expected_few)
    assert (weight_grad[4:] == 0).all()
    torch.testing.assert_close(second, expected_second)


INPUTS = (0, 1, 2)
"""The positions of hidden, weight and bias; that of labels is 3."""


def vmap_of_grad_over_hidden(loss: Any) -> Any:
    return vmap(grad(loss, INPUTS), (0, None, None, 0))


def vmap_of_grad_over_labels(loss: Any) -> Any:
    grads = vmap(grad(loss, INPUTS), (None, None, None, 0))
    return lambda hidden, *inputs: grads(hidden[0], *inputs)


def vmap_along_the_last_dimension(loss: Any) -> Any:
    mapped = vmap(loss, (2, None, None, 0))
    return lambda hidden, *inputs: mapped(hidden.movedim(0, 2), *inputs)


def grad_of_vmap_over_weight_and_bias(loss: Any) -> Any:
    def grads(hidden: Any, weight: Tensor, bias: Tensor, labels: Any) -> Any:
        def total(weights: Tensor, biases: Tensor) -> Tensor:
            losses: Tensor = vmap(loss)(hidden, weights, biases, labels)
            return losses.sum()

        weights = torch.stack([weight, 2 * weight])
        biases = torch.stack([bias, -bias])
        return grad(total, (0, 1))(weights, biases)

    return grads


def jvp_of_all(loss: Any) -> Any:
    def run(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Any) -> Any:
        def loss_of_inputs(*inputs: Tensor) -> Any:
            return loss(*inputs, labels)

        rows = weight[: hidden.shape[1]]
        tangents = (rows.expand_as(hidden), 2 * weight, bias)
        return jvp(loss_of_inputs, (hidden, weight, bias), tangents)

    return run


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap of grad over hidden": vmap_of_grad_over_hidden,
    "vmap of grad over labels alone": vmap_of_grad_over_labels,
    "vmap over hidden along its last dimension": vmap_along_the_last_dimension,
    "grad of vmap over weight and bias": grad_of_vmap_over_weight_and_bias,
    "jvp": jvp_of_all,
    "forward over reverse": lambda loss: hessian(loss, INPUTS),
    "reverse over reverse": lambda loss: jacrev(grad(loss, INPUTS), INPUTS),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_under_transforms(transform: str) -> None:
    """The same as of whole logits, to rounding.

    All sizes are near 1, and all sums are of less than 100 terms.
    """
    case = draw_problem(6, 3, 7)
    hidden = case.hidden.reshape(2, 3, 3)
    labels = case.labels.reshape(2, 3).clone()
    labels[0, 1] = -100
    options: Any = {"soft_cap": 2.0, "label_smoothing": 0.1, "z_loss": 0.01}

    def run(cross_entropy: Any, **settings: Any) -> list[Any]:
        def loss(hidden: Any, weight: Any, bias: Any, labels: Any) -> Any:
            losses = cross_entropy(hidden, weight, labels, bias, **settings)
            return losses.square().sum()

        transformed = TRANSFORMS[transform](loss)
        result = transformed(hidden, case.weight, BIAS, labels)
        return tree.leaves(result)

    actual = run(linear_cross_entropy, chunk_size=3, **options)
    expected = run(cross_entropy_of_logits, **options)

    for one, other in zip(actual, expected, strict=True):
        size = 1 + other.abs().max()
        bound = rounding_bound(1000, torch.float64) * size
        assert_within(one, other, bound)


@pytest.mark.parametrize(
    "trainable",
    [
        ["hidden"],
        ["weight"],
        ["bias"],
        ["hidden", "weight"],
    ],
)
def test_frozen_inputs_get_no_gradient(trainable: list[str]) -> None:
    """The others get theirs, also next to a bias without a derivative."""
    case = draw_problem(4, 3, 7)

    def grads(chunk_size: int) -> tuple[Tensor, ...]:
        inputs = {
            "hidden": case.hidden.clone(),
            "weight": case.weight.clone(),
            "bias": BIAS.clone(),
        }
        leaves = [inputs[name].requires_grad_() for name in trainable]
        losses = linear_cross_entropy(
            inputs["hidden"],
            inputs["weight"],
            case.labels,
            inputs["bias"],
            chunk_size=chunk_size,
        )
        return torch.autograd.grad(losses.sum(), leaves)

    chunked_grads = grads(chunk_size=3)
    whole_grads = grads(chunk_size=7)
    bound = rounding_bound(200, torch.float64)
    for in_chunks, at_once in zip(chunked_grads, whole_grads, strict=True):
        assert_within(in_chunks, at_once, bound)


def test_linear_under_autocast() -> None:
    """Products are of autocast's dtype, also in the backward pass.

    Gradients are of the params' dtype.
    """
    case = draw_problem(5, 4, 9, torch.float32)
    hidden = copy_leaf(case.hidden)
    weight = copy_leaf(case.weight)
    half_hidden = copy_leaf(case.hidden.bfloat16())
    half_weight = copy_leaf(case.weight.bfloat16())

    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, case.labels, chunk_size=2)
    grads = torch.autograd.grad(losses.sum(), (hidden, weight))

    expected = linear_cross_entropy(half_hidden, half_weight, case.labels, chunk_size=2)
    expected_grads = torch.autograd.grad(expected.sum(), (half_hidden, half_weight))
    assert_same(losses, expected)
    for actual, expected_grad in zip(grads, expected_grads, strict=True):
        assert actual.dtype == torch.float32
        assert_same(actual, expected_grad.float())


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"hidden": torch.ones(3, 4)},
        r"hidden of shape \(3, 4\) against labels of shape \(2,\)",
    ),
    ({"hidden": torch.tensor(1.0)}, r"hidden of shape \(\) against labels"),
    ({"weight": torch.ones(4, 5)}, r"weight needs shape \(classes, 4\)"),
    (
        {"weight": torch.ones(5, 4).bfloat16()},
        r"torch.float32 and weight is torch.bfloat16",
    ),
    ({"bias": torch.ones(1)}, r"bias of shape \(1,\) .* so shape \(5,\)"),
    ({"labels": torch.tensor([0, 5])}, r"a label is 5: weight has 5 classes"),
    ({"labels": torch.tensor([-1, 0])}, r"a label is -1: .* ignore_index=-100"),
    ({"label_smoothing": 1.5}, r"label_smoothing=1.5: it is a share"),
    ({"label_smoothing": -0.5}, r"label_smoothing=-0.5"),
    ({"soft_cap": 0.0}, r"soft_cap=0.0"),
    ({"soft_cap": torch.inf}, r"soft_cap=inf"),
    ({"chunk_size": 0}, r"chunk_size=0: it counts classes"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_linear_refuses(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.ones(2, 4),
        "weight": torch.ones(5, 4),
        "labels": torch.arange(2),
    }
    arguments.update(changed)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_narrow_labels(dtype: torch.dtype) -> None:
    hidden = torch.ones(100, 2)
    weight = torch.ones(300, 2)
    labels = torch.arange(100)

    losses = linear_cross_entropy(hidden, weight, labels.to(dtype))

    assert_same(losses, linear_cross_entropy(hidden, weight, labels))


def test_compiled_the_logits_are_whole() -> None:
    """One product in each pass, and not a copy of the loop for each chunk."""
    case = draw_problem(6, 4, 40)

    def total(hidden: Tensor, weight: Tensor) -> Tensor:
        losses = linear_cross_entropy(hidden, weight, case.labels, chunk_size=1)
        return losses.sum()

    def grads(hidden: Tensor, weight: Tensor) -> Any:
        return grad(total, (0, 1))(hidden, weight)

    compiled, graphs = compile_and_list_graphs(grads)
    actual = compiled(case.hidden, case.weight)
    expected = grads(case.hidden, case.weight)

    for one, other in zip(actual, expected, strict=True):
        size = 1 + other.abs()
        bound = rounding_bound(1000, torch.float64) * size
        assert_within(one, other, bound)
    assert sum(graph.count(".mm") for graph in graphs) == 3


def measure_peak(
    loss: Any,
    tokens: int,
    features: int,
    classes: int,
    *,
    dtype: torch.dtype = torch.float32,
    second_derivative: bool = False,
    **settings: Any,
) -> int:
    """Measures the peak of forward and backward in bytes, without inputs and outputs."""
    case = draw_problem(tokens, features, classes, dtype)
    leaves = [copy_leaf(case.hidden), copy_leaf(case.weight)]
    with LiveBytes() as live:
        result = loss(*leaves, case.labels, **settings)
        if second_derivative:
            grads = torch.autograd.grad(result.sum(), leaves, create_graph=True)
            squares = [leaf.square().sum() for leaf in grads]
            result = torch.stack(squares)
        cotangents = torch.ones_like(result)
        grads = torch.autograd.grad(result, leaves, cotangents)
        returned = result.nbytes + sum(leaf.nbytes for leaf in grads)
    return live.peak - returned


def usual_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return ps.losses.cross_entropy(hidden @ weight.T, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole(dtype: torch.dtype) -> None:
    """Few chunks of logits are alive; the usual way makes the whole logits three times."""
    tokens = 256
    features = 8
    classes = 8192
    chunk = 128
    size = (tokens, features, classes)
    chunk_bytes = 4 * tokens * chunk
    hidden_bytes = 4 * tokens * (features + 16)
    logits_bytes = 4 * tokens * classes

    peak = measure_peak(linear_cross_entropy, *size, chunk_size=chunk, dtype=dtype)
    usual_peak = measure_peak(usual_loss, *size, dtype=dtype)

    assert peak <= 3 * chunk_bytes + 8 * hidden_bytes
    assert usual_peak >= 2 * logits_bytes
    assert peak <= usual_peak / 10


def test_logits_are_never_whole_by_default() -> None:
    """A chunk is four million logits, or 256 classes."""
    tokens = 2**14
    classes = 2**10
    chunk_bytes = 4 * 2**22
    hidden_bytes = 4 * tokens * 17
    logits_bytes = 4 * tokens * classes

    peak = measure_peak(linear_cross_entropy, tokens, 1, classes)

    bound = 3 * chunk_bytes + 8 * hidden_bytes
    assert peak <= bound < logits_bytes


def test_a_second_derivative_holds_little_more_than_logits_twice() -> None:
    """The usual way holds them seven times."""
    size = (256, 2, 16384)
    logits_bytes = 4 * 256 * 16384

    peak = measure_peak(
        linear_cross_entropy, *size, second_derivative=True, chunk_size=128
    )
    usual_peak = measure_peak(usual_loss, *size, second_derivative=True)

    assert peak <= 2.5 * logits_bytes
    assert usual_peak >= 6 * logits_bytes
