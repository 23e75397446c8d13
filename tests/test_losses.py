"""Losses per token, row, pair and action."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, library
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import purestep as ps
from proofs.logits import Case, bounds, reference
from purestep import tree
from purestep.losses import linear_cross_entropy
from purestep.losses.vocabulary import parts, values
from purestep.testing.bounds import gamma
from tests.memory import LiveBytes
from tests.torch_internals import compiled_with_graphs


@given(
    st.sampled_from([(), (3,), (2, 3), (2, 3, 1)]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 1e-2]),
    st.sampled_from([-100, 2]),
)
def test_equals_its_formula(
    shape: tuple[int, ...], smoothing: float, z_loss: float, ignore_index: int
) -> None:
    """(1 − s)(z − xᵧ) + s (z − mean x) + z_loss z², and 0 where ignored."""
    generator = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(*shape, 5, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, 5, shape, generator=generator)
    if shape:
        labels.view(-1)[0] = ignore_index
    losses = ps.losses.cross_entropy(
        logits, labels, ignore_index=ignore_index, label_smoothing=smoothing, z_loss=z_loss
    )
    z = logits.exp().sum(-1).log()
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    formula = (1 - smoothing) * (z - picked) + smoothing * (z - logits.mean(-1)) + z_loss * z**2
    expected = torch.where(labels == ignore_index, 0, formula)
    # Each term rounds a handful of times, in sums of five.
    bound = 32 * torch.finfo(torch.float64).eps * (z.abs() + logits.abs().amax(-1) + z_loss * z**2)
    assert losses.shape == labels.shape
    assert ((losses - expected).abs() <= bound).all()
    assert (losses[labels == ignore_index] == 0).all()


def test_equals_torch() -> None:
    logits, labels = torch.randn(4, 7), torch.tensor([1, 6, -100, 0])
    expected = functional.cross_entropy(logits, labels, reduction="none")
    assert torch.equal(ps.losses.cross_entropy(logits, labels), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_lifted(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(4, 7).to(dtype), torch.tensor([1, 6, 2, 0])
    losses = ps.losses.cross_entropy(logits, labels)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, ps.losses.cross_entropy(logits.float(), labels))


def test_refuses_other_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"logits of shape \(2, 5\) against labels of shape \(3,\)"
    ):
        ps.losses.cross_entropy(torch.ones(2, 5), torch.ones(3, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------------- logits never whole


def problem(
    tokens: int, features: int, classes: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Case:
    """Hidden states, a weight, labels, cotangents of both signs."""
    generator = torch.Generator().manual_seed(seed)
    return Case(
        torch.randn(tokens, features, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(classes, features, generator=generator, dtype=torch.float64).to(dtype),
        torch.randint(classes, (tokens,), generator=generator),
        torch.randn(tokens, generator=generator, dtype=torch.float64),
    )


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


def test_tokens_that_are_ignored_may_be_anything_twice() -> None:
    """In a second derivative, too, of which nobody multiplies by zero what is no number."""
    case = problem(6, 4, 10)
    labels = torch.where(torch.arange(6) % 3 == 1, -100, case.labels)

    def twice(filled: float) -> Tensor:
        hidden = torch.where((labels == -100)[:, None], filled, case.hidden)

        def loss(weight: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, weight, labels, chunk=3).sum()

        return torch.func.grad(lambda w: torch.func.grad(loss)(w).square().sum())(case.weight)

    assert torch.equal(twice(math.nan), twice(0.0))


def test_a_chunk_that_is_ruled_out() -> None:
    """A bias of −∞, for entries that fill up a vocabulary: no probability, no gradient, no NaN, in either derivative."""
    case = problem(3, 4, 10)
    labels, bias = case.labels % 4, torch.zeros(10, dtype=torch.float64)
    bias[4:] = -math.inf

    def loss(hidden: Tensor, weight: Tensor, chunk: int, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias, chunk=chunk).sum()

    short = torch.func.grad(loss, (0, 1))(case.hidden, case.weight[:4], 4, None)
    for chunk in (2, 3, 10):
        found = torch.func.grad(loss, (0, 1))(case.hidden, case.weight, chunk, bias)
        torch.testing.assert_close(found[0], short[0])
        torch.testing.assert_close(found[1][:4], short[1])
        assert (found[1][4:] == 0).all()
        twice = torch.func.hessian(loss)(case.hidden, case.weight, chunk, bias)
        torch.testing.assert_close(
            twice, torch.func.hessian(loss)(case.hidden, case.weight[:4], 4, None)
        )


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(f, (0, 1, 2)),
    "vmap of grad over hidden": lambda f: torch.vmap(
        torch.func.grad(f, (0, 1, 2)), (0, None, None, 0)
    ),
    "grad of vmap over hidden": lambda f: torch.func.grad(
        lambda *given: torch.vmap(f, (0, None, None, 0))(*given).sum(), (0, 1, 2)
    ),
    "vmap over labels alone": lambda f: (
        lambda h, *given: torch.vmap(f, (None, None, None, 0))(h[0], *given)
    ),
    "vmap of grad over labels alone": lambda f: (
        lambda h, *given: torch.vmap(torch.func.grad(f, (0, 1, 2)), (None, None, None, 0))(
            h[0], *given
        )
    ),
    "vmap over hidden along its last dimension": lambda f: (
        lambda h, w, b, y: torch.vmap(torch.func.grad(f, (0, 1, 2)), (2, None, None, 0))(
            h.movedim(0, 2), w, b, y
        )
    ),
    "vmap of grad over the weight": lambda f: (
        lambda h, w, b, y: torch.vmap(torch.func.grad(f, (0, 1, 2)), (None, 0, None, None))(
            h[0], torch.stack([w, 2 * w]), b, y[0]
        )
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
    "reverse over forward": lambda f: torch.func.grad(
        lambda h, w, b, y: torch.func.jvp(lambda h: f(h, w, b, y), (h,), (torch.ones_like(h),))[1],
        (0, 1, 2),
    ),
}


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_under_transforms(transform: str, soft_cap: float | None) -> None:
    """The same as of whole logits, to rounding in float64: all sizes are near 1, all sums shorter than 100."""
    case = problem(6, 3, 7)
    hidden, labels = case.hidden.reshape(2, 3, 3), case.labels.reshape(2, 3).clone()
    labels[0, 1] = -100
    bias = problem(1, 7, 1).hidden[0]

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        losses = linear_cross_entropy(
            hidden, weight, labels, bias,
            chunk=3, soft_cap=soft_cap, label_smoothing=0.1, z_loss=0.01,
        )  # fmt: skip
        return losses.square().sum()

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        logits = capped(hidden @ weight.T + bias, soft_cap)
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


def test_linear_derivatives_of_autograd() -> None:
    """Once and twice, against differences."""
    case = problem(4, 3, 7)
    bias = problem(1, 7, 1).hidden[0]
    given_ = [each.clone().requires_grad_() for each in (case.hidden, case.weight, bias)]

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, case.labels, bias, chunk=3, soft_cap=2.0)

    assert torch.autograd.gradcheck(loss, given_)
    assert torch.autograd.gradgradcheck(loss, given_)


def test_a_frozen_weight_gets_no_gradient() -> None:
    case = problem(4, 3, 7)
    hidden = case.hidden.clone().requires_grad_()
    linear_cross_entropy(hidden, case.weight, case.labels, chunk=3).sum().backward()
    assert hidden.grad is not None
    assert case.weight.grad is None


STEPS: dict[str, dict[str, Any]] = {
    "eager": {},
    "torch.func": {"grad_and_value": torch.func.grad_and_value},
    "compiled": {"compile": True},
    "compiled torch.func": {"compile": True, "grad_and_value": torch.func.grad_and_value},
    "per example": {"normalize": "grads", "grad_and_value": ps.per_example(clip=1e9)},
}


@pytest.mark.parametrize("how", STEPS)
def test_a_step_with_a_tied_embedding(how: str) -> None:
    """The embedding's two gradients are one sum, in every kind of step, to rounding in float64."""
    params = {"embedding": problem(1, 4, 11).weight}
    labels = torch.tensor([[3, 5, -100], [1, 1, 10]])
    group = [{"x": labels.clamp(min=0), "labels": labels}, {"x": labels[:1] % 3, "labels": labels[:1]}]  # fmt: skip

    def ours(p: Any, m: Any) -> Tensor:
        hidden = torch.tanh(p["embedding"][m["x"]])
        return linear_cross_entropy(hidden, p["embedding"], m["labels"], chunk=4, z_loss=0.1)

    def plain(p: Any, m: Any) -> Tensor:
        logits = torch.tanh(p["embedding"][m["x"]]) @ p["embedding"].T
        return ps.losses.cross_entropy(logits, m["labels"], z_loss=0.1)

    optimizer = ps.optim.sgd(1.0)
    one, _, metrics = ps.make_update_step(ours, optimizer, **STEPS[how])(
        params, optimizer.init(params), group
    )
    other, _, expected = ps.make_update_step(plain, optimizer)(
        params, optimizer.init(params), group
    )
    bound = gamma(1000, torch.float64)
    assert (metrics.loss - expected.loss).abs() <= bound * expected.loss
    assert ((one["embedding"] - other["embedding"]).abs() <= 10 * bound).all()


def test_a_hugging_face_model_whose_logits_are_never_whole() -> None:
    """Hidden states, and logits of the last position alone, as the README has it: the update of whole logits, to rounding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    params, apply = ps.from_module(LlamaForCausalLM(config).double())
    ids = torch.randint(99, (2, 9))
    sizes: list[torch.Size] = []

    def ours(p: Any, m: Any) -> Tensor:
        output = apply(p, m["ids"], output_hidden_states=True, logits_to_keep=1)
        sizes.append(output.logits.shape)
        return linear_cross_entropy(
            output.hidden_states[-1], p["lm_head.weight"], m["labels"], chunk=10
        )

    def plain(p: Any, m: Any) -> Tensor:
        return ps.losses.cross_entropy(apply(p, m["ids"]).logits, m["labels"])

    optimizer, group = ps.optim.sgd(1.0), [{"ids": ids, "labels": ps.shift_labels(ids)}]
    one, other = (
        ps.make_update_step(loss, optimizer)(params, optimizer.init(params), group)[0]
        for loss in (ours, plain)
    )
    assert sizes == [(2, 1, 99)]
    for name, leaf in other.items():
        bound = gamma(10_000, torch.float64) * (1 + leaf.abs().max())
        assert ((one[name] - leaf).abs() <= bound).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_one_operation(dtype: torch.dtype) -> None:
    """However many chunks; with the bits of the eager one, of a transposed weight, too."""
    case = problem(6, 4, 40, dtype)

    def losses(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        def total(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, weight, case.labels, chunk=1).sum()

        return torch.func.grad(total, (0, 1))(hidden, weight)

    compiled, graphs = compiled_with_graphs(losses)
    for weight in (case.weight, case.weight.T.contiguous().T):
        graphs.clear()
        found = compiled(case.hidden, weight)
        for one, other in zip(found, losses(case.hidden, weight), strict=True):
            assert torch.equal(one, other)
        assert sum(graph.count("purestep.vocabulary_values") for graph in graphs) == 1
        assert sum(graph.count("purestep.vocabulary_gradients") for graph in graphs) == 1
        assert not any(".mm" in graph for graph in graphs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_compiler_is_told_what_the_operations_give(dtype: torch.dtype) -> None:
    """Shapes, dtypes and memory order, of transposed inputs, too; and that they write to none of them."""
    from purestep.losses import operators  # noqa: F401

    case = problem(6, 4, 10, dtype)
    hidden, weight = case.hidden.T.contiguous().T, case.weight.T.contiguous().T
    bias = weight[:, 0]
    z, *others = values(hidden, weight, bias, case.labels, None, 3)
    checks = ("test_schema", "test_faketensor")
    library.opcheck(
        torch.ops.purestep.vocabulary_values.default,
        (hidden, weight, bias, case.labels, None, 3), test_utils=checks,
    )  # fmt: skip
    for wanted in ([True, True, True], [True, False, True], [False, True, False]):
        library.opcheck(
            torch.ops.purestep.vocabulary_gradients.default,
            (hidden, weight, bias, case.labels, z, [z, *others], 2.0, None, wanted), test_utils=checks,
        )  # fmt: skip


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
    """Few logits' chunks and few hidden states are alive beside the inputs and the gradients; whole, it is logits three times."""
    tokens, features, classes, chunk = 256, 8, 8192, 128
    case = problem(tokens, features, classes, dtype)
    found = peak(lambda h, w: linear_cross_entropy(h, w, case.labels, chunk=chunk), case)
    logits, few = 4 * tokens * chunk, 4 * tokens * (features + 16)
    assert found <= 3 * logits + 8 * few
    whole = peak(lambda h, w: ps.losses.cross_entropy(h @ w.T, case.labels), case)
    assert whole >= 2 * 4 * tokens * classes
    assert found <= whole / 10


def test_what_a_second_derivative_holds() -> None:
    """Twice the logits, of what it differentiates in all chunks; seven times where they are whole."""
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


def test_a_default_chunk_holds_so_many_logits() -> None:
    def sizes(tokens: int, classes: int) -> set[int]:
        return {size for _, size in parts(classes, torch.empty(tokens, 1), None)}

    assert sizes(4096, 2**17) == {1024}
    assert sizes(1, 2**17) == {2**17}
    assert sizes(2**20, 2**17) == {256}
    assert sizes(0, 5) == {5}


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


# ------------------------------------------------------------------------------------------------------------ distillation


@given(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1, 3, 100]), st.integers(0, 3))
def test_kl_divergence(temperature: float, chunk: int, seed: int) -> None:
    """T² Σ q (log q − log p), whole and never whole; its gradient is T (p − q), and none reaches a detached teacher."""
    case, teacher = problem(4, 3, 7, seed=seed), problem(4, 5, 7, seed=seed + 10)
    logits, others = case.hidden @ case.weight.T, teacher.hidden @ teacher.weight.T
    p, q = (logits / temperature).softmax(-1), (others / temperature).softmax(-1)
    size = 1 + (case.hidden.abs() @ case.weight.abs().T).max()
    size = size + (teacher.hidden.abs() @ teacher.weight.abs().T).max()
    unit = gamma(500, torch.float64) * (size * (temperature + 1 / temperature)) ** 2
    vjp: Callable[..., Any] = torch.func.vjp
    found, pull = vjp(lambda x: ps.losses.kl_divergence(x, others, temperature=temperature), logits)
    assert ((found - temperature**2 * (q * (q / p).log()).sum(-1)).abs() <= unit).all()
    to_logits = temperature * case.cotangents[:, None] * (p - q)
    assert ((pull(case.cotangents)[0] - to_logits).abs() <= unit).all()

    chunked, pull = vjp(
        lambda h, w: ps.losses.linear_kl_divergence(
            h, w, teacher.hidden, teacher.weight, temperature=temperature, chunk=chunk
        ),
        case.hidden, case.weight,
    )  # fmt: skip
    assert ((chunked - found).abs() <= unit).all()
    to_hidden, to_weight = pull(case.cotangents)
    factor = 4 * (1 + case.hidden.abs().sum() + case.weight.abs().sum())
    assert ((to_hidden - to_logits @ case.weight).abs() <= factor * unit).all()
    assert ((to_weight - to_logits.T @ case.hidden).abs() <= factor * unit).all()


def test_kl_divergence_of_classes_that_are_ruled_out() -> None:
    """By the teacher they say nothing, even where the student rules them out too, and nothing that is no number flows back."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[1.0, 2.0, -math.inf]] * 2, requires_grad=True)
    losses = ps.losses.kl_divergence(logits, teacher)
    grads = torch.autograd.grad(losses.sum(), (logits, teacher))
    assert losses[1] == 0
    assert losses[0] > 0
    assert all(each.isfinite().all() for each in grads)


def test_kl_divergence_never_whole_is_small() -> None:
    tokens, classes, chunk = 256, 8192, 128
    case, teacher = problem(tokens, 8, classes, torch.float32), problem(tokens, 4, classes, torch.float32)  # fmt: skip
    found = peak(
        lambda h, w: ps.losses.linear_kl_divergence(
            h, w, teacher.hidden, teacher.weight, chunk=chunk
        ),
        case,
    )
    whole = peak(
        lambda h, w: ps.losses.kl_divergence(h @ w.T, teacher.hidden @ teacher.weight.T), case
    )
    assert found <= whole / 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_are_lifted(dtype: torch.dtype) -> None:
    """In half precision, each is that of what was lifted before, in float32."""
    generator = torch.Generator().manual_seed(0)
    x, y, z, u = (torch.randn(4, 4, generator=generator).to(dtype) for _ in range(4))
    losses: dict[Callable[..., Tensor], tuple[Tensor, ...]] = {
        ps.losses.kl_divergence: (x, y),
        ps.losses.mse: (x, y),
        ps.losses.dpo: (x, y, z, u),
        ps.losses.policy_gradient: (x, y, z),
    }
    for loss, given_ in losses.items():
        found = loss(*given_)
        assert found.dtype == torch.float32
        assert torch.equal(found, loss(*(each.float() for each in given_)))


# -------------------------------------------------------------------------------------------------- rows, pairs and actions


def test_mse_is_torchs_over_all_rows() -> None:
    x, y = torch.arange(24.0).reshape(2, 3, 4), torch.ones(2, 3, 4)
    squares = (x - y).square()
    assert torch.equal(ps.losses.mse(x, y), squares.mean((1, 2)))
    assert torch.equal(ps.losses.mse(x, y, unit_dims=2), squares.mean(2))
    assert torch.equal(ps.losses.mse(x, y, unit_dims=3), squares)
    assert torch.equal(ps.losses.mse(x, y, unit_dims=0), functional.mse_loss(x, y))
    torch.testing.assert_close(ps.losses.mse(x, y).mean(), functional.mse_loss(x, y))


@given(st.sampled_from([0.1, 2.0]), st.sampled_from([0.0, 0.2]))
def test_dpo(beta: float, smoothing: float) -> None:
    """−(1 − s) log σ(β Δ) − s log σ(−β Δ), whatever Δ, and where it is far from 0, no overflow."""
    chosen, rejected, first, second = problem(4, 9, 1).hidden * 3
    found = ps.losses.dpo(chosen, rejected, first, second, beta=beta, label_smoothing=smoothing)
    gap = beta * ((chosen - first) - (rejected - second))
    p = 1 / (1 + (-gap).exp())
    expected = -(1 - smoothing) * p.log() - smoothing * (1 - p).log()
    assert ((found - expected).abs() <= gamma(64, torch.float64) * (1 + gap.exp() + (-gap).exp())).all()  # fmt: skip
    far = ps.losses.dpo(*(torch.tensor([x]) for x in (-1e6, 0.0, 0.0, 0.0)), beta=1.0)
    assert far == 1e6


def test_policy_gradient_where_it_acted() -> None:
    """At the policy that acted, the gradient of −A log π, for either sign."""
    log_probs, advantages = problem(2, 5, 1).hidden
    vjp: Callable[..., Any] = torch.func.vjp
    _, pull = vjp(lambda x: ps.losses.policy_gradient(x, log_probs, advantages), log_probs)
    assert torch.equal(pull(torch.ones(5, dtype=torch.float64))[0], -advantages)


def test_policy_gradient_ends_where_it_is_clipped() -> None:
    """Beyond the clip, a gain gives no gradient and a loss its whole one."""
    ratio = torch.tensor([0.5, 0.5, 1.25, 1.25, 1.5, 1.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)
    vjp: Callable[..., Any] = torch.func.vjp
    losses, pull = vjp(
        lambda x: ps.losses.policy_gradient(x, torch.zeros_like(x), advantages, clip=(0.25, 0.375)),
        ratio.log(),
    )
    expected = torch.tensor([-0.5, 0.75, -1.25, 1.25, -1.375, 1.5], dtype=torch.float64)
    slopes = torch.tensor([-0.5, 0.0, -1.25, 1.25, 0.0, 1.5], dtype=torch.float64)
    assert ((losses - expected).abs() <= gamma(8, torch.float64) * 2).all()
    assert ((pull(torch.ones_like(ratio))[0] - slopes).abs() <= gamma(8, torch.float64) * 2).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: ps.losses.kl_divergence(a, b), r"teacher_logits of shape \(2, 1\) against logits"),
        (lambda a, b: ps.losses.kl_divergence(a, a, temperature=0.0), r"temperature=0.0"),
        (lambda a, b: ps.losses.kl_divergence(a[0, 0], b[0, 0]), r"no classes"),
        (lambda a, b: ps.losses.linear_kl_divergence(a, a, b[:1], b), r"hidden of shape \(2, 2\) against teacher_hidden"),
        (lambda a, b: ps.losses.linear_kl_divergence(a, a, b, b[:1]), r"the same classes"),
        (lambda a, b: ps.losses.mse(a, b), r"targets of shape \(2, 1\) against predictions of shape \(2, 2\)"),
        (lambda a, b: ps.losses.mse(a, a, unit_dims=3), r"unit_dims=3 .* from 0 to 2"),
        (lambda a, b: ps.losses.dpo(a, a, b, a), r"reference_chosen of shape \(2, 1\)"),
        (lambda a, b: ps.losses.policy_gradient(a, a, b), r"advantages of shape \(2, 1\)"),
        (lambda a, b: ps.losses.policy_gradient(a, a, a, clip=(2.0, 0.1)), r"clip=\(2.0, 0.1\)"),
    ],
)  # fmt: skip
def test_the_others_refuse(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 2), torch.ones(2, 1))
