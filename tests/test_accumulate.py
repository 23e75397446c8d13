"""``accumulate``: what it sums, in which dtype, and which loss terms it refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from tests.squares import x_ones


def weight_fn(microbatch: Tensor) -> Tensor:
    return torch.ones_like(microbatch)


def test_accumulate_is_a_plain_sum_without_a_count() -> None:
    grads, loss, _, aux = ps.accumulate(
        lambda w, m: w * m,
        torch.tensor(2.0),
        [torch.tensor([1.0, 2.0]), torch.tensor([4.0])],
        weight_fn=weight_fn,
    )
    assert (float(grads), float(loss), aux) == (7.0, 14.0, ())


def test_unused_leaves_and_empty_groups_are_exact_zeros() -> None:
    params = {"used": torch.tensor(2.0), "unused": torch.ones(3, dtype=torch.bfloat16)}
    for group in ([torch.tensor([1.0])], []):
        grads, *_ = ps.accumulate(lambda p, m: p["used"] * m, params, group, weight_fn=weight_fn)
        assert torch.equal(grads["unused"], torch.zeros(3))
        assert grads["unused"].dtype == torch.float32


@pytest.mark.parametrize("asked", [None, torch.float32, torch.float64])
def test_accum_dtype(asked: torch.dtype | None) -> None:
    params = [
        torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    ]
    group = [torch.ones(2), torch.ones(2)]
    grads, loss, *_ = ps.accumulate(
        lambda p, m: sum(p) * m, params, group, weight_fn=weight_fn, accum_dtype=asked
    )
    wide = [torch.float32, torch.float32, torch.float64]
    assert [grad.dtype for grad in grads] == [asked or own for own in wide]
    assert loss.dtype == torch.float64


def test_aux_sums_wide() -> None:
    """Flags are counted, halves are summed in float32; None is no aux."""

    def loss_fn(w: Tensor, m: Tensor) -> ps.LossTerms:
        return ps.LossTerms(w * m, aux={"flag": m[0] > 0, "half": m[0].to(torch.float16)})

    *_, aux = ps.accumulate(loss_fn, torch.tensor(1.0), [torch.ones(1)] * 3000, weight_fn=weight_fn)
    assert aux["flag"] == 3000
    assert aux["half"] == 3000

    def no_aux(w: Tensor, m: Tensor) -> ps.LossTerms:
        return ps.LossTerms(w * m, aux=None)

    assert ps.accumulate(no_aux, torch.tensor(1.0), [torch.ones(1)], weight_fn=weight_fn).aux == ()


def accumulate_one(terms: Any, **how: Any) -> Any:
    """One microbatch of these terms."""
    return ps.accumulate(
        lambda w, m: terms, torch.ones(2), [torch.ones(2)], **{"weight_fn": weight_fn, **how}
    )


def test_refuses_aux_that_is_no_tensor() -> None:
    with pytest.raises(
        TypeError, match=r"LossTerms\.aux\['n'\] must be a tensor, got int; wrap it"
    ):
        accumulate_one(ps.LossTerms(torch.ones(2), aux={"n": 3}))


def test_refuses_a_microbatch_term_per_token() -> None:
    with pytest.raises(ValueError, match=r"microbatch must be a scalar tensor, got shape \(2,\)"):
        accumulate_one(ps.LossTerms(torch.ones(2), microbatch=torch.ones(2)))


def test_refuses_a_microbatch_term_without_a_count() -> None:
    with pytest.raises(ValueError, match='known before the backward pass: use normalize="loss"'):
        accumulate_one(ps.LossTerms(torch.ones(2), microbatch=torch.ones(())))


def test_weights_come_once() -> None:
    with pytest.raises(ValueError, match="the weights come twice"):
        accumulate_one(ps.LossTerms(torch.ones(2), weights=torch.ones(2)))
    with pytest.raises(ValueError, match="weight_fn=None needs a loss_fn that returns LossTerms"):
        accumulate_one(torch.ones(2), weight_fn=None)


def test_the_function_that_is_differentiated_runs_once_per_microbatch() -> None:
    """No forward pass is spent on counting."""
    for how in ({"normalize": "loss"}, {"normalize": "grads"}):
        calls = []

        def loss_fn(w: Tensor, m: Tensor) -> Tensor:
            calls.append(m)  # noqa: B023
            return w * m

        step = ps.make_update_step(loss_fn, ps.optim.sgd(0.1), weight_fn=weight_fn, **how)  # type: ignore[arg-type]
        w = torch.tensor(1.0)
        step(w, ps.optim.sgd(0.1).init(w), [torch.ones(2)] * 3)
        assert len(calls) == 3


@pytest.mark.parametrize("way", ["own", "torch.func", "vmap", "grad"])
def test_a_loss_that_does_not_reach_params(way: str) -> None:
    """Refused where the group has tokens; single leaves and microbatches need not be reached."""
    how: Any = {"grad_and_value": torch.func.grad_and_value} if way == "torch.func" else {}
    params = {"a": torch.ones(2), "b": torch.ones(2)}

    def gradients(loss_fn: Any, group: list[Tensor], weight: float = 1.0) -> Any:
        def run(params: Any) -> Any:
            return ps.accumulate(
                loss_fn, params, group, weight_fn=lambda m: torch.full_like(m, weight), **how
            )[0]

        if way == "vmap":
            return torch.vmap(run, randomness="error")(
                {name: leaf.expand(3, 2) for name, leaf in params.items()}
            )
        if way == "grad":
            return torch.func.grad(lambda p: sum(leaf.sum() for leaf in run(p).values()))(params)
        return run(params)

    group = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])]

    def without_grad(p: Any, m: Tensor) -> Any:
        with torch.no_grad():
            return p["a"] * m

    for loss_fn in (lambda p, m: (p["a"] * m).detach(), lambda p, m: m * 1, without_grad):
        with pytest.raises(ValueError, match="losses that do not depend on params"):
            gradients(loss_fn, group)
        gradients(loss_fn, group, weight=0.0)
    gradients(lambda p, m: p["a"] ** 2 * m, group)
    gradients(lambda p, m: p["a"] ** 2 * m if m.ndim == 2 else m * 1, group)


def test_inference_mode_is_refused() -> None:
    """It records nothing, so that no gradient arrives."""
    w, ones = torch.ones(2), torch.ones(2)
    with torch.inference_mode():
        made = torch.ones(2)
        with pytest.raises(ValueError, match=r"all of it runs under torch\.inference_mode"):
            ps.accumulate(lambda w, m: w * m, w, [ones], weight_fn=weight_fn)
    with pytest.raises(RuntimeError, match="inference tensor outside InferenceMode"):
        ps.accumulate(lambda w, m: w * m, made, [ones], weight_fn=weight_fn)


def test_a_tangent_that_is_not_finite_is_taken_away_with_its_loss() -> None:
    """At weight 0 also in forward mode, where the loss itself is finite."""

    def loss(z: Tensor) -> Tensor:
        group = [{"x": torch.ones(3), "z": z, "w": torch.tensor([1.0, 1.0, 0.0])}]
        sums = ps.accumulate(
            lambda w, m: w * m["x"] + m["z"].sqrt(),
            torch.ones(()),
            group,
            weight_fn=lambda m: m["w"],
        )
        return sums.loss

    given = (torch.tensor([1.0, 4.0, 0.0]),), (torch.ones(3),)
    assert torch.func.jvp(loss, *given)[1] == 0.5 + 0.25


def test_losses_are_summed_in_float64() -> None:
    """2²⁴ and a thousand ones, which float32 would lose one by one."""
    group = [{"x": torch.tensor([x])} for x in [2.0**24] + [1.0] * 1000]
    for run in (torch.no_grad(), contextlib.nullcontext()):
        with run:
            _, loss, *_ = ps.accumulate(
                lambda w, m: w * m["x"], torch.ones(1), group, weight_fn=x_ones
            )
        assert loss.dtype == torch.float32
        assert loss == 2**24 + 1000


def test_half_precision_is_summed_wide_under_vmap() -> None:
    """256 + 1 + 1 is 256 in bfloat16."""
    group = [{"x": torch.tensor([x], dtype=torch.bfloat16)} for x in (256.0, 1.0, 1.0)]

    def run(w: Tensor) -> Tensor:
        return ps.accumulate(lambda w, m: w * m["x"], w, group, weight_fn=x_ones)[0]

    grads = torch.vmap(run)(torch.ones(2, 1, dtype=torch.bfloat16))
    assert grads.dtype == torch.float32
    assert grads.flatten().tolist() == [258, 258]


def test_the_losses_dtype_does_not_depend_on_the_order() -> None:
    """Nor does their sum: float32 loses a one beside 2 ** 24, and float64 does not."""
    group = [{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0**24 + 1], dtype=torch.float64)}]
    w = torch.ones(1)
    evaluate = ps.make_eval_step(lambda w, m: w * m["x"], weight_fn=x_ones)
    for parts in (group, group[::-1]):
        _, loss, *_ = ps.accumulate(lambda w, m: w * m["x"], w, parts, weight_fn=x_ones)
        assert loss.dtype == torch.float64
        assert loss == 2**24 + 2
        assert evaluate(w, parts).loss == 2**23 + 1
    many = [{"x": torch.tensor([2.0**24])}, *[{"x": torch.tensor([1.0])}] * 1023]
    total = evaluate(w, many).loss
    assert total.dtype == torch.float32
    assert total == torch.tensor((2**24 + 1023) / 1024)


@pytest.mark.parametrize("normalize", ["loss", "grads"])
def test_a_loss_that_writes_to_its_mask(normalize: Any) -> None:
    """What was counted multiplies, whatever becomes of the microbatch."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> Tensor:
        m["mask"][0] = 0
        return w * m["x"]

    sgd, w = ps.optim.sgd(0.5), torch.ones(())
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: m["mask"], normalize=normalize)
    new, _, metrics = step(w, sgd.init(w), [{"x": torch.ones(2), "mask": torch.ones(2)}])
    assert metrics.num_tokens == 2
    assert new == 0.5


def test_a_term_of_a_microbatch_without_tokens_may_be_anything() -> None:
    """A mean over its tokens, say."""

    def loss_fn(w: Tensor, m: dict[str, Tensor]) -> ps.LossTerms:
        mean = (m["w"] * w * m["x"]).sum() / m["w"].sum()
        return ps.LossTerms(w * m["x"], microbatch=mean)

    sgd, w = ps.optim.sgd(0.5), torch.ones(())
    step = ps.make_update_step(loss_fn, sgd, weight_fn=lambda m: m["w"])
    full = {"x": torch.ones(2), "w": torch.ones(2)}
    new, _, metrics = step(w, sgd.init(w), [full, {**full, "w": torch.zeros(2)}])
    assert new == 0
    assert metrics.num_microbatches == 1
