"""Losses of a product: values and derivatives are those of whole logits, which are never made."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional

import purestep as ps
from proofs.logits import bounds, reference
from purestep import tree
from purestep.losses import linear_cross_entropy
from purestep.testing.bounds import gamma
from tests.logits import problem
from tests.memory import LiveBytes
from tests.torch_private import compiled_with_graphs

vjp: Callable[..., Any] = torch.func.vjp
BIAS = problem(1, 7, 1).hidden[0]


def of_whole_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, *bias: Tensor, label_smoothing: float = 0.0,
    z_loss: float = 0.0, ignore_index: int = -100, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """What ``linear_cross_entropy`` computes, the usual way."""
    logits = functional.linear(hidden, weight, *bias)
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    z, picked = (
        logits.logsumexp(-1),
        logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)),
    )
    smooth = (1 - label_smoothing) * picked.squeeze(-1) + label_smoothing * logits.mean(
        -1
    )
    return torch.where(labels == ignore_index, 0, z - smooth + z_loss * z.square())


@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([1, 2, 33]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([None, 1, 3, 7, 100]),
)
def test_linear_is_as_exact_as_its_dtype(
    dtype: torch.dtype, tokens: int, features: int, classes: int, chunk: int | None
) -> None:
    """Losses, and gradients of any cotangent, within what rounding can do, whatever the chunk."""
    case = problem(tokens, features, classes, dtype, seed=features)
    hidden, weight = (
        case.hidden.clone().requires_grad_(),
        case.weight.clone().requires_grad_(),
    )
    losses = linear_cross_entropy(hidden, weight, case.labels, chunk=chunk)
    assert losses.dtype == tree.accumulation_dtype(dtype)
    case = case._replace(cotangents=case.cotangents.to(losses.dtype))
    grads = torch.autograd.grad(losses, (hidden, weight), case.cotangents)
    assert [each.dtype for each in grads] == [dtype, dtype]
    exact, allowed = reference(case), bounds(case)
    # Below its least normal number, what half precision rounds to is a fixed distance away.
    tiny = torch.finfo(dtype).tiny
    for name, found in zip(
        ("losses", "hidden", "weight"), (losses, *grads), strict=True
    ):
        error = (found.detach().double() - exact[name]).abs()
        assert (error <= allowed[name] + tiny * (1 + tokens)).all(), name


OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1]),
        "z_loss": st.sampled_from([0.0, 1.0]),
        "ignore_index": st.sampled_from([-100, 2]),
        "soft_cap": st.sampled_from([None, 0.5, 30.0]),
    }
)
SHAPES = st.sampled_from([(), (4,), (2, 3), (2, 0)])


@given(
    SHAPES, OPTIONS, st.booleans(), st.sampled_from([None, 1, 4, 7]), st.integers(0, 3)
)
def test_linear_is_cross_entropy_of_the_product(
    shape: tuple[int, ...], options: Any, biased: bool, chunk: int | None, seed: int
) -> None:
    """With all options, values and gradients, in float64. Each of few terms rounds as often as its sums are long."""
    features, classes, tokens = 3, 7, math.prod(shape)
    case = problem(tokens, features, classes, seed=seed)
    hidden, labels = case.hidden.reshape(*shape, features), case.labels.reshape(shape)
    if tokens > 1:
        labels.view(-1)[seed % tokens] = options["ignore_index"]
    given_ = (hidden, case.weight, *([BIAS] if biased else []))
    cotangents = case.cotangents.reshape(shape)
    found, pull = vjp(
        lambda h, w, *b: linear_cross_entropy(h, w, labels, *b, chunk=chunk, **options),
        *given_,
    )
    expected, pull_all = vjp(
        lambda h, w, *b: of_whole_logits(h, w, labels, *b, **options), *given_
    )
    size = (
        1 + (hidden.abs() @ case.weight.abs().T + biased * BIAS.abs()).max()
        if tokens
        else 1.0
    )
    unit = gamma(8 * (features + classes + tokens + 32), torch.float64) * size**2
    assert found.shape == labels.shape
    assert ((found - expected).abs() <= unit).all()
    assert (found[labels == options["ignore_index"]] == 0).all()
    # A token's logits have gradients of at most 4 in sum, each times what it was made of.
    factor = (
        4 * cotangents.abs().sum() * (1 + hidden.abs().sum() + case.weight.abs().sum())
    )
    for one, other in zip(pull(cotangents), pull_all(cotangents), strict=True):
        assert ((one - other).abs() <= unit * factor).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["ignored", "no cotangent"])
def test_tokens_that_do_not_count_may_be_anything(how: str, dtype: torch.dtype) -> None:
    """A NaN there gives what a zero gives, to the bit, and gets exactly zero."""
    case = problem(6, 4, 10, dtype)
    out = torch.tensor([False, True, False, False, True, True])
    labels = torch.where(out, -100, case.labels) if how == "ignored" else case.labels
    cotangents = torch.where(out, float(how == "ignored"), case.cotangents)

    def run(filled: float) -> tuple[Tensor, ...]:
        hidden = torch.where(out[:, None], filled, case.hidden).requires_grad_()
        weight, bias = case.weight.clone().requires_grad_(), torch.ones(10, dtype=dtype)
        losses = linear_cross_entropy(
            hidden, weight, labels, bias.requires_grad_(), chunk=3
        )
        return losses, *torch.autograd.grad(
            losses, (hidden, weight, bias), cotangents.to(losses)
        )

    losses, *grads = run(math.nan)
    assert how == "no cotangent" or (losses[out] == 0).all()
    assert torch.equal(grads[0].eq(0).all(1), out)
    for one, other in zip(grads, run(0.0)[1:], strict=True):
        assert torch.equal(one, other)


def test_a_chunk_that_is_ruled_out() -> None:
    """A bias of −∞ fills up a vocabulary: no probability, no gradient, no NaN; derived twice too."""
    case = problem(3, 4, 10)
    labels, bias = case.labels % 4, torch.zeros(10, dtype=torch.float64)
    bias[4:] = -math.inf

    def loss(hidden: Tensor, weight: Tensor, chunk: int, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias, chunk=chunk).sum()

    for derivative in (torch.func.grad(loss, (0, 1)), torch.func.hessian(loss)):
        short = derivative(case.hidden, case.weight[:4], 4, None)
        for chunk in (2, 3, 10):
            found = derivative(case.hidden, case.weight, chunk, bias)
            torch.testing.assert_close(found[0], short[0])
            if isinstance(found, tuple) and found[1].ndim == 2:
                torch.testing.assert_close(found[1][:4], short[1])
                assert (found[1][4:] == 0).all()


G, V = torch.func.grad, torch.vmap
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap of grad over hidden": lambda f: V(G(f, (0, 1, 2)), (0, None, None, 0)),
    "vmap of grad over labels alone": lambda f: (
        lambda h, *given: V(G(f, (0, 1, 2)), (None, None, None, 0))(h[0], *given)
    ),
    "vmap over hidden along its last dimension": lambda f: (
        lambda h, w, b, y: V(f, (2, None, None, 0))(h.movedim(0, 2), w, b, y)
    ),
    "grad of vmap over weight and bias": lambda f: (
        lambda h, w, b, y: G(lambda w, b: V(f)(h, w, b, y).sum(), (0, 1))(
            torch.stack([w, 2 * w]), torch.stack([b, -b])
        )
    ),
    "jvp": lambda f: (
        lambda h, w, b, y: torch.func.jvp(
            lambda *given: f(*given, y),
            (h, w, b),
            (w[: h.shape[1]].expand_as(h), 2 * w, b),
        )
    ),
    "forward over reverse": lambda f: torch.func.hessian(f, (0, 1, 2)),
    "reverse over reverse": lambda f: torch.func.jacrev(G(f, (0, 1, 2)), (0, 1, 2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_under_transforms(transform: str) -> None:
    """The same as of whole logits, to rounding: all sizes are near 1, all sums below 100 long."""
    case = problem(6, 3, 7)
    hidden, labels = case.hidden.reshape(2, 3, 3), case.labels.reshape(2, 3).clone()
    labels[0, 1] = -100
    how: Any = {"soft_cap": 2.0, "label_smoothing": 0.1, "z_loss": 0.01}
    found, expected = (
        tree.leaves(TRANSFORMS[transform](loss)(hidden, case.weight, BIAS, labels))
        for loss in (
            lambda h, w, b, y: (
                linear_cross_entropy(h, w, y, b, chunk=3, **how).square().sum()
            ),
            lambda h, w, b, y: of_whole_logits(h, w, y, b, **how).square().sum(),
        )
    )
    for one, other in zip(found, expected, strict=True):
        bound = gamma(1000, torch.float64) * (1 + other.abs().max())
        assert ((one - other).abs() <= bound).all()


@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (0, 1)])
def test_what_is_frozen_gets_no_gradient(moving: tuple[int, ...]) -> None:
    """The others get theirs, also beside a bias without a derivative."""
    case = problem(4, 3, 7)

    def grads(chunk: int) -> tuple[Tensor, ...]:
        given_ = enumerate([case.hidden, case.weight, BIAS])
        own = [each.clone().requires_grad_(i in moving) for i, each in given_]
        losses = linear_cross_entropy(own[0], own[1], case.labels, own[2], chunk=chunk)
        return torch.autograd.grad(losses.sum(), [own[i] for i in moving])

    for one, other in zip(grads(3), grads(7), strict=True):
        assert ((one - other).abs() <= gamma(200, torch.float64)).all()


def test_linear_under_autocast() -> None:
    """Products are of the dtype that autocast asks for, in the backward pass, too; gradients are of the params' own."""
    case = problem(5, 4, 9, torch.float32)
    hidden, weight = (
        case.hidden.clone().requires_grad_(),
        case.weight.clone().requires_grad_(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, case.labels, chunk=2)
    grads = torch.autograd.grad(losses.sum(), (hidden, weight))
    half = (
        case.hidden.bfloat16().requires_grad_(),
        case.weight.bfloat16().requires_grad_(),
    )
    expected = linear_cross_entropy(*half, case.labels, chunk=2)
    assert torch.equal(losses, expected)
    for one, other in zip(
        grads, torch.autograd.grad(expected.sum(), half), strict=True
    ):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


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
    ({"soft_cap": 0.0}, r"soft_cap=0.0"),
    ({"chunk": 0}, r"chunk=0: it counts classes"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_linear_refuses(changed: dict[str, Any], message: str) -> None:
    sound = {
        "hidden": torch.ones(2, 4),
        "weight": torch.ones(5, 4),
        "labels": torch.arange(2),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**sound, **changed})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_narrow_labels(dtype: torch.dtype) -> None:
    hidden, weight, labels = torch.ones(100, 2), torch.ones(300, 2), torch.arange(100)
    wanted = linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(linear_cross_entropy(hidden, weight, labels.to(dtype)), wanted)


def test_compiled_the_logits_are_whole() -> None:
    """One product in each pass, and not a copy of the loop for each chunk."""
    case = problem(6, 4, 40)

    def grads(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        def total(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, weight, case.labels, chunk=1).sum()

        return torch.func.grad(total, (0, 1))(hidden, weight)

    compiled, graphs = compiled_with_graphs(grads)
    found = compiled(case.hidden, case.weight)
    for one, other in zip(found, grads(case.hidden, case.weight), strict=True):
        assert (
            (one - other).abs() <= gamma(1000, torch.float64) * (1 + other.abs())
        ).all()
    assert sum(graph.count(".mm") for graph in graphs) == 3


def peak(
    loss: Any, tokens: int, features: int, classes: int, twice: bool = False, **how: Any
) -> int:
    """The bytes of forward and backward, above what comes in and goes out; of a second derivative, too."""
    case = problem(tokens, features, classes, how.pop("dtype", torch.float32))
    own = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    with LiveBytes() as live:
        made = loss(*own, case.labels, **how)
        if twice:
            grads = torch.autograd.grad(made.sum(), own, create_graph=True)
            made = torch.stack([each.square().sum() for each in grads])
        grads = torch.autograd.grad(made, own, torch.ones_like(made))
        returned = made.nbytes + sum(each.nbytes for each in grads)
    return live.peak - returned


def the_usual(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return ps.losses.cross_entropy(hidden @ weight.T, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole(dtype: torch.dtype) -> None:
    """Few chunks of logits are alive, by default four million of them or 256 classes; whole, it is logits three times."""
    size, chunk = (256, 8, 8192), 128
    found = peak(linear_cross_entropy, *size, chunk=chunk, dtype=dtype)
    assert found <= 3 * 4 * 256 * chunk + 8 * 4 * 256 * (8 + 16)
    whole = peak(the_usual, *size, dtype=dtype)
    assert whole >= 2 * 4 * 256 * 8192
    assert found <= whole / 10
    by_default = peak(linear_cross_entropy, 2**14, 1, 2**10)
    assert by_default <= 3 * 4 * 2**22 + 8 * 4 * 2**14 * 17 < 4 * 2**14 * 2**10


def test_a_second_derivative_holds_little_more_than_logits_twice() -> None:
    """Where they are whole, seven times."""
    size, logits = (256, 2, 16384), 4 * 256 * 16384
    assert peak(linear_cross_entropy, *size, twice=True, chunk=128) <= 2.5 * logits
    assert peak(the_usual, *size, twice=True) >= 6 * logits
