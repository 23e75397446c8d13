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
from proofs.logits import Case, bounds, reference
from purestep import tree
from purestep.losses import linear_cross_entropy
from purestep.testing.bounds import gamma
from tests.logits import problem
from tests.memory import LiveBytes
from tests.torch_private import compiled_with_graphs


@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([1, 2, 33]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([None, 1, 3, 7, 100]),
    st.integers(0, 3),
)
def test_linear_is_as_exact_as_its_dtype(
    dtype: torch.dtype, tokens: int, features: int, classes: int, chunk: int | None, seed: int
) -> None:
    """Losses, and gradients of any cotangent, within what rounding can do, whatever the chunk."""
    case = problem(tokens, features, classes, dtype, seed)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    losses = linear_cross_entropy(hidden, weight, case.labels, chunk=chunk)
    assert losses.dtype == tree.accumulation_dtype(dtype)
    cotangents = case.cotangents.to(losses.dtype)
    grads = torch.autograd.grad(losses, (hidden, weight), cotangents)
    assert [each.dtype for each in grads] == [dtype, dtype]
    case = case._replace(cotangents=cotangents)
    exact, allowed = reference(case), bounds(case)
    # Below its least normal number, what half precision rounds to is a fixed distance away.
    tiny = torch.finfo(dtype).tiny
    for name, found in zip(("losses", "hidden", "weight"), (losses, *grads), strict=True):
        error = (found.detach().double() - exact[name]).abs()
        assert (error <= allowed[name] + tiny * (1 + tokens)).all(), name


OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1]),
        "z_loss": st.sampled_from([0.0, 0.01]),
        "ignore_index": st.sampled_from([-100, 2]),
    }
)


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


@given(
    st.sampled_from([(), (4,), (2, 3), (2, 0)]),
    OPTIONS,
    st.sampled_from([None, 0.5, 30.0]),
    st.booleans(),
    st.sampled_from([None, 1, 4, 9]),
    st.integers(0, 3),
)
def test_linear_is_cross_entropy_of_the_product(
    shape: tuple[int, ...],
    options: dict[str, Any],
    soft_cap: float | None,
    biased: bool,
    chunk: int | None,
    seed: int,
) -> None:
    """With all options, values and gradients, in float64. Each of few terms rounds as often as its sums are long."""
    features, classes, tokens = 3, 9, math.prod(shape)
    case = problem(tokens, features, classes, seed=seed)
    hidden, labels = case.hidden.reshape(*shape, features), case.labels.reshape(shape)
    if tokens > 1:
        labels.view(-1)[seed % tokens] = options["ignore_index"]
    bias = problem(1, classes, 1, seed=seed).hidden[0]
    given_ = (hidden, case.weight, *([bias] if biased else []))
    cotangents = case.cotangents.reshape(shape)

    def ours(hidden: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, labels, *bias, soft_cap=soft_cap, chunk=chunk, **options
        )

    def plain(hidden: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return ps.losses.cross_entropy(
            capped(functional.linear(hidden, weight, *bias), soft_cap), labels, **options
        )

    vjp: Callable[..., Any] = torch.func.vjp
    found, pull = vjp(ours, *given_)
    expected, pull_plain = vjp(plain, *given_)
    size = 1 + (hidden.abs() @ case.weight.abs().T + biased * bias.abs()).max() if tokens else 1.0
    unit = gamma(8 * (features + classes + tokens + 32), torch.float64) * size**2
    assert found.shape == labels.shape
    assert ((found - expected).abs() <= unit).all()
    assert (found[labels == options["ignore_index"]] == 0).all()
    # A token's logits have gradients of at most 4 in sum, each times what it was made of.
    factor = 4 * cotangents.abs().sum() * (1 + hidden.abs().sum() + case.weight.abs().sum())
    for one, other in zip(pull(cotangents), pull_plain(cotangents), strict=True):
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
        losses = linear_cross_entropy(hidden, weight, labels, bias.requires_grad_(), chunk=3)
        return losses, *torch.autograd.grad(losses, (hidden, weight, bias), cotangents.to(losses))

    losses, to_hidden, to_weight, to_bias = run(math.nan)
    assert how == "no cotangent" or (losses[out] == 0).all()
    assert (to_hidden[out] == 0).all()
    assert not to_hidden[~out].eq(0).any()
    for one, other in zip((to_hidden, to_weight, to_bias), run(0.0)[1:], strict=True):
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


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap of grad over hidden": lambda f: torch.vmap(
        torch.func.grad(f, (0, 1, 2)), (0, None, None, 0)
    ),
    "vmap of grad over labels alone": lambda f: (
        lambda h, *given: torch.vmap(torch.func.grad(f, (0, 1, 2)), (None, None, None, 0))(
            h[0], *given
        )
    ),
    "vmap over hidden along its last dimension": lambda f: (
        lambda h, w, b, y: torch.vmap(f, (2, None, None, 0))(h.movedim(0, 2), w, b, y)
    ),
    "grad of vmap over weight and bias": lambda f: (
        lambda h, w, b, y: torch.func.grad(
            lambda w, b: torch.vmap(f, (0, 0, 0, 0))(h, w, b, y).sum(), (0, 1)
        )(torch.stack([w, 2 * w]), torch.stack([b, -b]))
    ),
    "jvp": lambda f: (
        lambda h, w, b, y: torch.func.jvp(
            lambda *given: f(*given, y), (h, w, b), (w[: h.shape[1]].expand_as(h), 2 * w, b)
        )
    ),
    "forward over reverse": lambda f: torch.func.hessian(f, (0, 1, 2)),
    "reverse over reverse": lambda f: torch.func.jacrev(torch.func.grad(f, (0, 1, 2)), (0, 1, 2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_under_transforms(transform: str) -> None:
    """The same as of whole logits, to rounding: all sizes are near 1, all sums below 100 long."""
    case = problem(6, 3, 7)
    hidden, labels = case.hidden.reshape(2, 3, 3), case.labels.reshape(2, 3).clone()
    labels[0, 1] = -100
    bias = problem(1, 7, 1).hidden[0]

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        losses = linear_cross_entropy(
            hidden, weight, labels, bias,
            chunk=3, soft_cap=2.0, label_smoothing=0.1, z_loss=0.01,
        )  # fmt: skip
        return losses.square().sum()

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        logits = capped(hidden @ weight.T + bias, 2.0)
        z = logits.logsumexp(-1)
        picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        losses = z - 0.9 * picked - 0.1 * logits.mean(-1) + 0.01 * z.square()
        return torch.where(labels == -100, 0, losses).square().sum()

    given_ = (hidden, case.weight, bias, labels)
    found, expected = (
        tree.leaves_of(TRANSFORMS[transform](loss)(*given_)) for loss in (ours, plain)
    )
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        bound = gamma(1000, torch.float64) * (1 + other.abs().max())
        assert ((one - other).abs() <= bound).all()


@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (0, 1)])
def test_what_is_frozen_gets_no_gradient(moving: tuple[int, ...]) -> None:
    """The others get theirs, also beside a bias without a derivative."""
    case = problem(4, 3, 7)
    given_ = [case.hidden, case.weight, problem(1, 7, 1).hidden[0]]

    def grads(chunk: int) -> tuple[Tensor, ...]:
        own = [each.clone().requires_grad_(i in moving) for i, each in enumerate(given_)]
        losses = linear_cross_entropy(own[0], own[1], case.labels, own[2], chunk=chunk)
        return torch.autograd.grad(losses.sum(), [own[i] for i in moving])

    for one, other in zip(grads(3), grads(7), strict=True):
        assert ((one - other).abs() <= gamma(200, torch.float64)).all()


def test_linear_under_autocast() -> None:
    """Products are of the dtype that autocast asks for, in the backward pass, too; gradients are of the params' own."""
    case = problem(5, 4, 9, torch.float32)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(hidden, weight, case.labels, chunk=2)
    grads = torch.autograd.grad(losses.sum(), (hidden, weight))
    half = case.hidden.bfloat16().requires_grad_(), case.weight.bfloat16().requires_grad_()
    expected = linear_cross_entropy(*half, case.labels, chunk=2)
    assert torch.equal(losses, expected)
    for one, other in zip(grads, torch.autograd.grad(expected.sum(), half), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.ones(3, 4)}, r"hidden of shape \(3, 4\) against labels of shape \(2,\)"),
        ({"hidden": torch.tensor(1.0)}, r"hidden of shape \(\) against labels"),
        ({"weight": torch.ones(4, 5)}, r"weight needs shape \(classes, 4\)"),
        ({"weight": torch.ones(5, 4).bfloat16()}, r"torch.float32 and weight is torch.bfloat16"),
        ({"bias": torch.ones(1)}, r"bias of shape \(1,\) .* so shape \(5,\)"),
        ({"labels": torch.tensor([0, 5])}, r"a label is 5: weight has 5 classes"),
        ({"labels": torch.tensor([-1, 0])}, r"a label is -1: .* ignore_index=-100"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0"),
        ({"chunk": 0}, r"chunk=0: it counts classes"),
    ],
)
def test_linear_refuses(changed: dict[str, Any], message: str) -> None:
    given_ = {"hidden": torch.ones(2, 4), "weight": torch.ones(5, 4), "labels": torch.tensor([0, 1])}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**given_, **changed})


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
        assert ((one - other).abs() <= gamma(1000, torch.float64) * (1 + other.abs())).all()
    assert sum(graph.count(".mm") for graph in graphs) == 3


def peak(losses: Callable[[Tensor, Tensor], Tensor], case: Case) -> int:
    """The bytes of forward and backward, above what comes in and goes out."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    with LiveBytes() as live:
        made = losses(hidden, weight)
        grads = torch.autograd.grad(made, (hidden, weight), torch.ones_like(made))
        returned = made.nbytes + sum(each.nbytes for each in grads)
    return live.peak - returned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole(dtype: torch.dtype) -> None:
    """Few chunks of logits are alive; whole, it is logits three times."""
    tokens, features, classes, chunk = 256, 8, 8192, 128
    case = problem(tokens, features, classes, dtype)
    found = peak(lambda h, w: linear_cross_entropy(h, w, case.labels, chunk=chunk), case)
    assert found <= 3 * 4 * tokens * chunk + 8 * 4 * tokens * (features + 16)
    whole = peak(lambda h, w: ps.losses.cross_entropy(h @ w.T, case.labels), case)
    assert whole >= 2 * 4 * tokens * classes
    assert found <= whole / 10


def test_a_second_derivative_holds_little_more_than_logits_twice() -> None:
    """Where they are whole, seven times."""
    tokens, classes = 256, 16384
    case, logits = problem(tokens, 2, classes, torch.float32), 4 * tokens * classes

    def twice(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def of(hidden: Tensor, weight: Tensor) -> Tensor:
            made = losses(hidden, weight).sum()
            grads = torch.autograd.grad(made, (hidden, weight), create_graph=True)
            return torch.stack([each.square().sum() for each in grads])

        return of

    found = peak(twice(lambda h, w: linear_cross_entropy(h, w, case.labels, chunk=128)), case)
    whole = peak(twice(lambda h, w: ps.losses.cross_entropy(h @ w.T, case.labels)), case)
    assert found <= 2.5 * logits
    assert whole >= 6 * logits


def test_a_default_chunk_holds_few_logits() -> None:
    """Four million, or 256 classes."""
    tokens, classes = 2**14, 2**10
    case = problem(tokens, 1, classes, torch.float32)
    found = peak(lambda h, w: linear_cross_entropy(h, w, case.labels), case)
    assert found <= 3 * 4 * 2**22 + 8 * 4 * tokens * 17 < 4 * tokens * classes


def test_kl_divergence_is_never_whole() -> None:
    tokens, classes = 256, 8192
    case, (_, weight, *_) = (problem(tokens, n, classes, torch.float32) for n in (8, 4))
    hidden = problem(tokens, 4, 1, torch.float32).hidden
    small, whole = (
        lambda h, w: ps.losses.linear_kl_divergence(h, w, hidden, weight, chunk=128),
        lambda h, w: ps.losses.kl_divergence(h @ w.T, hidden @ weight.T),
    )
    assert peak(small, case) <= peak(whole, case) / 10
