"""``accumulate``: what it sums, in which dtype, and which loss terms it refuses."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps

ONE = torch.tensor(1.0)


def linear(w: Tensor, m: Tensor) -> Tensor:
    return w * m


@pytest.mark.parametrize("group", [[torch.ones(2)] * 2, []])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64])
def test_accum_dtype(asked: torch.dtype | None, group: list[Tensor]) -> None:
    """Of leaves that the loss does not reach, too: exact zeros, as of a group without tokens."""
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.bfloat16]
    how: Any = {"weight_fn": torch.ones_like, "accum_dtype": asked}
    params = [torch.ones(2, dtype=dtype) for dtype in dtypes]
    grads, loss, *_ = ps.accumulate(lambda p, m: sum(p[:3]) * m, params, group, **how)
    wide = [torch.float32, torch.float32, torch.float64, torch.float32]
    assert [grad.dtype for grad in grads] == [asked or own for own in wide]
    assert [grad.tolist() for grad in grads] == [[len(group)] * 2] * 3 + [[0, 0]]
    assert loss.dtype == (torch.float64 if group else torch.float32)


def test_aux_sums_wide() -> None:
    """Flags are counted, halves are summed in float32; None is no aux."""

    def loss_fn(w: Tensor, m: Tensor) -> ps.LossOutput:
        aux = (
            {"flag": m[0] > 0, "half": m[0].to(torch.float16)} if len(m) == 1 else None
        )
        return ps.LossOutput(w * m, aux=aux)

    def aux_of(group: list[Tensor]) -> Any:
        return ps.accumulate(loss_fn, ONE, group, weight_fn=torch.ones_like).aux

    assert aux_of([torch.ones(1)] * 2049) == {"flag": 2049, "half": 2049}
    assert aux_of([torch.ones(2)]) == ()


TERMS: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"aux": {"n": 3}},
        TypeError,
        r"LossOutput\.aux\['n'\] must be a tensor, got int; wrap it",
    ),
    ({"microbatch_loss": ONE[None]}, ValueError, r"a scalar tensor, got shape \(1,\)"),
    (
        {"microbatch_loss": ONE},
        ValueError,
        'known before the backward pass: use normalize="loss"',
    ),
    ({"weights": torch.ones(2)}, ValueError, "the weights come twice"),
    (
        {"weight_fn": None},
        ValueError,
        "weight_fn=None needs a loss_fn that returns LossOutput",
    ),
]


@pytest.mark.parametrize(("terms", "error", "message"), TERMS)
def test_loss_terms_that_are_refused(terms: Any, error: Any, message: str) -> None:
    weight_fn, two = terms.pop("weight_fn", torch.ones_like), torch.ones(2)
    with pytest.raises(error, match=message):
        ps.accumulate(
            lambda w, m: ps.LossOutput(two, **terms), two, [two], weight_fn=weight_fn
        )


@pytest.mark.parametrize("way", ["own", "vmap", "grad"])
def test_a_loss_that_does_not_reach_params(way: str) -> None:
    """Refused where the group has tokens; single leaves and microbatches need not be reached."""
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    group = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])]

    def gradients(loss_fn: Any, weight: float = 1.0) -> Any:
        def run(params: Any) -> Any:
            weight_fn = partial(torch.full_like, fill_value=weight)
            return ps.accumulate(loss_fn, params, group, weight_fn=weight_fn).grads

        if way == "vmap":
            return torch.vmap(run)(
                {name: leaf.expand(3, 2) for name, leaf in params.items()}
            )
        if way == "grad":
            return torch.func.grad(
                lambda p: sum(leaf.sum() for leaf in run(p).values())
            )(params)
        return run(params)

    for loss_fn in (lambda p, m: (p["a"] * m).detach(), lambda p, m: m * 1):
        with pytest.raises(ValueError, match="losses that do not depend on params"):
            gradients(loss_fn)
        gradients(loss_fn, weight=0.0)
    gradients(lambda p, m: p["a"] ** 2 * m if m.ndim == 2 else m * 1)


def test_inference_mode_is_refused() -> None:
    """It records nothing, so that no gradient arrives."""
    w, group = torch.ones(2), [torch.ones(2)]
    with torch.inference_mode():
        made = torch.ones(2)
        with pytest.raises(
            ValueError, match=r"all of it runs under torch\.inference_mode"
        ):
            ps.accumulate(linear, w, group, weight_fn=torch.ones_like)
    with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
        ps.accumulate(linear, made, group, weight_fn=torch.ones_like)


def test_a_tangent_that_is_not_finite_is_taken_away_with_its_loss() -> None:
    """At weight 0 also in forward mode, where the loss itself is finite."""

    def loss(z: Tensor) -> Tensor:
        group = [{"z": z, "w": torch.tensor([1.0, 1.0, 0.0])}]
        return ps.accumulate(
            lambda w, m: w + m["z"].sqrt(), ONE, group, weight_fn=lambda m: m["w"]
        ).loss

    given = (torch.tensor([1.0, 4.0, 0.0]),), (torch.ones(3),)
    assert torch.func.jvp(loss, *given)[1] == 0.5 + 0.25


@pytest.mark.parametrize("order", [1, -1])
def test_losses_are_summed_in_float64(order: int) -> None:
    """Whatever the order: 2²⁴ and ones, which float32 would lose one by one; evaluation, too."""
    one, large = torch.tensor([1.0]), torch.tensor([2.0**24])
    evaluate = ps.make_eval_step(linear, weight_fn=torch.ones_like)
    for group, total, dtype in (
        ([large, *[one] * 256], 2**24 + 256, torch.float32),
        ([one, large.double() + 1], 2**24 + 2, torch.float64),
    ):
        parts = group[::order]
        loss = ps.accumulate(linear, ONE, parts, weight_fn=torch.ones_like).loss
        assert loss == torch.tensor(total, dtype=dtype)
        assert evaluate(ONE, parts).loss == torch.tensor(
            total / len(parts), dtype=dtype
        )
        assert loss.dtype == evaluate(ONE, parts).loss.dtype == dtype


def test_half_precision_is_summed_wide_under_vmap() -> None:
    """256 + 1 + 1 is 256 in bfloat16."""
    group = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    run = partial(ps.accumulate, linear, microbatches=group, weight_fn=torch.ones_like)
    grads = torch.vmap(lambda w: run(w).grads)(torch.ones(2, 1, dtype=torch.bfloat16))
    assert grads.dtype == torch.float32
    assert grads.flatten().tolist() == [258, 258]


def test_a_term_of_a_microbatch_without_tokens_may_be_anything() -> None:
    """A mean over its tokens, say. So may its value where another member of an ensemble has some."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossOutput:
        mean = (m["w"] * w * m["x"]).sum() / m["w"].sum()
        return ps.LossOutput(w * m["x"], microbatch_loss=mean)

    sgd, full = ps.optim.sgd(0.5), {"x": torch.ones(2), "w": torch.ones(2)}
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: m["w"])
    group = [full, {**full, "w": torch.zeros(2)}]
    new, _, metrics = step(ONE, sgd.init(ONE), group)
    assert metrics.num_microbatches == 1
    assert new == 0
    both = [{key: torch.stack([m[key], full[key]]) for key in full} for m in group]
    _, _, of_both = torch.vmap(step, (None, None, 0))(ONE, sgd.init(ONE), both)
    assert of_both.loss.tolist() == [2, 2]
